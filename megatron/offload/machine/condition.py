# SPDX-License-Identifier: Apache-2.0
"""A condition whose lock no signal leaves taken: `Condition`, for all that the main thread enters.

Python runs a signal's handler when a function of Python's begins, and `threading.Condition` gives
its lock back in one: where Ctrl-C comes just then, the lock stays taken, and every other thread
waits for ever. Here `with` calls the lock itself, which is written in C, and a notice that is
interrupted goes to all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Condition(threading.Condition):
    """As `threading.Condition`, with a lock that a signal's handler does not come into.

    Args:
        lock: that protects what is waited for, of C; None: an `RLock` of its own.
    """

    def __init__(self, lock: threading.Lock | None = None) -> None:
        self._own: Any = threading.RLock() if lock is None else lock
        super().__init__(self._own)

    # `with` looks both up before it takes the lock.
    @property
    def __enter__(self) -> Callable[[], bool]:
        return self._own.__enter__

    @property
    def __exit__(self) -> Callable[..., Any]:
        return self._own.__exit__

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
