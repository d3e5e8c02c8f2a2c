# SPDX-License-Identifier: Apache-2.0
"""Copies of the host tier: what they work on lives, what they took goes back, events are right."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron.offload.sizes import MIB
from megatron.offload.tiers.host import HostTier
from tests.support.simulated_device import SimulatedDevice
from tests.support.waiting import wait_until

PAGE = 4096


class GatedDevice(SimulatedDevice):
    """Its copies wait at a gate; it notes which threads set its events, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.recorded_by: list[threading.Thread] = []

    def record_event(self) -> Any:
        self.recorded_by.append(threading.current_thread())
        return super().record_event()

    def _take_a_while(self) -> None:
        assert self.gate.wait(timeout=10)
        if self.error is not None:
            raise self.error


@pytest.fixture
def device() -> Iterator[GatedDevice]:
    device = GatedDevice()
    yield device
    device.gate.set()


@pytest.fixture
def tier(device: GatedDevice) -> Iterator[HostTier]:
    tier = HostTier(MIB, device=device, num_threads=1)
    yield tier
    device.gate.set()
    tier.close()


def storage_of(value: int, device: GatedDevice, num_bytes: int = PAGE) -> torch.UntypedStorage:
    storage = torch.full((num_bytes,), value, dtype=torch.uint8).untyped_storage()
    device.queued(storage)
    return storage


def values_of(storage: torch.UntypedStorage) -> set[int]:
    return set(torch.empty(0, dtype=torch.uint8).set_(storage).unique().tolist())


def written(tier: HostTier, storage: torch.UntypedStorage) -> Any:
    started = tier.begin_write(storage)
    assert started is not None
    started[1].wait()
    return started[0]


def test_space_is_not_reused_while_its_read_runs(tier: HostTier, device: GatedDevice) -> None:
    block = written(tier, storage_of(1, device))
    offset = block.offset
    device.gate.clear()
    target, transfer = tier.begin_read(block)
    del block
    assert tier.used_bytes == PAGE
    other = tier.begin_write(storage_of(2, device))
    assert other is not None and other[0].offset != offset
    device.gate.set()
    transfer.wait()
    assert values_of(target) == {1}
    other[1].wait()
    wait_until(lambda: tier.used_bytes == PAGE, "a read that ended keeps its space")


def test_events_are_recorded_by_the_thread_that_computes(
    tier: HostTier, device: GatedDevice
) -> None:
    block = written(tier, storage_of(1, device))
    tier.begin_read(block)[1].wait()
    assert device.recorded_by == [threading.current_thread()] * 2


@pytest.mark.parametrize("direction", ["write", "read"])
def test_the_wait_for_the_device_counts_as_no_transfer(
    tier: HostTier, device: GatedDevice, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    """The bandwidth would look too low: a producer may be far behind."""
    block = written(tier, storage_of(1, device)) if direction == "read" else None
    meter = tier.statistics.reads if direction == "read" else tier.statistics.writes
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(device, "wait_for_event", lambda _: seen.append(("wait", meter._running)))
    monkeypatch.setattr(device, "_take_a_while", lambda: seen.append(("copy", meter._running)))
    if block is None:
        written(tier, storage_of(1, device))
    else:
        tier.begin_read(block)[1].wait()
    assert seen == [("wait", 0), ("copy", 1)] and meter._running == 0


def test_a_storage_that_was_freed_before_its_copy_is_refused(
    tier: HostTier, device: GatedDevice
) -> None:
    device.gate.clear()
    first = tier.begin_write(storage_of(1, device))
    source = storage_of(2, device)
    second = tier.begin_write(source)
    assert first is not None and second is not None
    source.resize_(0)
    device.gate.set()
    with pytest.raises(RuntimeError, match="resized"):
        second[1].wait()
    assert tier.statistics.writes.total_bytes == PAGE and not tier.degraded


def test_a_write_that_cannot_be_queued_leaves_nothing_behind(
    tier: HostTier, device: GatedDevice
) -> None:
    tier._threads.close()
    with pytest.raises(RuntimeError, match="closed"):
        tier.begin_write(storage_of(1, device))
    assert tier.used_bytes == 0


def test_closing_waits_for_a_running_copy_before_its_memory_goes(device: GatedDevice) -> None:
    tier = HostTier(MIB, device=device, num_threads=1)
    device.gate.clear()
    started = tier.begin_write(storage_of(1, device))
    assert started is not None
    wait_until(lambda: started[1].running(), "it does not run")
    closing = threading.Thread(target=tier.close, daemon=True)
    closing.start()
    closing.join(timeout=0.1)
    assert closing.is_alive() and not tier._arena._closed
    device.gate.set()
    closing.join(timeout=10)
    started[1].wait()
    assert tier._arena._closed
