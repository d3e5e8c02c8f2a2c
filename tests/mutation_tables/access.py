# SPDX-License-Identifier: Apache-2.0
"""Errors in how a drive gets at the bytes of a storage: marks, buffers, parts, edges.

Left out: a missing lock that only has every part copy the same bytes again.
"""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

ACCESS = "unit/test_access.py::"
THROUGH_A_BUFFER = ACCESS + "test_bytes_come_back_through_a_staging_buffer[5000]"
EDGES = ACCESS + (
    "test_edges_and_body_come_back_each_in_its_place[Alignment(memory=512, offset=512)-5000]"
)
MARKS = ACCESS + (
    "test_marks_are_set_at_once_by_the_thread_that_computes_and_after_memory_is_taken"
)
BUFFER_GOES_BACK = ACCESS + "test_a_buffer_goes_back_with_its_view_and_no_sooner"
LATE_DEVICE = "behaviour/test_ordering_on_an_asynchronous_device.py::"
STRIPED_LATE = LATE_DEVICE + "test_large_storages_striped_over_directories_come_back"

# -- storage/access.py -----------------------------------------------------------------------------
access = table_of("storage/access.py", MUTATIONS)

access(
    "a copy to the host does not wait for the producer",
    """
                self._access.copy_to_host(self._storage, self._buffer, self._mark)
""",
    """
                self._access.copy_to_host(self._storage, self._buffer, None)
""",
    STRIPED_LATE,
)
access(
    "a copy from the host does not wait for the memory's former user",
    """
        self._access.copy_from_host(self._buffer, self._storage, self._mark)
""",
    """
        self._access.copy_from_host(self._buffer, self._storage, None)
""",
    STRIPED_LATE,
)
access(
    "the mark of a write is set when the I/O thread comes to it",
    """
                self._access.copy_to_host(self._storage, self._buffer, self._mark)
""",
    """
                self._access.copy_to_host(self._storage, self._buffer, self._access.mark())
""",
    MARKS,
)
access(
    "the mark of a read is set when the I/O thread comes to it",
    """
        self._access.copy_from_host(self._buffer, self._storage, self._mark)
""",
    """
        self._access.copy_from_host(self._buffer, self._storage, self._access.mark())
""",
    MARKS,
)
access(
    "the mark of a read is set before its memory is taken",
    """
        target = self._device.new_storage(cut.num_bytes)
        return target, _StagedView(self, cut, target, num_parts)
""",
    """
        mark = self._device.mark()
        target = self._device.new_storage(cut.num_bytes)
        view = _StagedView(self, cut, target, num_parts)
        view._mark = mark
        return target, view
""",
    STRIPED_LATE,
)
access(
    "one mark serves all transfers",
    """
        return self._device.mark()
""",
    """
        if not hasattr(self, "_only"):
            self._only = self._device.mark()
        return self._only
""",
    LATE_DEVICE + "test_loss_and_gradients_are_equal[{'mode': 'ssd', 'threads': 1}]",
)
access(
    "the buffer goes back when the device has copied, before the drive has written",
    """
                self._is_staged = True
""",
    """
                self._is_staged = True
                self._buffer._owner.free(self._buffer._offset)
                self._buffer._offset = None
""",
    STRIPED_LATE,
)
access(
    "the buffer goes back when the drive has read, before the device has copied",
    """
        self._access.copy_from_host(self._buffer, self._storage, self._mark)
""",
    """
        self._buffer._owner.free(self._buffer._offset)
        self._buffer._offset = None
        self._access.copy_from_host(self._buffer, self._storage, self._mark)
""",
    STRIPED_LATE,
)
access(
    "buffers never go back",
    """
            self._owner.free(self._offset)
""",
    """
            pass
""",
    BUFFER_GOES_BACK,
)
access(
    "a buffer from outside the arena is freed at once",
    """
        return _Buffer(owner.data_ptr(), owner)
""",
    """
        return _Buffer(owner.data_ptr(), None)
""",
    ACCESS + "test_a_buffer_from_outside_the_arena_is_memory_of_its_own",
)
access(
    "nothing is copied to the host",
    """
                self._access.copy_to_host(self._storage, self._buffer, self._mark)
                self._is_staged = True
""",
    """
                self._is_staged = True
""",
    THROUGH_A_BUFFER,
)
access(
    "nothing is copied from the host",
    """
        self._access.copy_from_host(self._buffer, self._storage, self._mark)
""",
    "",
    THROUGH_A_BUFFER,
)
access(
    "other parts do not wait for the copy to the host",
    """
        with self._lock:
            if not self._is_staged:
                check_size(self._storage, self.cut.num_bytes)
                self._access.copy_to_host(self._storage, self._buffer, self._mark)
                self._is_staged = True
""",
    """
        with self._lock:
            is_staged, self._is_staged = self._is_staged, True
        if not is_staged:
            self._access.copy_to_host(self._storage, self._buffer, self._mark)
""",
    ACCESS + "test_every_part_of_a_write_waits_for_the_one_copy_to_the_host",
)
access(
    "the first part of a read copies all",
    """
        return target, _StagedView(self, cut, target, num_parts)
""",
    """
        return target, _StagedView(self, cut, target, 1)
""",
    ACCESS + "test_the_copy_to_the_device_waits_for_all_parts_of_a_read",
)
access(
    "every part of a read copies all",
    """
            if self._parts_left:
                return
""",
    "",
    ACCESS + "test_the_copy_to_the_device_waits_for_all_parts_of_a_read",
)
access(
    "a part of a staged body begins where the body does",
    """
        return memory_at(self._buffer.address + start, num_bytes)
""",
    """
        return memory_at(self._buffer.address, num_bytes)
""",
    STRIPED_LATE,
)
access(
    "a part of a body in place begins where the body does",
    """
        return memory_at(self._body_address + start, num_bytes)
""",
    """
        return memory_at(self._body_address, num_bytes)
""",
    EDGES,
)
access(
    "the head is not restored",
    """
        if cut.head:
""",
    """
        if False:
""",
    EDGES,
)
access(
    "the tail is not restored",
    """
        if cut.tail:
""",
    """
        if False:
""",
    EDGES,
)
access(
    "the edges are exchanged",
    """
        if cut.head:
            ctypes.memmove(address, cut.head, len(cut.head))
        if cut.tail:
            ctypes.memmove(address + cut.num_bytes - len(cut.tail), cut.tail, len(cut.tail))
""",
    """
        ctypes.memmove(address, cut.tail, len(cut.tail))
        ctypes.memmove(address + cut.num_bytes - len(cut.head), cut.head, len(cut.head))
""",
    EDGES,
)
access(
    "a restored body is not aligned as the file asks",
    """
            if (plain.data_ptr() + len(cut.head)) % self._alignment.memory == 0:
""",
    """
            if True:
""",
    ACCESS + "test_memory_to_read_into_is_aligned_whatever_the_head[1]",
)
access(
    "a view in place does not keep its memory",
    """
        self._storage = storage
        self._body_address = storage.data_ptr() + len(cut.head)
""",
    """
        self._storage = torch.UntypedStorage(storage.nbytes(), device="meta")
        self._body_address = storage.data_ptr() + len(cut.head)
""",
    "unit/test_ssd.py::test_a_running_write_keeps_its_source_when_nobody_else_does",
)
access(
    "a storage that was freed before its write is copied",
    """
                check_size(self._storage, self.cut.num_bytes)
""",
    "",
    ACCESS + "test_a_storage_that_was_freed_before_it_was_staged_is_refused",
)
access(
    "a storage that was freed before its write is written",
    """
        check_size(self._storage, self.cut.num_bytes)
""",
    """
        pass
""",
    "behaviour/test_resized_storages.py::test_freed_before_its_write_began_it_is_not_written",
)

# -- storage/direct.py -----------------------------------------------------------------------------
direct = table_of("storage/direct.py", MUTATIONS)

direct(
    "an aligned storage does not keep its memory",
    """
    window.owner = owner  # type: ignore[attr-defined]  # lives as long as the storage
""",
    "",
    ACCESS + "test_the_memory_of_an_aligned_storage_lives_as_long_as_it",
)
direct(
    "the edges are not copied when the storage is cut",
    """
        ctypes.string_at(address, head) if head else b"",
""",
    """
        bytes(head),
""",
    EDGES,
)
