# SPDX-License-Identifier: Apache-2.0
"""Errors in how a drive gets at the bytes of a storage: marks, buffers, pieces, edges."""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

ACCESS = "unit/test_access.py::"
THROUGH_BUFFERS = ACCESS + "test_bytes_come_back_through_staging_buffers[50000]"
EDGES = ACCESS + (
    "test_edges_and_body_come_back_each_in_its_place[Alignment(memory=512, offset=512)-5000]"
)
MARKS = ACCESS + (
    "test_marks_are_set_at_once_by_the_thread_that_computes_and_after_memory_is_taken"
)
LATE_DEVICE = "behaviour/test_ordering_on_an_asynchronous_device.py::"
STRIPED_LATE = LATE_DEVICE + "test_large_storages_striped_over_directories_come_back"

# -- tiers/access.py -----------------------------------------------------------------------------
access = table_of("tiers/access.py", MUTATIONS)

access(
    "a copy to the host does not wait for the producer",
    """
                self._device.copy_to_host(self._storage, address, self._event, piece)
""",
    """
                self._device.copy_to_host(self._storage, address, None, piece)
""",
    STRIPED_LATE,
)
access(
    "a copy from the host does not wait for the memory's former user",
    """
                self._device.copy_from_host(address, self._storage, self._event, piece)
""",
    """
                self._device.copy_from_host(address, self._storage, None, piece)
""",
    STRIPED_LATE,
)
access(
    "the mark of a write is set when the I/O thread comes to it",
    """
                self._device.copy_to_host(self._storage, address, self._event, piece)
""",
    """
                self._device.copy_to_host(self._storage, address, self._device.record_event(), piece)
""",
    MARKS,
)
access(
    "the mark of a read is set when the I/O thread comes to it",
    """
                self._device.copy_from_host(address, self._storage, self._event, piece)
""",
    """
                self._device.copy_from_host(address, self._storage, self._device.record_event(), piece)
""",
    MARKS,
)
access(
    "the mark of a read is set before its memory is taken",
    """
        target = self._device.new_storage(cut.num_bytes)
        return target, _StagedView(target, cut, self._device, self._pool)
""",
    """
        event = self._device.record_event()
        target = self._device.new_storage(cut.num_bytes)
        view = _StagedView(target, cut, self._device, self._pool)
        view._event = event
        return target, view
""",
    STRIPED_LATE,
)
access(
    "one mark serves all transfers",
    """
        self._event = device.record_event()
""",
    """
        if not hasattr(pool, "_only"):
            pool._only = device.record_event()
        self._event = pool._only
""",
    LATE_DEVICE + "test_loss_and_gradients_are_equal[{'mode': 'ssd', 'threads': 1}]",
)
access(
    "the buffer goes back when the device has copied, before the drive has written",
    """
                self._device.copy_to_host(self._storage, address, self._event, piece)
                yield memory_at(address, piece.stop - piece.start)
""",
    """
                self._device.copy_to_host(self._storage, address, self._event, piece)
                self._pool._free.put(address)
                yield memory_at(address, piece.stop - piece.start)
                self._pool._free.get()
""",
    ACCESS + "test_a_buffer_is_taken_by_a_thread_that_works_and_by_nobody_who_waits[write]",
)
access(
    "the buffer goes back when the drive has read, before the device has copied",
    """
                yield memory_at(address, piece.stop - piece.start)
                self._device.copy_from_host(address, self._storage, self._event, piece)
""",
    """
                with self._pool.buffer() as address:
                    yield memory_at(address, piece.stop - piece.start)
                self._device.copy_from_host(address, self._storage, self._event, piece)
""",
    ACCESS + "test_bytes_come_back_through_staging_buffers[5000]",
)
access(
    "nothing is copied to the host",
    """
                self._device.copy_to_host(self._storage, address, self._event, piece)
""",
    "",
    THROUGH_BUFFERS,
)
access(
    "nothing is copied from the host",
    """
                self._device.copy_from_host(address, self._storage, self._event, piece)
""",
    "",
    THROUGH_BUFFERS,
)
access(
    "a part of a staged body begins where the body does",
    """
        stop = start + num_bytes
""",
    """
        start, stop = 0, num_bytes
""",
    ACCESS + "test_each_part_moves_its_own_bytes_in_any_order",
)
access(
    "a body moves in one piece, larger than its buffer",
    """
            end = min(start + self._pool.piece_bytes, stop)
""",
    """
            end = stop
""",
    THROUGH_BUFFERS,
)
access(
    "a part of a body in place begins where the body does",
    """
    def pieces_to_fill(self, start: int, num_bytes: int) -> Generator[memoryview, None, None]:
        yield memory_at(self._body_address + start, num_bytes)
""",
    """
    def pieces_to_fill(self, start: int, num_bytes: int) -> Generator[memoryview, None, None]:
        yield memory_at(self._body_address, num_bytes)
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
        self._address = storage.data_ptr()
""",
    """
        self._storage = torch.UntypedStorage(storage.nbytes(), device="meta")
        self._address = storage.data_ptr()
""",
    "unit/test_ssd.py::test_a_running_write_keeps_its_source_when_nobody_else_does",
)
access(
    "a storage that was freed before its write is copied",
    """
                self.check()
""",
    "",
    ACCESS + "test_a_storage_that_was_freed_before_it_was_staged_is_refused",
)
access(
    "a storage that was freed before its write is written",
    """
        self.check()
        yield memory_at(self._body_address + start, num_bytes)
""",
    """
        yield memory_at(self._body_address + start, num_bytes)
""",
    ACCESS + "test_a_storage_that_was_freed_before_its_write_is_refused",
)
access(
    "nobody looks whether a storage was freed",
    """
    def check(self) -> None:
        check_size(self._storage, self.cut.num_bytes)
        if self._storage.data_ptr() != self._address:
""",
    """
    def check(self) -> None:
        if False:
""",
    "behaviour/test_resized_storages.py::test_freed_before_its_write_began_it_is_not_written",
)
access(
    "a drive is to blame for a storage that has moved",
    """
        if self._storage.data_ptr() != self._address:
""",
    """
        if False:
""",
    "behaviour/test_resized_storages.py::test_freed_while_it_is_written_and_filled_again_elsewhere",
)

