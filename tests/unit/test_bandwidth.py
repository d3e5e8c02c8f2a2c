# SPDX-License-Identifier: Apache-2.0
"""What a meter counts, on a clock that the test sets."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from megatron.offload.tiers.bandwidth import BandwidthMeter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    return advance


def test_time_counts_once_while_at_least_one_transfer_runs(clock: Callable[[float], None]) -> None:
    meter = BandwidthMeter()
    assert meter.bytes_per_s is None
    with meter.moving(300):
        clock(0.25)
        with meter.moving(100):
            clock(0.5)
        clock(0.25)
    clock(50.0)  # idle
    with meter.moving(0):
        pass
    assert (meter.total_bytes, meter.busy_s, meter.bytes_per_s) == (400, 1.0, 400.0)


def test_a_transfer_that_fails_counts_its_time_and_no_bytes(clock: Callable[[float], None]) -> None:
    meter = BandwidthMeter()
    with pytest.raises(OSError), meter.moving(300):
        clock(1.0)
        raise OSError
    clock(50.0)  # idle
    with meter.moving(0):
        pass
    assert (meter.total_bytes, meter.busy_s, meter.bytes_per_s) == (0, 1.0, None)


def test_the_rate_follows_a_change_and_the_total_does_not(clock: Callable[[float], None]) -> None:
    meter = BandwidthMeter()
    for num_bytes in (1000, 10):
        for _ in range(20):
            with meter.moving(num_bytes):
                clock(1.0)
    assert meter.total_bytes == 20_200 and meter.busy_s == 40.0
    assert meter.bytes_per_s is not None and 10 <= meter.bytes_per_s < 11
