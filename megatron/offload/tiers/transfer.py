# SPDX-License-Identifier: Apache-2.0
"""One read or write under way: `Transfer`, and `when_all`, which makes one of several.

Tiers hand them out, records and the prefetcher wait for them. A write runs piece by piece: between
two pieces it can be given up, or wait while its thread does something else.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

from megatron.offload.device.condition import Condition


class Transfer(Future[None]):
    """One read or write, which may be queued, running or done; a `Future` without a result.

    Attributes:
        events: of a read, once it has ended: of the device, after which the bytes are in its
            memory, see `Device.use_after`. None: they are there, in memory that is everybody's.

    Args:
        pieces: each moves a part of the bytes. Dropped, and with them the buffers that they hold,
            before anybody is told that the transfer has ended.
    """

    events: Sequence[Any] | None = None

    def __init__(self, *pieces: Callable[[], None]) -> None:
        super().__init__()
        self._condition = Condition()  # of `Future`
        self._pieces = collections.deque(pieces)
        self._unwanted = False
        self._given_up = False
        self.began_s: float | None = None  # of `time.perf_counter`; None: it has not run yet

    def run(self) -> bool:
        """Moves the next piece, in the thread that calls; whether there are more.

        What goes wrong surfaces in `wait`.
        """
        if self._unwanted:
            self.give_up()
            return False
        if not self.running():
            if not self.set_running_or_notify_cancel():
                return False
            self.began_s = time.perf_counter()
        try:
            self._pieces.popleft()()
        except Exception as error:
            self._pieces.clear()
            # The traceback, and that of an error behind this one, would keep the frame of the piece
            # alive, and with it the buffer.
            error.__context__ = error.__cause__ = None
            self.set_exception(error.with_traceback(None))
            return False
        if not self._pieces:
            self.set_result(None)
        elif self._unwanted:
            self.give_up()
        return not self.done()

    def fail(self, reason: str) -> None:
        """Ends it with an OSError because its thread is gone, so that nobody waits for ever."""
        self._pieces.clear()
        if not self.done():
            self.set_exception(OSError(errno.ECANCELED, reason))

    def give_up(self) -> None:
        """Ends it as cancelled, though it may have started. No thread may be moving a piece."""
        if not self.cancel():
            self._pieces.clear()
            self._given_up = True
            self.set_exception(CancelledError())

    def cancel(self) -> bool:
        """Takes it off the queue; False once it has started: then the piece under way is its last.

        However it is cancelled, until it has ended it keeps what it works on.
        """
        cancelled = super().cancel()
        if cancelled:
            self._pieces.clear()
        else:
            self._unwanted = True
        return cancelled

    def cancelled(self) -> bool:
        """Whether it has ended before all was moved, because nobody wanted it."""
        return self._given_up or super().cancelled()

    @property
    def is_unwanted(self) -> bool:
        """Whether it was cancelled or abandoned, so that running it will move nothing."""
        return self._unwanted or self.cancelled()

    def abandon(self) -> None:
        """Says that nobody wants it any more: the thread that has it, or finds it, cancels it.

        Safe in a finalizer, unlike `cancel`, which takes locks.
        """
        self._unwanted = True

    def wait(self) -> None:
        """Blocks until the bytes have moved.

        Raises:
            Exception: whatever stopped the worker that moved them, an OSError as a rule.
            concurrent.futures.CancelledError: it was cancelled or abandoned before its end.
        """
        try:
            self.result()
        finally:
            self = None  # type: ignore[assignment]  # an error refers to this frame, and we to it

    def wait_until_done(self) -> None:
        """Blocks until it has ended, well or badly.

        What the worker raised is not raised here: an error keeps the frames that it passes through.
        """
        with contextlib.suppress(CancelledError):
            self.exception()


def when_all(parts: Sequence[Transfer]) -> Transfer:
    """One transfer that is done when all parts are, and fails if any part failed."""
    if len(parts) == 1:
        return parts[0]
    return _WhenAll(parts) if parts else ended()


def ended() -> Transfer:
    """A transfer that has ended well."""
    transfer = Transfer()
    transfer.set_result(None)
    return transfer


class _WhenAll(Transfer):
    """Done when all parts are. The last part to end says how it went."""

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

    def _part_ended(self, _: Future[None]) -> None:
        with self._count_lock:
            self._num_left -= 1
            if self._num_left:
                return
        ended = [part for part in self._parts if not part.cancelled()]
        begins_s = [part.began_s for part in self._parts if part.began_s is not None]
        self.began_s = min(begins_s, default=None)
        errors = [error for part in ended if (error := part.exception()) is not None]
        if errors:
            self.set_exception(errors[0])
        elif len(ended) < len(self._parts):
            Future.cancel(self)
        else:
            self.set_result(None)
