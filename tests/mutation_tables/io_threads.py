# SPDX-License-Identifier: Apache-2.0
"""Errors in the threads that carry transfers out: order, pace, waking, dying, closing."""

from __future__ import annotations

from tests.mutation_tables import Mutation, table_of

MUTATIONS: list[Mutation] = []

TRANSFER = "unit/test_transfer.py::"
ENDS = "unit/test_how_transfers_end.py::"

# Left out: a thread that goes on with the queue after closing, which has emptied it.

io_threads = table_of("tiers/io_threads.py", MUTATIONS)

io_threads(
    "writes go before reads",
    """
                if self._reads:
                    return heapq.heappop(self._reads)
""",
    """
                if self._reads and not self._writes:
                    return heapq.heappop(self._reads)
""",
    TRANSFER + "test_reads_go_before_writes_and_each_kind_in_order",
)
io_threads(
    "the deadline of a read is ignored",
    """
            heapq.heappush(self._reads, _Job(deadline, next(self._arrivals), 0, transfer))
""",
    """
            heapq.heappush(self._reads, _Job(0.0, next(self._arrivals), 0, transfer))
""",
    TRANSFER + "test_the_read_that_is_needed_first_goes_first",
)
io_threads(
    "a read is queued at the end",
    """
            heapq.heappush(self._reads, _Job(deadline, next(self._arrivals), 0, transfer))
""",
    """
            self._reads.append(_Job(deadline, next(self._arrivals), 0, transfer))
""",
    TRANSFER + "test_the_read_that_is_needed_first_goes_first",
)
io_threads(
    "a write that was taken still counts as queued",
    """
        self.queued_write_bytes -= job.num_bytes
""",
    "",
    "unit/test_ssd.py::test_however_a_write_ends_its_bytes_are_no_longer_queued[done]",
)
io_threads(
    "a queued write does not count",
    """
            self.queued_write_bytes += num_bytes
""",
    "",
    "unit/test_ssd.py::test_however_a_write_ends_its_bytes_are_no_longer_queued[done]",
)
io_threads(
    "the transfer of a dying thread never ends",
    """
            job.transfer.fail("the I/O thread that carried it out died")
""",
    """
            pass
""",
    ENDS + "test_whoever_waits_for_a_thread_that_died_is_told",
)
io_threads(
    "a thread that died is not replaced",
    """
                try:
                    self._start_thread()
                except RuntimeError:  # the system gives us no more threads
""",
    """
                try:
                    pass
                except RuntimeError:  # the system gives us no more threads
""",
    ENDS + "test_a_thread_that_died_is_replaced_by_one",
)
io_threads(
    "a thread that died is still counted",
    """
            self._threads.remove(threading.current_thread())
""",
    "",
    ENDS + "test_a_thread_that_died_is_replaced_by_one",
)
io_threads(
    "without any thread, what is queued waits for ever",
    """
            orphan.transfer.fail("all I/O threads died and none can be started")
""",
    """
            pass
""",
    ENDS + "test_without_any_thread_whoever_waits_is_told",
)
io_threads(
    "without any thread, more is queued",
    """
                        self.have_died = self._closing = True
                        orphans = [*self._reads, *self._writes]
""",
    """
                        orphans = [*self._reads, *self._writes]
""",
    ENDS + "test_without_any_thread_whoever_waits_is_told",
)
io_threads(
    "a thread that waits keeps its last transfer alive",
    """
                job = None  # while this thread waits, it keeps no error and no frame alive
""",
    "",
    ENDS + "test_an_idle_thread_keeps_no_transfer_alive",
)
io_threads(
    "the error that killed a thread is kept, and with it the buffer",
    """
            reason = repr(error)
            logger.warning("activation offload: an I/O thread died (%s); starting another", reason)
""",
    """
            logger.warning("activation offload: an I/O thread died (%s); starting another", error)
""",
    ENDS + "test_a_thread_that_died_keeps_nothing_alive",
)
io_threads(
    "closing leaves whoever waits for what is queued waiting",
    """
            job.transfer.cancel()
""",
    """
            pass
""",
    TRANSFER + "test_close_cancels_what_is_queued_and_waits_for_what_runs",
)
io_threads(
    "closing does not wait for what runs",
    """
            thread.join()
""",
    """
            pass
""",
    TRANSFER + "test_close_cancels_what_is_queued_and_waits_for_what_runs",
)
io_threads(
    "closing wakes no thread",
    """
            self._changed.notify_all()
""",
    "",
    ENDS + "test_closing_ends_idle_threads",
)
io_threads(
    "what is queued after closing waits for ever",
    """
        if self._closing:
            raise RuntimeError("the tier is closed")
""",
    """
        pass
""",
    ENDS + "test_a_closed_queue_takes_nothing",
)
io_threads(
    "a queued read wakes no thread",
    """
            heapq.heappush(self._reads, _Job(deadline, next(self._arrivals), 0, transfer))
            self._changed.notify()
""",
    """
            heapq.heappush(self._reads, _Job(deadline, next(self._arrivals), 0, transfer))
""",
    ENDS + "test_an_idle_thread_takes_what_is_queued[read]",
)
io_threads(
    "a queued write wakes no thread",
    """
            self.queued_write_bytes += num_bytes
            self._changed.notify()
""",
    """
            self.queued_write_bytes += num_bytes
""",
    ENDS + "test_an_idle_thread_takes_what_is_queued[write]",
)
io_threads(
    "the write limit is ignored",
    """
                elif (delay_s := self._write_limit.delay_s()) > 0:
""",
    """
                elif (delay_s := 0.0) > 0:
""",
    TRANSFER + "test_a_write_limit_holds_writes_up_and_lets_reads_through",
)
io_threads(
    "writes are not charged to the write limit",
    """
                    self._write_limit.charge(self._writes[0].num_bytes)
""",
    "",
    TRANSFER + "test_a_write_limit_is_kept_on_average",
)
io_threads(
    "a write that the limit holds up is not looked at again",
    """
                    self._changed.wait(delay_s)
""",
    """
                    self._changed.wait()
""",
    TRANSFER + "test_a_write_limit_is_kept_on_average",
    hangs=True,
)
io_threads(
    "an unwanted write waits for the write limit",
    """
                elif self._write_limit is None or self._writes[0].transfer.is_unwanted:
""",
    """
                elif self._write_limit is None:
""",
    ENDS + "test_a_write_that_nobody_wants_is_not_held_up_by_the_limit",
)
io_threads(
    "threads that started stay when the others do not start",
    """
            self.close()
            raise
""",
    """
            raise
""",
    "unit/test_what_opens_closes.py::"
    "test_file_and_threads_end_when_the_system_starts_no_more_threads[3]",
)
