# SPDX-License-Identifier: Apache-2.0
"""How fast a drive or a link is under its present load: `BandwidthMeter`.

Tiers put every transfer into a `with` of `moving`; striping, the split between tiers and the
reports read the result. Time counts while at least one transfer runs, so idle drives do not look
slow and parallel transfers do not count twice.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator

_WINDOW_S = 2.0  # busy seconds after which the past weighs half


class BandwidthMeter:
    """Bytes and busy time of one direction of one drive. Thread-safe."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self.busy_s = 0.0
        self._running = 0
        self._since = 0.0  # busy and counted up to here
        self._recent_bytes = 0.0
        self._recent_s = 0.0
        # Protects all of the above. Held for a few instructions; no other lock is taken under it.
        self._lock = threading.Lock()

    @classmethod
    def side_by_side(cls, meters: Iterable[BandwidthMeter]) -> BandwidthMeter:
        """The sum of several meters that work at the same time, as it is now."""
        total = cls()
        for meter in meters:
            total.total_bytes += meter.total_bytes
            total.busy_s = max(total.busy_s, meter.busy_s)
            total._recent_bytes += meter.bytes_per_s or 0.0
            total._recent_s = 1.0
        return total

    def count(self, num_bytes: int) -> None:
        """Adds bytes to the total now; their transfer calls `moving` with `is_counted` later."""
        with self._lock:
            self.total_bytes += num_bytes

    @contextlib.contextmanager
    def moving(self, num_bytes: int, *, is_counted: bool = False) -> Iterator[None]:
        """A context around a transfer that waits for nothing; its bytes count unless it fails."""
        with self._lock:
            self._count_time()
            self._running += 1
        moved_bytes = 0
        try:
            yield
            moved_bytes = num_bytes
        finally:
            with self._lock:
                self._count_time()
                self._running -= 1
                self.total_bytes += 0 if is_counted else moved_bytes
                self._recent_bytes += moved_bytes
                if self._recent_s > _WINDOW_S:
                    self._recent_s /= 2
                    self._recent_bytes /= 2

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes a second over the last seconds of work; None before anything has moved."""
        with self._lock:
            if not self._recent_bytes or not self._recent_s:
                return None
            return self._recent_bytes / self._recent_s

    def _count_time(self) -> None:
        now = time.monotonic()
        if self._running:
            self.busy_s += now - self._since
            self._recent_s += now - self._since
        self._since = now
