# SPDX-License-Identifier: Apache-2.0
"""Errors in the read-ahead: order, window, what it holds."""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

PREFETCH = "behaviour/test_prefetch.py::"
WINDOW = PREFETCH + "test_the_window_opens_at_the_first_use_and_moves_in_reverse_order"
TWO_LARGEST = (
    PREFETCH + "test_the_window_holds_two_of_the_largest_within_the_inflight_budget[16384-16384]"
)
TAPE = "unit/test_save_order.py::"
NEVER = "behaviour/test_what_never_moves.py::"
DROPPED = TAPE + "test_a_storage_dropped_while_it_was_ahead_leaves_the_window"
ROOM = TAPE + "test_a_used_storage_makes_room_for_as_much_as_it_held"
HALF = TAPE + "test_the_read_ahead_hears_of_the_first_use_and_whenever_half_of_the_window_was_used"
CANNOT_BEGIN = TAPE + "test_a_read_that_cannot_begin_ends_the_read_ahead_of_its_pass"

# Left out: the number that comes with a read is the same for all (among equals, arrival counts);
# and a storage that is not taken off the save order, which is an endless loop in any test.

prefetch = table_of("transfer/prefetcher.py", MUTATIONS)

prefetch(
    "storages come back in forward order",
    """
        self._saves.append(weakref.ref(record))
""",
    """
        self._saves.insert(0, weakref.ref(record))
""",
    WINDOW,
)
prefetch(
    "the save_order keeps records alive",
    """
        self._saves.append(weakref.ref(record))
""",
    """
        self._saves.append(lambda: record)
""",
    TAPE + "test_a_dropped_record_is_neither_held_nor_read",
)
prefetch(
    "records that are ahead are kept alive",
    """
        reference = weakref.ref(record, self._died)
""",
    """
        reference = weakref.ref(record, self._died)
        self._held = record
""",
    TAPE + "test_a_record_that_is_read_ahead_is_not_held",
)
prefetch(
    "a record that died counts as ahead",
    """
        reference = weakref.ref(record, self._died)
""",
    """
        reference = weakref.ref(record)
""",
    DROPPED,
)
prefetch(
    "the window has no end",
    """
                if self._ahead_bytes and wanted_bytes > self.window_bytes:
                    self._resume_after = self._num_that_hold(save_order.largest_bytes)
                    return
""",
    "",
    WINDOW,
)
prefetch(
    "the window is not limited",
    """
        return min(2 * save_order.largest_bytes + self._missing_bytes, self.limit_bytes)
""",
    """
        return 2 * save_order.largest_bytes + self._missing_bytes
""",
    TWO_LARGEST,
)
prefetch(
    "the window holds one of the largest",
    """
        return min(2 * save_order.largest_bytes + self._missing_bytes, self.limit_bytes)
""",
    """
        return min(save_order.largest_bytes + self._missing_bytes, self.limit_bytes)
""",
    WINDOW,
)
prefetch(
    "the window is open before the first use",
    """
        if save_order is None or not self._has_used_one:
""",
    """
        if save_order is None:
""",
    WINDOW,
)
prefetch(
    "in its second backward pass the window is open before the first use",
    """
            self._has_used_one = opens_at_once
            self._missing_bytes *= _FORGETTING
""",
    """
            self._missing_bytes *= _FORGETTING
""",
    TAPE + "test_each_backward_pass_begins_with_one_storage",
)
prefetch(
    "a pass that was prepared begins anew",
    """
        if self._save_order is not save_order:
""",
    """
        if True:
""",
    PREFETCH + "test_a_pass_that_was_prepared_is_not_begun_a_second_time",
)
prefetch(
    "the window never opens at once",
    """
            self._has_used_one = opens_at_once
""",
    """
            self._has_used_one = False
""",
    PREFETCH + "test_a_pass_that_was_prepared_is_not_begun_a_second_time",
)
prefetch(
    "the first use does not open the window",
    """
        is_first, self._has_used_one = not self._has_used_one, True
""",
    """
        is_first = not self._has_used_one
""",
    WINDOW,
)
prefetch(
    "the read-ahead does not hear of the first use",
    """
        return is_first or len(self._left) >= self._resume_after
""",
    """
        return len(self._left) >= self._resume_after
""",
    TAPE + "test_the_read_ahead_hears_of_what_was_not_ahead_if_it_is_the_first_or_all_others_died",
)
prefetch(
    "the read-ahead hears of no use but the first",
    """
        return is_first or len(self._left) >= self._resume_after
""",
    """
        return is_first
""",
    HALF,
)
prefetch(
    "the read-ahead hears of each use",
    """
        return is_first or len(self._left) >= self._resume_after
""",
    """
        return True
""",
    HALF,
)
prefetch(
    "the read-ahead hears one use late",
    """
        return is_first or len(self._left) >= self._resume_after
""",
    """
        return is_first or len(self._left) > self._resume_after
""",
    HALF,
)
prefetch(
    "the read-ahead hears as soon as one storage was used",
    """
                    self._resume_after = self._num_that_hold(save_order.largest_bytes)
""",
    """
                    self._resume_after = 1
""",
    HALF,
)
prefetch(
    "more is to be used than is ahead",
    """
        return 1 + sum(total < num_bytes for total in itertools.accumulate(sizes[:-1]))
""",
    """
        return 1 + sum(total < num_bytes for total in itertools.accumulate(sizes))
""",
    TAPE + "test_the_read_ahead_hears_when_all_was_used_however_little_that_is",
)
prefetch(
    "the read-ahead hears of uses when nothing is left to read",
    """
            save_order.drop_last()
        self._resume_after = math.inf
""",
    """
            save_order.drop_last()
""",
    TAPE + "test_the_read_ahead_hears_of_no_use_when_all_is_read",
)
prefetch(
    "a storage larger than the window is never read ahead",
    """
                if self._ahead_bytes and wanted_bytes > self.window_bytes:
""",
    """
                if wanted_bytes > self.window_bytes:
""",
    WINDOW,
)
prefetch(
    "what is being read takes no room",
    """
        self._ahead_bytes += record.num_bytes
""",
    "",
    WINDOW,
)
prefetch(
    "what is ahead makes no room when it is used",
    """
        self._ahead[reference] = record.num_bytes
""",
    "",
    WINDOW,
)
prefetch(
    "a used storage counts as ahead",
    """
        num_bytes = self._ahead.pop(weakref.ref(record), None)
""",
    """
        num_bytes = self._ahead.get(weakref.ref(record))
        num_bytes = None
""",
    WINDOW,
)
prefetch(
    "a storage used twice makes room twice",
    """
        num_bytes = self._ahead.pop(weakref.ref(record), None)
""",
    """
        num_bytes = self._ahead.get(weakref.ref(record))
""",
    TAPE + "test_a_storage_used_more_than_once_counts_once",
)
prefetch(
    "the room of a used storage is lost",
    """
        if num_bytes is not None:
            self._left.append(num_bytes)
        is_first, self._has_used_one = not self._has_used_one, True
""",
    """
        is_first, self._has_used_one = not self._has_used_one, True
""",
    WINDOW,
)
prefetch(
    "the room of a record that died is lost",
    """
    def _died(self, reference: SavedReference) -> None:
        num_bytes = self._ahead.pop(reference, None)
        if num_bytes is not None:
            self._left.append(num_bytes)
""",
    """
    def _died(self, reference: SavedReference) -> None:
        self._ahead.pop(reference, None)
""",
    DROPPED,
)
prefetch(
    "room that was made is not used",
    """
                    self._ahead_bytes -= self._left.popleft()
""",
    """
                    self._left.popleft()
""",
    ROOM,
)
prefetch(
    "of the room that was made, some is used",
    """
                while self._left:
                    self._ahead_bytes -= self._left.popleft()
""",
    """
                if self._left:
                    self._ahead_bytes -= self._left.popleft()
""",
    TAPE + "test_room_of_several_storages_is_used_for_one",
)
prefetch(
    "what was begun is noted as ahead only then",
    """
        is_ahead = False
        try:
            is_ahead = record.take_back() is not None or self._begin_read(record, self._num_begun)
""",
    """
        is_ahead = False
        del self._ahead[reference]
        try:
            is_ahead = record.take_back() is not None or self._begin_read(record, self._num_begun)
            self._ahead[reference] = record.num_bytes
""",
    TAPE + "test_what_is_used_as_soon_as_it_was_begun_leaves_the_window",
)
prefetch(
    "what compute began itself counts as ahead",
    """
            if not is_ahead:
                self._died(reference)
""",
    """
            pass
""",
    TAPE + "test_what_compute_began_itself_is_not_ahead",
)
prefetch(
    "what compute has used before its turn is brought back",
    """
            if record.num_unused_views > 0 and record.state in _AWAY:
""",
    """
            if record.state in _AWAY:
""",
    TAPE + "test_what_was_used_before_its_turn_is_not_brought_back",
)
prefetch(
    "what is there or on its way is brought back",
    """
            if record.num_unused_views > 0 and record.state in _AWAY:
""",
    """
            if record.num_unused_views > 0:
""",
    TAPE + "test_what_is_on_its_way_is_not_begun_again",
)
for state in ("QUEUED", "WRITING", "ON_TIER"):
    others = ", ".join(f"State.{s}" for s in ("QUEUED", "WRITING", "ON_TIER") if s != state)
    prefetch(
        f"what is in this state is not brought back: {state}",
        """
_AWAY = (State.QUEUED, State.WRITING, State.ON_TIER)  # from memory, or about to leave it
""",
        f"""
_AWAY = ({others})
""",
        TAPE + f"test_what_is_or_may_soon_be_away_is_brought_back[State.{state}]",
    )
