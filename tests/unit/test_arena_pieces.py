# SPDX-License-Identifier: Apache-2.0
"""The pieces in which the host arena grows: no range lies across two that are pinned, nothing is
taken for what does not fit, and finalizers may give ranges back at any moment.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading

import pytest
import torch

from megatron.offload.tiers import arena as arena_module
from megatron.offload.tiers.arena import HostArena
from megatron.offload.tiers.extents import ExtentAllocator

PAGE = mmap.PAGESIZE


class Runtime:
    """CUDA's runtime, as far as pinning goes."""

    def __init__(self) -> None:
        self.pieces: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.pieces[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        ctypes.string_at(address, 1)  # would end the process if it were unmapped
        del self.pieces[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(arena_module, "GROWTH_BYTES", 4 * PAGE)
    return runtime


def test_what_does_not_fit_takes_no_memory(runtime: Runtime) -> None:
    arena = HostArena(32 * PAGE)
    assert arena.allocate(3 * PAGE) == 0 and arena.size_bytes == 4 * PAGE
    assert arena.allocate(30 * PAGE) is None and arena.size_bytes == 4 * PAGE
    assert arena.allocate(29 * PAGE) == 3 * PAGE and arena.size_bytes == 32 * PAGE
    arena.close()


def test_a_range_can_be_freed_by_a_finalizer_that_interrupts_an_allocation() -> None:
    arena = HostArena(32 * PAGE)
    offset = arena.allocate(PAGE)
    with arena._lock:
        freeing = threading.Thread(target=arena.free, args=(offset,), daemon=True)
        freeing.start()
        freeing.join(timeout=2)
        assert not freeing.is_alive()
    assert arena.used_bytes == 0
    arena.close()


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_extents_never_merge_across_a_border(order: tuple[int, ...]) -> None:
    extents = ExtentAllocator(PAGE)
    extents.grow(2 * PAGE)
    extents.grow(2 * PAGE, apart=True)
    offsets = [extents.allocate(PAGE) for _ in range(4)]
    for index in order:
        offset = offsets[index]
        assert offset is not None
        extents.free(offset)
    assert extents.largest_free_bytes == 2 * PAGE
    assert {extents.allocate(2 * PAGE), extents.allocate(2 * PAGE)} == {0, 2 * PAGE}


def test_no_range_lies_across_two_pinned_pieces(runtime: Runtime) -> None:
    arena = HostArena(32 * PAGE, pinned=True)
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
            for start, size in runtime.pieces.items()
        ]
        assert any(inside)
    arena.close()
    assert not runtime.pieces
