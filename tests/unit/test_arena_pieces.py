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
    allocating.join(timeout=2)
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
