# SPDX-License-Identifier: Apache-2.0
"""One read or write under way: `Transfer`, and `when_all`, which makes one of several.

Tiers return them; records and `MovingStorage`s wait for them. A write runs piece by piece: between
two pieces it can be cancelled, or wait while its thread does something else.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any

logger = logging.getLogger(__name__)

Work = Callable[[], None]  # moves one piece

# What transfers end with, and tiers and devices raise. Code that goes on behind an error catches
# these and no others: a signal's handler may raise any exception while the main thread waits, and
# that is no fault of a drive's, but for the script to see.
TRANSFER_ERRORS = (OSError, RuntimeError, MemoryError, CancelledError)


class TierClosedError(RuntimeError):
    """A transfer was asked for after its tier was closed."""

    def __init__(self) -> None:
        super().__init__("the tier is closed")


class Transfer:
    """One read or write, which may be queued, running or done.

    Most transfers end before any thread waits for them, and there is one for each storage both
    ways. So a lock for waiting is made only when a thread waits, and none is held: what only one
    thread may do is done by the thread that takes a token first.

    Attributes:
        events: of a read that has ended: events of the device, after which the memory has the
            bytes, see `Device.use_after`. None: it has them, and any thread may use them.
        began_s: of `time.perf_counter`; None: it has not run yet.
        error: that ended it; None: it has not ended, or without an error.

    Args:
        pieces: each moves a part of the bytes. They are dropped, with the buffers that they hold,
            before the callbacks are called.
    """

    events: Sequence[Any] | None = None
    began_s: float | None = None
    error: BaseException | None = None
    _has_ended = False
    _unwanted = False

    def __init__(self, *pieces: Work) -> None:
        self._pieces = list(pieces)
        self._to_tell: list[Callable[[Any], None]] = []  # the thread that takes one out calls it
        # A token, taken once: by the thread that begins the transfer, or that cancels it before.
        self._first = threading.Lock()

    def run(self) -> bool:
        """Moves the next piece, in the calling thread; returns whether there are more.

        `wait` raises the errors.
        """
        if self._unwanted:
            self.give_up()
            return False
        if self.began_s is None and not self.begin():
            return False
        try:
            self._pieces.pop(0)()
        except Exception as error:
            self._pieces.clear()
            # The traceback, and that of the error's cause, would keep the frame of the piece alive,
            # and with it the buffer.
            error.__context__ = error.__cause__ = None
            self.end(error.with_traceback(None))
            return False
        if not self._pieces:
            self.end()
        elif self._unwanted:
            self.give_up()
        return not self._has_ended

    def begin(self) -> bool:
        """Called before the first piece. False: it was cancelled. True: it no longer can be."""
        if not self._first.acquire(blocking=False):
            return False
        self.began_s = time.perf_counter()
        return True

    def end(self, error: BaseException | None = None) -> None:
        """Ends it, with an error or without, and calls the callbacks, those of waits first."""
        if error is not None and not isinstance(error, TRANSFER_ERRORS):
            error = OSError(errno.EIO, f"{type(error).__name__}: {error}")
        self.error, self._has_ended = error, True
        self._tell()

    def fail(self, reason: str) -> None:
        """Ends it with an OSError because its thread has died, so that no thread waits for ever."""
        self._pieces.clear()
        if not self.done():
            self.end(OSError(errno.ECANCELED, reason))

    def give_up(self) -> None:
        """Ends it as cancelled, even if it has started. No thread may be moving a piece."""
        if not self.cancel():
            self._pieces.clear()
            self.end(CancelledError())

    def cancel(self) -> bool:
        """Cancels it; False if it has started: then it ends after the piece under way.

        Until it has ended, it keeps alive what it works on.
        """
        # First: if Ctrl-C ends this method before `end`, the thread that finds it ends it.
        self._unwanted = True
        if self._first.acquire(blocking=False):
            self._pieces.clear()
            self.end(CancelledError())
            return True
        return self.cancelled() and self.began_s is None

    def done(self) -> bool:
        """Whether it has ended, well or badly."""
        return self._has_ended

    def cancelled(self) -> bool:
        """Whether it was cancelled before all bytes were moved."""
        return self.error is not None and isinstance(self.error, CancelledError)

    @property
    def is_unwanted(self) -> bool:
        """Whether it was cancelled or abandoned, so that running it will move nothing."""
        return self._unwanted or self.error is not None

    def abandon(self) -> None:
        """Marks it as unwanted: the thread that has it, or finds it, cancels it.

        Safe in a finalizer, unlike `cancel`, which calls callbacks.
        """
        self._unwanted = True

    def wait(self) -> None:
        """Blocks until the bytes have moved.

        Raises:
            Exception: the error of the thread that moved them, usually an OSError.
            concurrent.futures.CancelledError: it was cancelled or abandoned before its end.
        """
        try:
            self.result()
        finally:
            self = None  # type: ignore[assignment]  # the error refers to this frame, and we to it

    def wait_until_done(self) -> None:
        """Blocks until it has ended, well or badly.

        It does not raise the transfer's error: an error keeps the frames that it passes through.
        """
        self.exception()

    def result(self, timeout: float | None = None) -> None:
        """`wait` for at most so many seconds; raises TimeoutError if it has not ended by then."""
        try:
            if (error := self.exception(timeout)) is not None:
                raise error
        finally:
            self = error = None  # type: ignore[assignment]  # as in `wait`

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error that ended it, or None; waits for the end. TimeoutError: it has not ended."""
        if not self._has_ended:
            told = threading.Lock()
            told.acquire()
            self._to_tell.insert(0, lambda _: told.release())
            if self._has_ended:
                self._tell()
            if not told.acquire(timeout=-1 if timeout is None else timeout):
                raise TimeoutError(f"a transfer has not ended after {timeout} s")
        return self.error

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Calls this with the transfer when it ends, in the thread that ends it; or now."""
        self._to_tell.append(callback)
        if self._has_ended:
            self._tell()

    def _tell(self) -> None:
        while self._to_tell:
            try:
                callback = self._to_tell.pop(0)
            except IndexError:  # another thread has called the last one
                return
            try:
                callback(self)
            except BaseException as error:  # an error of the callback, not of the transfer
                if threading.current_thread() is threading.main_thread():
                    self._tell()  # the other callbacks; a signal's handler may have raised this
                    raise
                if not isinstance(error, Exception):
                    raise
                # Not the error itself: a handler that stores records would keep its traceback.
                reason = repr(error)
                logger.error("activation offload: a callback of a transfer failed: %s", reason)


def run_together(transfers: Sequence[Transfer], move: Callable[[list[Any]], None]) -> None:
    """Carries out transfers of one piece each, none of which has begun.

    Args:
        transfers: each ends by itself, with an error or without.
        move: moves several pieces at once: all, or, if it raises, any of them.
    """
    begun = []
    now_s = time.perf_counter()
    for transfer in transfers:
        if transfer._unwanted:
            transfer.give_up()
        elif transfer._first.acquire(blocking=False):  # as `begin`
            transfer.began_s = now_s
            begun.append(transfer)
    if len(begun) > 1:
        try:
            move([transfer._pieces[0] for transfer in begun])
        except Exception:  # an error of one of them: moved one by one, that one raises it again
            pass
        else:
            for transfer in begun:
                transfer._pieces.clear()
                transfer.end()
            return
    for transfer in begun:
        transfer.run()


def when_all(parts: Sequence[Transfer]) -> Transfer:
    """One transfer that is done when all parts are, and fails if a part failed."""
    if len(parts) == 1:
        return parts[0]
    return _WhenAll(parts) if parts else ended()


def ended() -> Transfer:
    """A transfer that has ended without an error."""
    transfer = Transfer()
    transfer.end()
    return transfer


class _WhenAll(Transfer):
    """Done when all parts are. The last part to end sets the error."""

    def __init__(self, parts: Sequence[Transfer]) -> None:
        super().__init__()
        self._parts = parts
        self._num_left = len(parts)
        # Protects the count; nothing else happens under it.
        self._count_lock = threading.Lock()
        for part in parts:
            part.add_done_callback(self._part_ended)

    def abandon(self) -> None:
        for part in self._parts:
            part.abandon()

    def cancel(self) -> bool:
        cancelled = [part.cancel() for part in self._parts]
        return all(cancelled)

    def _part_ended(self, _: Transfer) -> None:
        with self._count_lock:
            self._num_left -= 1
            if self._num_left:
                return
        ended = [part for part in self._parts if not part.cancelled()]
        begins_s = [part.began_s for part in self._parts if part.began_s is not None]
        self.began_s = min(begins_s, default=None)
        errors = [error for part in ended if (error := part.exception()) is not None]
        if errors:
            self.end(errors[0])
        elif len(ended) < len(self._parts):
            Transfer.cancel(self)
        else:
            self.end()
