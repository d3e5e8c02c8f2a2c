# SPDX-License-Identifier: Apache-2.0
"""How a storage is spread over drives: parts add up, follow bandwidth and queues, stay large."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.offload.sizes import GIB, MIB
from megatron.offload.tiers.striping import MIN_STRIPE_BYTES, Lane, stripe

GRANULE = 4096

speeds = st.one_of(st.none(), st.floats(1e6, 2e10))
lanes = st.lists(st.builds(Lane, speeds, st.integers(0, GIB)), min_size=1, max_size=8)
sizes = st.integers(0, GIB // GRANULE).map(lambda number: number * GRANULE)


def ends_s(lanes: list[Lane], parts: list[int]) -> list[float]:
    """When each lane is done, with every bandwidth known."""
    return [
        (lane.queued_bytes + part) / lane.bytes_per_s
        for lane, part in zip(lanes, parts, strict=True)
        if lane.bytes_per_s
    ]


@given(sizes, lanes, st.sampled_from([1, 512, GRANULE]))
def test_parts_add_up_and_are_multiples_of_the_granule(
    num_bytes: int, lanes: list[Lane], granule: int
) -> None:
    parts = stripe(num_bytes, lanes, granule)
    assert len(parts) == len(lanes) and sum(parts) == num_bytes
    assert all(part >= 0 and part % granule == 0 for part in parts)


@given(sizes, lanes)
def test_no_part_is_small_unless_it_is_all(num_bytes: int, lanes: list[Lane]) -> None:
    parts = [part for part in stripe(num_bytes, lanes, GRANULE) if part]
    assert len(parts) <= 1 or min(parts) > MIN_STRIPE_BYTES - GRANULE


@given(st.integers(1, 2 * MIN_STRIPE_BYTES // GRANULE - 1), lanes)
def test_a_small_storage_goes_whole_to_one_lane(number: int, lanes: list[Lane]) -> None:
    assert sum(part > 0 for part in stripe(number * GRANULE, lanes, GRANULE)) == 1


@given(
    st.integers(1, MIN_STRIPE_BYTES // GRANULE),
    st.lists(st.integers(0, GIB), min_size=2, max_size=8),
)
def test_of_equally_fast_lanes_the_least_loaded_gets_a_small_storage(
    number: int, queued: list[int]
) -> None:
    parts = stripe(number * GRANULE, [Lane(1e9, waiting) for waiting in queued], GRANULE)
    assert queued[parts.index(number * GRANULE)] == min(queued)


@given(
    st.integers(1, MIN_STRIPE_BYTES // GRANULE),
    st.lists(st.floats(1e8, 1e10), min_size=2, max_size=8),
)
def test_of_empty_lanes_the_fastest_gets_a_small_storage(number: int, speeds: list[float]) -> None:
    parts = stripe(number * GRANULE, [Lane(speed, 0) for speed in speeds], GRANULE)
    assert speeds[parts.index(number * GRANULE)] == pytest.approx(max(speeds))


@given(
    st.lists(st.floats(5e8, 8e9), min_size=2, max_size=4),
    st.integers(256 * MIB // GRANULE, GIB // GRANULE),
)
def test_empty_lanes_get_parts_in_proportion_to_bandwidth(speeds: list[float], number: int) -> None:
    num_bytes = number * GRANULE
    parts = stripe(num_bytes, [Lane(speed, 0) for speed in speeds], GRANULE)
    for part, speed in zip(parts, speeds, strict=True):
        assert part == pytest.approx(num_bytes * speed / sum(speeds), abs=len(speeds) * GRANULE)


@example([Lane(1204971531.0, 302227695), Lane(4222081651.0, 0)])
@given(st.lists(st.builds(Lane, st.floats(5e8, 8e9), st.integers(0, GIB)), min_size=2, max_size=6))
def test_lanes_that_get_a_part_end_together_and_before_the_others(lanes: list[Lane]) -> None:
    parts = stripe(GIB, lanes, GRANULE)
    ends = ends_s(lanes, parts)
    busy = [end for end, part in zip(ends, parts, strict=True) if part]
    slack_s = len(lanes) * GRANULE / 5e8  # parts are cut to whole granules
    assert max(busy) - min(busy) <= slack_s
    # A lane without a part would have got less than a worthwhile one, which the others took over.
    speed = sum(lane.bytes_per_s for lane, part in zip(lanes, parts, strict=True) if part)
    slack_s += parts.count(0) * MIN_STRIPE_BYTES / speed
    for end, lane, part in zip(ends, lanes, parts, strict=True):
        if not part:
            assert end + MIN_STRIPE_BYTES / lane.bytes_per_s >= max(busy) - slack_s


def test_a_lane_whose_queue_is_longer_gets_less() -> None:
    first, second = stripe(64 * MIB, [Lane(1e9, 32 * MIB), Lane(1e9, 0)], GRANULE)
    assert (first, second) == (16 * MIB, 48 * MIB)
    assert stripe(16 * MIB, [Lane(1e9, 32 * MIB), Lane(1e9, 0)], GRANULE) == [0, 16 * MIB]


def test_a_lane_that_was_not_measured_counts_as_the_mean_of_the_others() -> None:
    parts = stripe(96 * MIB, [Lane(1e9, 0), Lane(3e9, 0), Lane(None, 0)], GRANULE)
    assert parts == [16 * MIB, 48 * MIB, 32 * MIB]
    assert stripe(64 * MIB, [Lane(None, 0), Lane(None, 0)], GRANULE) == [32 * MIB] * 2


@given(st.floats(1e6, 2e10), st.integers(0, GIB), sizes)
def test_one_lane_gets_it_all(speed: float, queued_bytes: int, num_bytes: int) -> None:
    assert stripe(num_bytes, [Lane(speed, queued_bytes)], GRANULE) == [num_bytes]
