# SPDX-License-Identifier: Apache-2.0
"""Errors in what counts as the same bytes, what never moves, and what is gathered."""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

VIEWS = "behaviour/test_storage_moves_once.py::"
GATHERED = "behaviour/test_copied_spans.py::"
TWO_PARTS = GATHERED + "test_two_small_parts_of_one_storage_come_back_each_with_its_own_bytes"
CAN_MOVE = "unit/test_what_can_move.py::"
NEVER = "behaviour/test_what_never_moves.py::"
ENDS = "behaviour/test_engine_ends_what_it_began.py::"

# Left out: learning from an entry whose record lives (a line above has skipped it) or whose storage
# has expired (there is none to learn).

cache = table_of("saved/cache.py", MUTATIONS)

cache(
    "the version is no part of the identity",
    """
        if record is None or record.version != tensor._version or record.witness is None:
""",
    """
        if record is None or record.witness is None:
""",
    VIEWS + "test_a_storage_changed_between_two_saves_is_saved_twice",
)
cache(
    "parts of a storage that count their changes apart are taken for the same bytes",
    """
        return record if _count_together(record.witness, tensor) else None
""",
    """
        return record
""",
    VIEWS + "test_parts_that_count_their_changes_apart_move_each",
)
cache(
    "the span is no part of the identity",
    """
        entry = self._entries.get((storage._cdata, span))
""",
    """
        entries = [entry for key, entry in self._entries.items() if key[0] == storage._cdata]
        entry = entries[-1] if entries else None
""",
    TWO_PARTS,
)
# Left out, "the storage is no part of the identity":
# the tensors of another storage have another version counter, which `find` compares too.
# Left out, "the storage of a gathered view may be followed by another at its address":
# the tensors of another storage have another version counter, which `find` compares too.
cache(
    "an entry keeps its record alive",
    """
            weakref.ref(record),
""",
    """
            lambda: record,
""",
    "behaviour/test_transfers_and_memory_are_ordered.py::"
    "test_a_graph_dropped_without_backward_cancels_its_queued_writes",
)
cache(
    "excluded storages move",
    """
        if storage.nbytes() == 0 or storage._cdata in self._excluded:
""",
    """
        if storage.nbytes() == 0:
""",
    NEVER + "test_parameters_and_views_of_them_stay",
)
cache(
    "only the excluded tensor itself stays, and not what shares its storage",
    """
        if storage.nbytes() == 0 or storage._cdata in self._excluded:
""",
    """
        if storage.nbytes() == 0 or (
            storage._cdata in self._excluded and tensor.nbytes == storage.nbytes()
        ):
""",
    CAN_MOVE + "test_what_shares_a_storage_with_an_excluded_tensor_stays",
)
cache(
    "empty storages move",
    """
        if storage.nbytes() == 0 or storage._cdata in self._excluded:
""",
    """
        if storage._cdata in self._excluded:
""",
    CAN_MOVE + "test_tensors_that_cannot_move_exactly_are_refused[empty]",
)
cache(
    "an exclusion does not hold on to the identity of its storage",
    """
                self._excluded[storage._cdata] = StorageWeakRef(storage)
""",
    """
                self._excluded[storage._cdata] = StorageWeakRef(torch.UntypedStorage(0))
""",
    ENDS + "test_what_is_excluded_stays_so_over_steps",
)
cache(
    "exclusions of storages that are gone pile up",
    """
            del self._excluded[cdata]
""",
    """
            pass
""",
    ENDS + "test_what_outlived_a_step_and_then_died_is_forgotten",
)
cache(
    "what outlives the step is not learned",
    """
                    self._excluded[cdata] = entry.storage
""",
    "",
    NEVER + "test_a_table_that_outlives_the_step_is_learned",
)
cache(
    "entries outlive the step",
    """
            del self._entries[key]
""",
    """
            pass
""",
    ENDS + "test_what_outlived_a_step_and_then_died_is_forgotten",
)
cache(
    "records whose graph is still alive are forgotten with the step",
    """
            if record is not None and not entry.storage.expired():
                continue  # its graph is still alive
""",
    "",
    ENDS + "test_a_storage_whose_graph_outlives_the_step_is_not_moved_again",
)
for kind, condition in (
    ("a subclass", "type(tensor) is not torch.Tensor"),
    ("lazily conjugated", "or tensor.is_conj()"),
    ("lazily negated", "or tensor.is_neg()"),
    ("inference", "or tensor.is_inference()"),
    ("sparse", "or not _has_plain_storage(tensor)"),
    ("nested", "or tensor.is_nested"),
    ("zero without bytes", "or tensor._is_zerotensor()"),
):
    cache(
        f"tensors move although they are: {kind}",
        f"            {condition}",
        "            False" if condition.startswith("type") else "",
        CAN_MOVE + f"test_tensors_that_cannot_move_exactly_are_refused[{kind}]",
    )
cache(
    "a Python number that was saved moves",
    """
        if storage is None or (tensor.dim() == 0 and storage.nbytes() == tensor.itemsize):
""",
    """
        if storage is None:
""",
    CAN_MOVE + "test_a_python_number_that_was_saved_stays",
)
cache(
    "a part of a storage counts as a Python number",
    """
        if storage is None or (tensor.dim() == 0 and storage.nbytes() == tensor.itemsize):
""",
    """
        if storage is None or tensor.dim() == 0:
""",
    CAN_MOVE + "test_a_python_number_that_was_saved_stays",
)
cache(
    "one number in a row counts as a Python number",
    """
        if storage is None or (tensor.dim() == 0 and storage.nbytes() == tensor.itemsize):
""",
    """
        if storage is None or storage.nbytes() == tensor.itemsize:
""",
    CAN_MOVE + "test_a_python_number_that_was_saved_stays",
)
cache(
    "attributes that were set on a saved tensor are lost",
    """
        if tensor.__dict__ and any(_OF_COMPILER not in name for name in tensor.__dict__):
""",
    """
        if False:
""",
    CAN_MOVE + "test_a_tensor_that_was_saved_with_attributes_stays",
)
cache(
    "hints of torch.compile keep a tensor in memory",
    """
        if tensor.__dict__ and any(_OF_COMPILER not in name for name in tensor.__dict__):
""",
    """
        if tensor.__dict__:
""",
    CAN_MOVE + "test_a_tensor_that_was_saved_with_attributes_stays",
)
cache(
    "tensors with attributes stay and are not counted",
    """
            self.num_unsupported += 1
            return None
        return storage
""",
    """
            return None
        return storage
""",
    CAN_MOVE + "test_a_tensor_that_was_saved_with_attributes_stays",
)
for kind, condition, test in (
    (
        "parameters",
        "if tensor.device == self._device:",
        "test_tensors_that_cannot_move_exactly_are_refused[a parameter]",
    ),
    (
        "tensors of other devices",
        "if not isinstance(tensor, torch.nn.Parameter):",
        "test_tensors_of_another_device_are_refused",
    ),
):
    cache(
        f"{kind} count as left alone",
        """
            if tensor.device == self._device and not isinstance(tensor, torch.nn.Parameter):
""",
        f"            {condition}",
        CAN_MOVE + test,
    )
cache(
    "tensors of other devices move",
    """
            or tensor.device != self._device
""",
    "",
    CAN_MOVE + "test_tensors_of_another_device_are_refused",
)
cache(
    "a span ends before its last element",
    """
    return Span(int(tensor.storage_offset()) * size, (int(last) + 1) * size)
""",
    """
    return Span(int(tensor.storage_offset()) * size, int(last) * size)
""",
    TWO_PARTS,
)
