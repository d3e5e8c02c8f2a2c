# SPDX-License-Identifier: Apache-2.0
"""How fast a tier is: in the step alone once something has changed, on average before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.offload import OffloadConfig, OffloadEngine, Placement, Scope
from megatron.offload.device.cpu import CpuDevice
from megatron.offload.planner.online.step_meter import StepMeter
from megatron.offload.planner.profile.pipeline_schedule import PipelinePosition
from megatron.offload.planner.profile.stage_profile import StageProfile
from megatron.offload.planner.profile.timings import PassTimings, Timestamp
from tests.support.behind import DeviceBehind
from tests.support.stages import stage

FAST, SLOW = 1e9, 50e6


class Meter:
    """A `BandwidthMeter` that is told what has been moved. The average is what it was at first."""

    def __init__(self) -> None:
        self.total_bytes, self.busy_s = 0, 0.0
        self.bytes_per_s = FAST

    def move(self, bytes_per_s: float, seconds: float) -> None:
        self.total_bytes += int(bytes_per_s * seconds)
        self.busy_s += seconds


class Tier:
    """As much of one as is measured."""

    limit_bytes = None
    write_limit: Any = None

    def __init__(self) -> None:
        self.statistics = SimpleNamespace(writes=Meter(), reads=Meter())


@pytest.fixture
def tier() -> Tier:
    return Tier()


@pytest.fixture
def meter(tier: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StepMeter]:
    config = OffloadConfig(mode="auto", directories=(tmp_path,), memory_budget_bytes=1 << 30)
    engine = OffloadEngine(config)
    monkeypatch.setattr(OffloadEngine, "tiers", {Placement.SSD: tier})
    yield StepMeter(config, engine, CpuDevice())
    monkeypatch.undo()
    engine.close()


def speeds_of_step(meter: StepMeter) -> dict[str, float]:
    with meter.step(detailed=False):
        pass
    assert meter.last is not None
    return dict(meter.last.write_bytes_per_s)


def test_a_step_says_how_fast_the_tier_was_in_it(meter: StepMeter, tier: Tier) -> None:
    tier.statistics.writes.move(FAST, 3.0)
    assert speeds_of_step(meter) == {"ssd": pytest.approx(FAST)}
    tier.statistics.writes.move(SLOW, 0.5)
    assert speeds_of_step(meter) == {"ssd": pytest.approx(SLOW)}
    tier.statistics.reads.move(SLOW, 0.5)
    assert speeds_of_step(meter) == {}  # nothing was written


def test_what_was_too_short_to_tell_counts_as_before(meter: StepMeter, tier: Tier) -> None:
    tier.statistics.writes.move(SLOW, 0.05)
    assert speeds_of_step(meter) == {"ssd": FAST}


def test_a_limit_counts_where_transfers_are_faster(meter: StepMeter, tier: Tier) -> None:
    tier.write_limit = SimpleNamespace(bytes_per_s=SLOW)
    tier.statistics.writes.move(FAST, 0.5)
    assert speeds_of_step(meter) == {"ssd": SLOW}


def profile_of(meter: StepMeter, previous: StageProfile | None = None) -> StageProfile:
    """Of one step without layers."""
    moments = [Timestamp(float(second), 0) for second in range(4)]
    meter.profiler.steps.append([PassTimings(0, *moments)])
    meter._detailed_s.append(4.0)
    return meter.profile(PipelinePosition(1, 0, 1, 1), recomputes=True, previous=previous)


def test_after_a_change_a_profile_counts_on_the_last_step_alone(
    meter: StepMeter, tier: Tier
) -> None:
    tier.statistics.writes.move(SLOW, 0.5)
    speeds_of_step(meter)
    (first,) = profile_of(meter).tiers
    assert (first.write_bytes_per_s, first.read_bytes_per_s) == (FAST, FAST)
    tier.statistics.writes.move(SLOW, 0.5)
    tier.statistics.reads.move(2 * SLOW, 0.5)
    speeds_of_step(meter)
    (again,) = profile_of(meter, stage()).tiers
    assert again.write_bytes_per_s == pytest.approx(SLOW)
    assert again.read_bytes_per_s == pytest.approx(2 * SLOW)


def test_the_largest_micro_batch_of_a_step_is_its_size(meter: StepMeter) -> None:
    sizes = []
    for lengths in ((8, 32, 16), (8,), (64,), (16,)):
        with meter.step(detailed=lengths[-1] < 64):
            for length in lengths:
                x = torch.zeros(length, 2, 4)
                meter.profiler.begin_layer(Scope(), [x], recomputes=False)
        assert meter.last is not None
        sizes.append(meter.last.sizes["sequence_length"])
    assert sizes == [32, 8, 64, 16]
    assert profile_of(meter).sizes["sequence_length"] == 32, "of those that it is made from"
    assert profile_of(meter).sizes == {}


def test_what_follows_a_pause_is_no_part_of_a_step(
    meter: StepMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(CpuDevice, "timestamp", lambda _: clock.now)

    def take_step(*, pauses: bool) -> float:
        with meter.step(detailed=False):
            clock.now += 3.0
        assert meter.last is not None
        clock.now += 1.0  # the optimizer
        if pauses:
            meter.pause()
            clock.now += 50.0  # evaluation
        return meter.last.step_s

    assert [take_step(pauses=True) for _ in range(3)] == [3.0, 4.0, 4.0]
    take_step(pauses=False)
    take_step(pauses=False)
    assert take_step(pauses=False) == 4.0


def test_the_optimizers_first_step_stands_for_no_other(
    meter: StepMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(CpuDevice, "timestamp", lambda _: clock.now)
    seen = []
    for optimizer_s in (9.0, 1.0, 1.0, 2.0):
        with meter.step(detailed=False):
            clock.now += 3.0
        assert meter.last is not None
        seen.append((meter.last.step_s, meter.last.gap_s))
        clock.now += optimizer_s
    assert seen == [(3.0, 0.0), (12.0, 9.0), (4.0, 1.0), (4.0, 1.0)]


def test_planning_between_two_steps_is_left_out_and_the_optimizer_is_not(
    meter: StepMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether plans are made after a step, or before the next one as through the torch door."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(CpuDevice, "timestamp", lambda _: clock.now)

    def plan() -> None:
        with meter.left_out():
            clock.now += 50.0

    gaps_s = []
    for _ in range(4):
        with meter.step(detailed=False):
            clock.now += 3.0
        assert meter.last is not None
        gaps_s.append(meter.last.gap_s)
        plan()
        clock.now += 1.0  # the optimizer, and data
        plan()
    assert gaps_s == [0.0, 1.0, 1.0, 1.0]


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[tuple[StepMeter, DeviceBehind]]:
    """A meter of a device that comes to its work when the test says so."""
    device = DeviceBehind()
    engine = OffloadEngine(OffloadConfig(mode="auto", directories=(tmp_path,)), device)
    yield StepMeter(engine.config, engine, device), device
    engine.close()


def test_a_step_is_known_when_the_device_has_passed_it(
    behind: tuple[StepMeter, DeviceBehind],
) -> None:
    meter, device = behind
    for step_s in (3.0, 4.0):
        with meter.step(detailed=False):
            device.queue(step_s)
        device.queue(1.0)  # the optimizer
    assert meter.last is None and meter.read() == [] and meter.counts
    device.run(2)
    (first,) = meter.read()
    assert first is meter.last and first.step_s == 3.0
    (second,) = meter.read(waits=True)
    assert second is meter.last and (second.step_s, second.gap_s) == (5.0, 1.0)
    assert meter.read(waits=True) == []


def test_steps_in_detail_are_known_to_be_so_and_a_profile_waits_for_them(
    behind: tuple[StepMeter, DeviceBehind],
) -> None:
    meter, device = behind
    for detailed in (False, True):
        with meter.step(detailed=detailed):
            with meter.profiler.forward(0, 0):
                device.queue(3.0)
            with meter.profiler.backward(0, 0):
                device.queue(6.0)
        device.queue(1.0)
    assert meter.num_detailed == 1
    profile = meter.profile(PipelinePosition(1, 0, 1, 1), recomputes=True, previous=None)
    assert (profile.before_s, profile.backward_after_s) == ((3.0,), (6.0,))
    assert profile.step_fixed_s == 1.0 and meter.num_detailed == 0
    assert [one.in_detail for one in meter.read()] == [False, True]
