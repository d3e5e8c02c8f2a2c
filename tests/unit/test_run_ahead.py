# SPDX-License-Identifier: Apache-2.0
"""How far compute's thread may be ahead of the device with memory that was restored."""

from __future__ import annotations

import pytest

from megatron.offload.activations.stats.compute_waits import ComputeWaits
from megatron.offload.activations.transfer.run_ahead_limit import HostRunAheadLimit
from megatron.offload.device.clock import Clock
from megatron.offload.stats.statistics import StepStatistics
from megatron.offload.tiers.budget import ByteBudget
from tests.support.numbered_device import NumberedDevice


def run_ahead_of(device: NumberedDevice, budget: ByteBudget) -> HostRunAheadLimit:
    return HostRunAheadLimit(
        device, budget, ComputeWaits(Clock(device), StepStatistics(), is_host=True)
    )


@pytest.fixture
def device() -> NumberedDevice:
    return NumberedDevice()


def test_within_the_bound_nobody_waits_and_little_is_recorded(device: NumberedDevice) -> None:
    run_ahead = run_ahead_of(device, ByteBudget(800))
    for _ in range(40):
        run_ahead.used(10)
    assert device.awaited == [] and device.num_events == 4


def test_who_is_too_far_ahead_waits_for_what_was_used_before(device: NumberedDevice) -> None:
    run_ahead = run_ahead_of(device, ByteBudget(800))
    for _ in range(5):
        run_ahead.used(100)
    assert device.awaited == [1]
    run_ahead.used(300)
    assert device.awaited == [1, 4], "those before it have come as well"


def test_one_large_storage_does_not_wait_for_itself(device: NumberedDevice) -> None:
    run_ahead = run_ahead_of(device, ByteBudget(800))
    run_ahead.used(5000)
    assert device.awaited == []
    run_ahead.used(100)
    assert device.awaited == [1]


def test_the_bound_follows_what_may_be_in_flight(device: NumberedDevice) -> None:
    budget = ByteBudget(800)
    run_ahead = run_ahead_of(device, budget)
    budget.limit_bytes = 8000
    for _ in range(40):
        run_ahead.used(100)
    assert device.awaited == []
