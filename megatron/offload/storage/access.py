# SPDX-License-Identifier: Apache-2.0
"""How a drive gets at the bytes of a storage: `InPlace`, or `Staged` through host memory.

The SSD tier asks for a `View` of each storage that it writes or reads. In place, the drive works on
the tensor's own memory. Staged, an aligned host buffer stands in between, and the device copies
before the drive writes or after it has read.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from typing import Any, Protocol

import torch

from megatron.offload.storage.arena import HostArena
from megatron.offload.storage.device import Device
from megatron.offload.storage.direct import Alignment, Cut, aligned_storage, cut, memory_at

logger = logging.getLogger(__name__)


class View(Protocol):
    """One storage as a drive sees it, for one transfer. Keeps the memory alive."""

    cut: Cut  # only the body goes to the drive

    def memory(self, start: int, num_bytes: int) -> Any:
        """A part of the body, from `start` bytes on."""
        ...

    def before_write(self) -> None:
        """Every part's I/O thread calls it first; when it returns, the body holds the bytes."""
        ...

    def after_read(self) -> None:
        """Every part's I/O thread calls it last; when all have, the storage holds the bytes."""
        ...


class Access(Protocol):
    """Makes views. Called by threads that compute."""

    def for_writing(self, source: torch.UntypedStorage) -> View:
        """A view of a storage whose producer may still be queued on the device."""
        ...

    def for_reading(self, cut: Cut, num_parts: int) -> tuple[torch.UntypedStorage, View]:
        """A fresh storage, and the view that fills it.

        Args:
            cut: of the view that was written.
            num_parts: how many I/O threads will call `after_read`.
        """
        ...


class InPlace:
    """The drive works on the tensor's own memory, for devices whose memory is host memory.

    Args:
        alignment: what the files ask for.
    """

    def __init__(self, alignment: Alignment) -> None:
        self._alignment = alignment
        self._allocator_aligns = True  # until it is seen not to

    def for_writing(self, source: torch.UntypedStorage) -> View:
        """See `Access`. The edges are copied now."""
        return _InPlaceView(source, cut(source.data_ptr(), source.nbytes(), self._alignment))

    def for_reading(self, cut: Cut, num_parts: int) -> tuple[torch.UntypedStorage, View]:
        """See `Access`. The target is aligned like the source was, so the same cut fits it."""
        target = self._new_storage(cut)
        address = target.data_ptr()
        if cut.head:
            ctypes.memmove(address, cut.head, len(cut.head))
        if cut.tail:
            ctypes.memmove(address + cut.num_bytes - len(cut.tail), cut.tail, len(cut.tail))
        return target, _InPlaceView(target, cut)

    def _new_storage(self, cut: Cut) -> torch.UntypedStorage:
        """Like `aligned_storage`, with less work where the allocator aligns blocks by itself."""
        if self._allocator_aligns:
            plain = torch.UntypedStorage(cut.num_bytes)
            if (plain.data_ptr() + len(cut.head)) % self._alignment.memory == 0:
                return plain
            self._allocator_aligns = False
        return aligned_storage(cut.num_bytes, len(cut.head), self._alignment)


class _InPlaceView:
    def __init__(self, storage: torch.UntypedStorage, cut: Cut) -> None:
        self._storage = storage
        self._body_address = storage.data_ptr() + len(cut.head)
        self.cut = cut

    def memory(self, start: int, num_bytes: int) -> memoryview:
        return memory_at(self._body_address + start, num_bytes)

    def before_write(self) -> None:
        check_size(self._storage, self.cut.num_bytes)

    def after_read(self) -> None:
        pass


class Staged:
    """Host buffers between the device and the drives.

    Args:
        alignment: what the files ask for.
        device: where the storages are.
        arena: where the buffers come from. It should hold what may be in flight and read ahead at
            the same time; a buffer that finds no room there comes from the C library, which is
            slower and never wrong.
    """

    def __init__(self, alignment: Alignment, device: Device, arena: HostArena) -> None:
        self._alignment = alignment
        self._device = device
        self._arena = arena
        self._has_overflowed = False

    def for_writing(self, source: torch.UntypedStorage) -> View:
        """See `Access`. The body is the whole storage, filled up to what the files ask for."""
        granule = self._alignment.offset
        body_bytes = -(-source.nbytes() // granule) * granule
        return _StagedView(self, Cut(source.nbytes(), b"", body_bytes, b""), source, num_parts=1)

    def for_reading(self, cut: Cut, num_parts: int) -> tuple[torch.UntypedStorage, View]:
        """See `Access`."""
        target = self._device.new_storage(cut.num_bytes)
        return target, _StagedView(self, cut, target, num_parts)

    def new_buffer(self, num_bytes: int) -> _Buffer:
        """A page-aligned host buffer."""
        offset = self._arena.allocate(num_bytes)
        if offset is not None:
            return _Buffer(self._arena.address(offset), self._arena, offset)
        if not self._has_overflowed:
            self._has_overflowed = True
            logger.warning(
                "activation offload: the staging buffers are used up; more come from unpinned "
                "memory, which is slower; raise --activation-offload-inflight"
            )
        owner = aligned_storage(num_bytes, 0, Alignment(mmap.PAGESIZE, mmap.PAGESIZE))
        return _Buffer(owner.data_ptr(), owner)

    def copy_to_host(self, source: torch.UntypedStorage, buffer: _Buffer, after: Any) -> None:
        """See `Device`."""
        self._device.copy_to_host(source, buffer.address, after)

    def copy_from_host(self, buffer: _Buffer, target: torch.UntypedStorage, after: Any) -> None:
        """See `Device`."""
        self._device.copy_from_host(buffer.address, target, after)

    def mark(self) -> Any:
        """See `Device`."""
        return self._device.mark()


class _Buffer:
    """Host memory for one transfer. Goes back when the last reference to it is gone."""

    def __init__(self, address: int, owner: Any, offset: int | None = None) -> None:
        self.address = address
        self._owner = owner
        self._offset = offset  # in the arena; None: the owner is the memory itself

    def __del__(self) -> None:
        if self._offset is not None:
            self._owner.free(self._offset)


class _StagedView:
    def __init__(
        self, access: Staged, cut: Cut, storage: torch.UntypedStorage, num_parts: int
    ) -> None:
        self.cut = cut
        self._access = access
        self._storage = storage
        self._buffer = access.new_buffer(cut.body_bytes)
        # After it the source has been produced, and nobody uses the target's memory any more.
        self._mark = access.mark()
        self._is_staged = False
        self._parts_left = num_parts
        # Protects the two fields above. The copy to the host runs under it, and the other parts of
        # the same storage wait for that.
        self._lock = threading.Lock()

    def memory(self, start: int, num_bytes: int) -> memoryview:
        return memory_at(self._buffer.address + start, num_bytes)

    def before_write(self) -> None:
        with self._lock:
            if not self._is_staged:
                check_size(self._storage, self.cut.num_bytes)
                self._access.copy_to_host(self._storage, self._buffer, self._mark)
                self._is_staged = True

    def after_read(self) -> None:
        with self._lock:
            self._parts_left -= 1
            if self._parts_left:
                return
        self._access.copy_from_host(self._buffer, self._storage, self._mark)


def check_size(storage: torch.UntypedStorage, num_bytes: int) -> None:
    """Raises RuntimeError if a storage was freed or resized since it was saved.

    Recomputation does that: it frees what it will make again, so there is nothing to write.
    """
    if storage.nbytes() != num_bytes:
        raise RuntimeError("the storage was resized before it could be written")
