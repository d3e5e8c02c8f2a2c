# SPDX-License-Identifier: Apache-2.0
"""The .bin/.idx files that --data-path names: are they there, and what do their documents hold?

`check_corpus` runs before training, `usable_split` and `num_samples` with the datasets. How much a
document gives a model is the model's to say (`supply`), what --split makes of it is the same for
all. No token is read, only the index.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron.core.datasets.indexed_dataset import _INDEX_HEADER, IndexedDataset
from megatron.core.datasets.utils import get_blend_from_list

from .errors import UserError


@dataclass(frozen=True)
class Corpus:
    """The index of one corpus.

    Attributes:
        prefix: Path of its files, without .bin and .idx.
        lengths: Tokens of each sequence: a sentence, or a document that is not split.
        bounds: Document i has the sequences [bounds[i], bounds[i + 1]).
    """

    prefix: str
    lengths: Any
    bounds: Any


@dataclass(frozen=True)
class Supply:
    """What a corpus holds for one model.

    Attributes:
        amounts: One number per unit that core's split counts, in tokens or in documents.
        needed: The sum of amounts that gives one sample.
        samples_per_unit: Samples to ask core for; None: core draws one epoch by itself.
    """

    amounts: Any
    needed: int
    samples_per_unit: int | None = None


class Consumer(Protocol):
    """The part of a model's task that knows what a document gives it."""

    def supply(self, args: argparse.Namespace, corpus: Corpus) -> Supply:
        """What a corpus holds for this model.

        Raises:
            UserError: Not one sample.
        """


def check_corpus(args: argparse.Namespace, consumer: Consumer) -> None:
    """Checks that the corpus is there and holds enough for one sample.

    Raises:
        UserError: A file is missing, unreadable or empty, or the corpus is too short.
    """
    if not args.mock_data:
        for prefix in blend(args)[0]:
            _check_files(prefix)
            consumer.supply(args, _read(prefix))
        usable_split(args, consumer)


def _check_files(prefix: str) -> None:
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


def _read(prefix: str) -> Corpus:
    """The index of a corpus.

    Copies: core closes the mapping under the originals when the dataset goes, and a later look at
    them would end the process.

    Raises:
        UserError: The index is damaged or names no tokens.
    """
    try:
        dataset = IndexedDataset(prefix)
        corpus = Corpus(prefix, dataset.sequence_lengths.copy(), dataset.document_indices.copy())
        num_tokens = int(corpus.lengths.sum())
    except Exception as error:
        raise UserError(f"corpus {prefix}.idx is damaged: {error}; make it again") from error
    if num_tokens == 0:
        raise UserError(f"corpus {prefix} is empty; give it some text")
    return corpus


def blend(args: argparse.Namespace) -> tuple[list[str], list[float] | None]:
    """Prefixes and weights of --data-path.

    Raises:
        UserError: It is neither a list of prefixes nor of weights and prefixes.
    """
    try:
        prefixes, weights = get_blend_from_list(args.data_path)
    except Exception as error:
        raise UserError(f"--data-path: {error}; expected PREFIX or WEIGHT PREFIX ...") from error
    return list(prefixes), weights


def usable_split(args: argparse.Namespace, consumer: Consumer) -> str:
    """--split without the parts that hold no whole sample: core fails on those.

    Core divides a corpus by documents; a small one may leave nothing for validation or test.

    Raises:
        UserError: The training part has no whole sample.
    """
    weights = [float(weight) for weight in args.split.split(",")]
    if not args.mock_data:
        supplies = [consumer.supply(args, _read(prefix)) for prefix in blend(args)[0]]
        while (part := _short_part(weights, supplies)) is not None:
            if part == 0:
                raise UserError(
                    f"the training part of --split {args.split} holds less than one sample of "
                    f"--seq-length {args.seq_length}; give it more text"
                )
            weights[part] = 0.0
    return ",".join(f"{weight:g}" for weight in weights)


def num_samples(args: argparse.Namespace, consumer: Consumer, split: str) -> list[int | None]:
    """Samples to ask core for, for training, validation and test; None for one epoch.

    They do not depend on the length of the run, except for weighted blends.
    """
    if args.mock_data:
        return [None, None, None]
    prefixes, blend_weights = blend(args)
    if blend_weights is not None:
        evaluations = args.train_iters // args.eval_interval + 1
        return [
            args.train_iters * args.global_batch_size,
            max(1, evaluations * args.eval_iters * args.global_batch_size),
            1,
        ]
    supply = consumer.supply(args, _read(prefixes[0]))
    if supply.samples_per_unit is None:
        return [None, None, None]
    weights = [float(weight) for weight in split.split(",")]
    return [
        supply.samples_per_unit * _amount(weights, supply, part) for part in range(len(weights))
    ]


def _short_part(weights: list[float], supplies: list[Supply]) -> int | None:
    """The last part of the split that is wanted, but too short in one of the corpora."""
    for part in reversed(range(len(weights))):
        for supply in supplies:
            if weights[part] > 0.0 and _amount(weights, supply, part) < supply.needed:
                return part
    return None


def _amount(weights: list[float], supply: Supply, part: int) -> int:
    """What one part of the split holds; cut as core cuts."""
    bounds = [sum(weights[:part]) / sum(weights) for part in range(len(weights) + 1)]
    begin, end = (round(bounds[part + i] * float(len(supply.amounts))) for i in (0, 1))
    return int(supply.amounts[begin:end].sum())
