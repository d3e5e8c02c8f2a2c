# SPDX-License-Identifier: Apache-2.0
"""The thread that starts transfers, so that the thread that computes need not: `Dispatcher`.

Finding room, queueing a job and allocating memory take Python about a tenth of a millisecond a
storage, in which the thread that computes would launch nothing. So the engine submits this work to
the dispatcher, which takes a microsecond. The dispatcher never moves bytes itself; the tiers' I/O
threads do.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from megatron.offload.tiers.transfer import TRANSFER_ERRORS

logger = logging.getLogger(__name__)

_LOOK_S = 0.1  # a thread that waits in `drain` checks so often that the dispatcher is alive


class Dispatcher:
    """One daemon thread that runs what is submitted, in order.

    Work may wait for locks that are held for microseconds, and for nothing else; above all not for
    the thread that computes, which waits for the work in `drain`. Work must handle its own errors:
    the dispatcher logs an error that escapes, once for each type, and runs the next piece of work.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Sequence[Callable[[], None]] | None] = queue.SimpleQueue()
        self._reported: set[type[BaseException]] = set()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, *work: Callable[[], None]) -> None:
        """Queues work for the thread. Takes a microsecond or two; after `close`, the calling thread
        runs the work itself.
        """
        if self._is_closed:
            self._do(work)
        else:
            self._work.put(work)

    def drain(self) -> None:
        """Returns when everything that was submitted before has run; in its own thread, at once.

        There Python may collect what an interrupt left of a step, whose end drains.
        """
        if threading.current_thread() is self._thread:
            return
        done = threading.Lock()  # in C, so that a signal's handler cannot leave it locked
        done.acquire()
        self._work.put((done.release,))
        while not done.acquire(timeout=_LOOK_S) and self._thread.is_alive():
            pass

    def close(self) -> None:
        """Ends the thread when it has run what was submitted."""
        self._is_closed = True
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self._do(work)
            work = None  # while this thread waits, it must keep nothing alive

    def _do(self, work: Sequence[Callable[[], None]]) -> None:
        for number, piece in enumerate(work, 1):
            try:
                piece()
            except BaseException as error:  # any error: no other thread would do this one's work
                is_main = threading.current_thread() is threading.main_thread()  # after `close`
                if is_main and not isinstance(error, TRANSFER_ERRORS):
                    self._do(work[number:])
                    raise  # a signal's handler may have raised it
                if type(error) not in self._reported:
                    self._reported.add(type(error))
                    # Not the error itself: a handler that stores records would keep its traceback.
                    reason = repr(error)
                    logger.warning("activation offload: a transfer could not start: %s", reason)
