# SPDX-License-Identifier: Apache-2.0
"""Errors in a saved storage: states, waits, what is let go and when.

Left out:
- memory is freed under the lock: nothing that runs then takes it;
- a restored record keeps its finished transfer, which holds nothing and ignores `abandon`; its
  state is no longer READING, so nobody takes the transfer for one under way;
- a view takes what is ready without the lock: a list hands out each element once;
- `queue_write`, `memory_to_write` and `stay` do not take the lock: what may happen between their
  two steps is that the bytes are taken back, which `begin_writing` notices;
- `stay` does not look at the state: it is QUEUED, or already what it becomes.
"""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

RECORD = "unit/test_record.py::"
VIEWS = "behaviour/test_storage_moves_once.py::"
LAST_VIEW = RECORD + "test_restored_memory_stays_until_the_last_view_was_used"
NEVER = "behaviour/test_what_never_moves.py::"
ENDS = "behaviour/test_engine_ends_what_it_began.py::"
NOT_BEGUN = RECORD + "test_bytes_needed_before_their_write_began_are_not_written"
ARRIVED = RECORD + "test_a_read_has_arrived_when_its_transfer_is_done"
NEXT = RECORD + "test_the_end_of_a_read_is_not_taken_for_that_of_the_next"
LATE = RECORD + "test_bytes_that_were_read_and_used_by_others_are_to_be_read_again"
READY_ONCE = RECORD + "test_a_view_is_ready_after_a_read_once"
ERROR_AT_THE_END = RECORD + "test_who_waits_for_a_read_learns_of_its_error_at_the_end"
FREED = RECORD + "test_a_storage_that_was_resized_before_its_write_began_is_not_written[0]"

record = table_of("saved/record.py", MUTATIONS)

