# SPDX-License-Identifier: Apache-2.0
"""Errors in the views of a saved storage: versions, and what a tensor needs to be rebuilt."""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

VIEWS = "behaviour/test_storage_moves_once.py::"
ONE_STORAGE = VIEWS + "test_views_of_one_storage_are_written_once_and_come_back_in_shape"
GATHERED = "behaviour/test_copied_spans.py::"
TWO_PARTS = GATHERED + "test_two_small_parts_of_one_storage_come_back_each_with_its_own_bytes"
SEEN_BY_ALL = GATHERED + ("test_what_backward_writes_into_a_part_is_seen_by_all_of_the_storage")
ENDS = "behaviour/test_engine_ends_what_it_began.py::"
IN_PLACE = "behaviour/test_in_place_changes_raise.py::"
CHANGED = IN_PLACE + "test_change_after_capture_raises_and_names_the_layer[True]"
READY_ONCE = "unit/test_record.py::test_a_view_is_ready_after_a_read_once"

record = table_of("saved/record.py", MUTATIONS)

record(
    "a change in place is not noticed",
    """
        if self._witness._version != self._version:
            raise _changed(self._witness, self._version, tuple(self._shape), self.saved.scope)
""",
    """
        if False:
            raise _changed(self._witness, self._version, tuple(self._shape), self.saved.scope)
""",
    CHANGED,
)
record(
    "what is ready is handed out although it was changed in place",
    """
        if self._witness._version != self._version:
            return None
""",
    "",
    "behaviour/test_waiting_for_reads.py::test_what_is_ready_but_was_modified_is_not_handed_out",
)
record(
    "what is ready is handed out twice",
    """
            return self.ready.pop()
""",
    """
            return self.ready[-1]
""",
    READY_ONCE,
)
record(
    "what is not ready is an error",
    """
            return self.ready.pop()
        except IndexError:
            return None
""",
    """
            return self.ready.pop()
        except KeyError:
            return None
""",
    READY_ONCE,
)
record(
    "a record does not know its views",
    """
        saved._views.append(weakref.ref(self))
""",
    "",
    READY_ONCE,
)
record(
    "a record keeps its views alive, and they it",
    """
        saved._views.append(weakref.ref(self))
""",
    """
        saved._views.append(lambda: self)
""",
    "behaviour/test_transfers_and_memory_are_ordered.py::"
    "test_a_graph_dropped_without_backward_cancels_its_queued_writes",
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
        self._offset = tensor.storage_offset()
""",
    """
        self._offset = 0
""",
    ONE_STORAGE,
)
record(
    "a gathered view keeps its offset in the whole storage",
    """
        start = self.saved.start_bytes // self._witness.element_size() if is_own else 0
""",
    """
        start = 0
""",
    TWO_PARTS,
)
record(
    "a part of a storage that is still alive is taken for a copy of it",
    """
        start = self.saved.start_bytes // self._witness.element_size() if is_own else 0
""",
    """
        start = self.saved.start_bytes // self._witness.element_size()
""",
    SEEN_BY_ALL + "[False-False]",
)
record(
    "a gathered span begins at the start of the storage",
    """
    return source[start:][:num_bytes].clone().untyped_storage()
""",
    """
    return source[:num_bytes].clone().untyped_storage()
""",
    TWO_PARTS,
)
record(
    "a gathered span is not copied",
    """
    return source[start:][:num_bytes].clone().untyped_storage()
""",
    """
    return source[start:][:num_bytes].untyped_storage()
""",
    "unit/test_record.py::test_of_a_part_a_copy_is_written_once_it_is_gathered",
)
record(
    "a copy of a part is handed back though the storage is there",
    """
                copy, self._memory = self._memory, self._unmoved() or self._memory
""",
    """
                copy = None
""",
    SEEN_BY_ALL + "[False-False]",
)
record(
    "what stays is kept with its graph",
    """
        self._tensor = tensor.detach() if is_plain and not tensor.is_leaf else tensor
""",
    """
        self._tensor = tensor
""",
    ENDS + "test_an_output_that_stays_is_freed_with_its_graph",
)
record(
    "a tensor that a mode has made up is shared",
    """
        if type(nothing) is torch.Tensor:  # and none of a mode that has only made it up
""",
    """
        if True:
""",
    "autograd/test_hooks_modes_and_compilers.py::"
    "test_a_mode_that_makes_tensors_up_leaves_nothing_behind",
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
        self._witness.data = _nothing_like(tensor.dtype, tensor.device)
""",
    """
        self._witness.data = _nothing_like(torch.float32, tensor.device)
""",
    ONE_STORAGE,
)
