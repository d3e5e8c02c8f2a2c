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
from megatron.offload.tiers.transfer import Transfer
from tests.support.simulated_device import POISON, Event, GatedDevice
from tests.support.waiting import SOON_S, wait_until

PAGE = 4096


@pytest.fixture
def device() -> Iterator[GatedDevice]:
    device = GatedDevice()
    yield device
    device.gate.set()


@pytest.fixture
def tier(device: GatedDevice) -> Iterator[HostTier]:
    tier = HostTier(MIB, device=device)
    yield tier
    device.gate.set()
    tier.close()


def storage_of(value: int, device: GatedDevice, num_bytes: int = PAGE) -> torch.UntypedStorage:
    storage = torch.full((num_bytes,), value, dtype=torch.uint8).untyped_storage()
    device.queued(storage)
    return storage


def values_of(storage: torch.UntypedStorage) -> set[int]:
    return set(torch.empty(0, dtype=torch.uint8).set_(storage).unique().tolist())


def begun(tier: HostTier, value: int, device: GatedDevice) -> Any:
    storage = storage_of(value, device)
    started = tier.begin_write(storage, device.record_event())
    assert started is not None
    return started


def written(tier: HostTier, value: int, device: GatedDevice) -> Any:
    block, transfer = begun(tier, value, device)
    transfer.wait()
    return block


def read_back(tier: HostTier, block: Any, device: GatedDevice) -> set[int]:
    target, transfer = tier.begin_read(block)
    wait_for_bytes(transfer, device)
    return values_of(target)


def wait_for_bytes(transfer: Transfer, device: GatedDevice) -> None:
    transfer.wait()
    for event in transfer.events or ():
        device.wait_for_event(event)


def test_bytes_are_those_after_their_producer(tier: HostTier, device: GatedDevice) -> None:
    source = storage_of(1, device)
    too_early = Event({})
    for event, found in ((device.record_event(), 1), (too_early, POISON)):
        block, transfer = tier.begin_write(source, event) or (None, None)
        assert transfer is not None
        transfer.wait()
        assert read_back(tier, block, device) == {found}


def test_space_is_not_reused_while_its_read_runs(tier: HostTier, device: GatedDevice) -> None:
    block = written(tier, 1, device)
    offset = block.offset
    device.gate.clear()
    target, transfer = tier.begin_read(block)
    assert transfer.done(), "compute waits for the event, on the device"
    del block
    assert tier.used_bytes == PAGE
    other = begun(tier, 2, device)
    assert other[0].offset != offset
    device.gate.set()
    wait_for_bytes(transfer, device)
    assert values_of(target) == {1}
    other[1].wait()
    wait_until(lambda: tier.used_bytes == PAGE, "a read that ended keeps its space")


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_source_and_space_of_a_write_are_kept_until_its_copy_has_ended(
    tier: HostTier, device: GatedDevice, is_cancelled: bool
) -> None:
    device.gate.clear()
    source = storage_of(1, device)
    weak = source._weak_ref()
    block, transfer = tier.begin_write(source, device.record_event()) or (None, None)
    assert transfer is not None
    del source, block
    if is_cancelled:
        transfer.cancel()
    assert not device.gate.wait(timeout=0.1)  # the thread that watches has had time to err
    assert not torch.UntypedStorage._expired(weak) and tier.used_bytes == PAGE
    device.gate.set()
    wait_until(lambda: torch.UntypedStorage._expired(weak), "a copy that ended keeps its source")
    torch.UntypedStorage._free_weak_ref(weak)
    wait_until(lambda: tier.used_bytes == 0, "a copy that ended keeps its space")


