# SPDX-License-Identifier: Apache-2.0
"""Tensor, pipeline, virtual pipeline and sequence parallelism compute what one rank computes.

All layouts start from one checkpoint, so they also show that checkpoints move between layouts. The
layouts sum in other orders, in fp32: a relative tolerance of 1e-5 on losses near 5 is some 80 units
in the last place, for sums of at most a few hundred terms and three steps of Adam on top.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import launch
from tests.support.launch import Outcome, assert_same_bits, train
from tests.support.offload_flags import ssd

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


def test_stages_without_layers_and_chunks_without_parameters_move_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others move what they have, and no bit changes."""
    script = Path(__file__).parent / "uneven_pipeline_ranks.py"
    monkeypatch.setitem(launch.SCRIPTS, "uneven", script)
    flags = (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--untie-embeddings-and-output-weights --train-iters 3"
    )
    moves = (
        f"{ssd(tmp_path)} --parameter-offload ssd --optimizer-state-offload ssd "
        "--optimizer-state-bucket 32KiB --optimizer-state-window 0B"
    )
    kept = train(flags, model="uneven", world_size=2)
    moved = train(flags, moves, model="uneven", world_size=2)
    assert_same_bits(moved, kept, 3)
    last = moved.metrics[-1]
    assert last["offload"]["offloaded_bytes"] > 0
    assert last["states"]["read_bytes"] > 0 and last["parameters"]["read_bytes"] > 0
