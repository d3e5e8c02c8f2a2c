# SPDX-License-Identifier: Apache-2.0
"""Streams that lag behind: `Delays`, and `CarelessDevice`, which has forgotten to wait for them.

The ordering section puts kernels that only take time before producers, before copies and before
consumers, so that an operation that does not wait for the one before it finds the wrong bytes. On a
CPU nothing is queued, and a delay does nothing.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from megatron.offload.device.accelerator import AcceleratorDevice
from megatron.offload.device.cuda import CudaPlatform
from megatron.offload.device.device import Device

_LONGEST_CYCLES = 3_000_000  # 1.5 ms at 2 GHz: longer than a copy of most sizes here


class Delays:
    """Kernels that take a random time, on the current stream or on those of the copies."""

    def __init__(self, device: Device, chance: random.Random) -> None:
        self._chance = chance
        self._device = device.device
        self._copy_streams = []
        if isinstance(device, AcceleratorDevice):
            self._copy_streams = [device._store, device._pieces, device._load]

    def compute(self, at_least: float = 0.0) -> None:
        """On the current stream, more often than not; always with `at_least` of the longest."""
        if at_least or self._chance.random() < 0.6:
            self._sleep(max(self._chance.random(), at_least))

    def copies(self) -> None:
        """On the streams that store and load, now and then."""
        for stream in self._copy_streams:
            if self._chance.random() < 0.3:
                with torch.cuda.stream(stream):
                    self._sleep(self._chance.random())

    def _sleep(self, fraction: float) -> None:
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):  # not always the current one
                torch.cuda._sleep(int(fraction * _LONGEST_CYCLES))


class CarelessDevice(AcceleratorDevice):
    """A GPU whose copies wait for nothing: what the stress must be able to notice."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, CudaPlatform())

    def record_event(self, stream: Any = None) -> torch.cuda.Event:
        """An event that was never recorded; waiting for it is no wait at all."""
        return torch.cuda.Event(blocking=True)
