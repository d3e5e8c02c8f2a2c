# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the trainer's tests: the trainer package, corpora, a run that others compare with."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import preprocess_data
import pytest

from megatron.offload.integration.megatron import cpu_runtime
from tests.support.launch import TINY_LAYERS, Outcome, train

_TOKENIZERS = {
    "bert": "--tokenizer-type BertWordPieceLowerCase --vocab-size 200",
    "t5": "--vocab-extra-ids 16 --vocab-size 300",
}


@pytest.fixture
def with_cpu_runtime() -> Iterator[None]:
    """Megatron's checkpoint asks for the states of CUDA's generators."""
    cpu_runtime.activate()
    yield
    cpu_runtime.deactivate()


@pytest.fixture(scope="session")
def one_process() -> Outcome:
    """Four uninterrupted steps of the tiny model on one rank, dropout on.

    In a new interpreter: what the script prints while it imports is in the output.
    """
    return train("--train-iters 4", fresh=True)


@pytest.fixture(scope="session")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of 60 documents with 3 to 9 sentences each."""
    source = tmp_path_factory.mktemp("prose")
    draw = random.Random(1)
    words = ("this", "that", "one", "two", "all", "words", "bytes", "are", "was", "not", "seen")
    for number in range(60):
        sentences = (" ".join(draw.choices(words, k=draw.randrange(3, 12))) for _ in range(9))
        text = " ".join(f"{sentence.capitalize()}." for sentence in sentences)
        (source / f"{number:02}.txt").write_text(text)
    return source


@pytest.fixture(scope="session")
def tiny(prose: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Flags of the tiny BERT and T5, each with its corpus and its tokenizer."""
    flags = {}
    for model, tokenizer in _TOKENIZERS.items():
        folder = tmp_path_factory.mktemp(model)
        argv = f"--input {prose} --output-prefix {folder}/corpus --split-sentences {tokenizer}"
        assert preprocess_data.main(argv.split()) == 0
        flags[model] = (
            f"{TINY_LAYERS} --data-path {folder}/corpus_text_sentence --split 80,20,0"
            f" --tokenizer-model {folder}/tokenizer.json --make-vocab-size-divisible-by 512"
            " --global-batch-size 2"
        )
    flags["t5"] += " --num-layers 2 --decoder-seq-length 16"
    return flags
