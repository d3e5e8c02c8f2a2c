# SPDX-License-Identifier: Apache-2.0
"""Page-locked memory between a device and its drives: `BouncingTier`.

An SSD tier for devices with memory of their own. Writes leave the device at the speed of the link
to the host, and the pool's bytes go to the drives from there: device memory is free as soon as the
copy has ended, the pool absorbs bursts, and what is needed soon again is read from the pool.

Note [Bytes in the pool]
A storage for which the pool has room is copied to it as a whole; that copy is its transfer. Then
its bytes are written to the drives, and no thread waits for that write. While they are in the pool,
a read copies them from there and cancels the write: usually the storage dies after this use. What
the drives refuse stays in the pool until its block is freed, so nothing is lost.
If the pool has no room, storages pass through staging buffers and keep their device memory until
the drives have them: see Note [Staging in pieces] in `staging.py`. So the pool may be small, and
without one all storages take that way.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.offload.device.device import Device, memory_at
from megatron.offload.tiers.arena import HostArena
from megatron.offload.tiers.budget import ByteBudget
from megatron.offload.tiers.copies import ByDevice
from megatron.offload.tiers.direct_io import Cut
from megatron.offload.tiers.drive import Extent
from megatron.offload.tiers.mapped import storage_at
from megatron.offload.tiers.ssd import SsdBlock, SsdTier
from megatron.offload.tiers.tier import Block, TierStatistics
from megatron.offload.tiers.transfer import Transfer


class PoolRange:
    """Memory of the pool; it is free again when nothing refers to this object any more."""

    def __init__(self, arena: HostArena, offset: int) -> None:
        self._arena = arena
        self._offset = offset
        self.address = arena.address(offset)

    def __del__(self) -> None:
        try:
            arena, offset = self._arena, self._offset
        except AttributeError:  # an interrupt has ended `__init__`
            return
        arena.free(offset)  # takes no lock


class BouncingBlock(Block):
    """Where the bytes of one storage are: in the pool, on the drives, or both.

    Attributes:
        on_drives: where the bytes are on the drives, or will be.
        in_pool: where they are in the pool; None once the drives have them.
        write: to the drives; None: it has not begun.
    """

    def __init__(self, tier: BouncingTier, on_drives: SsdBlock, in_pool: PoolRange) -> None:
        self.on_drives: SsdBlock | None = on_drives  # None: freed
        self.in_pool: PoolRange | None = in_pool
        self.write: Transfer | None = None
        super().__init__(tier, on_drives.num_bytes)

    def __str__(self) -> str:
        pool = "page-locked memory, to go to " if self.in_pool is not None else ""
        return f"{pool}{self.on_drives}"


class BouncingTier(SsdTier):
    """An SSD tier whose writes pass through page-locked memory, while that has room.

    Takes the arguments of `SsdTier`.

    Args:
        directories: existing directories, each on an SSD of its own.
        device: with memory of its own.
        pool_bytes: the most page-locked memory; pinned as it is needed.

    Raises:
        ConfigurationError: as `SsdTier`; or the system has no address space of that size.
    """

    def __init__(
        self, directories: Sequence[Path], *, device: Device, pool_bytes: int, **options: Any
    ) -> None:
        self._copies: ByDevice | None = None
        self._pool: HostArena | None = None
        # Storages in the pool that are to be written to the drives, by the copies to the pool.
        self._leaving = ByteBudget(sys.maxsize)
        super().__init__(directories, device=device, **options)
        try:
            assert self._staging is not None
            self._piece_bytes = self._staging.piece_bytes  # checksums are of pieces
            self._pool = HostArena(pool_bytes, device, self._purpose, flag="pinned")
            self._copies = ByDevice(device, TierStatistics(), self._purpose)  # not the drives' own
        except BaseException:
            self.close()
            raise

    def begin_write(
        self, source: torch.UntypedStorage, after: Any = None
    ) -> tuple[Block, Transfer] | None:
        """Starts to copy a whole storage to the pool, or to write it to the drives."""
        assert self._pool is not None and self._copies is not None
        granule = self._alignment.offset
        body_bytes = -(-source.nbytes() // granule) * granule
        offset = self._pool.allocate(body_bytes)
        if offset is None:
            return super().begin_write(source, after)
        in_pool = PoolRange(self._pool, offset)
        extents = self._allocate(body_bytes)
        if extents is None:
            return None
        on_drives = SsdBlock(self, Cut(source.nbytes(), b"", body_bytes, b""), extents)
        block = BouncingBlock(self, on_drives, in_pool)
        copy = self._copies.begin_write(source, in_pool.address, after, in_pool)
        self._leaving.acquire(copy, body_bytes)
        # The drives' queues have them only after the copy, and striping looks at the queues now.
        for extent in extents:
            extent.drive.expect(extent)
        reference = weakref.ref(block)
        copy.add_done_callback(lambda copied: self._in_pool(reference, extents, copied))
        return block, copy

    def begin_read(
        self, block: Block, deadline: float = 0.0, into: torch.UntypedStorage | None = None
    ) -> tuple[torch.UntypedStorage, Transfer]:
        """Starts to read a block, from the pool while it is there."""
        if not isinstance(block, BouncingBlock):
            return super().begin_read(block, deadline, into)
        in_pool, write = block.in_pool, block.write
        if in_pool is None:
            assert block.on_drives is not None, "the block was freed"
            return super().begin_read(block.on_drives, deadline, into)
        if write is not None:
            write.abandon()
            write.cancel()
        assert self._copies is not None
        return self._copies.begin_read(in_pool.address, block.num_bytes, deadline, in_pool)

    def free(self, block: Block) -> None:
        """Cancels the write and frees the block's space. Finalizers call it."""
        if not isinstance(block, BouncingBlock):
            super().free(block)
            return
        if block.write is not None:
            block.write.abandon()
        block.on_drives = block.in_pool = block.write = None  # a running write holds its own

    def view(self, block: Block) -> torch.UntypedStorage:
        """The bytes of a block, in the pool or in their files."""
        if not isinstance(block, BouncingBlock):
            return super().view(block)
        in_pool = block.in_pool
        if in_pool is not None:
            assert self._pool is not None
            owner = (block, in_pool, self._pool.keep_mapped())
            return storage_at(in_pool.address, block.num_bytes, owner)
        assert block.on_drives is not None, "the block was freed"
        return super().view(block.on_drives)

    def copy_view(self, block: Block, into: torch.UntypedStorage) -> None:
        """See `SsdTier`."""
        if not isinstance(block, BouncingBlock):
            super().copy_view(block, into)
        elif block.in_pool is not None:
            into.copy_(self.view(block))
        else:
            assert block.on_drives is not None, "the block was freed"
            super().copy_view(block.on_drives, into)

    def renew(self, block: Block) -> None:
        """See `SsdTier`; bytes in the pool have no checksums."""
        if not isinstance(block, BouncingBlock):
            super().renew(block)
        elif block.in_pool is None and block.on_drives is not None:
            super().renew(block.on_drives)

    def wait_for_writes(self, timeout_s: float | None = None) -> bool:
        """Blocks until what is in the pool was written to the drives, refused or cancelled."""
        return self._leaving.wait_until_free(timeout_s)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool that are taken."""
        return 0 if self._pool is None else self._pool.used_bytes

    def close(self) -> None:
        """Waits for copies and for writes under way; what is only in the pool is lost."""
        if self._copies is not None:
            self._copies.close()
        super().close()
        if self._pool is not None:
            self._pool.close()

    # -- From the pool to the drives ------------------------------------------------------------

    # Runs in the thread that watches the copies.
    def _in_pool(
        self,
        reference: weakref.ref[BouncingBlock],
        extents: Sequence[Extent],
        copied: Transfer,
    ) -> None:
        """A copy to the pool has ended: starts to write its bytes, if the block is still alive."""
        for extent in extents:
            extent.drive.expect_no_more(extent)
        block = reference()
        has_failed = copied.cancelled() or copied.exception() is not None
        on_drives, in_pool = (None, None) if block is None else (block.on_drives, block.in_pool)
        if block is None or on_drives is None or in_pool is None or has_failed:
            self._leaving.release(copied)
            return
        view = _PoolView(in_pool, on_drives.cut, self._piece_bytes)
        try:
            write = self._write_body(view, on_drives)
        except Exception:  # e.g. the drives' threads have ended: the bytes stay in the pool
            self._leaving.release(copied)
            return
        block.write = write
        del block, on_drives, in_pool, view
        write.add_done_callback(lambda written: self._on_drives(reference, copied, written))

    # Usually runs in an I/O thread.
    def _on_drives(
        self, reference: weakref.ref[BouncingBlock], copied: Transfer, written: Transfer
    ) -> None:
        """A write to the drives has ended; if it did not fail, frees the memory in the pool."""
        block = reference()
        if block is not None and not written.cancelled() and written.exception() is None:
            block.in_pool = None
        del block
        self._leaving.release(copied)


class _PoolView:
    """Bytes in the pool as a drive sees them, see `View`."""

    events = None

    def __init__(self, in_pool: PoolRange, cut: Cut, piece_bytes: int) -> None:
        self.cut = cut
        self.piece_bytes = piece_bytes
        self._in_pool = in_pool

    def pieces_to_write(self, start: int, num_bytes: int) -> Generator[memoryview, None, None]:
        yield memory_at(self._in_pool.address + start, num_bytes)

    def pieces_to_fill(self, start: int, num_bytes: int) -> Generator[memoryview, None, None]:
        raise NotImplementedError("what is in the pool is not read from a drive")

    def memory(self, start: int, num_bytes: int) -> memoryview:
        return memory_at(self._in_pool.address + start, num_bytes)

    def check(self) -> None:
        """Does nothing: no other owner can free or resize the memory."""
