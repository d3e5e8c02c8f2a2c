# SPDX-License-Identifier: Apache-2.0
"""From .bin/.idx files to micro-batches, in an order that a resumed run continues exactly.

`check_corpus` runs before training, `build_datasets` once all ranks are up. Core's datasets draw
one epoch, whatever the length of the run, and `SampleOrder` goes through it as often as needed: so
the order of samples depends on the seed alone, and a run can be stopped, resumed and prolonged.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.indexed_dataset import _INDEX_HEADER, IndexedDataset
from megatron.core.datasets.utils import get_blend_from_list
from torch.utils.data import DataLoader

from .arguments import UserError

Batch = dict[str, torch.Tensor]


class DatasetSource(Protocol):
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


def check_corpus(args: argparse.Namespace) -> None:
    """Checks that the corpus is there and holds enough for one sample.

    Raises:
        UserError: A file is missing, unreadable or empty, or the corpus is too short.
    """
    if args.mock_data:
        return
    prefixes, _ = _blend(args)
    for prefix in prefixes:
        for suffix in (".bin", ".idx"):
            if not Path(prefix + suffix).is_file():
                raise UserError(
                    f"corpus {prefix}{suffix} does not exist; make it with tools/preprocess_data.py"
                )
            if Path(prefix + suffix).stat().st_size == 0:
                raise UserError(f"corpus {prefix}{suffix} is empty; give it some text")
        # Core's reader fails on a wrong header too, but then again, aloud, when it is collected.
        with Path(prefix + ".idx").open("rb") as index:
            if index.read(len(_INDEX_HEADER)) != _INDEX_HEADER:
                raise UserError(
                    f"corpus {prefix}.idx is not a Megatron index; make it with "
                    "tools/preprocess_data.py"
                )
        try:
            num_tokens = int(_sequence_lengths(prefix).sum())
        except Exception as error:
            raise UserError(f"corpus {prefix}.idx is damaged: {error}; make it again") from error
        if num_tokens == 0:
            raise UserError(f"corpus {prefix} is empty; give it some text")
        if num_tokens <= args.seq_length:
            raise UserError(
                f"corpus {prefix} has {num_tokens} tokens; one sample of --seq-length "
                f"{args.seq_length} needs {args.seq_length + 1}"
            )
    _usable_split(args)


def _blend(args: argparse.Namespace) -> tuple[list[str], list[float] | None]:
    """Prefixes and weights of --data-path.

    Raises:
        UserError: It is neither a list of prefixes nor of weights and prefixes.
    """
    try:
        prefixes, weights = get_blend_from_list(args.data_path)
    except Exception as error:
        raise UserError(f"--data-path: {error}; expected PREFIX or WEIGHT PREFIX ...") from error
    return list(prefixes), weights


def _sequence_lengths(prefix: str) -> Any:
    """Tokens of each document of a corpus.

    A copy: core closes the mapping under the original when the dataset goes, and a later look at
    it would end the process.
    """
    dataset = IndexedDataset(prefix)
    return dataset.sequence_lengths.copy()


def _num_samples(args: argparse.Namespace) -> list[int | None]:
    """Samples to draw for training, validation and test: one epoch, except for weighted blends."""
    if args.mock_data or _blend(args)[1] is None:
        return [None, None, None]
    evaluations = args.train_iters // args.eval_interval + 1
    return [
        args.train_iters * args.global_batch_size,
        max(1, evaluations * args.eval_iters * args.global_batch_size),
        1,
    ]


def _usable_split(args: argparse.Namespace) -> str:
    """--split without the parts that hold no whole sample: core fails on those.

    Core divides a corpus by documents; a small one may leave nothing for validation or test.

    Raises:
        UserError: The training part has no whole sample.
    """
    weights = [float(weight) for weight in args.split.split(",")]
    if not args.mock_data:
        lengths = [_sequence_lengths(prefix) for prefix in _blend(args)[0]]
        while (part := _short_part(weights, lengths, args.seq_length)) is not None:
            if part == 0:
                raise UserError(
                    f"the training part of --split {args.split} holds less than one sample of "
                    f"{args.seq_length + 1} tokens; give it more text"
                )
            weights[part] = 0.0
    return ",".join(f"{weight:g}" for weight in weights)


def _short_part(weights: list[float], lengths: list[Any], seq_length: int) -> int | None:
    """The last part of the split that is wanted, but too short in one of the corpora."""
    bounds = [sum(weights[:part]) / sum(weights) for part in range(len(weights) + 1)]
    for part in reversed(range(len(weights))):
        for corpus in lengths:
            begin, end = (round(bounds[part + i] * float(len(corpus))) for i in (0, 1))
            if weights[part] > 0.0 and int(corpus[begin:end].sum()) <= seq_length:
                return part
    return None


def build_datasets(args: argparse.Namespace, source: DatasetSource, tokenizer: Any) -> list[Any]:
    """Core's training and validation datasets; None for validation without a whole sample."""
    config = source.dataset_config(
        args,
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None if args.mock_data else _blend(args),
        split=_usable_split(args),
        path_to_cache=args.data_cache_path,
        tokenizer=tokenizer,
    )
    train, valid, _ = BlendedMegatronDatasetBuilder(
        source.dataset_class(args), _num_samples(args), lambda: True, config
    ).build()
    return [train, valid]


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
