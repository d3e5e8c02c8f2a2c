# SPDX-License-Identifier: Apache-2.0
"""How a drive reads and writes the bytes of a storage: `InPlace`, or `Staged` through host memory.

The SSD tier asks for a `View` of each storage that it writes or reads. In place, the drive works on
the tensor's own memory. Staged, the device copies each piece to an aligned host buffer before the
drive writes it, or from the buffer after the drive has read it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Protocol

import torch

from megatron.offload.device.device import Device, memory_at
from megatron.offload.tiers.direct_io import Alignment, Cut, aligned_storage, cut
from megatron.offload.tiers.mapped import own_pages
from megatron.offload.tiers.restored_memory import RestoredMemory
from megatron.offload.tiers.staging import PIECE_BYTES, StagingPool


class View(Protocol):
    """One storage as a drive sees it, for one transfer. Keeps the memory alive.

    For each part of the body one I/O thread reads, or several threads write one after another; each
    goes through one of the iterators and closes it.
    """

    cut: Cut  # only the body goes to the drive
    piece_bytes: int  # of each piece to write but a part's last; divides those of pieces to fill

    @property
    def events(self) -> Sequence[Any] | None:
        """For a view that was filled: see `Transfer.events`."""
        ...

    def pieces_to_write(self, start: int, num_bytes: int) -> Generator[Any, None, None]:
        """Yields the memory of a part of the body, in order; a piece is valid until the next one.

        Raises:
            RuntimeError: see `check`.
        """
        ...

    def pieces_to_fill(self, start: int, num_bytes: int) -> Generator[Any, None, None]:
        """Yields memory for a part of the body, in order; the caller fills a piece before the next.

        Its pieces may be longer than those to write, because nothing interrupts a read.

        When the iterators of all parts have ended, the storage holds the bytes; on a device after
        `events`, which are complete then.
        """
        ...

    def memory(self, start: int, num_bytes: int) -> memoryview | None:
        """The memory of a part of the body, for a drive; None: it is not in host memory.

        Raises:
            RuntimeError: see `check`.
        """
        ...

    def check(self) -> None:
        """Raises RuntimeError if the storage was freed or resized since it was saved."""
        ...


class Access(Protocol):
    """How a tier makes views of storages: in place, or staged."""

    def for_writing(self, source: torch.UntypedStorage, after: Any) -> View:
        """Makes a view of a storage that has its bytes after an event of the device."""
        ...

    def for_reading(
        self, cut: Cut, into: torch.UntypedStorage | None = None
    ) -> tuple[torch.UntypedStorage, View]:
        """Makes a new storage and the view that fills it; `cut` is that of the written view.

        Args:
            cut: of the written view.
            into: the storage to fill instead of a new one; see `Tier.begin_read`.
        """
        ...

    def trim(self) -> None:
        """See `Tier.trim`."""
        ...


class InPlace:
    """The drive works on the tensor's own memory, for devices whose memory is host memory.

    Args:
        alignment: that the files require.
        in_pages: what is read back is large and stays long, as optimizer states do: each storage
            gets pages of its own, also one whose source began within a page, as a gradient's
            does. Otherwise storages of one step reuse a region.
    """

    def __init__(self, alignment: Alignment, *, in_pages: bool = False) -> None:
        self._alignment = alignment
        self._restored = None if in_pages else RestoredMemory()

    def for_writing(self, source: torch.UntypedStorage, after: None) -> View:
        """Makes a view of the tensor's own memory; copies the edges beside the body now."""
        self.trim()  # forward does not need the memory of the last backward pass
        return _InPlaceView(source, cut(source.data_ptr(), source.nbytes(), self._alignment))

    def for_reading(
        self, cut: Cut, into: torch.UntypedStorage | None = None
    ) -> tuple[torch.UntypedStorage, View]:
        """Makes a storage with its source's alignment, so that the cut fits, and its view."""
        target = self._new_storage(cut) if into is None else into
        address = target.data_ptr()
        if cut.head:
            ctypes.memmove(address, cut.head, len(cut.head))
        if cut.tail:
            ctypes.memmove(address + cut.num_bytes - len(cut.tail), cut.tail, len(cut.tail))
        return target, _InPlaceView(target, cut)

    def trim(self) -> None:
        """Returns the region's memory to the system, if no storage is left in it."""
        if self._restored is not None:
            self._restored.trim()

    def _new_storage(self, cut: Cut) -> torch.UntypedStorage:
        """Like `aligned_storage`, in a region of its own while that has room, or in pages."""
        head_bytes, alignment = len(cut.head), self._alignment
        if self._restored is not None:
            found = self._restored.new_storage(cut.num_bytes, head_bytes, alignment.memory)
        else:
            found = own_pages(cut.num_bytes, -head_bytes % alignment.memory)
        return aligned_storage(cut.num_bytes, head_bytes, alignment) if found is None else found