record(
    "a read is not waited for",
    """
                pending.wait()
            with self._lock:
""",
    """
                pass
            with self._lock:
""",
    RECORD + "test_bytes_that_are_being_read_are_given_out_only_after_the_wait",
)
record(
    "a read that has begun counts as restored",
    """
            self.state, self._memory, self._pending = State.READING, memory, pending
""",
    """
            self.state, self._memory, self._pending = State.RESTORED, memory, None
""",
    RECORD + "test_bytes_that_are_being_read_are_given_out_only_after_the_wait",
)
record(
    "memory that is being read into is given out",
    """
            memory = self._memory if self.state in (State.IN_MEMORY, State.RESTORED) else None
""",
    """
            memory = self._memory
""",
    RECORD + "test_bytes_that_are_being_read_are_given_out_only_after_the_wait",
)
record(
    "a failed read leaves the record waiting for it",
    """
            with self._lock:
                if self._pending is pending:
                    self.state, self._memory, self._pending = State.ON_TIER, None, None
            raise
""",
    """
            raise
""",
    ENDS + "test_a_read_that_failed_once_is_tried_again",
)
record(
    "a failed read ends the one after it",
    """
                if self._pending is pending:
                    self.state, self._memory, self._pending = State.ON_TIER, None, None
""",
    """
                self.state, self._memory, self._pending = State.ON_TIER, None, None
""",
    RECORD + "test_the_error_of_a_read_does_not_end_the_next",
)
record(
    "the end of a read that was waited for is taken for that of the next",
    """
                if self._pending is pending and self.state is State.READING:
""",
    """
                if self.state is State.READING:
""",
    NEXT + "[True]",
)
record(
    "the end of a read is taken for that of the next",
    """
            if self.state is not State.READING or self._pending is not ended:
                return
""",
    """
            if self.state is not State.READING:
                return
""",
    NEXT + "[False]",
)
record(
    "who comes late takes what was let go for restored",
    """
                if self._pending is pending and self.state is State.READING:
""",
    """
                if True:
""",
    LATE,
)
record(
    "what was waited for goes on being read",
    """
                if self._pending is pending and self.state is State.READING:
                    self.state, self._pending = State.RESTORED, None
                return self._memory if self.state in (State.IN_MEMORY, State.RESTORED) else None
""",
    """
                return self._memory
""",
    RECORD + "test_bytes_that_are_being_read_are_given_out_only_after_the_wait",
)
record(
    "who waited for a read is handed memory of the next",
    """
                return self._memory if self.state in (State.IN_MEMORY, State.RESTORED) else None
""",
    """
                return self._memory
""",
    NEXT + "[True]",
)
record(
    "what is in memory for good is not handed out",
    """
                return self._memory if self.state in (State.IN_MEMORY, State.RESTORED) else None
""",
    """
                return self._memory if self.state is State.RESTORED else None
""",
    RECORD + "test_bytes_that_are_in_memory_for_good_need_no_read",
)
record(
    "the error of a read keeps its transfer and its frame",
    """
            del pending  # an error refers to this frame, and the transfer to the error
""",
    """
            pass
""",
    RECORD + "test_the_error_of_a_read_keeps_nothing_alive",
)
record(
    "what is made ready goes on being read",
    """
            self.state, self._pending = State.RESTORED, None
            memory = self._memory
""",
    """
            memory = self._memory
""",
    READY_ONCE,
)
record(
    "what somebody waited for, used and let go is made ready",
    """
            if self.state is not State.READING or self._pending is not ended:
                return
""",
    """
            if self._pending is not None and self._pending is not ended:
                return
""",
    RECORD + "test_what_was_used_and_let_go_is_not_made_ready",
)
record(
    "views that were used are made ready",
    """
            if not view.is_used:
                tensor = view.rebuild(memory)
                with self._lock:
                    if not view.is_used:
                        view.ready.append(tensor)
""",
    """
            if True:
                tensor = view.rebuild(memory)
                with self._lock:
                    view.ready.append(tensor)
""",
    RECORD + "test_a_view_that_was_used_is_not_made_ready",
)
record(
    "tensors of views that were used are built for nothing",
    """
            if not view.is_used:
                tensor = view.rebuild(memory)
""",
    """
            if True:
                tensor = view.rebuild(memory)
""",
    RECORD + "test_a_view_that_was_used_is_not_made_ready",
)
record(
    "a view that was used meanwhile is made ready",
    """
                    if not view.is_used:
                        view.ready.append(tensor)
""",
    """
                    view.ready.append(tensor)
""",
    RECORD + "test_a_view_that_was_used_meanwhile_keeps_nothing",
)
record(
    "a view that died is made ready",
    """
        for view in [view for weak in self._views if (view := weak()) is not None]:
""",
    """
        for view in [weak() for weak in self._views]:
""",
    RECORD + "test_views_that_died_are_not_made_ready",
)
record(
    "views are made ready without the lock",
    """
                with self._lock:
                    if not view.is_used:
""",
    """
                if True:
                    if not view.is_used:
""",
    RECORD + "test_a_view_and_its_last_use_exclude_each_other_when_it_is_made_ready",
)
record(
    "a use is not noted",
    """
            view.is_used = True
""",
    "",
    RECORD + "test_a_view_that_was_used_is_not_made_ready",
)
record(
    "what was ready and not taken stays",
    """
            late, view.ready = view.ready, []
""",
    "",
    RECORD + "test_what_is_ready_and_not_taken_goes_with_the_last_use",
)
for name, line, end in (
    (
        "the end of a read that was waited for does not take the lock",
        "                if self._pending is pending and self.state is State.READING:",
        "waited for",
    ),
    (
        "the end of a read that failed does not take the lock",
        "                if self._pending is pending:",
        "failed",
    ),
    (
        "make_ready does not take the lock",
        "            if self.state is not State.READING or self._pending is not ended:",
        "made ready",
    ),
):
    margin = "        " if end == "made ready" else "            "
    record(
        name,
        f"{margin}with self._lock:\n{line}",
        f"{margin}if True:\n{line}",
        RECORD + f"test_the_end_of_a_read_and_its_uses_exclude_each_other[{end}]",
    )
