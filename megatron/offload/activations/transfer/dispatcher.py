# SPDX-License-Identifier: Apache-2.0
"""The thread that starts transfers, so that the thread that computes need not: `Dispatcher`.

To find room, to queue a job and to ask for memory takes Python about a tenth of a millisecond a
storage, time in which no operation is launched. The engine hands that work over here for next to
nothing. It never moves bytes itself; the tiers' I/O threads do.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

_LOOK_S = 0.1  # how often somebody who waits looks whether the thread is still there


class Dispatcher:
    """One daemon thread that does what it is given, in order.

    Work may wait for locks that are held for microseconds, and for nothing else; above all not for
    the thread that computes, which waits for it in `drain`. Work must handle its own errors: what
    gets through is logged once for each kind, and the next piece of work is done.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Sequence[Callable[[], None]] | None] = queue.SimpleQueue()
        self._reported: set[type[BaseException]] = set()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, *work: Callable[[], None]) -> None:
        """Has each piece of work done soon. Takes a microsecond or two; after `close`, as long as
        the work does.
        """
        if self._is_closed:
            self._do(work)
        else:
            self._work.put(work)

    def drain(self) -> None:
        """Returns when everything that was submitted before has been done."""
        done = threading.Lock()  # of C: a signal's handler does not come into it
        done.acquire()
        self._work.put((done.release,))
        while not done.acquire(timeout=_LOOK_S) and self._thread.is_alive():
            pass

    def close(self) -> None:
        """Ends the thread when it has done what was submitted."""
        self._is_closed = True
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self._do(work)
            work = None  # while this thread waits, it keeps nothing alive

    def _do(self, work: Sequence[Callable[[], None]]) -> None:
        for piece in work:
            try:
                piece()
            except BaseException as error:  # also from outside: nobody could take this one's place
                if type(error) not in self._reported:
                    self._reported.add(type(error))
                    # Not the error itself: who keeps log records would keep its traceback too.
                    reason = repr(error)
                    logger.warning("activation offload: a transfer could not start: %s", reason)
