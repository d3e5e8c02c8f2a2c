# SPDX-License-Identifier: Apache-2.0
"""`mode="auto"` and its predictions on a device that runs behind its host.

Each run is `tools/check/auto_on_device.py`'s, with fewer layers. Other work on the machine holds
the accelerator's streams up, and its host. So what is compared with a prediction may be measured
again; a mechanism that is missing is missing every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from check import auto_on_device
from check.auto_on_device import Bench, Run
from check.timed_model import Shape

from megatron.offload.activations.placement.plan import Plan, PlannedPart
from megatron.offload.activations.placement.plan_file import save_plans
from megatron.offload.activations.placement.policy import WHOLE_LAYER, Placement
from megatron.offload.planner.profile.pipeline_schedule import PipelinePosition
from megatron.offload.planner.profile.stage_profile import (
    UNBOUNDED,
    LayerProfile,
    PartProfile,
    StageProfile,
    TierProfile,
)
from megatron.offload.planner.simulator.timeline import Timeline
from megatron.offload.sizes import MIB
from tests.support.accelerators import Lag
from tests.support.lag.module import LagModule

HOST, KEEP, RECOMPUTE = Placement.HOST, Placement.KEEP, Placement.RECOMPUTE
SHAPE = Shape(num_layers=8, num_parts=4, layer_s=0.02, layer_bytes=MIB)
ATTEMPTS = 6
NUM_STEPS = 16  # a first plan after three, and a second one


@pytest.fixture(params=["fast"])
def bench(
    request: pytest.FixtureRequest,
    accelerator: Lag,
    lag: LagModule,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Bench]:
    monkeypatch.setitem(auto_on_device.LINKS, "fast", 8.0)
    made = Bench(request.param, tmp_path, SHAPE)
    with made.simulated():
        yield made


def truth(link: float) -> StageProfile:
    """The profile of the model, by how it is made."""
    part = PartProfile(WHOLE_LAYER, SHAPE.layer_bytes, 0, SHAPE.num_parts, SHAPE.layer_s, 0.0)
    seconds = SHAPE.layer_s, 2 * SHAPE.layer_s, SHAPE.layer_s
    layers = tuple(
        LayerProfile(0, f"layers.{n}", *seconds, 0, (part,)) for n in range(SHAPE.num_layers)
    )
    rate, nothing = link * SHAPE.produced_bytes_per_s, (0.0,)
    return StageProfile(
        PipelinePosition(1, 0, 1, 1),
        1,
        layers,
        (TierProfile("host", rate, rate),),
        *(nothing, nothing, nothing, nothing),
        inflight_bytes=2 * SHAPE.layer_bytes,
        lead_layers=UNBOUNDED,
        hands_over="operation",
    )


def plan_of(*placements: Placement, lead: int | None = None) -> Plan:
    lines = [
        PlannedPart(0, f"layers.{n}", WHOLE_LAYER, placement, SHAPE.layer_bytes)
        for n, placement in enumerate(placements)
    ]
    return Plan(tuple(lines), lead_layers=lead)


def peaks_of(bench: Bench, folder: Path, plan: Plan) -> list[int]:
    """Of some steps that follow a plan."""
    path = folder / "followed.json"
    save_plans(path, [plan])
    run = Run("followed", bench.link, None)
    bench._train(run, 4, plan_file=path)
    return [one.peak_bytes for one in run.steps]


@pytest.mark.slow(but="fast-placements3-1")
@pytest.mark.parametrize(
    ("placements", "lead"),
    [
        ([HOST] * 8, None),
        ([HOST] * 4 + [KEEP] * 4, None),
        ([HOST] * 4 + [KEEP] * 4, 1),
        ([HOST, KEEP] * 4, 1),
        ([RECOMPUTE] * 2 + [HOST] * 3 + [KEEP] * 3, None),
        ([RECOMPUTE] * 8, None),
    ],
)
def test_peaks_are_those_that_are_predicted(
    bench: Bench, tmp_path: Path, placements: list[Placement], lead: int | None
) -> None:
    plan = plan_of(*placements, lead=lead)
    predicted = Timeline(truth(8.0)).predict(plan).peak_bytes
    errors: list[float] = []
    for _ in range(ATTEMPTS):
        errors += [abs(one / predicted - 1) for one in peaks_of(bench, tmp_path, plan)]
        if min(errors) <= 0.05:
            return
    raise AssertionError(f"{predicted} bytes are predicted, off by {sorted(errors)}")


@pytest.mark.slow
def test_a_bound_of_the_lead_has_layers_leave_before_others_come(
    bench: Bench, tmp_path: Path
) -> None:
    placements = [HOST] * 4 + [KEEP] * 4
    for _ in range(ATTEMPTS):
        far = max(peaks_of(bench, tmp_path, plan_of(*placements)))
        near = min(peaks_of(bench, tmp_path, plan_of(*placements, lead=1)))
        if far - near >= SHAPE.layer_bytes:
            return
    raise AssertionError(f"{far} bytes without a bound, {near} with one")


def until(found: Callable[[Run], str], bench: Bench, budget_bytes: int) -> None:
    """Trains within a budget, again where a moment of this machine was in the way."""
    reasons = []
    for _ in range(ATTEMPTS):
        run = bench.auto(budget_bytes, NUM_STEPS)
        assert not run.failed, run.failed
        reason = found(run)
        if run.over_budget_steps:  # a copy was late: it took longer than those that were measured
            reason = f"{run.over_budget_steps} steps are over the budget"
        elif run.steps[-1].plans > 2:
            reason = reason or f"{run.steps[-1].plans} plans"
        if not reason:
            return
        reasons.append(f"{reason}\n{run.plan}")
    raise AssertionError("\n\n".join(reasons))


@pytest.mark.slow
def test_with_room_for_everything_everything_is_kept(bench: Bench) -> None:
    def found(run: Run) -> str:
        last = run.steps[-1]
        return "" if not last.recomputed_layers and not last.offloaded_bytes else "something leaves"

    until(found, bench, SHAPE.num_layers * SHAPE.layer_bytes + MIB // 2)


@pytest.mark.slow
@pytest.mark.parametrize("kept_layers", [4, 6])
def test_behind_a_fast_link_layers_move_and_nothing_is_recomputed(
    bench: Bench, kept_layers: int
) -> None:
    def found(run: Run) -> str:
        last = run.steps[-1]
        if last.recomputed_layers or not last.offloaded_bytes:
            return f"{last.recomputed_layers} layers are recomputed, {last.offloaded_bytes} B move"
        error = last.predicted_peak_bytes / run.peak_bytes - 1
        return "" if abs(error) <= 0.05 else f"the peak is off by {error:.1%}"

    until(found, bench, kept_layers * SHAPE.layer_bytes + MIB // 2)


@pytest.mark.slow
@pytest.mark.parametrize("bench", ["tenth"], indirect=True)
def test_behind_a_slow_link_layers_are_recomputed(bench: Bench) -> None:
    def found(run: Run) -> str:
        number = run.steps[-1].recomputed_layers
        return "" if number >= 3 else f"{number} layers are recomputed"

    until(found, bench, 4 * SHAPE.layer_bytes)


@pytest.mark.slow
def test_at_the_least_budget_there_is_a_plan_that_keeps_to_it(bench: Bench) -> None:
    # Of one layer that is recomputed and a little: nothing is there while another one is.
    until(lambda run: "", bench, round(1.05 * SHAPE.layer_bytes))
