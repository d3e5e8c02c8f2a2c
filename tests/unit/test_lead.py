# SPDX-License-Identifier: Apache-2.0
"""How many layers forward may be launched ahead of the device."""

from __future__ import annotations

import pytest

from megatron.offload.activations.stats.compute_waits import ComputeWaits
from megatron.offload.activations.transfer.lead import Lead
from megatron.offload.device.clock import Clock
from megatron.offload.stats.statistics import StepStatistics
from tests.support.numbered_device import NumberedDevice


@pytest.fixture
def device() -> NumberedDevice:
    return NumberedDevice()


def lead_of(device: NumberedDevice, most_layers: int | None) -> Lead:
    lead = Lead(device, ComputeWaits(Clock(device), StepStatistics(), is_host=True))
    lead.most_layers = most_layers
    return lead


def test_without_a_bound_nothing_is_recorded_and_nobody_waits(device: NumberedDevice) -> None:
    lead = lead_of(device, None)
    for _ in range(12):
        lead.begin_layer()
    assert device.num_events == 0 and device.awaited == []


@pytest.mark.parametrize(("most_layers", "awaited"), [(1, [1, 2, 3]), (2, [1, 2]), (4, [])])
def test_a_layer_is_launched_once_the_device_has_come_to_an_earlier_one(
    device: NumberedDevice, most_layers: int, awaited: list[int]
) -> None:
    lead = lead_of(device, most_layers)
    for _ in range(4):
        lead.begin_layer()
    assert device.awaited == awaited


def test_a_smaller_bound_waits_once_for_the_newest_that_is_too_far_ahead(
    device: NumberedDevice,
) -> None:
    lead = lead_of(device, 4)
    for _ in range(4):
        lead.begin_layer()
    lead.most_layers = 1
    lead.begin_layer()
    assert device.awaited == [4]


def test_what_was_begun_before_a_bound_ended_is_forgotten(device: NumberedDevice) -> None:
    lead = lead_of(device, 2)
    for most_layers in (2, 2, None, 2, 2):
        lead.most_layers = most_layers
        lead.begin_layer()
    assert device.awaited == []