record(
    "a write of what was taken back is not cancelled",
    """
            pending.cancel()
""",
    """
            pass
""",
    "behaviour/test_transfers_and_memory_are_ordered.py::"
    "test_forwarding_gives_the_memory_back_and_cancels_the_queued_write",
)
record(
    "what was taken back keeps its block",
    """
                pending, self._pending = self._pending, None
                self.state, self.block = State.IN_MEMORY, None
""",
    """
                pending, self._pending = self._pending, None
                self.state = State.IN_MEMORY
""",
    ENDS + "test_a_view_taken_back_in_mid_write_can_be_asked_for_again_after_the_write",
)
record(
    "a write that ends takes the memory of what was taken back",
    """
            if self.state is not State.WRITING:
                return  # taken back by `take_back` meanwhile
""",
    "",
    ENDS + "test_a_view_taken_back_in_mid_write_can_be_asked_for_again_after_the_write",
)
record(
    "a failed write counts as done",
    """
            if failed or _place_of(self._memory) != self._own_place:
""",
    """
            if self._memory.nbytes() != self.num_bytes:
""",
    "behaviour/test_failed_transfers.py::test_failed_writes_keep_the_bytes_and_warn_once",
)
record(
    "a storage resized while it was written counts as written",
    """
            if failed or _place_of(self._memory) != self._own_place:
""",
    """
            if failed:
""",
    RECORD + "test_a_storage_that_was_resized_while_it_was_written_stays_in_memory",
)
record(
    "a failed write keeps its block",
    """
                self.state, self.block = State.IN_MEMORY, None
            else:
""",
    """
                self.state = State.IN_MEMORY
            else:
""",
    RECORD + "test_a_write_that_fails_leaves_the_bytes_and_gives_the_block_back",
)
record(
    "written memory is never let go",
    """
                memory, self._memory = self._memory, None
""",
    """
                pass
""",
    "behaviour/test_transfers_and_memory_are_ordered.py::"
    "test_memory_of_a_running_write_stays_alive",
)
record(
    "a resized origin is trusted",
    """
        return alive if alive is not None and _place_of(alive) == self._origin_place else None
""",
    """
        return alive
""",
    "behaviour/test_resized_storages.py::test_freed_after_it_was_written_it_is_read",
)
record(
    "bytes that are still alive are read",
    """
        alive = storage_if_alive(self.origin)
""",
    """
        alive = None
""",
    NEVER + "test_a_storage_that_is_still_alive_is_not_read",
)
# Left out, "the address of a freed storage is given to another one":
# the tensors of another storage have another version counter, which `find` compares too.
record(
    "the origin keeps the bytes alive",
    """
        self.origin = StorageWeakRef(storage)  # does not keep the bytes alive
""",
    """
        self.origin = StorageWeakRef(storage)
        self.kept = storage
""",
    VIEWS + "test_the_memory_is_really_given_up",
)
record(
    "a used view releases nothing",
    """
            self.num_unused_views -= 1
""",
    """
            pass
""",
    LAST_VIEW,
)
record(
    "the last view that is used leaves the memory restored",
    """
                self.state, restored, self._memory = State.ON_TIER, self._memory, None
""",
    """
                pass
""",
    "behaviour/test_every_way_through_a_step.py::test_backward_twice_through_one_graph",
)
record(
    "the first view that is used releases the memory",
    """
            if self.num_unused_views <= 0 and self.state is State.RESTORED:
""",
    """
            if self.state is State.RESTORED:
""",
    LAST_VIEW,
)
record(
    "only the first pass through a graph releases the memory",
    """
            if self.num_unused_views <= 0 and self.state is State.RESTORED:
""",
    """
            if self.num_unused_views == 0 and self.state is State.RESTORED:
""",
    "behaviour/test_every_way_through_a_step.py::test_backward_twice_through_one_graph",
)
record(
    "views are not counted",
    """
            saved.num_unused_views += 1
""",
    """
            pass
""",
    LAST_VIEW,
)
record(
    "views are counted without the lock",
    """
        with saved._lock:
            saved.num_unused_views += 1
""",
    """
        if True:
            saved.num_unused_views += 1
""",
    RECORD + "test_a_new_view_and_the_last_use_exclude_each_other",
)
record(
    "a record that dies leaves its transfer queued",
    """
            self._pending.abandon()
""",
    """
            pass
""",
    "behaviour/test_transfers_and_memory_are_ordered.py::"
    "test_a_graph_dropped_without_backward_cancels_its_queued_writes",
)
record(
    "a finalizer takes the locks of a transfer",
    """
            self._pending.abandon()
""",
    """
            self._pending.cancel()
""",
    RECORD + "test_a_record_that_dies_abandons_its_transfer_and_takes_no_lock",
)
for call, first_line in (
    ("end_writing", "            if self.state is not State.WRITING:"),
    (
        "take_back",
        "            if self.state is State.QUEUED:\n"
        "                self.state = State.IN_MEMORY\n"
        "            elif self.state is State.WRITING:",
    ),
):
    record(
        f"{call} does not take the lock",
        f"        with self._lock:\n{first_line}",
        f"        if True:\n{first_line}",
        RECORD + f"test_the_end_of_a_write_and_taking_back_exclude_each_other[{call}]",
    )
