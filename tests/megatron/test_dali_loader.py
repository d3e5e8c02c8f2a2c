# SPDX-License-Identifier: Apache-2.0
"""`--dataloader-type dali` gives what the default loader gives, tensor by tensor."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from argparse import Namespace
from itertools import islice

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from trainer import data
from trainer.arguments import parse_arguments
from trainer.gpt import GPT
from trainer.tokenizer import build_tokenizer
from trainer.training import pretrain

from tests.support.launch import TINY, Outcome, train

pytestmark = pytest.mark.slow

NUM_RANKS = 3
MICRO_BATCH_SIZE = 3
Batches = list[data.Batch]


needs_dali = pytest.mark.skipif(
    importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None,
    reason="NVIDIA DALI is not installed here (pip install nvidia-dali-cuda130)",
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """40 documents of different lengths: 40 samples, so that a test passes several epochs."""
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    random = np.random.default_rng(1)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in random.integers(1, 64, 40):
        builder.add_document(random.integers(0, 255, length), [int(length)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def arguments(corpus: str, *more: str) -> Namespace:
    line = (
        f"--num-layers 1 --seq-length 32 --micro-batch-size {MICRO_BATCH_SIZE} --vocab-size 256 "
        f"--data-path {corpus} --split 1,0,0"
    )
    return parse_arguments("", [*shlex.split(line), *more])


def read(
    args: Namespace,
    monkeypatch: pytest.MonkeyPatch,
    rank: int = 0,
    consumed_samples: int = 0,
    num_batches: int = 12,
    num_chunks: int = 1,
) -> list[Batches]:
    """What each model chunk of one of NUM_RANKS data-parallel ranks reads."""
    monkeypatch.setattr(data.parallel_state, "get_data_parallel_rank", lambda: rank)
    monkeypatch.setattr(data.parallel_state, "get_data_parallel_world_size", lambda: NUM_RANKS)
    dataset = data.build_datasets(args, GPT(), build_tokenizer(args))[0]
    assert len(dataset) < NUM_RANKS * MICRO_BATCH_SIZE * num_batches, "the test sees one epoch only"
    streams = data.batches(args, dataset, consumed_samples, num_chunks)
    return [list(islice(stream, num_batches)) for stream in streams]


def assert_same(batches: Batches, expected: Batches) -> None:
    """Equal names in equal order, types, shapes and every element."""
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        assert list(batch) == list(other)
        for name, tensor in other.items():
            assert batch[name].dtype == tensor.dtype, name
            assert torch.equal(batch[name], tensor), name


@needs_dali
@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_each_rank_reads_the_same_batches_over_several_epochs(
    corpus: str, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    (expected,) = read(arguments(corpus), monkeypatch, rank)
    (batches,) = read(arguments(corpus, "--dataloader-type", "dali"), monkeypatch, rank)
    assert_same(batches, expected)
    assert not torch.equal(expected[0]["tokens"], expected[1]["tokens"])


@needs_dali
def test_it_goes_on_where_a_run_stopped(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(corpus, "--dataloader-type", "dali")
    consumed = 5 * NUM_RANKS * MICRO_BATCH_SIZE
    (whole,) = read(arguments(corpus), monkeypatch, rank=1)
    (resumed,) = read(args, monkeypatch, rank=1, consumed_samples=consumed, num_batches=7)
    assert_same(resumed, whole[5:])


@needs_dali
def test_all_chunks_of_a_pipeline_stage_see_the_same_batches(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = read(arguments(corpus), monkeypatch)
    for batches in read(arguments(corpus, "--dataloader-type", "dali"), monkeypatch, num_chunks=2):
        assert_same(batches, expected)


@needs_dali
def test_training_is_bit_identical(one_process: Outcome) -> None:
    """Dropout is on: the pipeline must not draw from the training's random numbers either."""
    outcome = train("--train-iters 4 --dataloader-type dali")
    assert outcome.values("loss") == one_process.values("loss")
    assert outcome.model == one_process.model


def test_without_dali_one_sentence_names_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "nvidia", None)
    monkeypatch.delitem(sys.modules, "nvidia.dali", raising=False)
    with pytest.raises(SystemExit) as exit_info:
        pretrain(GPT(), [*shlex.split(TINY), "--dataloader-type", "dali"])
    assert exit_info.value.code == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "DALI, which is not installed; install it with: pip install 'nvidia-dali-" in sentence
