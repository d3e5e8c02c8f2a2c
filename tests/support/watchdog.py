# SPDX-License-Identifier: Apache-2.0
"""Fails what does not end: `Watchdog`, for tests that look for waits without an end."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from types import FrameType

HANG_S = 60.0


class Hang(BaseException):
    """The main thread did not come to the end of something; with the stacks of all threads."""


class Watchdog:
    """Interrupts the main thread, by SIGUSR2, where it is at one thing for too long.

    A thread of its own looks at the clock; a lock that is waited for lets a signal's handler in.
    """

    def __init__(self, hang_s: float = HANG_S) -> None:
        self._hang_s = hang_s
        self._until_s: float | None = None
        self._what = ""
        self._stacks = ""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._before = signal.signal(signal.SIGUSR2, self._bark)
        self._thread.start()

    @contextlib.contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Around what has to end.

        Raises:
            Hang: it did not.
        """
        self._what, self._until_s = what, time.monotonic() + self._hang_s
        try:
            yield
        finally:
            self._until_s = None

    def close(self) -> None:
        """Ends its thread."""
        self._ends.set()
        self._thread.join()
        signal.signal(signal.SIGUSR2, self._before)

    def _watch(self) -> None:
        while not self._ends.wait(1.0):
            if self._until_s is not None and time.monotonic() > self._until_s:
                self._until_s = None
                with tempfile.TemporaryFile("w+") as file:
                    faulthandler.dump_traceback(file, all_threads=True)
                    file.seek(0)
                    self._stacks = file.read()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)

    def _bark(self, _: int, __: FrameType | None) -> None:
        raise Hang(f"{self._what} has not ended in {self._hang_s:.0f} s\n{self._stacks}")
