# SPDX-License-Identifier: Apache-2.0
"""Layer-major steps of Megatron's models: the bits of one micro-batch after the other.

With dropout.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.offload.activations.placement.plan_file import load_plans
from megatron.offload.activations.saved.scope import layer_of
from megatron.offload.planner.profile.stage_profile import StageProfile
from tests.support.launch import Outcome, assert_same_bits, train, train_once
from tests.support.offload_flags import auto, ssd

STEPS = 4
UNITS = "--layer-major-units 2"
UNTIED = "--untie-embeddings-and-output-weights"
MOE = "--num-experts 4 --disable-bias-linear"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce"
LAYOUTS = {
    "fp32": (1, UNTIED),
    "bf16": (1, f"{UNTIED} --bf16"),
    "selective": (1, f"{UNTIED} --recompute-granularity selective --recompute-modules core_attn"),
    "recomputed": (1, f"{UNTIED} --activation-recompute-layers 2-3"),
    "tied": (1, ""),
    "tied bf16": (1, f"--bf16 {SHARDED}"),
    "tied TP2+SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "tied DP2": (2, f"--bf16 {SHARDED}"),
    "tied chunked loss": (1, "--activation-chunked-loss 7"),
    "chunked loss": (1, f"{UNTIED} --activation-chunked-loss 7"),
    "MoE": (1, f"{UNTIED} {MOE}"),
    "TP2+SP": (2, f"{UNTIED} --tensor-model-parallel-size 2 --sequence-parallel"),
    "DP2 distributed": (2, f"{UNTIED} {SHARDED} --bf16 --overlap-param-gather"),
    "EP2": (2, f"{UNTIED} {MOE} --expert-model-parallel-size 2"),
}
# In memory if no layer is recomputed: that belongs to offload.
CASES = [
    (layout, moves)
    for layout, (_, flags) in LAYOUTS.items()
    for moves in (True, False)
    if moves or "--activation-recompute-layers" not in flags
]
# The rest is left out unless --rare is given. Offload or not is the same question in each layout.
FAST = (
    ("fp32", True),
    ("fp32", False),
    ("tied", True),
    ("TP2+SP", True),
    ("DP2 distributed", True),
)


@pytest.mark.slow(but="fp32-in memory")
@pytest.mark.parametrize(
    ("layout", "moves"),
    [
        pytest.param(
            *case,
            marks=() if case in FAST else pytest.mark.rare,
            id=f"{case[0]}-{'ssd' if case[1] else 'in memory'}",
        )
        for case in CASES
    ],
)
def test_layer_major_steps_change_no_bit(layout: str, moves: bool, tmp_path: Path) -> None:
    """Compared with steps whose activations stay in memory, wherever those in units have theirs."""
    world_size, flags = LAYOUTS[layout]
    flags += f" --train-iters {STEPS}"
    where = ssd(tmp_path) if moves else ""
    if "--activation-recompute-layers" in flags:
        one_by_one = train(flags, where, world_size=world_size)
    else:
        one_by_one = train_once(flags, world_size=world_size)
    boundary = "--activation-boundary ssd" if (layout, moves) == ("TP2+SP", True) else ""
    in_units = train(flags, where, UNITS, boundary, world_size=world_size)
    assert_same_bits(in_units, one_by_one, STEPS)
    assert bool(in_units.metrics[-1]["offload"]) is moves


# Of what waits between units: processes, flags, and the bytes of a micro-batch's hidden states.
CROSSING = {
    "fp32": (1, "", 32 * 64 * 4),
    "recomputed": (
        1,
        "--activation-recompute-layers 1-4 --activation-recompute-input ssd",
        32 * 64 * 4,
    ),
    "TP2": (2, "--tensor-model-parallel-size 2", 32 * 64 * 4),
    "TP2+SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel", 16 * 64 * 4),
    "DP2 distributed": (2, f"{SHARDED} --bf16 --global-batch-size 16", 32 * 64 * 2),
    "MoE": (1, MOE, 32 * 64 * 4),
    "EP2": (2, f"{MOE} --expert-model-parallel-size 2 --global-batch-size 16", 32 * 64 * 4),
}


@pytest.mark.rare
@pytest.mark.parametrize("layout", CROSSING)
def test_what_waits_between_units_on_a_tier_changes_no_bit(layout: str, tmp_path: Path) -> None:
    """And costs what its gradients are to write: hidden states are saved by the next layer too."""
    world_size, flags, one = CROSSING[layout]
    flags = f"{UNTIED} --train-iters 3 --global-batch-size 8 --layer-major-units 4 {flags}"
    kept = train(flags, ssd(tmp_path), world_size=world_size)
    moved = train(flags, ssd(tmp_path), "--activation-boundary ssd", world_size=world_size)
    assert_same_bits(moved, kept, 3)
    theirs, mine = kept.metrics[-1]["offload"], moved.metrics[-1]["offload"]
    num_bytes = 3 * 8 * one
    assert mine["offloaded_bytes"] - theirs["offloaded_bytes"] == num_bytes
    assert mine["deduplicated_bytes"] - theirs["deduplicated_bytes"] == num_bytes


def near(one: Outcome, other: Outcome) -> None:
    """As near as additions in another order leave them, over a few steps."""
    for name in ("loss", "grad_norm"):
        assert one.values(name) == pytest.approx(other.values(name), rel=1e-4)
    assert one.values("loss")[0] == other.values("loss")[0]


@pytest.mark.slow
def test_alternating_units_add_in_another_order(tmp_path: Path) -> None:
    flags = f"{UNTIED} --train-iters {STEPS}"
    alternating = "--layer-major-units auto --layer-major-order alternating"
    near(train(flags, ssd(tmp_path), alternating), train_once(flags))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bert", "t5"])
def test_bert_and_t5(model: str, tiny: dict[str, str], tmp_path: Path) -> None:
    flags = f"--train-iters 2 {ssd(tmp_path)}"
    one_by_one = train(flags, tiny=tiny[model], model=model)
    assert_same_bits(train(flags, UNITS, tiny=tiny[model], model=model), one_by_one, 2)


@pytest.mark.rare
def test_what_t5_has_between_units_waits_on_a_tier(tiny: dict[str, str], tmp_path: Path) -> None:
    """With the encoder's output, which all later units take."""
    flags = f"--train-iters 3 --global-batch-size 8 --layer-major-units 4 {ssd(tmp_path)}"
    kept = train(flags, tiny=tiny["t5"], model="t5")
    moved = train(flags, "--activation-boundary ssd", tiny=tiny["t5"], model="t5")
    assert_same_bits(moved, kept, 3)
    theirs, mine = kept.metrics[-1]["offload"], moved.metrics[-1]["offload"]
    assert mine["offloaded_bytes"] > theirs["offloaded_bytes"]


