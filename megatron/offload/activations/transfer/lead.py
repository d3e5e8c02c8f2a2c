# SPDX-License-Identifier: Apache-2.0
"""How many layers the thread that computes may launch ahead of the device in forward: `Lead`.

The engine tells it of each layer, a plan sets the bound. `RunAhead` is the same of backward, in
bytes. It is of no use on a CPU, and without a bound it does nothing.
"""

from __future__ import annotations

import collections
from typing import Any

from megatron.offload.device.device import Device
from megatron.offload.stats.compute_waits import ComputeWaits


class Lead:
    """Bounds how far forward is launched ahead: memory is taken at launch, and freed by the device.

    What moves is in memory until the device has computed it and copied it. A host far ahead has
    then allocated the layers that come after it too, all at once. With a bound it waits, as a layer
    begins, until the device has come to an earlier one.

    Attributes:
        most_layers: that may be launched and not begun by the device; None: any number, bounded by
            the bytes on their way out alone.

    Args:
        device: that computes.
        waits: times how long the device has nothing to do meanwhile.
    """

    def __init__(self, device: Device, waits: ComputeWaits) -> None:
        self.most_layers: int | None = None
        self._device = device
        self._waits = waits
        # Events at the beginnings of layers, of those that the device may not have come to. Of the
        # thread that runs forward.
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
