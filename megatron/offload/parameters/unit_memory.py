# SPDX-License-Identifier: Apache-2.0
"""Memory behind a storage that stays, which comes and goes: `open_unit_memory`."""

from __future__ import annotations

from typing import Protocol

import torch

from megatron.offload.device.device import Device
from megatron.offload.tiers.mapped import Pages


class UnitMemory(Protocol):
    """A storage whose bytes may be given up and had again; views of it stay valid.

    Attributes:
        storage: has memory at first, contents undefined.
    """

    storage: torch.UntypedStorage

    def obtain(self) -> None:
        """Has memory again after `release`; on a device for operations after `use_after`."""
        ...

    def release(self) -> None:
        """Gives the memory back; the host may do it, no read or write of it is under way."""
        ...


def open_unit_memory(num_bytes: int, device: Device) -> UnitMemory:
    """Memory of `num_bytes`: on the CPU pages at addresses for good, on a device a storage that is
    resized, as FSDP does with its own."""
    return Pages(num_bytes) if device.is_host else _DeviceMemory(num_bytes, device)


class _DeviceMemory:
    def __init__(self, num_bytes: int, device: Device) -> None:
        self.storage = device.new_restored(num_bytes)
        self._num_bytes = num_bytes
        self._device = device

    def obtain(self) -> None:
        self._device.alloc_storage(self.storage, self._num_bytes)

    def release(self) -> None:
        self._device.free_storage(self.storage)
