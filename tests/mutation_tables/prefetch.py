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
TAPE = "unit/test_tape.py::"
NEVER = "behaviour/test_what_never_moves.py::"
ENDS = "behaviour/test_engine_ends_what_it_began.py::"

# Left out: the number that comes with a read is the same for all (among equals, arrival counts);
# and a storage that is not taken off the tape, which is an endless loop in any test.

prefetch = table_of("restore/prefetch.py", MUTATIONS)

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
    "the tape keeps records alive",
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
                self._ahead[weakref.ref(record, self._died)] = record.num_bytes
""",
    """
                self._ahead[weakref.ref(record, self._died)] = record.num_bytes
                self._held = record
""",
    TAPE + "test_a_record_that_is_read_ahead_is_not_held",
)
prefetch(
    "a record that died counts as ahead",
    """
                self._ahead[weakref.ref(record, self._died)] = record.num_bytes
""",
    """
                self._ahead[weakref.ref(record)] = record.num_bytes
""",
    TAPE + "test_a_storage_dropped_while_it_was_ahead_leaves_the_window",
)
prefetch(
    "the window has no end",
    """
                if ahead_bytes and ahead_bytes + record.num_bytes > window_bytes:
                    return
""",
    "",
    WINDOW,
)
prefetch(
    "the window is not limited",
    """
            self._fill(min(self.window_bytes, self._limit_bytes))
""",
    """
            self._fill(self.window_bytes)
""",
    TWO_LARGEST,
)
prefetch(
    "a storage larger than the window is never read ahead",
    """
                if ahead_bytes and ahead_bytes + record.num_bytes > window_bytes:
""",
    """
                if ahead_bytes + record.num_bytes > window_bytes:
""",
    WINDOW,
)
prefetch(
    "what is being read does not count as ahead",
    """
                self._ahead[weakref.ref(record, self._died)] = record.num_bytes
""",
    "",
    WINDOW,
)
prefetch(
    "a used storage counts as ahead",
    """
        self._ahead.pop(weakref.ref(record), None)
""",
    "",
    WINDOW,
)
prefetch(
    "what is being read is read once more",
    """
            if record.state is State.ON_TIER and record.take_back() is None:
""",
    """
            if record.take_back() is None:
""",
    TAPE + "test_what_is_on_its_way_is_not_begun_again",
)
prefetch(
    "what is being written is taken back before anybody needs it",
    """
            if record.state is State.ON_TIER and record.take_back() is None:
""",
    """
            if record.take_back() is None and record.state is State.ON_TIER:
""",
    ENDS + "test_the_read_ahead_leaves_writes_alone",
)
prefetch(
    "what is still in memory is read",
    """
            if record.state is State.ON_TIER and record.take_back() is None:
""",
    """
            if record.state is State.ON_TIER:
""",
    NEVER + "test_a_storage_that_is_still_alive_is_not_read",
)
prefetch(
    "a stopped read-ahead goes on",
    """
        \"\"\"The backward pass is over.\"\"\"
        self._tape = None
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