@pytest.mark.slow
def test_evaluation_and_resume(tmp_path: Path) -> None:
    """Trained in units, evaluated, saved and gone on from; and the other way round."""
    flags = f"{UNTIED} --train-iters {STEPS}"
    evaluated = f"{ssd(tmp_path)} --eval-interval 2 --eval-iters 2"
    whole = train_once(flags)  # evaluation changes nothing
    for first, then in ((UNITS, ""), ("", UNITS)):
        folder = tmp_path / (first and "units")
        train(flags, evaluated, first, f"--save {folder} --exit-interval 2")
        rest = train(flags, evaluated, then, f"--load {folder}")
        assert rest.model == whole.model
        assert rest.values("loss") == whole.values("loss")[2:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "batches"),
    [
        ("fp32", 4),
        pytest.param("TP2+SP", 4, marks=pytest.mark.rare),
        pytest.param("DP2 distributed", 8, marks=pytest.mark.rare),
    ],
)
def test_units_are_planned(layout: str, batches: int, tmp_path: Path) -> None:
    """The first step counts random numbers, two are measured; then each unit has its plan."""
    world_size, flags = LAYOUTS[layout]
    flags += f" --train-iters {STEPS} --global-batch-size {batches}"
    run, path = tmp_path / "run", tmp_path / "plan.json"
    planned = train(
        flags,
        auto(tmp_path, "--activation-offload-max-slowdown 1", f"--activation-offload-plan {path}"),
        f"--metrics-file {run / 'metrics.jsonl'}",
        UNITS,
        world_size=world_size,
        timeout_s=150,
    )
    assert_same_bits(planned, train_once(flags, world_size=world_size), STEPS)
    plan = load_plans(path)[0]
    assert {(one.chunk, one.layer) for one in plan.parts if layer_of(one.layer)} == {
        (number > 2, f"decoder.{number}") for number in range(1, 5)
    }
    profile = StageProfile.load(run / "activation-profile-stage0.json")
    assert profile.position == (1, 0, 2, 1, "ascending") and profile.num_micro_batches == 4
    hidden_states = 4 * 32 * 64 // world_size
    assert profile.passed_on_bytes == (hidden_states, 0)
    for one in profile.layers:
        assert one.forward_s > 0 and one.backward_s > 0 and one.movable_bytes > 0
        assert all(part.recompute_s and part.selective_s for part in one.parts)
    figures = [record["offload"] for record in planned.metrics]
    assert [step["plans"] for step in figures] == [0, 0, 1, 1]
    assert figures[-1]["predicted_step_s"] > 0 and figures[-1]["measured_step_s"] > 0
    assert "unit 0 decoder.1" in planned.output and "unit 1 decoder.3" in planned.output


@pytest.mark.slow
def test_states_move_beside(tmp_path: Path) -> None:
    flags = f"{UNTIED} --train-iters {STEPS}"
    states = "--optimizer-state-offload ssd --optimizer-state-window 64KiB"
    in_units = train(flags, ssd(tmp_path), states, UNITS)
    assert_same_bits(in_units, train_once(flags), STEPS)
    assert in_units.metrics[-1]["states"]["read_bytes"] > 0


EVALUATED = {
    "fp32": (1, ""),
    "MoE": (1, MOE),
    "TP2": (2, "--tensor-model-parallel-size 2"),
}


@pytest.mark.slow(but="fp32")
@pytest.mark.parametrize("layout", EVALUATED)
def test_evaluation_in_units_has_the_same_losses_and_reads_each_unit_once(
    layout: str, tmp_path: Path
) -> None:
    """Dropout is off in it; steps before and behind it have their own bits."""
    world_size, flags = EVALUATED[layout]
    flags = (
        f"{UNTIED} {flags} --layer-major-units auto --train-iters 3 --eval-iters 2 "
        f"--eval-interval 1 --parameter-offload ssd --parameter-offload-dir {tmp_path}"
    )
    usual = train(flags, world_size=world_size)
    in_units = train(flags, "--layer-major-eval on", world_size=world_size)
    assert_same_bits(in_units, usual, 3)
    theirs, mine = (
        [line for line in one.output.splitlines() if "validation at step" in line]
        for one in (usual, in_units)
    )
    assert mine == theirs and len(mine) >= 2
    read = [one.metrics[-1]["parameters"]["read_bytes"] for one in (usual, in_units)]
    assert 0 < read[1] < 0.7 * read[0]
