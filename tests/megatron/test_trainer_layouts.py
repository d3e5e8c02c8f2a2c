# SPDX-License-Identifier: Apache-2.0
"""Tensor, pipeline, virtual pipeline and sequence parallelism compute what one rank computes.

All layouts start from one checkpoint, so they also show that checkpoints move between layouts. The
layouts sum in other orders, in fp32: a relative tolerance of 1e-5 on losses near 5 is some 80 units
in the last place, for sums of at most a few hundred terms and three steps of Adam on top.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launch import Outcome, train

pytestmark = pytest.mark.slow

RELATIVE_TOLERANCE = 1e-5
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step on one rank."""
    directory = tmp_path_factory.mktemp("checkpoint")
    train(NO_DROPOUT, f"--train-iters 1 --save {directory}")
    return directory


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Outcome:
    """Three more steps on one rank."""
    return train(NO_DROPOUT, f"--load {checkpoint} --train-iters 4")


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 2",
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--pipeline-model-parallel-size 2",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
        "--global-batch-size 4",  # what is left of two ranks is data parallelism
    ],
    ids=["TP2", "TP2+SP", "PP2", "PP2xVPP2", "DP2"],
)
def test_layout_agrees_with_one_rank(checkpoint: Path, reference: Outcome, flags: str) -> None:
    outcome = train(NO_DROPOUT, flags, f"--load {checkpoint} --train-iters 4", world_size=2)
    assert outcome.values("step") == [2, 3, 4]
    for name in ("loss", "grad_norm"):
        expected = pytest.approx(reference.values(name), rel=RELATIVE_TOLERANCE)
        assert outcome.values(name) == expected, name


def test_bf16_trains_on_two_stages() -> None:
    outcome = train(
        "--bf16 --pipeline-model-parallel-size 2 --lr 1e-3 --train-iters 8", world_size=2
    )
    assert outcome.values("loss")[-1] < outcome.values("loss")[0]


def test_llama_like_layers_train() -> None:
    outcome = train(
        "--swiglu --normalization RMSNorm --position-embedding-type rope --rotary-percent 0.5"
        " --group-query-attention --num-query-groups 2 --disable-bias-linear"
        " --untie-embeddings-and-output-weights --lr 1e-3 --train-iters 8"
        " --lr-decay-style cosine --lr-warmup-iters 2 --min-lr 1e-4"
    )
    assert outcome.values("loss")[-1] < outcome.values("loss")[0]
    assert outcome.values("learning_rate")[2] == max(outcome.values("learning_rate")) == 1e-3
