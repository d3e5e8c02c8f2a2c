# SPDX-License-Identifier: Apache-2.0
"""What bounds a tier: bytes in flight (`ByteBudget`), bytes a second (`RateLimit`), space
(`SpaceBudget`).

Several drives or tiers may share one of each. A caller over budget waits, or keeps its bytes.
"""

from __future__ import annotations

import threading
import time

from megatron.offload.machine.condition import Condition


class ByteBudget:
    """Bounds the bytes in flight: `acquire` waits while there are too many.

    A transfer that is larger than the whole budget may run alone, else it could never run.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0
        self._num_waiting = 0  # threads; usually none, and then there is nothing to notify
        # Protects the above. Held for a few instructions; no other lock is taken under it.
        self._lock = threading.Lock()
        self._changed = Condition(self._lock)

    def _fits(self, num_bytes: int) -> bool:
        return self.taken_bytes == 0 or self.taken_bytes + num_bytes <= self.limit_bytes

    def try_acquire(self, num_bytes: int) -> bool:
        """Takes `num_bytes` if they fit now; returns whether they did."""
        with self._lock:
            fits = self._fits(num_bytes)
            if fits:
                self.taken_bytes += num_bytes
            return fits

    def acquire(self, num_bytes: int) -> None:
        """Takes `num_bytes`; waits until they fit."""
        with self._lock:
            self._num_waiting += 1
            try:
                while not self._fits(num_bytes):
                    self._changed.wait()
            finally:
                self._num_waiting -= 1
            self.taken_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Gives back `num_bytes` that `acquire` or `try_acquire` took; wakes waiting threads."""
        with self._lock:
            self.taken_bytes -= num_bytes
            if self._num_waiting:
                self._changed.notify_all()

    def wait_until_free(self, timeout_s: float | None = None) -> bool:
        """Blocks until nothing is taken; False after `timeout_s`."""
        with self._lock:
            self._num_waiting += 1
            try:
                return self._changed.wait_for(lambda: self.taken_bytes == 0, timeout_s)
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
