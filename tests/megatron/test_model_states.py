# SPDX-License-Identifier: Apache-2.0
"""Invariant 1 for model states: losses, gradient norms, weights, main weights and states are the
same bits with states on the SSD or in host memory, in every layout. What of Megatron's optimizers
is refused, and when reads begin: test_model_states_parts.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import Outcome, assert_same_bits, train
from tests.support.offload_flags import ssd
from tests.support.ranks import run_ranks

STEPS = 10
CLIPPED = 0.5  # what gradients are clipped to, less than the norm of any step
SCRIPT = Path(__file__).parent / "model_states_ranks.py"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce"
LAYOUTS = {
    "fp32": (1, ""),
    "bf16": (1, "--bf16"),
    "TP2": (2, "--tensor-model-parallel-size 2"),
    "TP2+SP bf16": (2, "--bf16 --tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2 bf16": (2, "--bf16 --pipeline-model-parallel-size 2"),
    "PP2xVPP2": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "DP2 distributed": (2, f"{SHARDED}"),
    "DP2 distributed bf16": (2, f"--bf16 {SHARDED} --overlap-param-gather"),
}
# The rest is left out unless --rare is given.
FAST = (("PP2 bf16", "host"), ("DP2 distributed bf16", "ssd"))


def states_in(mode: str, directory: Path) -> str:
    """Flags that move states in small buckets; of some the window holds the last ones."""
    flags = f"--optimizer-state-offload {mode} --optimizer-state-bucket 32KiB"
    if mode == "host":
        return f"{flags} --optimizer-state-window 64KiB"
    # Where activations go, if nothing else is said.
    return f"{flags} --optimizer-state-window 768KiB {ssd(directory)}"


def tensors_of(checkpoint: Path) -> dict[str, bytes]:
    """The files of a checkpoint that hold tensors."""
    return {str(f.relative_to(checkpoint)): f.read_bytes() for f in checkpoint.rglob("*.distcp")}


def moved(outcome: Outcome) -> dict[str, Any]:
    """What was counted of the first rank's states."""
    counted: dict[str, Any] = outcome.metrics[-1]["states"]
    return counted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        pytest.param(layout, mode, marks=() if (layout, mode) in FAST else pytest.mark.rare)
        for layout in LAYOUTS
        for mode in ("ssd", "host")
    ],
)
def test_states_that_move_change_no_bit(layout: str, mode: str, tmp_path: Path) -> None:
    """Nor a byte of a checkpoint, which has main weights and states. Gradients are clipped."""
    world_size, flags = LAYOUTS[layout]
    flags += f" --train-iters {STEPS} --clip-grad {CLIPPED}"
    off = train(flags, f"--save {tmp_path}/off", world_size=world_size)
    on = train(flags, f"--save {tmp_path}/on", states_in(mode, tmp_path), world_size=world_size)
    assert_same_bits(on, off, STEPS)
    assert min(on.values("grad_norm")) > CLIPPED
    files = tensors_of(tmp_path / "on")
    assert files and files == tensors_of(tmp_path / "off")
    counted = moved(on)
    # A step reads what does not stay, but for what is still being written.
    stays = counted["memory_bytes"]
    assert (stays > 0) is (mode == "ssd") and stays <= 768 << 10
    assert counted["read_bytes"] >= STEPS / 2 * (counted["bytes"] - stays) > 0
    assert bool(on.metrics[-1]["offload"]) is (mode == "ssd")  # activations move beside, or not


@pytest.mark.rare
@pytest.mark.parametrize("mode", ["ssd", "host"])
def test_experts_have_an_optimizer_of_their_own(mode: str, tmp_path: Path) -> None:
    flags = "--num-experts 4 --disable-bias-linear --expert-model-parallel-size 2 --bf16"
    flags += f" --train-iters {STEPS}"
    off = train(flags, world_size=2)
    on = train(flags, states_in(mode, tmp_path), world_size=2)
    assert_same_bits(on, off, STEPS)
    assert moved(on)["read_bytes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "fp16 distributed",
        pytest.param("fp16", marks=pytest.mark.rare),
        pytest.param("fp16 sgd", marks=pytest.mark.rare),
    ],
)
def test_a_step_that_loss_scaling_skips_changes_no_state(case: str, tmp_path: Path) -> None:
    (tmp_path / "ssd").mkdir()
    results = run_ranks(SCRIPT, tmp_path, str(tmp_path / "ssd"), case)
    assert results.keys() == {"ssd", "host"}
    for mode, found in results.items():
        assert found["skipped"] == [7], mode
        assert found["steps"] and found["shown"] and found["restored"], (mode, found)
        assert found["num_tensors"] > 80
        assert found["read_bytes"] > 10 * found["bytes"]  # of 20 steps
