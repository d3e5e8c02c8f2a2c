# SPDX-License-Identifier: Apache-2.0
"""The pieces in which the host arena grows: no range lies across two that are pinned, nothing is
taken for what does not fit, and finalizers may give ranges back at any moment.
"""

from __future__ import annotations

import mmap
import threading

import pytest

from megatron.offload.device.open import open_device
from megatron.offload.tiers import arena as arena_module
from megatron.offload.tiers.arena import HostArena
from megatron.offload.tiers.extents import ExtentAllocator
from tests.support.fake_cuda import FakeCuda
from tests.support.waiting import SOON_S, wait_until

PAGE = mmap.PAGESIZE


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "GROWTH_BYTES", 4 * PAGE)


def test_what_does_not_fit_takes_no_memory() -> None:
    arena = HostArena(32 * PAGE)
    assert arena.allocate(3 * PAGE) == 0 and arena.size_bytes == 4 * PAGE
    assert arena.allocate(30 * PAGE) is None and arena.size_bytes == 4 * PAGE
    assert arena.allocate(29 * PAGE) == 3 * PAGE and arena.size_bytes == 32 * PAGE
    arena.close()


def test_a_range_can_be_freed_by_a_finalizer_that_interrupts_an_allocation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arena = HostArena(32 * PAGE)
    first = arena.allocate(PAGE)
    assert first is not None
    allocate = ExtentAllocator.allocate

    def interrupted(self: ExtentAllocator, num_bytes: int) -> int | None:
        monkeypatch.undo()
        arena.free(first)
        return allocate(self, num_bytes)

    monkeypatch.setattr(ExtentAllocator, "allocate", interrupted)
    allocating = threading.Thread(target=arena.allocate, args=(PAGE,), daemon=True)
    allocating.start()
    allocating.join(timeout=SOON_S)
    assert not allocating.is_alive()
    assert arena.used_bytes == PAGE
    arena.close()


def test_no_range_lies_across_two_pinned_pieces(fake_cuda: FakeCuda) -> None:
    arena = HostArena(32 * PAGE, open_device("cuda"))
    offsets = [arena.allocate(3 * PAGE) for _ in range(4)]
    for offset in offsets:
        assert offset is not None
        arena.free(offset)
    for num_pages in (3, 4, 2, 2, 1, 3):
        offset = arena.allocate(num_pages * PAGE)
        assert offset is not None
        address = arena.address(offset)
        inside = [
            start <= address and address + num_pages * PAGE <= start + size
            for start, size in fake_cuda.pinned.items()
        ]
        assert any(inside)
    arena.close()
    assert not fake_cuda.pinned


class SlowDevice:
    """Page-locks nothing, and that at a gate."""

    pins_host_memory = True

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.arrived = threading.Semaphore(0)
        self.pinned_by: list[threading.Thread] = []

    def pin(self, address: int, num_bytes: int) -> None:
        self.pinned_by.append(threading.current_thread())
        self.arrived.release()
        assert self.open.wait(timeout=SOON_S)

    def unpin(self, address: int) -> None:
        pass


def test_the_next_step_is_pinned_ahead_by_a_thread_that_nobody_waits_for() -> None:
    device = SlowDevice()
    arena = HostArena(12 * PAGE, device)  # type: ignore[arg-type]
    assert arena.allocate(PAGE) == 0
    wait_until(lambda: arena.size_bytes == 8 * PAGE, "nothing is pinned ahead")
    wait_until(lambda: arena._ahead is None, "it goes on")
    assert arena.size_bytes == 8 * PAGE, "a step is free, which is enough"
    device.open.clear()
    assert arena.allocate(4 * PAGE) == 4 * PAGE
    for _ in range(3):
        assert device.arrived.acquire(timeout=SOON_S)  # the third step is being pinned
    assert arena.allocate(3 * PAGE) == PAGE, "what is free is handed out meanwhile"
    closing = threading.Thread(target=arena.close, daemon=True)
    closing.start()
    closing.join(timeout=0.1)
    assert closing.is_alive(), "memory that is being pinned is not unmapped"
    device.open.set()
    closing.join(timeout=SOON_S)
    assert not closing.is_alive()
    here = threading.current_thread()
    assert [thread is here for thread in device.pinned_by] == [True, False, False]


def test_whoever_needs_room_that_is_being_pinned_gets_it() -> None:
    device = SlowDevice()
    arena = HostArena(8 * PAGE, device)  # type: ignore[arg-type]
    assert arena.allocate(4 * PAGE) == 0
    found: list[int | None] = []
    asking = threading.Thread(target=lambda: found.append(arena.allocate(4 * PAGE)), daemon=True)
    asking.start()
    asking.join(timeout=SOON_S)
    assert found == [4 * PAGE] and arena.allocate(1) is None
    assert len(device.pinned_by) == 2
    arena.close()


def test_where_ranges_are_larger_than_a_step_the_budget_is_left_to_them() -> None:
    arena = HostArena(15 * PAGE, SlowDevice())  # type: ignore[arg-type]
    assert [arena.allocate(5 * PAGE) for _ in range(3)] == [0, 5 * PAGE, 10 * PAGE]
    arena.close()