for state in ("IN_MEMORY", "READING", "RESTORED"):
    prefetch(
        f"what is in this state takes room: {state}",
        """
_AWAY = (State.QUEUED, State.WRITING, State.ON_TIER)  # from memory, or about to leave it
""",
        f"""
_AWAY = (State.QUEUED, State.WRITING, State.ON_TIER, State.{state})
""",
        TAPE + f"test_what_is_there_or_on_its_way_takes_no_room[State.{state}]",
    )
prefetch(
    "what is still in memory is read",
    """
            is_ahead = record.take_back() is not None or self._begin_read(record, self._num_begun)
""",
    """
            is_ahead = self._begin_read(record, self._num_begun)
""",
    NEVER + "test_a_storage_that_is_still_alive_is_not_read",
)
prefetch(
    "after an error the read-ahead goes on",
    """
            self._save_order = None  # out of memory, say; compute asks itself for what it needs
            raise
""",
    """
            raise
""",
    CANNOT_BEGIN,
)
prefetch(
    "an error of the read-ahead is not said",
    """
            self._save_order = None  # out of memory, say; compute asks itself for what it needs
            raise
""",
    """
            self._save_order = None
""",
    CANNOT_BEGIN,
)
prefetch(
    "what could not be read counts as ahead",
    """
        finally:
            if not is_ahead:
                self._died(reference)
""",
    """
        if not is_ahead:
            self._died(reference)
""",
    CANNOT_BEGIN,
)
prefetch(
    "the first wait of a backward pass widens the window",
    """
        if self._has_used_one:
            self._missing_bytes += seconds * bytes_per_s
""",
    """
        self._missing_bytes += seconds * bytes_per_s
""",
    PREFETCH + "test_the_window_grows_by_what_a_stall_would_have_read_and_shrinks_again",
)
prefetch(
    "a stopped read-ahead goes on",
    """
        \"\"\"The backward pass is over.\"\"\"
        self._save_order = None
""",
    """
        \"\"\"The backward pass is over.\"\"\"
""",
    TAPE + "test_between_backward_passes_nothing_is_read",
)
prefetch(
    "stalls do not widen the window",
    """
            self._missing_bytes += seconds * bytes_per_s
""",
    """
            pass
""",
    PREFETCH + "test_the_window_grows_by_what_a_stall_would_have_read_and_shrinks_again",
)
prefetch(
    "a widened window stays wide",
    """
            self._missing_bytes *= _FORGETTING
""",
    "",
    PREFETCH + "test_the_window_grows_by_what_a_stall_would_have_read_and_shrinks_again",
)
