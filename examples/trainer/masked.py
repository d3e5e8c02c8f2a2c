# SPDX-License-Identifier: Apache-2.0
"""What BERT and T5 share: flags and data of masked language modelling, with core's datasets.

Core's `MaskedWordPieceDataset` hides words of consecutive sentences; `MaskedTask` says which
corpora it can use and how many samples to ask it for. The models are in `bert.py` and `t5.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from .arguments import fraction
from .corpus import Corpus, Supply, blend
from .errors import UserError
from .model import Task

# Core's compiled `build_mapping` leaves out documents that have a longer sentence among several.
_LONGEST_SENTENCE = 512
_SHORTEST = 8  # for special tokens and a little text; of almost none core's code divides by zero
# A dataset repeats its masks in every epoch. So core is asked for several samples per document,
# each with other words hidden; BERT's authors hid them in ten ways (arXiv 1907.11692, section 4.1).
_SAMPLES_PER_DOCUMENT = 10


class MaskedTask(Task):
    """The common half of BERT and T5."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the flags of masking."""
        group = parser.add_argument_group("masked language modelling")
        group.add_argument(
            "--mask-prob", type=fraction, default=0.15, help="share of the tokens that is hidden"
        )
        group.add_argument(
            "--short-seq-prob", type=fraction, default=0.1, help="share of shortened samples"
        )

    def check_arguments(self, args: argparse.Namespace) -> None:
        """Checks what this model cannot do.

        Raises:
            UserError: It is asked for.
        """
        if args.mock_data:
            raise UserError(
                f"{self.name} has no mock data; give --data-path PREFIX, "
                "made with tools/preprocess_data.py --split-sentences"
            )
        modules = {"moe", "shared_experts"}.intersection(args.recompute_modules or ())
        if args.expert_model_parallel_size > 1 or modules:
            flag = f"--recompute-modules {min(modules)}" if modules else ""
            raise UserError(
                f"{self.name} has no experts; leave out {flag or '--expert-model-parallel-size'}"
            )
        if args.seq_length < _SHORTEST:
            raise UserError(f"--seq-length must be at least {_SHORTEST}, got {args.seq_length}")
        if not 0.0 < args.mask_prob < 1.0:
            raise UserError(f"--mask-prob must be above 0 and below 1, got {args.mask_prob}")
        if args.rotary_base != 10000:
            raise UserError(f"{self.name} has a fixed rotary base; leave out --rotary-base")
        prefixes, weights = blend(args)
        if weights is None and len(prefixes) > 1:
            raise UserError(
                f"--data-path: several corpora need weights for {self.name}; "
                "give --data-path WEIGHT PREFIX WEIGHT PREFIX"
            )

    def least_sentences(self, args: argparse.Namespace) -> int:
        """Sentences that a sample has at least."""
        return 1

    def supply(self, args: argparse.Namespace, corpus: Corpus) -> Supply:
        """Every document with enough sentences, none of them too long, gives a sample at least.

        Raises:
            UserError: There is no such document, or nothing is split into sentences.
        """
        made_with = "make it with tools/preprocess_data.py --split-sentences"
        num_sentences = corpus.bounds[1:] - corpus.bounds[:-1]
        if not (num_sentences > 1).any():
            raise UserError(
                f"corpus {corpus.prefix} has no document of several sentences, "
                f"which {self.name} needs; {made_with}"
            )
        long_before = np.cumsum(np.append(0, corpus.lengths > _LONGEST_SENTENCE))
        num_long = long_before[corpus.bounds[1:]] - long_before[corpus.bounds[:-1]]
        usable = (num_sentences == 1) | (num_long == 0)
        usable &= num_sentences >= self.least_sentences(args)
        if not usable.any():
            raise UserError(
                f"corpus {corpus.prefix}: every document of several sentences has one of more than "
                f"{_LONGEST_SENTENCE} tokens, which megatron-core leaves out; {made_with}"
            )
        return Supply(usable.astype("int64"), 1, _SAMPLES_PER_DOCUMENT)

    def masking(self, args: argparse.Namespace) -> dict[str, Any]:
        """Fields that both dataset configurations have."""
        return {
            "masking_probability": args.mask_prob,
            "short_sequence_probability": args.short_seq_prob,
            "masking_do_full_word": True,
            "masking_do_permutation": False,
            "masking_use_longer_ngrams": False,
        }

    def tokenizer_path(self, args: argparse.Namespace) -> Path:
        """The file with the special tokens that masking needs.

        Raises:
            UserError: None is named.
        """
        if args.tokenizer_model is None or args.tokenizer_type == "NullTokenizer":
            raise UserError(
                f"{self.name} needs --tokenizer-model FILE; the tool that makes the corpus, "
                "tools/preprocess_data.py, makes one too"
            )
        return Path(args.tokenizer_model)