# -- tiers/staging.py ----------------------------------------------------------------------------
staging = table_of("tiers/staging.py", MUTATIONS)

staging(
    "a buffer does not go back",
    """
            self._free.put(address)
""",
    """
            pass
""",
    ACCESS + "test_a_buffer_is_taken_by_a_thread_that_works_and_by_nobody_who_waits[write]",
)
staging(
    "all buffers are one",
    """
            self._free.put(self._arena.address(start) + number * piece_bytes)
""",
    """
            self._free.put(self._arena.address(start))
""",
    ACCESS + "test_buffers_do_not_overlap",
)
staging(
    "where pinning is refused, there are no buffers",
    """
            self._arena = HostArena(self.size_bytes)
            start = self._arena.allocate(self.size_bytes)
""",
    "",
    "unit/test_staging.py::test_where_the_system_refuses_to_pin_buffers_are_pageable_and_it_is_said",
)
staging(
    "its memory is never given back",
    """
    def close(self) -> None:
        \"\"\"Gives the memory back. Nobody may use a buffer any more.\"\"\"
        self._arena.close()
""",
    """
    def close(self) -> None:
        \"\"\"Gives the memory back. Nobody may use a buffer any more.\"\"\"
""",
    "unit/test_staging.py::test_buffers_are_pinned_at_once_and_unpinned_at_the_end",
)

# -- tiers/direct_io.py -----------------------------------------------------------------------------
direct = table_of("tiers/direct_io.py", MUTATIONS)

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
