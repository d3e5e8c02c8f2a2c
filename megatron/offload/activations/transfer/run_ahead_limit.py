# SPDX-License-Identifier: Apache-2.0
"""How far the thread that computes may be ahead of the device in backward: `HostRunAheadLimit`.

The reader calls it for each storage that was read back. A CPU needs none.
"""

from __future__ import annotations

import collections
import threading
from typing import Any

from megatron.offload.activations.stats.compute_waits import ComputeWaits
from megatron.offload.activations.transfer.pace import MARKS
from megatron.offload.device.device import Device
from megatron.offload.tiers.budget import ByteBudget


class HostRunAheadLimit:
    """Bounds memory that was read back and that the host, but not yet the device, has used.

    The host queues the use of a storage as soon as its read has ended. So it can run far ahead of a
    slower device, and all that a backward pass needs would be in device memory at once. Where
    queued operations use more than half of what may be read ahead, the thread that computes waits
    for the oldest of them.

    Args:
        device: that computes.
        budget: its limit is the most bytes that are read ahead.
        waits: times how long the device is idle meanwhile.
    """

    def __init__(self, device: Device, budget: ByteBudget, waits: ComputeWaits) -> None:
        self._device = device
        self._waits = waits
        self._budget = budget
        self._new_bytes = 0  # used since the last event
        self._queued: collections.deque[tuple[Any, int]] = collections.deque()
        self._queued_bytes = 0
        # Protects the above: several threads may run backward. No thread waits under it.
        self._lock = threading.Lock()

    def used(self, num_bytes: int) -> None:
        """The thread that computes is about to queue the last use of this much restored memory."""
        bound_bytes = self._budget.limit_bytes // 2
        with self._lock:
            self._new_bytes += num_bytes
            if self._new_bytes * MARKS < bound_bytes:
                return
            self._queued.append((self._device.record_event(), self._new_bytes))
            self._queued_bytes += self._new_bytes
            self._new_bytes = 0
            passed = []
            while self._queued_bytes > bound_bytes and len(self._queued) > 1:
                event, event_bytes = self._queued.popleft()
                self._queued_bytes -= event_bytes
                passed.append(event)
        if passed:
            with self._waits.for_read("wait for the device"):
                self._device.wait_for_event(passed[-1])
