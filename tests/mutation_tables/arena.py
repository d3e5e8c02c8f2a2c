# SPDX-License-Identifier: Apache-2.0
"""Errors in host memory: its budget, pinning, giving back."""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

PIECES = "unit/test_arena_pieces.py::"
ARENA = "unit/test_arena.py::"
PINNING = ARENA + "test_growth_is_pinned_range_by_range_and_unpinned_before_it_is_unmapped"
REFUSED_PIN = ARENA + (
    "test_when_pinning_fails_the_arena_stops_growing_and_says_which_limit_to_raise"
)

arena = table_of("tiers/arena.py", MUTATIONS)

arena(
    "it grows beyond its budget",
    """
        growth = min(max(missing, GROWTH_BYTES), left)
""",
    """
        growth = max(missing, GROWTH_BYTES)
""",
    ARENA + "test_the_budget_can_be_used_to_the_last_page",
)
arena(
    "it grows for what will not fit",
    """
        if missing > left or self.growth_failed:
""",
    """
        if self.growth_failed:
""",
    PIECES + "test_what_does_not_fit_takes_no_memory",
)
arena(
    "it tries to grow after a refusal",
    """
        if missing > left or self.growth_failed:
""",
    """
        if missing > left:
""",
    REFUSED_PIN,
)
arena(
    "a refusal to pin does not count",
    """
        if self.pinned and not self._pin(growth):
""",
    """
        if self.pinned and self._pin(growth) is None:
""",
    REFUSED_PIN,
)
arena(
    "growth is not pinned",
    """
        if self.pinned and not self._pin(growth):
""",
    """
        if False:
""",
    PINNING,
)
arena(
    "a range lies across two pinned pieces",
    """
        self._extents.grow(growth, apart=self.pinned)
""",
    """
        self._extents.grow(growth)
""",
    PIECES + "test_no_range_lies_across_two_pinned_pieces",
)
arena(
    "pinned memory is never unpinned",
    """
                unpin(address)
""",
    """
                pass
""",
    PINNING,
)
arena(
    "pinned memory is unmapped before it is unpinned",
    """
            for address in self._pinned_addresses:
""",
    """
            self._mapping.close()
            for address in self._pinned_addresses:
""",
    PINNING,
)
arena(
    "ranges that were freed are not used again",
    """
            self._extents.free(self._freed.popleft())
""",
    """
            self._freed.popleft()
""",
    ARENA + "test_in_steady_state_nothing_new_is_taken",
)
arena(
    "a finalizer takes the arena's lock",
    """
        self._freed.append(offset)
""",
    """
        with self._lock:
            self._extents.free(offset)
""",
    PIECES + "test_a_range_can_be_freed_by_a_finalizer_that_interrupts_an_allocation",
)
arena(
    "a closed arena hands out ranges",
    """
            if self._closed:
                raise RuntimeError("the arena is closed")
""",
    "",
    ARENA + "test_memory_is_returned_when_the_arena_is_closed",
)
arena(
    "a closed arena keeps its memory",
    """
                self._mapping.close()
""",
    """
                pass
""",
    ARENA + "test_memory_is_returned_when_the_arena_is_closed",
)
arena(
    "forked workers hold the memory",
    """
    mapping.madvise(mmap.MADV_DONTFORK)
""",
    "",
    ARENA + "test_the_memory_is_private_and_forked_workers_do_not_hold_it",
)
