# SPDX-License-Identifier: Apache-2.0
"""Profiles that are made to agree with whole steps."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.offload.activations.placement.plan import Plan, PlannedPart, Prediction
from megatron.offload.activations.placement.policy import Placement
from megatron.offload.planner.profile.calibration import calibrated
from megatron.offload.planner.profile.pipeline_schedule import PipelinePosition
from megatron.offload.planner.profile.stage_profile import (
    UNBOUNDED,
    LayerProfile,
    PartProfile,
    StageProfile,
    TierProfile,
)
from megatron.offload.planner.simulator.timeline import Timeline

MIB = 1 << 20


def profile(*, inflight_bytes: int = 512 * MIB) -> StageProfile:
    part = PartProfile("layer", 8 * MIB, 0, 4, produced_s=0.1, first_use_s=0.05)
    layers = tuple(
        LayerProfile(0, f"decoder.{number}", 0.1, 0.2, 0.1, MIB, (part,)) for number in (1, 2, 3)
    )
    return StageProfile(
        position=PipelinePosition(1, 0, 1, 1),
        num_micro_batches=2,
        layers=layers,
        tiers=(TierProfile("ssd", 20e6, 20e6),),
        before_s=(0.01,),
        after_s=(0.02,),
        backward_before_s=(0.03,),
        backward_after_s=(0.04,),
        step_fixed_s=0.1,
        inflight_bytes=inflight_bytes,
    )


def plan(placement: Placement) -> Plan:
    return Plan(
        tuple(
            PlannedPart(one.chunk, one.name, "layer", placement, 8 * MIB)
            for one in profile().layers
        )
    )


def simulate(one: StageProfile, placement: Placement) -> Prediction:
    return Timeline(one).predict(plan(placement))


@pytest.mark.parametrize("placement", [Placement.KEEP, Placement.SSD, Placement.RECOMPUTE])
@pytest.mark.parametrize("factor", [0.6, 1.0, 1.3, 5.0])
def test_the_simulation_shows_what_was_measured(placement: Placement, factor: float) -> None:
    before = simulate(profile(), placement)
    step_s, peak_bytes = before.step_s * factor, before.peak_bytes + 12345
    after = calibrated(
        profile(), lambda one: simulate(one, placement), step_s=step_s, peak_bytes=peak_bytes
    )
    # What computes slower leaves transfers more time, so a step that waits is not exact.
    tolerance = 0.1 if placement is Placement.SSD else 1e-9
    assert simulate(after, placement).step_s == pytest.approx(step_s, rel=tolerance)
    assert simulate(after, placement).peak_bytes == peak_bytes


def test_other_plans_get_slower_by_the_same_factor() -> None:
    kept = simulate(profile(), Placement.KEEP)
    after = calibrated(
        profile(),
        lambda one: simulate(one, Placement.KEEP),
        step_s=kept.step_s * 1.5,
        peak_bytes=kept.peak_bytes,
    )
    recomputed = simulate(profile(), Placement.RECOMPUTE).step_s
    assert simulate(after, Placement.RECOMPUTE).step_s == pytest.approx(1.5 * recomputed)


def test_without_a_step_the_times_stay_as_they_are() -> None:
    peak_bytes = simulate(profile(), Placement.KEEP).peak_bytes + 7
    after = calibrated(profile(), lambda one: simulate(one, Placement.KEEP), peak_bytes=peak_bytes)
    assert after == dataclasses.replace(profile(), transient_bytes=7)


def test_less_memory_than_simulated_is_taken_from_working_memory_as_far_as_there_is_some() -> None:
    one = dataclasses.replace(profile(), transient_bytes=100)
    peak_bytes = simulate(one, Placement.KEEP).peak_bytes
    for missing, left in ((30, 70), (1000, 0)):
        after = calibrated(
            one, lambda one: simulate(one, Placement.KEEP), peak_bytes=peak_bytes - missing
        )
        assert after.transient_bytes == left


@pytest.mark.parametrize("part", [1.15, 1.07, 1.0])
def test_less_memory_than_fragments_would_take_shows_that_there_are_fewer(part: float) -> None:
    bare_bytes = simulate(profile(), Placement.KEEP).peak_bytes
    one = dataclasses.replace(profile(), allocator_slack=0.2, transient_bytes=100)
    measured = round(part * bare_bytes)
    after = calibrated(one, lambda one: simulate(one, Placement.KEEP), peak_bytes=measured)
    assert after.transient_bytes == 0
    assert after.allocator_slack == pytest.approx(part - 1, abs=1e-6)
    assert simulate(after, Placement.KEEP).peak_bytes == pytest.approx(measured, abs=1)


def test_what_keeps_less_has_fewer_fragments() -> None:
    one = dataclasses.replace(profile(), allocator_slack=0.2)
    measured = round(1.5 * simulate(profile(), Placement.KEEP).peak_bytes)
    after = calibrated(one, lambda one: simulate(one, Placement.KEEP), peak_bytes=measured)
    less = simulate(after, Placement.RECOMPUTE).peak_bytes - after.transient_bytes
    assert less == pytest.approx(1.2 * simulate(profile(), Placement.RECOMPUTE).peak_bytes, abs=1)


def test_behind_a_host_only_what_lies_between_layers_is_missing() -> None:
    slow = (TierProfile("ssd", 2e6, 2e6),)
    inflight = profile(inflight_bytes=8 * MIB)
    behind = dataclasses.replace(inflight, lead_layers=UNBOUNDED, tiers=slow)
    moved = simulate(behind, Placement.SSD)
    busy_s = moved.step_s - moved.stall_s
    found = calibrated(
        behind,
        lambda one: simulate(one, Placement.SSD),
        step_s=busy_s + 0.25,
        peak_bytes=moved.peak_bytes,
    )
    assert moved.stall_s > 0 and found.layers == behind.layers
    assert found.step_fixed_s == pytest.approx(behind.step_fixed_s + 0.25)
    assert simulate(found, Placement.KEEP).step_s == pytest.approx(
        simulate(behind, Placement.KEEP).step_s + 0.25
    )
