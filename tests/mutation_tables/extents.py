# SPDX-License-Identifier: Apache-2.0
"""Errors in which ranges are taken: overlap, merging, borders."""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

ARENA = "unit/test_arena.py::"
EXTENTS = "unit/test_extents.py::"
RANDOM_EXTENTS = EXTENTS + "test_random_lifetimes_never_overlap_and_coalesce_fully"

extents = table_of("tiers/extents.py", MUTATIONS)

extents(
    "a range that is taken is handed out again",
    """
        self._remove(start, size)
        if size > wanted:
            self._insert(start + wanted, size - wanted)
""",
    """
        if size > wanted:
            self._remove(start, size)
            self._insert(start + wanted, size - wanted)
""",
    ARENA + "test_the_budget_can_be_used_to_the_last_page",
)
extents(
    "what is left of a range begins inside the part that was handed out",
    """
            self._insert(start + wanted, size - wanted)
""",
    """
            self._insert(start + self.granule, size - self.granule)
""",
    RANDOM_EXTENTS,
)
extents(
    "sizes are not rounded up",
    """
        return max(-(-num_bytes // self.granule), 1) * self.granule
""",
    """
        return max(num_bytes // self.granule, 1) * self.granule
""",
    "unit/test_arena.py::test_random_lifetimes_keep_their_contents_and_stay_within_the_budget",
)
extents(
    "not the smallest that fits is taken",
    """
        index = bisect.bisect_left(self._by_size, (wanted, -1))
        if index == len(self._by_size):
            return None
""",
    """
        if not self._by_size or self._by_size[-1][0] < wanted:
            return None
        index = -1
""",
    EXTENTS + "test_the_smallest_extent_that_fits_is_taken",
)
extents(
    "a range merges with no free one behind it",
    """
            self._remove(start + size, after)
            size += after
        self._insert(start, size)
""",
    """
            pass
        self._insert(start, size)
""",
    RANDOM_EXTENTS,
)
extents(
    "a range merges with no free one before it",
    """
            start, size = before, size + start - before
""",
    """
            self._by_size.insert(bisect.bisect(self._by_size, (start - before, before)), (0, 0))
            self._by_size.remove((0, 0))
""",
    RANDOM_EXTENTS,
)
extents(
    "a range that was freed is still taken",
    """
        size = self._taken.pop(start, None)
""",
    """
        size = self._taken.get(start)
""",
    EXTENTS + "test_freeing_what_is_not_taken_is_an_error[4096]",
)
extents(
    "freeing what is not taken is no error",
    """
        if size is None:
            raise ValueError(f"no extent at offset {start} is taken")
""",
    """
        if size is None:
            return
""",
    EXTENTS + "test_freeing_what_is_not_taken_is_an_error[4096]",
)
for side, line in (
    ("before", "        if before is not None and start not in self._borders:"),
    ("behind", "        if after is not None and start + size not in self._borders:"),
):
    extents(
        f"a range merges with a free one {side} it across a border",
        line,
        line.partition(" and ")[0] + ":",
        EXTENTS + "test_extents_never_merge_across_a_border",
    )
