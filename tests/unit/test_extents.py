# SPDX-License-Identifier: Apache-2.0
"""The extent allocator: no overlap, full coalescing, no growth in steady state."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.offload.sizes import MIB
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
