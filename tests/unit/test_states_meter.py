# SPDX-License-Identifier: Apache-2.0
"""What steps of an optimizer took whose states are on tiers, on a device that runs behind."""

from __future__ import annotations

import pytest

from megatron.offload.states.statistics import StatesMeter
from tests.support.behind import DeviceBehind


@pytest.fixture
def device() -> DeviceBehind:
    return DeviceBehind()


@pytest.fixture
def meter(device: DeviceBehind) -> StatesMeter:
    return StatesMeter(device, (), lambda: 7)


def take_step(meter: StatesMeter, device: DeviceBehind) -> None:
    """Forward and backward, whose end is near when reads begin, then two buckets."""
    device.queue(20.0)
    meter.prefetch()
    device.queue(4.0)
    meter.prefetch()
    with meter.step():
        for _ in range(2):
            with meter.waiting():
                device.queue(0.5)
            with meter.updating():
                device.queue(3.0)
            meter.updated(100)
        device.queue(1.0)


def test_a_step_takes_what_it_took_on_the_device(meter: StatesMeter, device: DeviceBehind) -> None:
    for _ in range(3):
        take_step(meter, device)
    assert meter.num_steps == 3 and device.num_waits == 0, "nothing waits for the device"
    (last,) = meter.settled()
    assert (last.between_s, last.prefetch_s) == (24.0, 4.0)
    assert (last.step_s, last.wait_s, last.update_s) == (8.0, 1.0, 6.0)
    assert (last.updated_bytes, last.peak_bytes) == (200, 7)
    assert meter.seconds == 3 * 8.0 + 2 * 24.0, "before the first step nothing is known"
