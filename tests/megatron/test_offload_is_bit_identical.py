# SPDX-License-Identifier: Apache-2.0
"""Invariant 1 on megatron-core: losses, gradient norms and final weights are the same bits with
activations on the SSD, in every parallel layout, with dropout on.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import (
    TINY,
    Run,
    assert_same_bits,
    train,
    train_once,
)
from tests.support.offload_flags import ssd
from tests.support.waiting import SOON_S

STEPS = 4
LAYOUTS = {
    "TP1": (1, ""),
    "TP2": (2, "--tensor-model-parallel-size 2"),
    "TP2+SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "PP2xVPP2": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "DP2+distributed-optimizer": (
        2,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    "bf16": (1, "--bf16"),
    "TP2 bf16 llama-like": (
        2,
        "--bf16 --tensor-model-parallel-size 2 --swiglu --normalization RMSNorm"
        " --position-embedding-type rope --group-query-attention --num-query-groups 2"
        " --disable-bias-linear --untie-embeddings-and-output-weights",
    ),
    "selective recompute": (1, "--recompute-granularity selective"),
}


def trained_like_off(layout: str, directory: Path, lists: str) -> list[dict[str, Any]]:
    """Trains a layout with its layers placed by lists, as it does without offload.

    Returns:
        What was counted of activations in each step.
    """
    world_size, flags = LAYOUTS[layout]
    flags += f" --train-iters {STEPS}"
    found = train(flags, ssd(directory), lists, world_size=world_size)
    assert_same_bits(found, train_once(flags, world_size=world_size), STEPS)
    return found.values("offload")


REPEATS = ("TP2", "TP2 bf16 llama-like")  # what TP2+SP and bf16 show


@pytest.mark.slow(but="TP1")
@pytest.mark.parametrize(
    "layout",
    [pytest.param(one, marks=pytest.mark.rare) if one in REPEATS else one for one in LAYOUTS],
)
def test_offload_changes_no_bit(layout: str, tmp_path: Path) -> None:
    world_size, flags = LAYOUTS[layout]
    flags += f" --train-iters {STEPS}"
    off = train_once(flags, world_size=world_size)
    # New interpreters for one layout: nothing may depend on a hash seed that all ranks share, or on
    # what the fork server has imported.
    fresh = layout == "DP2+distributed-optimizer"
    offloaded = train(flags, ssd(tmp_path), model="settled", world_size=world_size, fresh=fresh)
    assert_same_bits(offloaded, off, STEPS)
    for record in offloaded.metrics:
        # Bytes really left memory: they came from the disk, or were needed before the write ended.
        moved = record["offload"]
        assert moved["offloaded_bytes"] > 0
        assert moved["read_bytes"] + moved["forwarded_bytes"] > 0
    # A write that was overtaken by its use may still run when a step ends; a leak would stay.
    last = offloaded.metrics[-1]["offload"]
    assert last["tier_used_bytes"] == 0 and last["read_bytes"] > 0
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["TP2+SP", "DP2+distributed-optimizer"])
def test_layers_may_be_placed_one_by_one(layout: str, tmp_path: Path) -> None:
    """`test_matrix.py` has more of these."""
    # The last layer keeps everything.
    lists = "--activation-recompute-layers 1,3 --activation-offload-layers decoder.2"
    for step in trained_like_off(layout, tmp_path, lists):
        assert step["recomputed_layers"] > 0 and step["offloaded_bytes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["TP2+SP", "PP2xVPP2"])
def test_the_inputs_of_recomputed_layers_may_move(layout: str, tmp_path: Path) -> None:
    lists = "--activation-recompute-layers 1-4 --activation-recompute-input ssd"
    for step in trained_like_off(layout, tmp_path, lists):
        # At most an input each: the schedule holds the first one of a chunk itself.
        assert 0 < step["offloaded_storages"] <= step["recomputed_layers"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "num_layers", "layout", "checkpoints", "recomputed"),
    [("uniform", 2, "TP1", 2, 4), ("block", 1, "PP2", 1, 1), ("block", 3, "TP2+SP", 3, 3)],
)
def test_the_inputs_of_megatrons_own_checkpoints_move(
    method: str, num_layers: int, layout: str, checkpoints: int, recomputed: int, tmp_path: Path
) -> None:
    """`test_matrix.py` has more of these."""
    world_size, flags = LAYOUTS[layout]
    flags += f" --train-iters {STEPS}"
    own = f" --recompute-granularity full --recompute-method {method}"
    own += f" --recompute-num-layers {num_layers}"
    # Layers that are not recomputed move as well, to the SSD.
    own += " --activation-recompute-input host --activation-offload-host-budget 1GiB"
    moved = train(flags, ssd(tmp_path) + own, model="settled", world_size=world_size)
    assert_same_bits(moved, train_once(flags, world_size=world_size), STEPS)
    for step in (record["offload"] for record in moved.metrics):
        assert step["recomputed_layers"] == 4 * recomputed  # micro-batches
        if method == "uniform":
            assert step["offloaded_storages"] == 4 * checkpoints
        else:
            assert step["offloaded_storages"] > 4 * checkpoints
    # Inputs go to host memory.
    written = [record["offload"]["written_bytes"] for record in moved.metrics]
    assert (written[-1] > 0) is (sum(written) > 0) is (method == "block")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "layout"),
    [
        ("host --activation-offload-host-budget 1GiB", "TP1"),
        ("tiered --activation-offload-host-budget 128KiB", "TP2"),
        ("ssd --activation-offload-verify checksum --activation-offload-io buffered", "TP1"),
    ],
)
def test_the_other_modes_change_no_bit_either(mode: str, layout: str, tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    world_size, model = LAYOUTS[layout]
    model += f" --train-iters {STEPS}"
    offload = (
        f"--activation-offload {mode} --activation-offload-min-bytes 1KiB"
        f" --activation-offload-dir {directories[0]},{directories[1]}"
    )
    offloaded = train(model, offload, model="settled", world_size=world_size)
    assert_same_bits(offloaded, train_once(model, world_size=world_size), STEPS)
    moved = [record["offload"] for record in offloaded.metrics]
    uses_host, uses_ssd = not mode.startswith("ssd"), not mode.startswith("host")
    for name, is_used in (("host_read_bytes", uses_host), ("read_bytes", uses_ssd)):
        assert (moved[-1][name] > 0) is (sum(step[name] for step in moved) > 0) is is_used
    assert [os.listdir(directory) for directory in directories] == [[], []]
    assert ("to the drive of" in offloaded.output) is uses_ssd


@pytest.mark.slow
def test_a_resumed_run_with_offload_equals_an_uninterrupted_one_without(tmp_path: Path) -> None:
    whole = train("--train-iters 6")
    saved, offload = f"--save {tmp_path / 'checkpoint'}", ssd(tmp_path)
    train(saved, offload, "--train-iters 3 --lr-decay-iters 6")
    resumed = train(saved, offload, f"--load {tmp_path / 'checkpoint'} --train-iters 6")
    for name in ("loss", "grad_norm"):
        assert resumed.values(name)[-3:] == whole.values(name)[-3:]
    assert resumed.model == whole.model


@pytest.mark.slow
def test_evaluation_between_steps_changes_nothing(tmp_path: Path) -> None:
    flags = "--train-iters 4 --eval-interval 2 --eval-iters 2"
    off, offloaded = train(flags), train(flags, ssd(tmp_path))
    assert offloaded.values("loss") == off.values("loss")
    assert offloaded.model == off.model
    validation = [line for line in off.output.splitlines() if line.startswith("validation at")]
    assert len(validation) == 2
    assert all(line in offloaded.output for line in validation)


def test_kill_9_in_mid_training_leaves_the_directory_empty(tmp_path: Path) -> None:
    with Run(TINY, ssd(tmp_path), "--train-iters 100000") as run:
        run.wait_for_step(2)
        run.processes[0].send_signal(signal.SIGKILL)
        assert run.processes[0].wait(timeout=SOON_S) == -signal.SIGKILL
    assert os.listdir(tmp_path) == []
