# SPDX-License-Identifier: Apache-2.0
"""The memory of what moves: new with each read (`FreshMemory`), or one storage that is freed and
allocated again (`open_staying_memory`)."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from megatron.offload.device.device import Device
from megatron.offload.tiers.mapped import Pages, own_pages


class Memory(Protocol):
    """Memory that is released while a tier has the bytes, and allocated again for a read."""

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """It has memory at first; None: the memory was released."""
        ...

    def for_read(self) -> torch.UntypedStorage | None:
        """A storage with memory again, uninitialised; None: the tier allocates one."""
        ...

    def took(self, storage: torch.UntypedStorage) -> None:
        """A read into this storage has begun."""
        ...

    def use_after(self, device: Device, events: Sequence[Any]) -> None:
        """Operations that the calling thread queues from now on may use it: `Device.use_after`."""
        ...

    def leave(self) -> None:
        """No operation uses it from now on: what it holds next waits for those that are queued."""
        ...

    def release(self) -> None:
        """Releases the memory; no read or write of it is under way."""
        ...


class FreshMemory:
    """A storage that is dropped with its memory; each read fills a new one."""

    storage: torch.UntypedStorage | None

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self._num_bytes = storage.nbytes()
        self._is_on_host = storage.device.type == "cpu"
        # A gradient may be in an allocator's memory, which begins anywhere in a page: what it comes
        # back into begins there too, as direct I/O wants it.
        self._skipped_bytes = storage.data_ptr() % mmap.PAGESIZE if self._is_on_host else 0

    def for_read(self) -> torch.UntypedStorage | None:
        """New pages on a CPU; None on an accelerator, where the tier allocates."""
        return own_pages(self._num_bytes, self._skipped_bytes) if self._is_on_host else None

    def took(self, storage: torch.UntypedStorage) -> None:
        """It is the memory from now on."""
        self.storage = storage

    def use_after(self, device: Device, events: Sequence[Any]) -> None:
        """The allocator keeps the memory until the calling thread's stream has run."""
        assert self.storage is not None
        device.use_after(self.storage, events)

    def leave(self) -> None:
        """Does nothing: the allocator keeps what is dropped for the streams that use it."""

    def release(self) -> None:
        """Drops the storage."""
        self.storage = None


class StayingMemory(Memory, Protocol):
    """A `Memory` whose storage object, and so all views of it, stay; it has memory at first."""

    @property
    def storage(self) -> torch.UntypedStorage:
        """Uninitialised at first."""
        ...

    def for_read(self) -> torch.UntypedStorage:
        """The storage, with memory again; operations on a device use it after `use_after`."""
        ...


def open_staying_memory(num_bytes: int, device: Device) -> StayingMemory:
    """Memory of `num_bytes`: on a CPU pages whose addresses stay, on a device a storage that is
    resized, as FSDP resizes its own."""
    return _StayingPages(num_bytes) if device.is_host else _DeviceMemory(num_bytes, device)


class _StayingPages:
    def __init__(self, num_bytes: int) -> None:
        self._pages = Pages(num_bytes)
        self.storage = self._pages.storage

    def for_read(self) -> torch.UntypedStorage:
        return self.storage  # the system allocates pages when they are written

    def took(self, storage: torch.UntypedStorage) -> None:
        pass

    def use_after(self, device: Device, events: Sequence[Any]) -> None:
        pass

    def leave(self) -> None:
        pass

    def release(self) -> None:
        self._pages.release()


class _DeviceMemory:
    """Not kept by the allocator for streams that use it: it is released while they are to run."""

    def __init__(self, num_bytes: int, device: Device) -> None:
        self.storage = device.new_restored(num_bytes)
        self._num_bytes = num_bytes
        self._device = device
        self._streams: list[Any] = []  # that use it

    def __del__(self) -> None:
        # It was not released: the storage is dropped, now or by others that have it.
        for stream in vars(self).get("_streams", ()):  # an interrupt may end `__init__`
            used = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
            self._device.used_on(used.set_(self.storage), stream)

    def for_read(self) -> torch.UntypedStorage:
        self._device.alloc_storage(self.storage, self._num_bytes)
        return self.storage

    def took(self, storage: torch.UntypedStorage) -> None:
        pass

    def use_after(self, device: Device, events: Sequence[Any]) -> None:
        device.wait_on_stream(events)
        if (stream := device.current_stream()) not in self._streams:
            self._streams.append(stream)

    def leave(self) -> None:
        streams, self._streams = self._streams, []
        self._device.refill_after(streams)

    def release(self) -> None:
        self.leave()
        self._device.free_storage(self.storage)