def test_where_the_watching_thread_is_interrupted_all_is_kept_until_the_copy_has_ended(
    tier: HostTier, device: GatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it goes on: nobody could take its place."""
    plain, interrupted = device.wait_for_event, threading.Event()

    def wait_for_event(event: Any) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt
        plain(event)

    device.gate.clear()
    monkeypatch.setattr(device, "wait_for_event", wait_for_event)
    source = storage_of(1, device)
    weak = source._weak_ref()
    block, transfer = tier.begin_write(source, device.record_event()) or (None, None)
    assert transfer is not None
    del source, block
    with pytest.raises(OSError, match="interrupted"):
        transfer.wait()
    assert not device.gate.wait(timeout=0.1)  # the thread has had time to err
    assert not torch.UntypedStorage._expired(weak) and tier.used_bytes == PAGE
    device.gate.set()
    wait_until(lambda: torch.UntypedStorage._expired(weak), "a copy that ended keeps its source")
    torch.UntypedStorage._free_weak_ref(weak)
    assert read_back(tier, written(tier, 2, device), device) == {2}


def test_what_a_write_held_is_free_when_its_end_is_known(
    tier: HostTier, device: GatedDevice
) -> None:
    source = storage_of(1, device)
    weak, seen = source._weak_ref(), []
    device.gate.clear()
    started = tier.begin_write(source, device.record_event())
    assert started is not None
    started[1].add_done_callback(lambda _: seen.append(torch.UntypedStorage._expired(weak)))
    del source
    device.gate.set()
    started[1].wait()
    wait_until(lambda: bool(seen), "nobody was told")
    assert seen == [True]
    torch.UntypedStorage._free_weak_ref(weak)


@pytest.mark.parametrize("direction", ["write", "read"])
def test_the_wait_for_the_producer_counts_as_no_transfer(
    tier: HostTier, device: GatedDevice, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    """The bandwidth would look too low: a producer may be far behind."""
    block = written(tier, 1, device) if direction == "read" else None
    meter = tier.statistics.reads if direction == "read" else tier.statistics.writes
    wait, seen = device.wait_for_event, []

    def noted(event: Any) -> None:
        if event is not None:
            seen.append(("wait for a copy" if event.happened else "wait", meter._running))
        wait(event)

    monkeypatch.setattr(device, "wait_for_event", noted)
    if block is None:
        written(tier, 1, device)
        assert seen == [("wait", 0), ("wait for a copy", 1)]
    else:
        tier.begin_read(block)
        assert meter.total_bytes == PAGE, "the step may end before it has arrived"
        wait_until(lambda: bool(seen), "it is not timed")
        assert seen == [("wait for a copy", 1)]
        wait_until(lambda: not meter._running, "it does not end")
        assert meter.total_bytes == PAGE
    assert meter._running == 0


def test_a_storage_that_was_freed_before_its_copy_is_refused(
    tier: HostTier, device: GatedDevice
) -> None:
    device.gate.clear()
    first = begun(tier, 1, device)
    source = storage_of(2, device)
    second = tier.begin_write(source, device.record_event())
    assert second is not None
    source.resize_(0)
    device.gate.set()
    with pytest.raises(RuntimeError, match="resized"):
        second[1].wait()
    first[1].wait()
    assert tier.statistics.writes.total_bytes == PAGE and not tier.degraded


def test_a_copy_that_fails_on_the_device_is_a_failed_write(
    tier: HostTier, device: GatedDevice
) -> None:
    device.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    block, transfer = begun(tier, 1, device)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        transfer.wait()
    wait_until(lambda: tier.statistics.failed_writes == 1, "it does not count as failed")
    assert tier.statistics.writes.total_bytes == 0
    device.error = None
    del block, transfer
    assert read_back(tier, written(tier, 2, device), device) == {2}, "the others go on"


def test_copies_of_a_device_run_side_by_side_in_both_directions(
    tier: HostTier, device: GatedDevice
) -> None:
    blocks = [written(tier, value, device) for value in range(5)]
    reads = [tier.begin_read(block) for block in blocks]
    writes = [begun(tier, 10 + value, device) for value in range(5)]
    for value, (target, transfer) in enumerate(reads):
        wait_for_bytes(transfer, device)
        assert values_of(target) == {value}
    for value, (block, transfer) in enumerate(writes):
        transfer.wait()
        assert read_back(tier, block, device) == {10 + value}


@pytest.mark.parametrize("direction", ["write", "read"])
def test_a_closed_tier_takes_nothing_and_keeps_nothing(device: GatedDevice, direction: str) -> None:
    tier = HostTier(MIB, device=device)
    block = written(tier, 1, device)
    tier._copies.close()
    with pytest.raises(RuntimeError, match="closed"):
        begun(tier, 2, device) if direction == "write" else tier.begin_read(block)
    assert tier.used_bytes == PAGE
    tier._arena.close()


@pytest.mark.parametrize("direction", ["write", "read"])
def test_closing_waits_for_a_running_copy_before_its_memory_goes(
    device: GatedDevice, direction: str
) -> None:
    tier = HostTier(MIB, device=device)
    block = written(tier, 1, device)
    device.gate.clear()
    started = begun(tier, 2, device) if direction == "write" else tier.begin_read(block)
    closing = threading.Thread(target=tier.close, daemon=True)
    closing.start()
    closing.join(timeout=0.1)
    assert closing.is_alive() and not tier._arena._closed
    device.gate.set()
    closing.join(timeout=SOON_S)
    assert not closing.is_alive() and tier._arena._closed
    wait_for_bytes(started[1], device)
