# SPDX-License-Identifier: Apache-2.0
"""From .bin/.idx files to micro-batches, in an order that a resumed run continues exactly.

`build_datasets` runs once all ranks are up. Core's datasets draw as many samples as the corpus has,
whatever the length of the run, and `SampleOrder` goes through them as often as needed: so the order
of samples depends on the seed alone, and a run can be stopped, resumed and prolonged.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from torch.utils.data import DataLoader

from .corpus import Consumer, blend, num_samples, usable_split

Batch = dict[str, torch.Tensor]


class DatasetSource(Consumer, Protocol):
    """The part of a model's task that knows its dataset."""

    def dataset_class(self, args: argparse.Namespace) -> type:
        """Core's dataset class."""

    def dataset_config(self, args: argparse.Namespace, **common: Any) -> Any:
        """Its configuration; `common` holds the fields that all of core's datasets share."""


class SampleOrder:
    """Yields this data-parallel rank's micro-batches of sample indices, for ever.

    Args:
        num_samples: Samples in one epoch.
        first_sample: Samples that all ranks together have consumed before.
        micro_batch_size: Samples per micro-batch and rank.
        rank: Data-parallel rank.
        num_ranks: Data-parallel size.
        seed: Orders the epochs after the first; core has shuffled the first.
    """

    def __init__(
        self,
        num_samples: int,
        first_sample: int,
        micro_batch_size: int,
        rank: int,
        num_ranks: int,
        seed: int,
    ) -> None:
        self._num_samples = num_samples
        self._first_sample = first_sample
        self._micro_batch_size = micro_batch_size
        self._rank = rank
        self._num_ranks = num_ranks
        self._seed = seed
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def __iter__(self) -> Iterator[list[int]]:
        for number in itertools.count():
            yield [self.sample(number, index) for index in range(self._micro_batch_size)]

    def sample(self, number: int, index: int) -> int:
        """The sample at `index` in this rank's micro-batch `number`, both counted from 0."""
        position = (number * self._num_ranks + self._rank) * self._micro_batch_size + index
        epoch, place = divmod(self._first_sample + position, self._num_samples)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._order_of(epoch)
        return int(self._order[place])

    def _order_of(self, epoch: int) -> torch.Tensor:
        if epoch == 0:
            return torch.arange(self._num_samples)
        generator = torch.Generator().manual_seed(self._seed + epoch)
        return torch.randperm(self._num_samples, generator=generator)


def build_datasets(args: argparse.Namespace, source: DatasetSource, tokenizer: Any) -> list[Any]:
    """Core's training and validation datasets; None for validation without a whole sample.

    Of mock data, whose millions of samples take long to shuffle, only what is asked for is built.
    """
    split = usable_split(args, source)
    config = source.dataset_config(
        args,
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None if args.mock_data else blend(args),
        split=split,
        path_to_cache=args.data_cache_path,
        tokenizer=tokenizer,
    )
    if args.mock_data:
        wanted = (True, args.eval_iters > 0, False)
        parts = zip(config.split_matrix, wanted, strict=True)
        config.split_matrix = [part if is_wanted else None for part, is_wanted in parts]
    train, valid, _ = BlendedMegatronDatasetBuilder(
        source.dataset_class(args), num_samples(args, source, split), lambda: True, config
    ).build()
    return [train, valid]


def next_batch(iterator: Iterator[Batch]) -> Batch:
    """The next micro-batch, on the GPU where there is one."""
    batch = next(iterator)
    if torch.cuda.is_available():
        return {name: tensor.cuda(non_blocking=True) for name, tensor in batch.items()}
    return batch


def batches(
    args: argparse.Namespace, dataset: Any, consumed_samples: int, num_chunks: int
) -> list[Iterator[Batch]]:
    """One endless stream of micro-batches per model chunk; all chunks see the same ones."""

    def order() -> SampleOrder:
        return SampleOrder(
            num_samples=len(dataset),
            first_sample=consumed_samples,
            micro_batch_size=args.micro_batch_size,
            rank=parallel_state.get_data_parallel_rank(),
            num_ranks=parallel_state.get_data_parallel_world_size(),
            seed=args.seed,
        )

    if args.dataloader_type == "dali":
        from .dali import dali_batches

        return list(itertools.tee(dali_batches(args, dataset, order()), num_chunks))
    # A generator of its own: a loader without one would draw from the training's.
    return [
        iter(DataLoader(dataset, batch_sampler=order(), generator=torch.Generator()))
        for _ in range(num_chunks)
    ]
