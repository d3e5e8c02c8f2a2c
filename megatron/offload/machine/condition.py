# SPDX-License-Identifier: Apache-2.0
"""A condition whose lock no signal leaves taken: `Condition`, for all that the main thread enters.

Python runs a signal's handler when a function of Python's begins and when one of C's has returned.
`threading.Condition` gives its lock back in a function of Python's: where Ctrl-C comes just then,
the lock stays taken, and every other thread waits for ever. Its `wait` is left without the lock
where Ctrl-C comes between two of its lines, and a RuntimeError about the lock takes the place of
what the handler raised. Here `with` calls the lock itself, which is written in C, `wait` has the
lock however it ends, and a notice that is interrupted goes to all.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any


class Condition(threading.Condition):
    """As `threading.Condition`, with a lock that a signal's handler does not come into.

    The lock is its own. A thread may enter it again, but not wait where it has done so.
    """

    def __init__(self) -> None:
        self._own: Any = threading.RLock()
        super().__init__(self._own)

    # `with` looks both up before it takes the lock.
    @property
    def __enter__(self) -> Callable[[], bool]:
        return self._own.__enter__

    @property
    def __exit__(self) -> Callable[..., Any]:
        return self._own.__exit__

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until a notice, or for so many seconds; whether there was a notice.

        The calling thread holds the lock once, and holds it again when this returns or raises.
        """
        waiter = threading.Lock()
        waiter.acquire()
        waiters: collections.deque[Any] = self._waiters  # type: ignore[attr-defined]
        was_told = False
        try:
            waiters.append(waiter)
            self._own.release()
            was_told = waiter.acquire(timeout=-1 if timeout is None else max(timeout, 0))
            return was_told
        finally:
            try:
                if not self._own._is_owned():  # an interrupt came before the lock was given back
                    self._own.acquire()
            except BaseException:  # one came before it was taken, or after
                if not self._own._is_owned():
                    self._own.acquire()
                raise
            finally:
                if waiter in waiters:  # no notice has removed it
                    waiters.remove(waiter)

    def notify(self, n: int = 1) -> None:
        """Wakes some threads that wait; all, where an interrupt comes meanwhile.

        Else it would leave the place of a thread that has been woken, and the next notice would go
        there and be lost.
        """
        try:
            super().notify(n)
        except BaseException:
            super().notify(len(self._waiters))  # type: ignore[attr-defined]
            raise