record(
    "view_used does not take the lock",
    """
        with self._lock:
            view.is_used = True
""",
    """
        if True:
            view.is_used = True
""",
    RECORD + "test_the_last_use_and_taking_back_exclude_each_other",
)
record(
    "begin_writing does not take the lock",
    """
        with self._lock:
            if self.state is State.QUEUED:
                self.state, self.block, self._pending = State.WRITING, block, pending
""",
    """
        if True:
            if self.state is State.QUEUED:
                self.state, self.block, self._pending = State.WRITING, block, pending
""",
    RECORD + "test_the_begin_of_a_write_and_taking_back_exclude_each_other",
)
record(
    "a record that could not be made fails once more when it dies",
    """
        self._pending: Pending | None = None  # first: `__del__` also runs if the rest raises
        self.scope = scope
        self.version = version  # of the tensor that was saved first
        # In the storage that was saved; a copy of a part begins with its first byte.
        self.start_bytes, self.num_bytes = span or Span(0, storage.nbytes())
""",
    """
        self.scope = scope
        self.version = version  # of the tensor that was saved first
        self.start_bytes, self.num_bytes = span or Span(0, storage.nbytes())
        self._pending: Pending | None = None
""",
    RECORD + "test_a_record_that_could_not_be_made_dies_without_another_error",
)
record(
    "what is to be written counts as in memory",
    """
            self.state = State.QUEUED
""",
    """
            pass
""",
    NOT_BEGUN,
)
record(
    "what was taken back before its write began is written",
    """
            if self.state is not State.QUEUED:
                return None
""",
    "",
    NOT_BEGUN,
)
record(
    "what was freed before its write began is written",
    """
            if _place_of(self._memory) != self._own_place:
                self.state = State.IN_MEMORY
                return None
""",
    "",
    FREED,
)
record(
    "what was freed before its write began is still to be written",
    """
                self.state = State.IN_MEMORY
                return None
""",
    """
                return None
""",
    FREED,
)
record(
    "what is to be written is not given out",
    """
            if self.state is State.QUEUED:
                self.state = State.IN_MEMORY
            elif self.state is State.WRITING:
""",
    """
            if self.state is State.WRITING:
""",
    NOT_BEGUN,
)
record(
    "what no tier takes is still to be written",
    """
        \"\"\"No tier takes the bytes: they remain in memory.\"\"\"
        with self._lock:
            if self.state is State.QUEUED:
                self.state = State.IN_MEMORY
""",
    """
        \"\"\"No tier takes the bytes: they remain in memory.\"\"\"
""",
    RECORD + "test_bytes_that_no_tier_takes_stay_in_memory",
)
record(
    "the write of what was taken back meanwhile is not cancelled",
    """
            assert self.state is State.IN_MEMORY, self.state
        pending.cancel()
""",
    """
            assert self.state is State.IN_MEMORY, self.state
""",
    NOT_BEGUN,
)
record(
    "a write begins although its bytes were taken back meanwhile",
    """
            if self.state is State.QUEUED:
                self.state, self.block, self._pending = State.WRITING, block, pending
                return
""",
    """
            if True:
                self.state, self.block, self._pending = State.WRITING, block, pending
                return
""",
    NOT_BEGUN,
)
record(
    "each write is cancelled as soon as it begins",
    """
                self.state, self.block, self._pending = State.WRITING, block, pending
                return
            assert self.state is State.IN_MEMORY, self.state
""",
    """
                self.state, self.block, self._pending = State.WRITING, block, pending
""",
    RECORD + "test_a_write_that_nobody_took_back_goes_on",
)
record(
    "each read has arrived as soon as it begins",
    """
        return pending is None or pending.done()
""",
    """
        return True
""",
    ARRIVED,
)
record(
    "no read has arrived",
    """
        return pending is None or pending.done()
""",
    """
        return pending is None
""",
    ARRIVED,
)
record(
    "where nothing is read nothing has arrived",
    """
        return pending is None or pending.done()
""",
    """
        return pending is not None and pending.done()
""",
    ARRIVED,
)
record(
    "who waits for a read does not",
    """
            pending.wait_until_done()
""",
    """
            pass
""",
    ERROR_AT_THE_END,
)
record(
    "who waits for a read meets its error",
    """
            pending.wait_until_done()
""",
    """
            pending.wait()
""",
    ERROR_AT_THE_END,
)
