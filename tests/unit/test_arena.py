# SPDX-License-Identifier: Apache-2.0
"""The host arena: exact sizes, reuse, budget, memory given back.

Pinning is tried against a stand-in for CUDA's runtime, which tells nothing of CUDA itself.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.offload.device.open import open_device
from megatron.offload.errors import ConfigurationError
from megatron.offload.sizes import MIB
from megatron.offload.tiers.arena import GROWTH_BYTES, HostArena
from tests.support.waiting import wait_until

PAGE = mmap.PAGESIZE


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def fill(arena: HostArena, offset: int, num_bytes: int, value: int) -> None:
    ctypes.memset(arena.address(offset), value, num_bytes)


@pytest.fixture
def arena():
    arena = HostArena(256 * PAGE)
    yield arena
    arena.close()


# -- Budget and exact sizes ---------------------------------------------------------------------


@pytest.mark.parametrize("budget_bytes", [0, 1, PAGE - 1])
def test_a_budget_below_a_page_holds_nothing_and_is_no_error(budget_bytes):
    arena = HostArena(budget_bytes)
    assert arena.allocate(1) is None
    assert arena.size_bytes == arena.used_bytes == 0 and not arena.growth_failed
    arena.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20 * PAGE)), max_size=100))
def test_random_lifetimes_keep_their_contents_and_stay_within_the_budget(operations):
    arena = HostArena(64 * PAGE)
    live: dict[int, tuple[int, int]] = {}  # size and value by offset
    for value, (frees, num_bytes) in enumerate(operations):
        if frees and live:
            offset = list(live)[num_bytes % len(live)]
            size, expected = live.pop(offset)
            assert ctypes.string_at(arena.address(offset), size) == bytes([expected]) * size
            arena.free(offset)
        elif (offset := arena.allocate(num_bytes)) is not None:
            assert arena.address(offset) % PAGE == 0
            live[offset] = num_bytes, value
            fill(arena, offset, num_bytes, value)
        assert arena.used_bytes == sum(-(-size // PAGE) * PAGE for size, _ in live.values())
        assert arena.used_bytes <= arena.size_bytes <= arena.budget_bytes == 64 * PAGE
    for offset, (size, expected) in live.items():
        assert ctypes.string_at(arena.address(offset), size) == bytes([expected]) * size
    arena.close()


def test_the_budget_can_be_used_to_the_last_page(arena):
    offsets = [arena.allocate(PAGE) for _ in range(256)]
    assert sorted(offsets) == [i * PAGE for i in range(256)]
    assert arena.allocate(1) is None
    for offset in offsets:
        arena.free(offset)
    assert arena.allocate(256 * PAGE) == 0


def test_sizes_just_above_a_power_of_two_take_no_more_memory_than_they_ask_for():
    num_bytes = 32 * MIB + 1
    arena = HostArena(1024 * MIB)
    before = resident_bytes()
    for value in range(3):
        offset = arena.allocate(num_bytes)
        assert offset is not None
        fill(arena, offset, num_bytes, value)
    assert arena.used_bytes == 3 * (32 * MIB + PAGE)
    assert resident_bytes() - before < 3 * num_bytes + 8 * MIB  # with powers of two: 192 MiB
    arena.close()


def test_in_steady_state_nothing_new_is_taken(arena):
    sizes = [3 * PAGE, 1, 7 * PAGE + 5, 2 * PAGE, PAGE]

    def step() -> list[int | None]:
        offsets = [arena.allocate(size) for size in sizes]
        for offset in offsets:
            arena.free(offset)
        return offsets

    first = step()
    assert all(step() == first for _ in range(10))


def test_reused_memory_is_not_committed_twice():
    arena = HostArena(256 * MIB)
    before = resident_bytes()
    for value in range(8):
        offset = arena.allocate(32 * MIB)
        assert offset is not None
        fill(arena, offset, 32 * MIB, value)
        arena.free(offset)
    assert resident_bytes() - before < 40 * MIB
    arena.close()


def test_address_space_that_is_not_used_is_not_committed():
    before = resident_bytes()
    arena = HostArena(64 * 1024 * MIB)
    offset = arena.allocate(PAGE)
    assert offset is not None
    fill(arena, offset, PAGE, 1)
    assert resident_bytes() - before < 8 * MIB
    arena.close()


def test_a_budget_without_address_space_is_refused_in_a_sentence():
    with pytest.raises(ConfigurationError, match=r"no address space for .*-host-budget"):
        HostArena(1 << 60)


def test_memory_is_returned_when_the_arena_is_closed():
    before = resident_bytes()
    arena = HostArena(64 * MIB)
    offset = arena.allocate(64 * MIB)
    assert offset is not None
    fill(arena, offset, 64 * MIB, 1)
    assert resident_bytes() - before > 56 * MIB
    arena.close()
    assert resident_bytes() - before < 8 * MIB
    arena.free(offset)  # a block that dies later
    with pytest.raises(RuntimeError, match="closed"):
        arena.allocate(1)


def test_the_memory_is_private_and_forked_workers_do_not_hold_it(arena):
    offset = arena.allocate(PAGE)
    flags, permissions, ours = [], "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, *rest = line.split()
        if "-" in head and not head.endswith(":"):
            start, end = (int(part, 16) for part in head.split("-"))
            ours = start <= arena.address(offset) < end
            permissions = rest[0] if ours else permissions
        elif ours and head == "VmFlags:":
            flags = rest
    assert permissions == "rw-p"
    assert "dc" in flags  # "do not copy on fork"


# -- Pinning, with a stand-in for CUDA's runtime ------------------------------------------------


def test_growth_is_pinned_range_by_range_and_unpinned_before_it_is_unmapped(fake_cuda):
    arena = HostArena(2 * GROWTH_BYTES + 3 * PAGE, open_device("cuda"))
    assert not fake_cuda.pinned  # nothing is pinned before it is needed
    assert [arena.allocate(PAGE) for _ in range(3)] == [0, PAGE, 2 * PAGE]
    wait_until(lambda: arena._ahead is None, "it does not stop to grow")
    assert list(fake_cuda.pinned.values()) == [GROWTH_BYTES] * 2  # in use, and ahead of need
    assert arena.allocate(GROWTH_BYTES) == GROWTH_BYTES  # a block lies in one range
    assert arena.allocate(GROWTH_BYTES - 3 * PAGE) == 3 * PAGE
    assert arena.allocate(3 * PAGE) == 2 * GROWTH_BYTES
    sizes = list(fake_cuda.pinned.values())
    assert sizes == [GROWTH_BYTES, GROWTH_BYTES, 3 * PAGE]  # the rest of the budget
    starts = sorted(fake_cuda.pinned)
    assert starts == [
        arena.address(0),
        arena.address(GROWTH_BYTES),
        arena.address(2 * GROWTH_BYTES),
    ]
    assert arena.size_bytes == arena.budget_bytes
    arena.close()
    assert not fake_cuda.pinned


def test_when_pinning_fails_the_arena_stops_growing_and_says_which_limit_to_raise(
    fake_cuda, caplog
):
    fake_cuda.accepts = 1
    arena = HostArena(4 * GROWTH_BYTES, open_device("cuda"))
    offset = arena.allocate(GROWTH_BYTES)
    assert offset == 0
    wait_until(lambda: arena._ahead is None, "it does not stop to grow")
    assert not caplog.records and not arena.growth_failed, "nobody needs more yet"
    with caplog.at_level(logging.WARNING):
        assert arena.allocate(1) is None
        assert arena.allocate(1) is None
    assert len(caplog.records) == 1
    assert "out of memory" in caplog.text
    assert "ulimit -l" in caplog.text and "cgroup" in caplog.text
    assert arena.growth_failed and arena.size_bytes == GROWTH_BYTES
    assert not fake_cuda.has_error  # else torch would raise it at its next kernel
    arena.free(offset)
    assert arena.allocate(PAGE) == 0  # what is pinned is used on
    arena.close()


@pytest.mark.slow
def test_an_arena_that_is_dropped_and_was_not_closed_is_unpinned(fake_cuda):
    arena = HostArena(8 * PAGE, open_device("cuda"))
    assert arena.allocate(PAGE) is not None and fake_cuda.pinned
    del arena
    gc.collect()
    assert not fake_cuda.pinned
