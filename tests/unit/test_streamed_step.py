# SPDX-License-Identifier: Apache-2.0
"""Simulated steps whose parameters stream: bytes, bounds and limits of their time, memory."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
import torch

from megatron.offload.device.cpu import CpuDevice
from megatron.offload.layer_major.boundary import AHEAD
from megatron.offload.parameters.window import ParameterWindow
from megatron.offload.planner.profile.stage_profile import TierProfile
from megatron.offload.planner.simulator.streamed_step import (
    GRADIENTS,
    KEPT,
    MOVING,
    PARAMETERS,
    WAITING,
    StreamedCost,
    StreamedStep,
    UnitWork,
    simulate,
    visits,
)
from megatron.offload.tiers.host import HostTier

MIB = 1 << 20
ORDERS = (False, True)


def tier(bytes_per_s: float = 1.0, shared: float | None = None) -> TierProfile:
    return TierProfile("ssd", bytes_per_s, bytes_per_s, shared)


def step(units: int, micro_batches: int, work: UnitWork, **more: object) -> StreamedStep:
    more = {"parameters_on": tier(), **more}
    return StreamedStep((work,) * units, micro_batches, **more)  # type: ignore[arg-type]


SIZES = list(itertools.product((1, 2, 3, 6), (1, 2, 5), (2, 3)))


@pytest.mark.parametrize(("units", "micro_batches", "live"), SIZES)
def test_units_come_in_twice_but_for_those_at_both_turns(
    units: int, micro_batches: int, live: int
) -> None:
    of = step(units, micro_batches, UnitWork(7, 1.0, 3.0), live_units=live)
    once = 2 * max(units - live, 0) * 7
    assert simulate(of, layer_major=True).read_bytes == once
    assert simulate(of, layer_major=False).read_bytes == micro_batches * once


@pytest.mark.parametrize("layer_major", ORDERS)
@pytest.mark.parametrize(("units", "micro_batches", "live"), SIZES)
def test_the_window_of_a_training_reads_as_much(
    units: int, micro_batches: int, live: int, layer_major: bool
) -> None:
    window = ParameterWindow([HostTier(64 * MIB)], CpuDevice(), live)
    for number in range(units):
        window.add(f"unit {number}", [torch.nn.Parameter(torch.zeros(1024))])

    def run() -> int:
        for unit, _, is_backward in visits(units, micro_batches, layer_major=layer_major):
            window.use(unit, -1 if is_backward else 1)
        return int(window.tiers[0].statistics.reads.total_bytes)

    of = step(units, micro_batches, UnitWork(window.units[0].num_bytes, 1.0, 3.0), live_units=live)
    before = run()
    assert run() - before == simulate(of, layer_major=layer_major).read_bytes
    window.close()


@pytest.mark.parametrize("layer_major", ORDERS)
def test_each_micro_batch_is_in_each_unit_once_in_each_direction(layer_major: bool) -> None:
    order = list(visits(3, 4, layer_major=layer_major))
    assert len(order) == len(set(order)) == 2 * 3 * 4
    for batch in range(4):
        own = [(one.unit, one.is_backward) for one in order if one.micro_batch == batch]
        assert own == [(0, False), (1, False), (2, False), (2, True), (1, True), (0, True)]


def test_a_step_takes_what_can_be_counted_by_hand() -> None:
    # Forward 4 x 1 s, backward 4 x 3 s; a read takes 2 s and begins as the unit before is used:
    # units 3 and 4 are waited for in forward for 1 s each, 2 and 1 come behind backward.
    of = step(4, 1, UnitWork(2, 1.0, 3.0))
    found = simulate(of, layer_major=False)
    assert (found.compute_s, found.waits_s[PARAMETERS], found.passes_s) == (16.0, 2.0, 18.0)
    # Two micro-batches of each unit hide a read of 2 s in forward too.
    assert simulate(step(4, 2, UnitWork(2, 1.0, 3.0)), layer_major=True).passes_s == 32.0


@pytest.mark.parametrize("layer_major", ORDERS)
@pytest.mark.parametrize("seed", range(8))
def test_time_is_never_below_compute_nor_below_traffic(seed: int, layer_major: bool) -> None:
    draw = random.Random(seed)
    units = tuple(
        UnitWork(draw.randrange(1, 50), draw.random(), 3 * draw.random(), 0, draw.randrange(0, 20))
        for _ in range(draw.randrange(1, 8))
    )
    rate = draw.choice((1.0, 10.0, 100.0))
    on = tier(rate, rate if seed % 2 else None)
    of = StreamedStep(
        units,
        draw.randrange(1, 5),
        on,
        on,
        live_units=draw.randrange(2, 4),
        updates_all=draw.random() < 0.5,
        inflight_bytes=draw.choice((0, 30, 1000)),
    )
    found = simulate(of, layer_major=layer_major)
    assert found.passes_s >= found.compute_s * (1 - 1e-9)
    assert found.passes_s >= found.read_bytes / rate * (1 - 1e-9)
    waited_s = sum(found.waits_s.values())
    assert found.passes_s == pytest.approx(found.compute_s + waited_s)
    assert found.written_bytes <= sum(unit.parameter_bytes for unit in units) * of.updates_all


@pytest.mark.parametrize("layer_major", ORDERS)
def test_a_drive_without_end_leaves_compute_and_one_without_compute_leaves_traffic(
    layer_major: bool,
) -> None:
    endless = tier(math.inf)
    work = UnitWork(5, 1.0, 3.0, moved_bytes=4)
    found = simulate(
        step(5, 3, work, parameters_on=endless, activations_on=endless, updates_all=True),
        layer_major=layer_major,
    )
    assert found.passes_s == found.compute_s == 5 * 3 * 4 and found.all_in_s == 0
    found = simulate(step(5, 3, UnitWork(5, 0.0, 0.0)), layer_major=layer_major)
    assert found.compute_s == 0 and found.passes_s == found.read_bytes == found.waits_s[PARAMETERS]


def test_layer_major_is_the_same_with_one_micro_batch_and_never_slower() -> None:
    for micro_batches in (1, 2, 4):
        of = step(6, micro_batches, UnitWork(3, 1.0, 2.0))
        alone, together = (simulate(of, layer_major=one).passes_s for one in ORDERS)
        assert together == alone if micro_batches == 1 else together < alone


@pytest.mark.parametrize("layer_major", ORDERS)
def test_memory_is_the_window_and_what_each_order_keeps(layer_major: bool) -> None:
    of = step(6, 4, UnitWork(100, 1.0, 2.0, kept_bytes=10), boundary_bytes=1)
    peak = simulate(of, layer_major=layer_major).peak
    assert peak[PARAMETERS] == 2 * 100
    # All layers' of one micro-batch; or in addition, before the last unit, of the others.
    assert peak[KEPT] == (5 * 10 * 4 + 10 if layer_major else 6 * 10)
    # What backward hands on is there before its unit lets go of what it has kept.
    assert sum(peak.get(name, 0) for name in WAITING) == (4 if layer_major else 1)


def test_activations_share_the_drive_with_parameters() -> None:
    def cost(shared: float | None) -> StreamedCost:
        on = tier(1.0, shared)
        work = UnitWork(4, 1.0, 1.0, moved_bytes=2)
        of = step(3, 1, work, parameters_on=on, activations_on=on, inflight_bytes=2)
        return simulate(of, layer_major=False)

    # Shared: unit 3 is read from 1 to 5 s, which holds up the first write, of 2 s, until 7 s. The
    # second one is still under way as backward wants it: it stays. Unit 1 is read from 9 to 13 s,
    # what it has saved until 15 s, and its backward ends after 16 s.
    shared, apart = cost(1.0), cost(None)
    assert shared.passes_s == 16 and shared.waits_s == {PARAMETERS: 3, KEPT: 7, GRADIENTS: 0}
    # By itself each direction is done sooner; the second unit's activations come back too.
    assert apart.passes_s == 15 and apart.waits_s == {PARAMETERS: 5, KEPT: 4, GRADIENTS: 0}
    # All but the last unit's, whose backward follows at once.
    assert apart.activation_bytes == shared.activation_bytes == 2 * 2
    assert apart.peak[MOVING] == 4


def test_compute_waits_once_too_much_is_being_written() -> None:
    work = UnitWork(1, 1.0, 1.0, moved_bytes=10)
    loose = step(6, 3, work, activations_on=tier(), inflight_bytes=1000)
    tight = dataclasses.replace(loose, inflight_bytes=20)
    loose_cost, tight_cost = (simulate(one, layer_major=True) for one in (loose, tight))
    # Being written; what backward uses, and what it has read ahead.
    assert tight_cost.peak[MOVING] <= 20 + 2 * 10 < loose_cost.peak[MOVING]
    assert tight_cost.waits_s[KEPT] > loose_cost.waits_s[KEPT]


def test_ranks_that_divide_parameters_read_their_share_and_gather_the_rest() -> None:
    work = UnitWork(16, 0.0, 0.0)
    alone = simulate(step(5, 1, work), layer_major=True)
    divided = simulate(step(5, 1, work, shares=4), layer_major=True)
    assert divided.read_bytes * 4 == alone.read_bytes
    assert divided.passes_s * 4 == alone.passes_s
    slow = simulate(step(5, 1, work, shares=4, gather_bytes_per_s=0.5), layer_major=True)
    assert slow.passes_s == 2 * 3 * 12 / 0.5


def test_an_optimizer_that_needs_all_parameters_has_them_read_and_written() -> None:
    found = simulate(step(6, 2, UnitWork(3, 1.0, 2.0), updates_all=True), layer_major=True)
    assert found.all_in_s == found.all_in_bytes == 4 * 3  # all but the two that are there
    assert found.written_bytes == 6 * 3
    assert found.peak[PARAMETERS] == 6 * 3


def test_gradients_that_leave_are_one_units_that_is_made_and_one_that_is_written() -> None:
    work = UnitWork(1, 1.0, 3.0, gradient_bytes=8)
    fast = simulate(step(6, 2, work, parameters_on=tier(4.0)), layer_major=True)
    assert fast.gradient_bytes == 6 * 8
    # Written in 2 s, while the next unit's two micro-batches take 6 s.
    assert fast.waits_s[GRADIENTS] == 0 and fast.peak[GRADIENTS] == 2 * 8
    # A write takes 8 s, which 6 s of compute do not hide, for all units but the first to leave; the
    # second of two steps begins while the last unit's are still written, which hides nothing.
    slow = simulate(step(6, 2, work, parameters_on=tier(1.0)), layer_major=True)
    assert slow.waits_s[GRADIENTS] >= 5 * 2 and slow.peak[GRADIENTS] == 2 * 8
    assert slow.passes_s == pytest.approx(slow.compute_s + sum(slow.waits_s.values()))
    stays = simulate(step(6, 2, UnitWork(1, 1.0, 3.0)), layer_major=True)
    assert stays.gradient_bytes == 0 and not stays.peak.get(GRADIENTS)


def test_what_waits_between_units_is_of_a_few_micro_batches() -> None:
    """Bytes by hand: a hidden state is read, a gradient written and read, at each boundary."""
    units, micro_batches, one = 4, 10, 5
    work = UnitWork(1, 1.0, 3.0, 0, 7)
    fast = {"parameters_on": tier(1e9), "activations_on": tier(1e9), "boundary_bytes": one}
    kept = step(units, micro_batches, work, **fast)
    away = dataclasses.replace(kept, boundary_on=tier(1e9))
    before, after = (simulate(of, layer_major=True) for of in (kept, away))
    assert before.boundary_bytes == 0 and before.activation_bytes == after.activation_bytes
    crossing = (units - 1) * micro_batches * one
    # The last unit's activations are needed at once and not written: its hidden states are.
    assert after.boundary_bytes == 3 * crossing + micro_batches * one
    for term in WAITING:
        assert before.peak.get(term, 0) in (0, micro_batches * one)
        assert after.peak.get(term, 0) <= (AHEAD + 1) * one
    assert after.passes_s == pytest.approx(before.passes_s, rel=1e-6)


def test_of_few_micro_batches_and_one_after_the_other_nothing_leaves_between_units() -> None:
    work = UnitWork(1, 1.0, 3.0)
    for micro_batches, layer_major in ((AHEAD, True), (8, False)):
        of = step(3, micro_batches, work, boundary_bytes=5, boundary_on=tier())
        assert simulate(of, layer_major=layer_major).boundary_bytes == 0


def test_a_slow_tier_between_units_holds_compute_up() -> None:
    work, one = UnitWork(0, 1.0, 3.0), 10
    of = step(3, 8, work, boundary_bytes=one, boundary_on=tier(2.0), inflight_bytes=one)
    cost = simulate(of, layer_major=True)
    assert cost.waits_s[KEPT] > 0
    assert cost.passes_s >= 2 * 8 * one / 2.0, "all hidden states of two boundaries are written"
    quick = dataclasses.replace(of, boundary_on=tier(1e9))
    assert simulate(quick, layer_major=True).waits_s[KEPT] == pytest.approx(0, abs=1e-4)
