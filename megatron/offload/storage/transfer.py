# SPDX-License-Identifier: Apache-2.0
"""One read or write under way: `Transfer`; and the threads that carry them out: `IoThreads`.

Tiers submit, records and the prefetcher wait. Reads go before writes: backward waits for a read,
nothing waits for a write until memory runs short.
"""

from __future__ import annotations

import enum
import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future


class Priority(enum.IntEnum):
    """Lower goes first."""

    READ = 0
    WRITE = 1
    STOP = 2


class Transfer(Future[None]):
    """A transfer that may be queued, running or done. `done()`, `cancel()` as in `Future`."""

    abandoned = False

    def abandon(self) -> None:
        """Nobody wants it any more: a thread that finds it still queued cancels it.

        Safe in a finalizer, unlike `cancel`, which takes locks.
        """
        self.abandoned = True

    def wait(self) -> None:
        """Blocks until the bytes have moved.

        Raises:
            OSError: as raised by the worker that moved them.
        """
        self.result()


class IoThreads:
    """A few daemon threads that take transfers from one priority queue.

    Each thread runs only the `work` it was given: one blocking pread or pwrite loop, which
    releases the interpreter lock. It may wait for the queue and for the drive, never for another
    thread or a lock that is held across either.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._queue: queue.PriorityQueue[
            tuple[int, int, Transfer | None, Callable[[], None] | None]
        ] = queue.PriorityQueue()
        self._order = itertools.count()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, priority: Priority, work: Callable[[], None]) -> Transfer:
        """Queues `work`. First in, first out within one priority."""
        transfer = Transfer()
        self._queue.put((priority, next(self._order), transfer, work))
        return transfer

    def close(self) -> None:
        """Finishes everything queued, then ends the threads."""
        for _ in self._threads:
            self._queue.put((Priority.STOP, next(self._order), None, None))
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            _, _, transfer, work = self._queue.get()
            if transfer is None or work is None:
                return
            if transfer.abandoned:
                transfer.cancel()
            if transfer.set_running_or_notify_cancel():
                try:
                    work()
                except BaseException as error:  # surfaces in wait(), whatever it is
                    # The traceback would keep this frame, and with it the buffer, alive.
                    error.__traceback__ = None
                    del work
                    transfer.set_exception(error)
                else:
                    # Drop the buffer before anybody is told that it is free.
                    del work
                    transfer.set_result(None)
            # An idle thread must not keep the last transfer's memory alive.
            transfer = work = None


class ByteBudget:
    """Bounds the bytes on their way: `acquire` waits while too many are.

    One transfer larger than the whole budget is let through alone, else it could never run.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0
        # Protects taken_bytes. Held for a few instructions; no other lock is taken under it.
        self._changed = threading.Condition()

    def _fits(self, num_bytes: int) -> bool:
        return self.taken_bytes == 0 or self.taken_bytes + num_bytes <= self.limit_bytes

    def acquire(self, num_bytes: int) -> None:
        """Takes `num_bytes`, waiting for others to be given back."""
        with self._changed:
            self._changed.wait_for(lambda: self._fits(num_bytes))
            self.taken_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Gives `num_bytes` back."""
        with self._changed:
            self.taken_bytes -= num_bytes
            self._changed.notify_all()
