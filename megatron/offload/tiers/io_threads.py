# SPDX-License-Identifier: Apache-2.0
"""The threads that carry transfers out: `IoThreads`.

Reads go before writes, and the read that is needed first goes first: backward waits for reads,
nothing waits for a write until memory runs short. One instance serves one drive, so that a slow
drive holds up no other.

Note [Writes in pieces]
A storage may be as large as all that a drive moves in a second, so a write is done in pieces
(`PIECE_BYTES` of `staging.py`), in order, by one thread at a time. After each piece its rest is
next among the writes: a read that waits goes before it, and a write that nobody wants any more ends
there. A thread that takes another job keeps nothing of a write that waits, no staging buffer
either, so all threads may have left one. Until the transfer ends, its pieces hold memory and space.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron.offload.device.condition import Condition
from megatron.offload.tiers.budget import RateLimit
from megatron.offload.tiers.purpose import ACTIVATIONS, Purpose
from megatron.offload.tiers.transfer import Transfer

logger = logging.getLogger(__name__)

_THREADS_A_DISK = 4
_MAX_THREADS = 32  # each needs staging buffers in page-locked memory


def usual_num_threads(num_disks: int) -> int:
    """As many I/O threads as keep the disks beneath a directory busy."""
    return min(_THREADS_A_DISK * num_disks, _MAX_THREADS)


class Piece(NamedTuple):
    """A part of a write: how long it is, and what writes it."""

    num_bytes: int
    write: Callable[[], None]


@dataclass(order=True)
class _Job:
    """A transfer in the queue. Sorts by deadline, then by arrival."""

    deadline: float
    arrival: int
    transfer: Transfer = field(compare=False)
    # Of the pieces of a write that no thread has taken yet.
    left_bytes: collections.deque[int] = field(default_factory=collections.deque, compare=False)


class IoThreads:
    """A few daemon threads that take transfers from one queue.

    Each runs only what it was given: a blocking read, or a piece of a write, which releases the
    interpreter lock. It may wait for the queue and for the drive, never for another thread. A
    thread that dies is replaced; the transfer that it held fails.

    Args:
        num_threads: the queue depth that the drive sees.
        name: of the threads.
        write_limit: pieces of writes start no faster than this; reads are not held up by it.
        purpose: what they work for, in sentences.
    """

    def __init__(
        self,
        num_threads: int,
        name: str,
        write_limit: RateLimit | None = None,
        purpose: Purpose = ACTIVATIONS,
    ) -> None:
        self._name = name
        self._prefix = purpose.prefix
        self._write_limit = write_limit
        self._arrivals = itertools.count()
        self._reads: list[_Job] = []  # a heap
        self._writes: collections.deque[_Job] = collections.deque()
        self.queued_write_bytes = 0
        self.have_died = False  # and none can be started
        self._closing = False
        # Protects all of the above and the list of threads. Held for a few instructions; the write
        # limit's lock is taken under it, no other.
        self._changed = Condition()
        self._threads: list[threading.Thread] = []
        try:
            for _ in range(num_threads):
                self._start_thread()
        except BaseException:  # the system gives us no more: those that run would wait for ever
            self.close()
            raise

    def submit_read(self, work: Callable[[], None], deadline: float = 0.0) -> Transfer:
        """Queues a read; among queued reads the smallest deadline goes first."""
        transfer = Transfer(work)
        with self._changed:
            self._check_open()
            heapq.heappush(self._reads, _Job(deadline, next(self._arrivals), transfer))
            self._changed.notify()
        return transfer

    def submit_write(self, pieces: Sequence[Piece]) -> Transfer:
        """Queues a write; writes go in order of arrival. See Note [Writes in pieces]."""
        transfer = Transfer(*(piece.write for piece in pieces))
        left_bytes = collections.deque(piece.num_bytes for piece in pieces)
        with self._changed:
            self._check_open()
            self._writes.append(_Job(0.0, next(self._arrivals), transfer, left_bytes))
            self.queued_write_bytes += sum(left_bytes)
            self._changed.notify()
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
            raise RuntimeError("the tier is closed")

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _run(self) -> None:
        job: _Job | None = None
        try:
            while (job := self._next(job)) is not None:
                if not job.transfer.run():
                    job = None  # while this thread waits, it keeps no error and no frame alive
        except BaseException as error:  # only from outside: `run` lets none of its own through
            # Not the error itself: who keeps log records would keep its traceback, and the buffer.
            reason = repr(error)
            logger.warning("%san I/O thread died (%s); starting another", self._prefix, reason)
        finally:
            self._thread_ended(job)

    def _thread_ended(self, job: _Job | None) -> None:
        """Nobody may wait for a transfer that no thread will carry out."""
        if job is not None:
            job.transfer.fail("the I/O thread that carried it out died")
        orphans: list[_Job] = []
        with self._changed:
            self._threads.remove(threading.current_thread())
            if not self._closing:
                try:
                    self._start_thread()
                except RuntimeError:  # the system gives us no more threads
                    if not self._threads:
                        self.have_died = self._closing = True
                        orphans = self._take_all()
        for orphan in orphans:
            orphan.transfer.fail("all I/O threads died and none can be started")

    def _take_all(self) -> list[_Job]:
        """Empties the queue. Called under the lock, or when there are no threads any more."""
        queued = [*self._reads, *self._writes]
        self._reads.clear()
        self._writes.clear()
        self.queued_write_bytes = 0
        return queued

    def _next(self, unfinished: _Job | None) -> _Job | None:
        """Waits for the next job; None when the threads are to end.

        Args:
            unfinished: the write that this thread has done a piece of; first of the writes again.
        """
        with self._changed:
            if unfinished is not None:
                self._writes.appendleft(unfinished)
                self.queued_write_bytes += sum(unfinished.left_bytes)
                unfinished = None
            while True:
                if self._closing:
                    return None
                if self._reads:
                    return heapq.heappop(self._reads)
                if not self._writes:
                    self._changed.wait()
                elif self._write_limit is None or self._writes[0].transfer.is_unwanted:
                    return self._next_write()
                elif (delay_s := self._write_limit.delay_s()) > 0:
                    self._changed.wait(delay_s)
                else:
                    self._write_limit.charge(self._writes[0].left_bytes[0])
                    return self._next_write()

    def _next_write(self) -> _Job:
        """Called under the lock."""
        job = self._writes.popleft()
        self.queued_write_bytes -= sum(job.left_bytes)
        job.left_bytes.popleft()
        return job
