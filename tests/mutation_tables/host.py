# SPDX-License-Identifier: Apache-2.0
"""Errors in blocks and in the host tier: what copies wait for, hold and give back.

Left out: the block in the default argument of `begin_read` (the copy names it anyway; the error
below takes both away).
"""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

HOST = "unit/test_host.py::"
HOST_ENDS = "unit/test_host_transfers.py::"
LATE_HOST = (
    "behaviour/test_ordering_on_an_asynchronous_device.py::"
    "test_loss_and_gradients_are_equal[{'mode': 'host', 'host_budget': 67108864}]"
)

# -- tiers/tier.py -------------------------------------------------------------------------------
tier = table_of("tiers/tier.py", MUTATIONS)

tier(
    "a block that nobody refers to keeps its space",
    """
        self.tier.free(self)
""",
    """
        pass
""",
    HOST + "test_a_block_that_nobody_refers_to_frees_its_space",
)

# -- tiers/host.py -------------------------------------------------------------------------------
host = table_of("tiers/host.py", MUTATIONS)

host(
    "a write does not keep its space",
    """
        def work(_: HostBlock = block) -> None:  # the block holds the range until the copy is done
""",
    """
        def work() -> None:
""",
    HOST + "test_space_is_not_reused_while_its_write_runs",
)
host(
    "a read does not keep its space",
    """
        def work(_: HostBlock = block) -> None:
            self._device.wait_for_event(event)
            with self.statistics.reads.moving(block.num_bytes):
""",
    """
        def work() -> None:
            self._device.wait_for_event(event)
            with self.statistics.reads.moving(target.nbytes()):
""",
    HOST_ENDS + "test_space_is_not_reused_while_its_read_runs",
)
host(
    "a write does not wait for the producer",
    """
            self._write(source, num_bytes, address, event)
""",
    """
            self._write(source, num_bytes, address, None)
""",
    LATE_HOST,
)
host(
    "a read does not wait for the memory's former user",
    """
                self._device.copy_from_host(address, target, event)
""",
    """
                self._device.copy_from_host(address, target, None)
""",
    LATE_HOST,
)
for direction, before, after in (
    (
        "write",
        """
            self._device.wait_for_event(event)
            check_size(source, num_bytes)
""",
        """
            check_size(source, num_bytes)
""",
    ),
    (
        "read",
        """
            self._device.wait_for_event(event)
            with self.statistics.reads.moving(block.num_bytes):
""",
        """
            with self.statistics.reads.moving(block.num_bytes):
""",
    ),
):
    host(
        f"the wait for the device counts as a {direction}",
        before,
        after,
        HOST_ENDS + f"test_the_wait_for_the_device_counts_as_no_transfer[{direction}]",
    )
host(
    "the mark of a write is set when the I/O thread comes to it",
    """
            self._write(source, num_bytes, address, event)
""",
    """
            self._write(source, num_bytes, address, self._device.record_event())
""",
    HOST_ENDS + "test_events_are_recorded_by_the_thread_that_computes",
)
host(
    "the mark of a read is set when the I/O thread comes to it",
    """
                self._device.copy_from_host(address, target, event)
""",
    """
                self._device.copy_from_host(address, target, self._device.record_event())
""",
    HOST_ENDS + "test_events_are_recorded_by_the_thread_that_computes",
)
host(
    "the mark of a read is set before its memory is taken",
    """
        target = self._device.new_storage(block.num_bytes)
        address = self._arena.address(block.offset)
        event = self._device.record_event()
""",
    """
        event = self._device.record_event()
        target = self._device.new_storage(block.num_bytes)
        address = self._arena.address(block.offset)
""",
    LATE_HOST,
)
host(
    "a block is freed twice",
    """
        offset, block.offset = block.offset, None
""",
    """
        offset = block.offset
""",
    HOST + "test_a_block_freed_by_hand_is_not_freed_again_when_it_dies",
)
host(
    "a block is never freed",
    """
            self._arena.free(offset)
""",
    """
            pass
""",
    HOST + "test_a_block_that_nobody_refers_to_frees_its_space",
)
host(
    "a failed write counts as done",
    """
            self.statistics.failed_writes += 1
            raise
""",
    """
            self.statistics.failed_writes += 1
""",
    HOST + "test_a_copy_that_fails_surfaces_in_wait[write]",
)
host(
    "a storage that was freed before its write is written",
    """
            check_size(source, num_bytes)
""",
    "",
    HOST_ENDS + "test_a_storage_that_was_freed_before_its_copy_is_refused",
)
host(
    "the deadline of a read is ignored",
    """
        return target, self._threads.submit_read(work, deadline)
""",
    """
        return target, self._threads.submit_read(work)
""",
    HOST + "test_the_read_that_is_needed_first_goes_first",
)
host(
    "memory goes before the copies that use it have ended",
    """
        self._threads.close()
        self._arena.close()
""",
    """
        self._arena.close()
        self._threads.close()
""",
    HOST_ENDS + "test_closing_waits_for_a_running_copy_before_its_memory_goes",
)
host(
    "memory stays when the tier is closed",
    """
        self._arena.close()
""",
    "",
    HOST + "test_memory_is_returned_when_the_tier_is_closed",
)
