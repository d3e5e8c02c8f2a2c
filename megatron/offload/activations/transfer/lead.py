# SPDX-License-Identifier: Apache-2.0
"""How many layers the thread that computes may launch ahead of the device in forward: `Lead`.

The engine calls it for each layer, a plan sets the bound. `HostRunAheadLimit` bounds backward, in
bytes. It does nothing on a CPU, and nothing without a bound.
"""

from __future__ import annotations

import collections
from typing import Any

from megatron.offload.activations.stats.compute_waits import ComputeWaits
from megatron.offload.device.device import Device


class Lead:
    """Bounds how far forward is launched ahead: memory is taken at launch and freed by the device.

    A saved tensor stays in memory until the device has computed and copied it. A host far ahead has
    then also allocated the layers after it, all at once. With a bound, the host waits at the
    beginning of a layer until the device has reached an earlier one.

    Attributes:
        most_layers: that may be launched before the device begins them; None: any number, bounded
            only by the bytes in flight.

    Args:
        device: that computes.
        waits: times how long the device is idle meanwhile.
    """

    def __init__(self, device: Device, waits: ComputeWaits) -> None:
        self.most_layers: int | None = None
        self._device = device
        self._waits = waits
        # Events at the beginnings of the layers that the device may not have reached. Only the
        # thread that runs forward uses it.
        self._begun: collections.deque[Any] = collections.deque()

    def begin_layer(self) -> None:
        """The calling thread is about to launch a layer's forward."""
        if self.most_layers is None:
            self._begun.clear()
            return
        self._begun.append(self._device.record_event())
        passed = None
        while len(self._begun) > self.most_layers:
            passed = self._begun.popleft()
        if passed is not None:
            with self._waits.for_room():
                self._device.wait_for_event(passed)
