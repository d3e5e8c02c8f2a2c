# SPDX-License-Identifier: Apache-2.0
"""The solver's plans keep what they promise, and say so when nothing can."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.offload.activations.placement.plan import Plan
from megatron.offload.activations.placement.plan_table import plan_table
from megatron.offload.activations.placement.policy import Placement
from megatron.offload.errors import ConfigurationError, InfeasibleBudgetError
from megatron.offload.planner.profile.pipeline_schedule import PipelinePosition
from megatron.offload.planner.profile.stage_profile import (
    UNBOUNDED,
    PartProfile,
    StageProfile,
)
from megatron.offload.planner.simulator.instructions import RECOMPUTE_LAYER
from megatron.offload.planner.simulator.timeline import Timeline
from megatron.offload.planner.solver.formulation import Program
from megatron.offload.planner.solver.solve import solve
from tests.support.stages import layer, part, stage, tier

ROOT = Path(__file__).resolve().parent.parent.parent

# Forward takes 4 s, backward 8. The SSD needs 4 s for a layer, so one or two of four hide.
SLOW_SSD = tier("ssd", write=2.0, read=2.0)
SLOW_HOST = tier("host", write=4.0, read=4.0)


def placements(plan: Plan) -> list[Placement]:
    return [line.placement for line in plan.parts]


def best_of_all(profile: StageProfile, budget_bytes: int) -> float:
    """The shortest step of all plans within the budget."""
    timeline = Timeline(profile)
    costs = [
        timeline.cost(np.array(list(itertools.chain(*plan)), np.int64))
        for plan in itertools.product(*timeline.choices.options)
    ]
    return min((cost.step_s for cost in costs if cost.peak_bytes <= budget_bytes), default=math.inf)


def test_with_room_for_everything_everything_is_kept() -> None:
    plan = solve(stage(4), budget_bytes=32)
    assert placements(plan) == [Placement.KEEP] * 4
    assert {line.reason for line in plan.parts} == {"there is room"}
    assert plan.predicted == plan.fastest and plan.goal == "at most 32 B"


def test_the_program_leaves_room_for_fragments() -> None:
    layers = tuple(layer(f"decoder.{n}", parts=(part(size=800),)) for n in range(8))
    profile = stage(layers=layers, tiers=(), allocator_slack=0.25)
    timeline = Timeline(profile)
    chosen = Program(profile, timeline.choices).solve(budget_bytes=5000)
    assert chosen is not None
    assert 4000 < timeline.cost(chosen).peak_bytes <= 5000


def test_what_hides_moves_before_anything_is_recomputed() -> None:
    plan = solve(stage(4), budget_bytes=24)
    assert plan.predicted is not None and plan.fastest is not None
    assert plan.predicted.peak_bytes <= 24 and plan.predicted.step_s == plan.fastest.step_s
    assert Placement.RECOMPUTE not in placements(plan) and Placement.SSD in placements(plan)
    moved = [line.reason for line in plan.parts if line.placement is Placement.SSD]
    assert set(moved) == {"hides behind compute"}


def test_below_what_recomputation_alone_needs_its_inputs_move() -> None:
    layers = tuple(
        layer(f"decoder.{n}", input_bytes=4, movable_input_bytes=4, parts=(part(size=16),))
        for n in range(6)
    )
    # Too slow for a layer's 16 bytes, but not for an input's 4.
    profile = stage(layers=layers, tiers=(tier(write=4.0, read=4.0),))
    timeline = Timeline(profile)
    recomputed = timeline.cost(timeline.choices.all(RECOMPUTE_LAYER))
    budget = int(recomputed.peak_bytes) - 8
    plan = solve(profile, budget_bytes=budget)
    assert plan.predicted is not None and plan.predicted.peak_bytes <= budget
    assert plan.predicted.step_s == best_of_all(profile, budget)
    assert set(plan.inputs.values()) == {Placement.SSD}
    kept = stage(
        layers=tuple(replace(one, movable_input_bytes=0) for one in layers), tiers=profile.tiers
    )
    assert best_of_all(kept, budget) > plan.predicted.step_s


def test_recomputation_is_taken_where_waiting_costs_more() -> None:
    # A layer is written in a second and read in 16.
    plan = solve(stage(4, tiers=(tier(read=0.5),)), budget_bytes=20)
    assert plan.predicted is not None and plan.predicted.peak_bytes <= 20
    reasons = {line.reason for line in plan.parts if line.placement is Placement.RECOMPUTE}
    assert any(reason.startswith("cheaper than waiting") for reason in reasons), reasons


@pytest.mark.parametrize("budget_bytes", [14, 18, 22, 26, 30, 36, 44])
@pytest.mark.parametrize(
    "position",
    [
        PipelinePosition(1, 0, 1, 1),
        PipelinePosition(2, 0, 1, 2),
        PipelinePosition(2, 1, 2, 2),
        PipelinePosition(1, 0, 2, 1, "ascending"),
    ],
    ids=str,
)
def test_within_a_budget_the_plan_is_as_fast_as_the_best_of_all(
    position: PipelinePosition, budget_bytes: int
) -> None:
    profile = stage(
        4 // position.num_chunks,
        position=position,
        micro_batches=2,
        tiers=(SLOW_HOST, SLOW_SSD),
        inflight_bytes=16,
        after_s=(0.5,) * position.num_chunks,
    )
    best_s = best_of_all(profile, budget_bytes)
    if math.isinf(best_s):
        with pytest.raises(InfeasibleBudgetError):
            solve(profile, budget_bytes=budget_bytes)
        return
    plan = solve(profile, budget_bytes=budget_bytes)
    assert plan.predicted is not None
    assert plan.predicted.peak_bytes <= budget_bytes
    assert plan.predicted.step_s <= 1.01 * best_s
    assert plan.predicted == Timeline(profile, all_micro_batches=True).predict(plan)


def test_of_plans_that_are_as_fast_the_one_that_writes_least_is_taken() -> None:
    profile, budget_bytes = stage(4), 24
    timeline = Timeline(profile)
    costs = [
        timeline.cost(np.array(list(itertools.chain(*plan)), np.int64))
        for plan in itertools.product(*timeline.choices.options)
    ]
    fitting = [cost for cost in costs if cost.peak_bytes <= budget_bytes]
    fastest_s = min(cost.step_s for cost in fitting)
    least = min(cost.written_bytes for cost in fitting if cost.step_s == fastest_s)
    most = max(cost.written_bytes for cost in fitting if cost.step_s == fastest_s)
    predicted = solve(profile, budget_bytes=budget_bytes).predicted
    assert predicted is not None and predicted.written_bytes == least < most


@pytest.mark.slow
def test_a_long_step_keeps_to_the_budget_as_a_whole() -> None:
    profile = stage(6, micro_batches=24, tiers=(SLOW_SSD,), inflight_bytes=16)
    whole = Timeline(profile, all_micro_batches=True)
    for budget_bytes in range(16, 48, 2):
        try:
            plan = solve(profile, budget_bytes=budget_bytes)
        except InfeasibleBudgetError:
            continue
        assert plan.predicted == whole.predict(plan)
        assert plan.predicted.peak_bytes <= budget_bytes


def test_a_larger_budget_is_never_slower() -> None:
    profile = stage(5, micro_batches=2, tiers=(SLOW_HOST, SLOW_SSD), inflight_bytes=16)
    steps = []
    for budget_bytes in range(16, 44, 4):
        predicted = solve(profile, budget_bytes=budget_bytes).predicted
        assert predicted is not None
        steps.append(predicted.step_s)
    assert steps == sorted(steps, reverse=True) and steps[0] > steps[-1]


def test_the_least_memory_within_a_slowdown() -> None:
    profile = stage(5, tiers=(SLOW_HOST,), inflight_bytes=16)
    peaks = []
    for slowdown in (0.0, 0.1, 0.2, 0.35):
        plan = solve(profile, max_slowdown=slowdown)
        assert plan.predicted is not None and plan.fastest is not None
        assert plan.predicted.step_s <= (1 + slowdown) * plan.fastest.step_s + 1e-6
        peaks.append(plan.predicted.peak_bytes)
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < peaks[0] < 40
    assert plan.goal == "at most 35 % slower"


def test_a_budget_that_cannot_be_met_names_the_smallest_that_can() -> None:
    profile = stage(4)
    with pytest.raises(InfeasibleBudgetError, match="fits into 0 B of device memory") as caught:
        solve(profile, budget_bytes=0)
    smallest, step_s = caught.value.smallest_bytes, caught.value.step_s
    assert f"({smallest} bytes), with {step_s:.3f} s a step" in str(caught.value)
    plan = solve(profile, budget_bytes=smallest)
    assert plan.predicted is not None
    assert plan.predicted.peak_bytes == smallest and plan.predicted.step_s == step_s
    with pytest.raises(InfeasibleBudgetError):
        solve(profile, budget_bytes=smallest - 1)


def test_a_budget_and_a_slowdown_are_both_kept_or_refused() -> None:
    profile = stage(4, tiers=())
    plan = solve(profile, budget_bytes=24, max_slowdown=0.5)
    assert plan.goal == "at most 24 B, at most 50 % slower"
    with pytest.raises(InfeasibleBudgetError, match=r"slower than keeping.*at most 1\.0%"):
        solve(profile, budget_bytes=24, max_slowdown=0.01)


def test_a_tier_takes_no_more_than_it_holds() -> None:
    profile = stage(4, tiers=(tier(capacity_bytes=8),), layers=None)
    plan = solve(profile, budget_bytes=26)
    assert plan.predicted is not None and plan.predicted.written_bytes <= 8


def test_the_hosts_lead_is_bounded_where_memory_is_short_and_only_there() -> None:
    # Layers of 8 bytes, half a second a copy. Without a bound all four are there at once whatever
    # moves; with one, the first has left when the last one is launched.
    behind = stage(4, tiers=(tier("host", 16.0, 16.0),), lead_layers=UNBOUNDED)
    near = solve(behind, budget_bytes=24)
    assert near.lead_layers == 1 and "at most 1 layer ahead" in plan_table(near)
    assert near.predicted is not None and near.predicted.peak_bytes <= 24
    assert near.predicted == Timeline(behind).predict(near)
    assert near.predicted.step_s == 12.0
    assert Timeline(behind).predict(replace(near, lead_layers=None)).peak_bytes > 24
    far = solve(behind, budget_bytes=32)
    assert far.lead_layers is None and placements(far) == [Placement.KEEP] * 4
    # A CPU's thread that computes is ahead of nothing.
    assert solve(replace(behind, lead_layers=0), budget_bytes=24).lead_layers is None
    # What no bound makes possible is refused with the least that one does.
    with pytest.raises(InfeasibleBudgetError) as refused:
        solve(behind, budget_bytes=2)
    assert solve(behind, budget_bytes=refused.value.smallest_bytes).predicted is not None


def test_what_cannot_be_recomputed_or_moved_is_not() -> None:
    layers = tuple(
        layer(f"decoder.{n}", recompute_s=None, parts=(part(size=8 if n else 0),)) for n in range(4)
    )
    plan = solve(stage(layers=layers), budget_bytes=22)
    assert Placement.RECOMPUTE not in placements(plan)
    assert plan.parts[0].placement is Placement.KEEP
    assert plan.parts[0].reason == "nothing to move"


def test_parts_of_a_layer_are_placed_on_their_own() -> None:
    parts = (
        part("attention", 6, produced_s=0.5, first_use_s=1.0, recompute_s=0.1),
        part("mlp", 8),
    )
    layers = tuple(layer(f"decoder.{n}", parts=parts) for n in range(4))
    plan = solve(stage(layers=layers, tiers=()), budget_bytes=42)
    found = {(line.part, line.placement) for line in plan.parts}
    assert ("attention", Placement.RECOMPUTE) in found and ("mlp", Placement.KEEP) in found
    assert ("layer", Placement.RECOMPUTE) not in found


@pytest.mark.parametrize("budget_bytes", [20, 24, 28, 34])
def test_a_part_is_recomputed_alone_where_that_is_best(budget_bytes: int) -> None:
    # The MLP gives back seven bytes for 0.25 s, attention one for 0.75 s, the layer nine for 1 s.
    parts = (
        part("attention", 2, produced_s=0.75, first_use_s=0.5, recompute_s=0.75, input_bytes=1),
        part("mlp", 8, recompute_s=0.25, input_bytes=1),
    )
    layers = tuple(layer(f"decoder.{n}", input_bytes=1, parts=parts) for n in range(4))
    profile = stage(layers=layers, tiers=(tier(write=0.5, read=0.5),))
    plan = solve(profile, budget_bytes=budget_bytes)
    assert plan.predicted is not None and plan.predicted.peak_bytes <= budget_bytes
    assert plan.predicted.step_s <= 1.01 * best_of_all(profile, budget_bytes)
    recomputed = [line for line in plan.parts if line.placement is Placement.RECOMPUTE]
    assert recomputed and {line.part for line in recomputed} == {"mlp"}
    assert all(line.reason for line in plan.parts)


@pytest.mark.parametrize("budget_bytes", [26, 30, 36])
def test_selective_operations_are_recomputed_where_that_is_best(budget_bytes: int) -> None:
    parts = (
        part("attention", 2, produced_s=0.75, first_use_s=0.5),
        part("mlp", 8, recompute_s=0.25, input_bytes=1, selective_bytes=4, selective_s=0.0625),
    )
    layers = tuple(layer(f"decoder.{n}", input_bytes=1, parts=parts) for n in range(4))
    profile = stage(layers=layers, tiers=(tier(write=0.5, read=0.5),))
    plan = solve(profile, budget_bytes=budget_bytes)
    assert plan.predicted is not None and plan.predicted.peak_bytes <= budget_bytes
    assert plan.predicted.step_s <= 1.01 * best_of_all(profile, budget_bytes)
    recomputed = [line for line in plan.parts if line.placement is Placement.RECOMPUTE]
    assert "mlp-selective" in {line.part for line in recomputed} <= {"mlp", "mlp-selective"}
    reasons = {one.reason for one in recomputed if one.part == "mlp-selective"}
    assert reasons == {"runs again in 62 ms"}


def test_a_goal_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="without a goal"):
        solve(stage())
    with pytest.raises(ConfigurationError, match="from zero up"):
        solve(stage(), budget_bytes=-1)
    with pytest.raises(ConfigurationError, match="from zero up"):
        solve(stage(), max_slowdown=float("nan"))


@pytest.mark.slow
def test_the_same_profile_gives_the_same_plan_in_every_process(tmp_path: Path) -> None:
    profile = stage(
        7,
        position=PipelinePosition(4, 1, 1, 4),
        micro_batches=6,
        tiers=(SLOW_HOST, SLOW_SSD),
        inflight_bytes=16,
    )
    here = solve(profile, budget_bytes=60)
    assert solve(profile, budget_bytes=60) == here
    path = tmp_path / "profile.json"
    path.write_text(profile.to_json())
    program = (
        "import sys, pathlib, json\n"
        "from megatron.offload.planner.profile.stage_profile import StageProfile\n"
        "from megatron.offload.planner.solver.solve import solve\n"
        "plan = solve(StageProfile.load(pathlib.Path(sys.argv[1])), budget_bytes=60)\n"
        "print(json.dumps([[one.layer, one.placement.value, one.reason] for one in plan.parts]))\n"
    )
    there = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    assert json.loads(there.stdout) == [
        [one.layer, one.placement.value, one.reason] for one in here.parts
    ]


def test_a_stage_without_layers_has_an_empty_plan() -> None:
    assert solve(stage(layers=()), budget_bytes=10).parts == ()


def uneven(seed: int) -> StageProfile:
    """Eight layers, each of other sizes and with other choices, and two small tiers."""
    chance = random.Random(seed)

    def one(name: str) -> PartProfile:
        return part(
            name,
            chance.randint(50, 400),
            resident_bytes=chance.randint(0, 20),
            produced_s=chance.random(),
            first_use_s=chance.random(),
            recompute_s=chance.choice((None, 0.5)),
            input_bytes=chance.randint(0, 30),
        )

    layers = tuple(
        layer(
            f"decoder.{n}",
            input_bytes=chance.randint(1, 40),
            recompute_s=chance.choice((None, 1.0)),
            parts=(one("attention"), one("mlp")),
        )
        for n in range(8)
    )
    ssd = tier(write=100.0, read=100.0, capacity_bytes=chance.randint(100, 2000))
    host = tier("host", 300.0, 300.0, capacity_bytes=chance.randint(100, 1000))
    return stage(layers=layers, tiers=(ssd, host), inflight_bytes=500)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, pytest.param(14, marks=pytest.mark.rare), 23])
def test_the_smallest_budget_is_the_same_whatever_was_asked_for_and_is_met(seed: int) -> None:
    profile = uneven(seed)

    def smallest(budget_bytes: int) -> int:
        with pytest.raises(InfeasibleBudgetError) as refused:
            solve(profile, budget_bytes=budget_bytes)
        assert refused.value.plan.predicted.peak_bytes <= refused.value.smallest_bytes
        return refused.value.smallest_bytes

    least = smallest(1)
    assert smallest(least // 2) == smallest(9 * least // 10) == least
    met = solve(profile, budget_bytes=least)
    assert met.predicted is not None and met.predicted.peak_bytes <= least