class _InPlaceView:
    piece_bytes = PIECE_BYTES
    events = None

    def __init__(self, storage: torch.UntypedStorage, cut: Cut) -> None:
        self._storage = storage
        self._address = storage.data_ptr()
        self._body_address = self._address + len(cut.head)
        self.cut = cut
        # Made here, in the dispatcher's thread, because the I/O threads have less time.
        self._body = memory_at(self._body_address, cut.body_bytes) if cut.body_bytes else None

    def pieces_to_write(self, start: int, num_bytes: int) -> Generator[memoryview, None, None]:
        for piece in _pieces(start, num_bytes, self.piece_bytes):
            self.check()
            yield memory_at(self._body_address + piece.start, piece.stop - piece.start)

    def pieces_to_fill(self, start: int, num_bytes: int) -> Generator[memoryview, None, None]:
        yield memory_at(self._body_address + start, num_bytes)

    def memory(self, start: int, num_bytes: int) -> memoryview | None:
        storage = self._storage
        if storage.data_ptr() != self._address or storage.nbytes() != self.cut.num_bytes:
            self.check()  # raises the right error
        return None if self._body is None else self._body[start : start + num_bytes]

    def check(self) -> None:
        check_size(self._storage, self.cut.num_bytes)
        if self._storage.data_ptr() != self._address:
            raise RuntimeError("the storage was freed and filled again before it was written")


class Staged:
    """Host buffers between the device and the drives, for devices with memory of their own.

    See Note [Staging in pieces].

    The device's memory is freed when the drive has the last byte: there is never a copy of all of
    it. A `BouncingTier` is used where page-locked memory may hold whole copies.

    Args:
        alignment: that the files require.
        device: where the storages are.
        pool: with a buffer for each I/O thread, and some more that are copied from.
    """

    def __init__(self, alignment: Alignment, device: Device, pool: StagingPool) -> None:
        self._alignment = alignment
        self._device = device
        self._pool = pool

    def for_writing(self, source: torch.UntypedStorage, after: Any) -> View:
        """Makes a view whose body is the whole storage, rounded up to the files' alignment."""
        granule = self._alignment.offset
        body_bytes = -(-source.nbytes() // granule) * granule
        cut = Cut(source.nbytes(), b"", body_bytes, b"")
        return _StagedView(source, cut, self._device, self._pool, after)

    def for_reading(
        self, cut: Cut, into: torch.UntypedStorage | None = None
    ) -> tuple[torch.UntypedStorage, View]:
        """Makes a storage on the device, and the view that fills it through host buffers."""
        target = self._device.new_restored(cut.num_bytes) if into is None else into
        return target, _StagedView(target, cut, self._device, self._pool)

    def trim(self) -> None:
        """Does nothing: the device allocates what a read fills."""


class _StagedView:
    def __init__(
        self,
        storage: torch.UntypedStorage,
        cut: Cut,
        device: Device,
        pool: StagingPool,
        after: Any = None,
    ) -> None:
        self.cut = cut
        self.piece_bytes = pool.piece_bytes
        self.events: list[Any] = []
        self._storage = storage
        self._device = device
        self._pool = pool
        self._after = after

    def memory(self, start: int, num_bytes: int) -> None:
        return None

    def check(self) -> None:
        check_size(self._storage, self.cut.num_bytes)

    # The body may reach beyond the storage's end. Copies end with the storage.

    def pieces_to_write(self, start: int, num_bytes: int) -> Generator[memoryview, None, None]:
        # The host waits, not the device: see Note [Who waits for whom] in `device.py`.
        self._device.wait_for_event(self._after)
        for piece in _pieces(start, num_bytes, self.piece_bytes):
            with self._pool.buffer() as buffer:
                self.check()
                copied = self._device.copy_to_host(self._storage, buffer.address, None, piece)
                buffer.event = copied  # the next user waits for it if Ctrl-C ends this wait
                self._device.wait_for_event(copied)
                buffer.event = None
                yield memory_at(buffer.address, piece.stop - piece.start)

    def pieces_to_fill(self, start: int, num_bytes: int) -> Generator[memoryview, None, None]:
        copied = None
        for piece in _pieces(start, num_bytes, self.piece_bytes):
            with self._pool.buffer() as buffer:
                yield memory_at(buffer.address, piece.stop - piece.start)
                copied = self._device.copy_from_host(buffer.address, self._storage, piece)
                buffer.event = copied
        self.events.append(copied)  # copies run in order, so the earlier ones have ended too


def _pieces(start: int, num_bytes: int, piece_bytes: int) -> Iterator[slice]:
    """A range of bytes, in pieces."""
    stop = start + num_bytes
    while start < stop:
        end = min(start + piece_bytes, stop)
        yield slice(start, end)
        start = end


def check_size(storage: torch.UntypedStorage, num_bytes: int) -> None:
    """Raises RuntimeError if a storage was freed or resized since it was saved.

    Recomputation does that: it frees what it will compute again, so there is nothing to write.
    """
    if storage.nbytes() != num_bytes:
        raise RuntimeError("the storage was resized before it could be written")
