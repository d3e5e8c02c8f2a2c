# SPDX-License-Identifier: Apache-2.0
"""The extent allocator: no overlap, full coalescing, no growth in steady state."""

from __future__ import annotations

import itertools
import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.offload.sizes import MIB
from megatron.offload.tiers import extents
from megatron.offload.tiers.drive import FILE_BLOCK_BYTES, GROWTH_BYTES
from megatron.offload.tiers.extents import ExtentAllocator

GRANULE = 4096


def filled(num_granules: int) -> ExtentAllocator:
    allocator = ExtentAllocator(GRANULE)
    allocator.grow(num_granules * GRANULE)
    return allocator


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20 * GRANULE)), max_size=200))
def test_random_lifetimes_never_overlap_and_coalesce_fully(operations):
    allocator = filled(256)
    live: list[tuple[int, int]] = []
    for frees, num_bytes in operations:
        if frees and live:
            allocator.free(live.pop(num_bytes % len(live))[0])
            continue
        offset = allocator.allocate(num_bytes)
        if offset is None:
            assert allocator.largest_free_bytes < num_bytes
            continue
        size = allocator.round_up(num_bytes)
        assert offset % GRANULE == 0 and offset + size <= allocator.size_bytes
        for other, other_bytes in live:
            assert offset + size <= other or other + allocator.round_up(other_bytes) <= offset
        live.append((offset, num_bytes))
        assert allocator.used_bytes == sum(allocator.round_up(n) for _, n in live)
    for extent in live:
        allocator.free(extent[0])
    assert allocator.used_bytes == 0
    assert allocator.largest_free_bytes == allocator.size_bytes


def test_the_smallest_extent_that_fits_is_taken():
    allocator = filled(10)
    offsets = [allocator.allocate(n * GRANULE) for n in (3, 1, 2, 1, 3)]
    allocator.free(offsets[0])
    allocator.free(offsets[2])
    assert allocator.allocate(2 * GRANULE) == offsets[2]


def test_growth_merges_with_a_free_tail():
    allocator = filled(2)
    assert allocator.allocate(3 * GRANULE) is None
    allocator.grow(GRANULE)
    assert allocator.allocate(3 * GRANULE) == 0


@pytest.mark.parametrize("offset", [GRANULE, 2 * GRANULE, -GRANULE, 9 * GRANULE, 1])
def test_freeing_what_is_not_taken_is_an_error(offset):
    allocator = filled(4)
    assert allocator.allocate(1) == 0
    with pytest.raises(ValueError, match="is taken"):
        allocator.free(offset)
    allocator.free(0)
    with pytest.raises(ValueError, match="is taken"):
        allocator.free(0)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_extents_never_merge_across_a_border(order):
    extents = filled(2)
    extents.grow(2 * GRANULE, apart=True)
    assert extents.allocate(3 * GRANULE) is None
    offsets = [extents.allocate(GRANULE) for _ in range(4)]
    for index in order:
        extents.free(offsets[index])
    assert extents.largest_free_bytes == 2 * GRANULE
    assert {extents.allocate(2 * GRANULE), extents.allocate(2 * GRANULE)} == {0, 2 * GRANULE}


@pytest.mark.parametrize("seed", [0, 1])
def test_random_lifetimes_lose_less_than_a_tenth_to_fragments(seed):
    """Around a thousand extents of 1 to 64 MiB; the space grows as a drive's file does."""
    chance, allocator = random.Random(seed), ExtentAllocator(FILE_BLOCK_BYTES)
    live: list[tuple[int, int]] = []
    live_bytes = most_live_bytes = most_extents = 0
    for _ in range(20_000):
        if chance.random() < len(live) / 2000:
            index = chance.randrange(len(live))
            live[index], live[-1] = live[-1], live[index]
            offset, num_bytes = live.pop()
            allocator.free(offset)
            live_bytes -= num_bytes
            continue
        num_bytes = int(MIB * 64 ** chance.random())
        found = allocator.allocate(num_bytes)
        if found is None:
            missing = allocator.round_up(num_bytes) - allocator.free_at_end_bytes
            allocator.grow(max(missing, GROWTH_BYTES))
            found = allocator.allocate(num_bytes)
            assert found is not None
        live.append((found, num_bytes))
        live_bytes += num_bytes
        most_live_bytes = max(most_live_bytes, live_bytes)
        most_extents = max(most_extents, len(live))
    assert most_extents > 1000
    assert 0 <= 1 - most_live_bytes / allocator.size_bytes < 0.1


class _Interrupt(BaseException):
    pass


def test_an_interrupt_between_any_two_lines_loses_no_space():
    """Each line of an operation in turn is not reached; everything can be had again behind it."""
    chance = random.Random(3)
    for line in itertools.count():
        allocator, live = filled(64), {}
        allocator.grow(32 * GRANULE, apart=True)
        for _ in range(40):
            if len(live) > 3 and chance.random() < 0.4:
                start = chance.choice(sorted(live))
                allocator.free(start)
                del live[start]
            elif (start := allocator.allocate(chance.randint(1, 6) * GRANULE)) is not None:
                live[start] = allocator._taken[start]
        freed = chance.choice(sorted(live))
        left = line

        def trace(frame, event, _):
            nonlocal left
            if frame.f_code.co_filename != extents.__file__:
                return None
            if event == "line":
                left -= 1
                if left < 0:
                    raise _Interrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            allocator.free(freed)
            allocator.allocate(2 * GRANULE)
            allocator.grow(4 * GRANULE, apart=True)
            has_ended = True
        except _Interrupt:
            has_ended = False
        finally:
            sys.settrace(before)
        taken = dict(allocator._taken)
        assert {one for one in live if one != freed} <= taken.keys()
        for start in taken:
            allocator.free(start)
        assert allocator.used_bytes == 0
        assert (
            allocator.free_at_end_bytes
            + sum(
                size for size, start in allocator._by_size if start + size != allocator.size_bytes
            )
            == allocator.size_bytes
        )
        assert allocator.largest_free_bytes == 64 * GRANULE
        if has_ended:
            break
    assert line > 20
