# SPDX-License-Identifier: Apache-2.0
"""The threads that carry transfers out: `IoThreads`.

Reads go before writes, and the read that is needed first goes first: backward waits for reads,
nothing waits for a write until memory runs short. One instance serves one drive, so that a slow
drive does not delay another.

Note [Writes in pieces]
A storage may be as large as all that a drive moves in a second, so a write is done in pieces
(`PIECE_BYTES` of `staging.py`), in order, by one thread at a time. After each piece its rest is
first among the writes: queued reads go before it, and a cancelled write ends there. A write that
waits between pieces holds no thread and no staging buffer. Until the transfer ends, its pieces hold
memory and space.

Note [Small transfers together]
Waking a thread, and taking a job off the queue, takes as long as moving some 100 KiB. So a thread
that takes a small transfer also takes the next ones, as long as all of them together are small, and
moves neighbours in one call. Each transfer ends by itself. For the same reason a job wakes a thread
only if no woken thread is about to look at the queue; that thread wakes the next.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megatron.offload.machine.condition import Condition
from megatron.offload.sizes import MIB
from megatron.offload.tiers.budget import RateLimit
from megatron.offload.tiers.purpose import ACTIVATIONS, Purpose
from megatron.offload.tiers.transfer import TierClosedError, Transfer, run_together

logger = logging.getLogger(__name__)

_THREADS_A_DISK = 4
_MAX_THREADS = 32  # each needs staging buffers in page-locked memory
_TOGETHER_BYTES = MIB  # of small transfers that a thread takes at once


def usual_num_threads(num_disks: int) -> int:
    """The number of I/O threads that keeps the disks of a directory busy."""
    return min(_THREADS_A_DISK * num_disks, _MAX_THREADS)


class Piece(NamedTuple):
    """A part of a write: its length, and the function that writes it."""

    num_bytes: int
    write: Callable[[], None]


class _Job(NamedTuple):
    """A transfer in the queue. Sorts by deadline, then by arrival."""

    deadline: float
    arrival: int
    transfer: Transfer
    left_bytes: collections.deque[int]  # of the pieces that no thread has taken yet
    small_bytes: float  # its size if it may move together with others; infinite: it moves alone


class IoThreads:
    """A few daemon threads that take transfers from one queue.

    Each runs only what it was given: a blocking read, or a piece of a write, which releases the
    GIL. It may wait for the queue and for the drive, never for another thread. A thread that dies
    is replaced; the transfer that it was running fails.

    Args:
        num_threads: the queue depth that the drive sees.
        name: of the threads.
        write_limit: pieces of writes start no faster than this; reads are not delayed by it.
        purpose: what they work for, in sentences.
        move_together: moves the work of several small transfers of one direction, in the order of
            the queue; see `run_together`.
    """

    def __init__(
        self,
        num_threads: int,
        name: str,
        write_limit: RateLimit | None = None,
        purpose: Purpose = ACTIVATIONS,
        move_together: Callable[[list[Any]], None] | None = None,
    ) -> None:
        self._name = name
        self._move_together = move_together
        self._prefix = purpose.prefix
        self._write_limit = write_limit
        self._arrivals = itertools.count()
        self._reads: list[_Job] = []  # a heap
        self._writes: collections.deque[_Job] = collections.deque()
        self.queued_write_bytes = 0
        self.have_died = False  # whether all have, and the system starts no others
        self._closing = False
        self._num_idle = 0  # threads that wait for a job
        self._is_woken = False  # whether one of them was woken and has not looked at the queue yet
        # Protects all of the above and the list of threads. Held for microseconds; the write
        # limit's lock is taken under it, no other.
        self._changed = Condition()
        self._threads: list[threading.Thread] = []
        try:
            for _ in range(num_threads):
                self._start_thread()
        except BaseException:  # the system starts no more threads: ends those that were started
            self.close()
            raise

    def submit_read(
        self, work: Callable[[], None], deadline: float = 0.0, num_bytes: int = 0
    ) -> Transfer:
        """Queues a read; among queued reads the smallest deadline goes first.

        Args:
            work: the read.
            deadline: a number.
            num_bytes: that it reads; 0: it moves alone.
        """
        transfer = Transfer(work)
        small_bytes = num_bytes or math.inf
        with self._changed:
            self._check_open()
            arrival = next(self._arrivals)
            job = _Job(deadline, arrival, transfer, collections.deque(), small_bytes)
            heapq.heappush(self._reads, job)
            self._wake()
        return transfer

    def submit_write(self, pieces: Sequence[Piece]) -> Transfer:
        """Queues a write; writes go in order of arrival. See Note [Writes in pieces]."""
        transfer = Transfer(*(piece.write for piece in pieces))
        left_bytes = collections.deque(piece.num_bytes for piece in pieces)
        small_bytes = left_bytes[0] if len(left_bytes) == 1 else math.inf
        with self._changed:
            self._check_open()
            arrival = next(self._arrivals)
            self._writes.append(_Job(0.0, arrival, transfer, left_bytes, small_bytes))
            self.queued_write_bytes += sum(left_bytes)
            self._wake()
        return transfer

    def close(self) -> None:
        """Cancels what is queued, waits for reads and pieces under way, ends the threads."""
        with self._changed:
            self._closing = True
            queued = self._take_all()
            threads = list(self._threads)
            self._changed.notify_all()
        for job in queued:
            job.transfer.give_up()
        for thread in threads:
            thread.join()
        for job in self._take_all():  # the rests of writes
            job.transfer.give_up()

    def _check_open(self) -> None:
        if self.have_died:
            raise RuntimeError("all I/O threads died and none can be started")
        if self._closing:
            raise TierClosedError

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _run(self) -> None:
        jobs: list[_Job] = []  # that this thread runs; a write may have more pieces
        try:
            while self._next(jobs):
                if len(jobs) > 1:
                    self._run_together([job.transfer for job in jobs])
                    jobs.clear()
                elif not jobs[0].transfer.run():
                    jobs.clear()  # while this thread waits, it must keep no error and frame alive
        except BaseException as error:  # an asynchronous one: `run` handles those of the work
            # Not the error itself: a handler that stores records would keep its traceback.
            reason = repr(error)
            logger.warning("%san I/O thread died (%s); starting another", self._prefix, reason)
        finally:
            self._thread_ended(jobs)

    def _run_together(self, transfers: Sequence[Transfer]) -> None:
        if self._move_together is not None:
            run_together(transfers, self._move_together)
            return
        for transfer in transfers:
            if self._closing:
                transfer.give_up()
            else:
                transfer.run()

    def _thread_ended(self, jobs: list[_Job]) -> None:
        """Fails the transfers of a thread that has died, so that no other thread waits for them."""
        for job in jobs:
            job.transfer.fail("the I/O thread that carried it out died")
        orphans: list[_Job] = []
        with self._changed:
            self._threads.remove(threading.current_thread())
            if not self._closing:
                try:
                    self._start_thread()
                except RuntimeError:  # the system starts no more threads
                    if not self._threads:
                        self.have_died = self._closing = True
                        orphans = self._take_all()
        for orphan in orphans:
            orphan.transfer.fail("all I/O threads died and none can be started")

    def _take_all(self) -> list[_Job]:
        """Empties the queue. Called under the lock, or after all threads have ended."""
        queued = [*self._reads, *self._writes]
        self._reads.clear()
        self._writes.clear()
        self.queued_write_bytes = 0
        return queued

    def _wake(self) -> None:
        """Called under the lock: there is a job. See Note [Small transfers together]."""
        if self._num_idle and not self._is_woken:
            self._changed.notify()  # first: Ctrl-C between the two lines wakes one thread more
            self._is_woken = True

    def _wait(self, timeout_s: float | None = None) -> None:
        """Called under the lock, by a thread that has no job."""
        self._num_idle += 1
        try:
            self._changed.wait(timeout_s)
        finally:
            self._num_idle -= 1
            self._is_woken = False

    def _next(self, jobs: list[_Job]) -> bool:
        """Waits for the next jobs and takes them; False: the thread is to end.

        Args:
            jobs: empty, or a write of which this thread has done a piece, and which becomes the
                first of the writes again; afterwards the jobs that it has taken.
        """
        with self._changed:
            if jobs:
                self._writes.appendleft(jobs[0])
                self.queued_write_bytes += sum(jobs[0].left_bytes)
                jobs.clear()
            while True:
                if self._closing:
                    return False
                if self._reads:
                    self._take_reads(jobs)
                elif not self._writes:
                    self._wait()
                elif self._write_limit is None:
                    self._take_writes(jobs)
                elif self._writes[0].transfer.is_unwanted:
                    jobs.append(self._next_write())
                elif (delay_s := self._write_limit.delay_s()) > 0:
                    self._wait(delay_s)
                else:
                    self._write_limit.charge(self._writes[0].left_bytes[0])
                    jobs.append(self._next_write())
                if jobs:
                    if self._reads or self._writes:
                        self._wake()
                    return True

    def _take_reads(self, jobs: list[_Job]) -> None:
        """Called under the lock."""
        left_bytes: float = _TOGETHER_BYTES
        while self._reads and (not jobs or self._reads[0].small_bytes <= left_bytes):
            job = heapq.heappop(self._reads)
            jobs.append(job)
            left_bytes -= job.small_bytes

    def _take_writes(self, jobs: list[_Job]) -> None:
        """Called under the lock."""
        left_bytes: float = _TOGETHER_BYTES
        while self._writes and (not jobs or self._writes[0].small_bytes <= left_bytes):
            job = self._next_write()
            jobs.append(job)
            left_bytes -= job.small_bytes

    def _next_write(self) -> _Job:
        """Called under the lock."""
        job = self._writes.popleft()
        self.queued_write_bytes -= sum(job.left_bytes)
        job.left_bytes.popleft()
        return job
