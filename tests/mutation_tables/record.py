# SPDX-License-Identifier: Apache-2.0
"""Errors in a saved storage and its views: states, waits, versions, what is let go and when.

Left out: freeing memory under the lock (nothing that runs then takes it), and a restored record
that keeps its finished transfer (which holds nothing, and ignores `abandon`).
"""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

RECORD = "unit/test_record.py::"
VIEWS = "behaviour/test_storage_moves_once.py::"
ONE_STORAGE = VIEWS + "test_views_of_one_storage_are_written_once_and_come_back_in_shape"
GATHERED = "behaviour/test_gathered_views.py::"
TWO_PARTS = GATHERED + "test_two_small_parts_of_one_storage_come_back_each_with_its_own_bytes"
IN_PLACE = "behaviour/test_in_place_changes_raise.py::"
CHANGED = IN_PLACE + "test_change_after_capture_raises_and_names_the_layer[True]"
NEVER = "behaviour/test_what_never_moves.py::"
ENDS = "behaviour/test_engine_ends_what_it_began.py::"

record = table_of("saved/record.py", MUTATIONS)

record(
    "a read is not waited for",
    """
            self._pending.wait()
""",
    """
            pass
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
            self.state, self._memory, self._pending = State.ON_TIER, None, None
            raise
""",
    """
            raise
""",
    ENDS + "test_a_read_that_failed_once_is_tried_again",
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
            if failed or not self._is_as_saved(self._memory):
""",
    """
            if self._memory.nbytes() != self.num_bytes:
""",
    "behaviour/test_failed_transfers.py::test_failed_writes_keep_the_bytes_and_warn_once",
)
record(
    "a storage resized while it was written counts as written",
    """
            if failed or not self._is_as_saved(self._memory):
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
                if alive is not None and self._is_as_saved(alive):
""",
    """
                if alive is not None:
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
    RECORD + "test_restored_memory_stays_until_the_last_view_was_used",
)
record(
    "the last view that is used leaves the memory restored",
    """
            self.state, self._memory = State.ON_TIER, None

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
    ONE_STORAGE,
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
    "",
    ONE_STORAGE,
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
    ("take_back", "            if self.state is State.WRITING:"),
):
    record(
        f"{call} does not take the lock",
        f"        with self._lock:\n{first_line}",
        f"        if True:\n{first_line}",
        RECORD + f"test_the_end_of_a_write_and_taking_back_exclude_each_other[{call}]",
    )
record(
    "a change in place is not noticed",
    """
        if self._witness._version != self._version:
""",
    """
        if False:
""",
    CHANGED,
)
record(
    "the witness has a version counter of its own",
    """
        self._witness = tensor.detach()
        self._witness.data = _nothing_like(tensor.dtype, tensor.device)
""",
    """
        self._witness = tensor.new_empty(0)
""",
    CHANGED,
)
record(
    "the witness keeps the memory",
    """
        self._witness.data = _nothing_like(tensor.dtype, tensor.device)
""",
    "",
    VIEWS + "test_the_memory_is_really_given_up",
)
record(
    "a restored tensor has a version counter of its own",
    """
        tensor = self._witness.detach()
        tensor.data = content
        return tensor
""",
    """
        return content
""",
    IN_PLACE + "test_what_a_node_changes_in_backward_is_an_error_for_the_next",
)
record(
    "a view forgets its offset",
    """
        self._offset = tensor.storage_offset() - start_bytes // tensor.element_size()
""",
    """
        self._offset = 0
""",
    ONE_STORAGE,
)
record(
    "a gathered view keeps its offset in the whole storage",
    """
        self._offset = tensor.storage_offset() - start_bytes // tensor.element_size()
""",
    """
        self._offset = tensor.storage_offset()
""",
    TWO_PARTS,
)
record(
    "a view forgets its stride",
    """
        self._stride = tensor.stride()
""",
    """
        self._stride = torch.empty(tensor.shape, device="meta").stride()
""",
    ONE_STORAGE,
)
record(
    "a view forgets its shape",
    """
        self._shape = tensor.shape
""",
    """
        self._shape = torch.Size([1] * tensor.dim())
""",
    ONE_STORAGE,
)
record(
    "a view forgets its dtype",
    """
        self._dtype = tensor.dtype
""",
    """
        self._dtype = torch.float32
""",
    ONE_STORAGE,
)
