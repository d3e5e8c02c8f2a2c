# SPDX-License-Identifier: Apache-2.0
"""The memory of what moves: new with each read (`FreshMemory`), or one storage whose bytes come and
go (`open_staying_memory`)."""

from __future__ import annotations

import mmap
from typing import Protocol

import torch

from megatron.offload.device.device import Device
from megatron.offload.tiers.mapped import Pages, own_pages


class Memory(Protocol):
    """Memory that is given up while a tier has the bytes, and had again."""

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """Has memory at first; None: it has been given up."""
        ...

    def for_read(self) -> torch.UntypedStorage | None:
        """A storage with memory again, contents undefined; None: the tier makes a fresh one."""
        ...

    def took(self, storage: torch.UntypedStorage) -> None:
        """A read into this storage has begun."""
        ...

    def release(self) -> None:
        """Gives the memory back; no read or write of it is under way."""
        ...


class FreshMemory:
    """A storage that is dropped with its memory; each read has one of its own.

    Args:
        storage: with the bytes.
    """

    storage: torch.UntypedStorage | None

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self._num_bytes = storage.nbytes()
        # A gradient may have memory of an allocator's, which begins anywhere in a page.
        self._has_pages = (
            storage.device.type == "cpu"
            and self._num_bytes % mmap.PAGESIZE == 0
            and storage.data_ptr() % mmap.PAGESIZE == 0
        )

    def for_read(self) -> torch.UntypedStorage | None:
        """Fresh pages on a CPU; an accelerator's would have to wait for what used them before."""
        return own_pages(self._num_bytes) if self._has_pages else None

    def took(self, storage: torch.UntypedStorage) -> None:
        """It is the memory from now on."""
        self.storage = storage

    def release(self) -> None:
        """Drops the storage."""
        self.storage = None


class StayingMemory(Protocol):
    """A `Memory` whose storage stays, and with it all views; it has memory at first."""

    @property
    def storage(self) -> torch.UntypedStorage:
        """Contents undefined at first."""
        ...

    def for_read(self) -> torch.UntypedStorage:
        """The storage, with memory again; on a device for operations after `use_after`."""
        ...

    def took(self, storage: torch.UntypedStorage) -> None:
        """A read has begun."""
        ...

    def release(self) -> None:
        """Gives the memory back; the host may do it, no read or write of it is under way."""
        ...


def open_staying_memory(num_bytes: int, device: Device) -> StayingMemory:
    """Memory of `num_bytes`: on the CPU pages at addresses for good, on a device a storage that is
    resized, as FSDP does with its own."""
    return _StayingPages(num_bytes) if device.is_host else _DeviceMemory(num_bytes, device)


class _StayingPages:
    def __init__(self, num_bytes: int) -> None:
        self._pages = Pages(num_bytes)
        self.storage = self._pages.storage

    def for_read(self) -> torch.UntypedStorage:
        return self.storage  # what is written to it takes memory

    def took(self, storage: torch.UntypedStorage) -> None:
        pass

    def release(self) -> None:
        self._pages.release()


class _DeviceMemory:
    def __init__(self, num_bytes: int, device: Device) -> None:
        self.storage = device.new_restored(num_bytes)
        self._num_bytes = num_bytes
        self._device = device

    def for_read(self) -> torch.UntypedStorage:
        self._device.alloc_storage(self.storage, self._num_bytes)
        return self.storage

    def took(self, storage: torch.UntypedStorage) -> None:
        pass

    def release(self) -> None:
        self._device.free_storage(self.storage)
