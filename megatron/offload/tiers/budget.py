# SPDX-License-Identifier: Apache-2.0
"""What bounds a tier: bytes in flight (`ByteBudget`), bytes a second (`RateLimit`), space
(`SpaceBudget`).

Several drives or tiers may share one of each. A caller over budget waits, or keeps its bytes.
"""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from megatron.offload.machine.condition import Condition

_LOOK_S = 0.1  # a thread that waits looks so often whether a holder has died
# Behind so many seconds it has Python collect what is dead: the frames of an exception may refer to
# the exception, and so keep a holder that they were about to hand on.
_COLLECTS_AFTER_S = 1.0


class ByteBudget:
    """Bounds the bytes in flight: `acquire` waits while there are too many.

    A transfer that is larger than the whole budget may run alone, else it could never run.

    Bytes are taken for a holder, such as the transfer. A holder that dies before `release` takes
    nothing any more: where a signal's handler raises between two lines of a thread that was about
    to start a transfer, its bytes do not stay taken for ever.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        # Bytes by a weak reference to the holder. Each change is one call of C's, which nothing
        # interrupts.
        self._taken: dict[weakref.ref[Any], int] = {}
        self._num_waiting = 0  # threads; usually none, and then there is nothing to notify
        # Protects the count of waiting threads, and a look at what is taken until more is. Held for
        # a few instructions; no other lock is taken under it.
        self._changed = Condition()

    @property
    def taken_bytes(self) -> int:
        """Bytes of all holders."""
        return sum(self._taken.values())

    @property
    def holders(self) -> list[Any]:
        """Those that have taken bytes."""
        return [one for ref in self._taken.copy() if (one := ref()) is not None]

    def _take(self, holder: Any, num_bytes: int) -> bool:
        """Takes `num_bytes` if they fit. Called under the lock."""
        taken_bytes = self.taken_bytes
        if taken_bytes and taken_bytes + num_bytes > self.limit_bytes:
            return False
        self._taken[weakref.ref(holder, self._taken.pop)] = num_bytes
        return True

    def try_acquire(self, holder: Any, num_bytes: int) -> bool:
        """Takes `num_bytes` for `holder` if they fit now; returns whether they did."""
        with self._changed:
            return self._take(holder, num_bytes)

    def acquire(self, holder: Any, num_bytes: int) -> None:
        """Takes `num_bytes` for `holder`; waits until they fit."""
        self._wait(lambda: self._take(holder, num_bytes))

    def release(self, holder: Any) -> None:
        """Gives back what `holder` has taken, if it holds anything; wakes waiting threads."""
        self._taken.pop(weakref.ref(holder), None)
        with self._changed:
            if self._num_waiting:
                self._changed.notify_all()

    def wait_until_free(self, timeout_s: float | None = None) -> bool:
        """Blocks until nothing is taken; False after `timeout_s`."""
        return self._wait(lambda: not self._taken, timeout_s)

    def _wait(self, is_time: Callable[[], bool], timeout_s: float | None = None) -> bool:
        now_s = time.monotonic()
        until_s = math.inf if timeout_s is None else now_s + timeout_s
        if self._wait_until(is_time, min(until_s, now_s + _COLLECTS_AFTER_S)):
            return True
        gc.collect()  # outside of the lock: what it ends may wait for a thread that wants that
        return self._wait_until(is_time, until_s)

    def _wait_until(self, is_time: Callable[[], bool], until_s: float) -> bool:
        with self._changed:
            self._num_waiting += 1
            try:
                while not is_time():
                    left_s = until_s - time.monotonic()
                    if left_s <= 0:
                        return False
                    self._changed.wait(min(left_s, _LOOK_S))
                return True
            finally:
                self._num_waiting -= 1


class RateLimit:
    """Bounds bytes a second: each transfer charges for its bytes, and waits until earlier ones are
    paid.

    A piece is never divided: it starts at once when nothing is owed, and the next one waits for as
    long as this one should take.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._paid_at = 0.0
        # Protects the above. Held for a few instructions; no other lock is taken under it.
        self._lock = threading.Lock()

    def delay_s(self) -> float:
        """Seconds until the next piece may start; 0 if it may now."""
        with self._lock:
            return max(self._paid_at - time.monotonic(), 0.0)

    def charge(self, num_bytes: int) -> None:
        """A piece of `num_bytes` starts."""
        with self._lock:
            start = max(self._paid_at, time.monotonic())
            self._paid_at = start + num_bytes / self.bytes_per_s


class SpaceBudget:
    """Bounds the space that several files may take together; unused space can be given back."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._left_bytes = limit_bytes  # None: as much as the disks hold
        # Protects the above. Held for a few instructions; no other lock is taken under it.
        self._lock = threading.Lock()

    def take(self, num_bytes: int, granule: int) -> int:
        """Grants up to `num_bytes` of what is left, in whole granules; 0 if nothing is left."""
        with self._lock:
            if self._left_bytes is None:
                return num_bytes
            granted = min(num_bytes, self._left_bytes // granule * granule)
            self._left_bytes -= granted
            return granted

    def give_back(self, num_bytes: int) -> None:
        """Returns space that was granted and that the disk did not have."""
        with self._lock:
            if self._left_bytes is not None:
                self._left_bytes += num_bytes
