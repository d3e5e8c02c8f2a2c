# SPDX-License-Identifier: Apache-2.0
"""A device whose clock only the test moves, and which runs behind: `DeviceBehind`."""

from __future__ import annotations

from megatron.offload.device.cpu import CpuDevice


class DeviceBehind(CpuDevice):
    """Its moments are seconds of queued work; it has passed those up to which it was run.

    Attributes:
        num_moments: that were recorded.
        num_waits: how often a thread waited for it.
    """

    is_host = False

    def __init__(self) -> None:
        super().__init__()
        self.num_moments = self.num_waits = 0
        self._queued_s = self._passed_s = 0.0
        self._ends_s: list[float] = []  # of what is queued and has not run

    def queue(self, seconds: float) -> None:
        """Work of so many seconds."""
        self._queued_s += seconds
        self._ends_s.append(self._queued_s)

    def run(self, number: int | None = None) -> None:
        """Runs so many pieces of what is queued; all by default."""
        for _ in range(len(self._ends_s) if number is None else number):
            self._passed_s = self._ends_s.pop(0)

    def timestamp(self) -> float:
        self.num_moments += 1
        return self._queued_s

    def has_passed(self, timestamp: float) -> bool:
        return timestamp <= self._passed_s

    def seconds_between(self, earlier: float, later: float) -> float:
        if not self.has_passed(later):
            self.num_waits += 1
            self.run()
        return later - earlier
