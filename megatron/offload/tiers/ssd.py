# SPDX-License-Identifier: Apache-2.0
"""Bytes on SSDs: `SsdTier`, one drive per mount point and large storages striped over them.

`access.py` decides how a drive reads and writes the bytes, the drives do the I/O.
"""

from __future__ import annotations

import errno
import logging
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.offload.device.cpu import CpuDevice
from megatron.offload.device.device import Device, bytes_at
from megatron.offload.directories import resolved_directories
from megatron.offload.machine.mounts import num_disks
from megatron.offload.sizes import format_size
from megatron.offload.tiers.access import Access, InPlace, Staged, View
from megatron.offload.tiers.bandwidth import BandwidthMeter
from megatron.offload.tiers.budget import RateLimit, SpaceBudget
from megatron.offload.tiers.checksum import load_checksum
from megatron.offload.tiers.direct_io import Alignment, Cut
from megatron.offload.tiers.drive import Drive, Extent, Health
from megatron.offload.tiers.file import DriveFile, UnlinkedFile
from megatron.offload.tiers.io_threads import usual_num_threads
from megatron.offload.tiers.mapped import FileRange, map_ranges
from megatron.offload.tiers.purpose import ACTIVATIONS, Purpose
from megatron.offload.tiers.staging import StagingPool
from megatron.offload.tiers.striping import Lane, stripe
from megatron.offload.tiers.tier import Block, TierStatistics
from megatron.offload.tiers.transfer import Transfer, when_all

logger = logging.getLogger(__name__)


# Staging buffers of each drive beside those of its threads: copies to the device read from them.
# The link is faster than a drive, so a few are enough for any number of threads.
_COPIED_FROM = 4


class SsdBlock(Block):
    """Where the SSD tier keeps one storage's bytes: its body in extents, its edges in memory."""

    def __init__(self, tier: SsdTier, cut: Cut, extents: list[Extent]) -> None:
        # First, and in one statement: from here on `__del__` frees the extents.
        self.tier, self.cut, self.extents = tier, cut, extents
        super().__init__(tier, cut.num_bytes)

    def __str__(self) -> str:
        return "; ".join(str(extent) for extent in self.extents)


class SsdTier:
    """A tier in unlinked files on one or several mount points; storages are striped over them.

    Args:
        directories: existing directories, each on an SSD of its own.
        reserve_bytes: allocated now, in equal parts, so that a disk that is too small is noticed
            before training.
        budget_bytes: the most that the files may take together; None: until the disks are full.
        num_threads: I/O threads per directory, the queue depth that each drive sees; None: as many
            as suit the number of disks of the directory.
        io: `auto`, `direct` or `buffered`, see `OffloadConfig.io`.
        write_bytes_per_s: bounds the write bandwidth of all drives together; None: no bound.
        verify: compares a checksum of what is read with that of what was written.
        device: where the storages are; None: in host memory.
        purpose: whose bytes it holds, in sentences.

    Raises:
        ConfigurationError: a directory cannot hold its file; the message says why.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        *,
        reserve_bytes: int = 0,
        budget_bytes: int | None = None,
        num_threads: int | None = None,
        io: str = "auto",
        write_bytes_per_s: float | None = None,
        verify: bool = False,
        device: Device | None = None,
        purpose: Purpose = ACTIVATIONS,
    ) -> None:
        self.limit_bytes = budget_bytes
        self._purpose = purpose
        self._device = device or CpuDevice()
        self._staging: StagingPool | None = None  # for a device with memory of its own
        space = SpaceBudget(budget_bytes)
        self.write_limit = RateLimit(write_bytes_per_s) if write_bytes_per_s else None
        checksum = load_checksum(purpose) if verify else None
        self.drives: list[Drive] = []
        directories = resolved_directories(directories, purpose.prefix, purpose.flag("dir"))
        each_num_threads = threads_of(directories, num_threads)
        try:
            for directory, threads_here in zip(directories, each_num_threads, strict=True):
                if num_threads is None and threads_here > usual_num_threads(1):
                    logger.info(
                        "%s%s is on several disks and gets %d I/O threads (%s)",
                        purpose.prefix,
                        directory,
                        threads_here,
                        purpose.flag("threads"),
                    )
                drive = Drive(
                    self._open_file(directory, io),
                    space=space,
                    num_threads=threads_here,
                    write_limit=self.write_limit,
                    checksum=checksum,
                    purpose=purpose,
                )
                self.drives.append(drive)
                if reserve_bytes:
                    drive.reserve(-(-reserve_bytes // len(directories)))
            # Suits every drive: alignments are powers of two.
            self._alignment = Alignment(
                max(drive.file.alignment.memory for drive in self.drives),
                max(drive.file.alignment.offset for drive in self.drives),
            )
            self._access = self._open_access(self._alignment, sum(each_num_threads))
        except BaseException:
            self.close()
            raise

    def __str__(self) -> str:
        return ", ".join(str(drive) for drive in self.drives)

    @property
    def statistics(self) -> TierStatistics:
        """What the drives moved, added up; bandwidths too: the drives work side by side."""
        return TierStatistics(
            writes=BandwidthMeter.side_by_side([d.statistics.writes for d in self.drives]),
            reads=BandwidthMeter.side_by_side([d.statistics.reads for d in self.drives]),
            failed_writes=sum(drive.statistics.failed_writes for drive in self.drives),
        )

    @property
    def degraded(self) -> bool:
        """Whether a drive is full or has failed."""
        return any(drive.health is not Health.GOOD for drive in self.drives)

    @property
    def used_bytes(self) -> int:
        """Bytes of the files taken by live blocks."""
        return sum(drive.used_bytes for drive in self.drives)

    @property
    def capacity_bytes(self) -> int:
        """Bytes that the files have grown to, taken or free; they grow up to the budget."""
        return sum(drive.file.size_bytes for drive in self.drives)

    def begin_write(
        self, source: torch.UntypedStorage, after: Any = None
    ) -> tuple[Block, Transfer] | None:
        """Starts to write a whole storage to the drives; None if they are full or have failed."""
        view = self._access.for_writing(source, after)
        extents = self._allocate(view.cut.body_bytes)
        if extents is None:
            return None
        block = SsdBlock(self, view.cut, extents)
        return block, self._write_body(view, block)

    def _write_body(self, view: View, block: SsdBlock) -> Transfer:
        """Starts to write the body of a view to a block's extents."""
        return when_all([e.drive.begin_write(view, start, e, block) for start, e in _places(block)])

    def begin_read(
        self, block: Any, deadline: float = 0.0, into: torch.UntypedStorage | None = None
    ) -> tuple[torch.UntypedStorage, Transfer]:
        """Starts to read a block into a new storage, or into `into`."""
        target, view = self._access.for_reading(block.cut, into)
        transfer = when_all(
            [e.drive.begin_read(view, start, e, block, deadline) for start, e in _places(block)]
        )
        transfer.events = view.events
        return target, transfer

    def view(self, block: Any) -> torch.UntypedStorage:
        """The bytes of a block in their files, mapped. Only for storages of whole pages.

        Raises:
            OSError: some bytes of the block are in no whole page of a file; or the bytes are not
                those that were written.
        """
        ranges = [FileRange(e.drive.file.fd, e.offset, e.num_bytes) for e in block.extents]
        cut = block.cut
        is_paged = all(not one.num_bytes % mmap.PAGESIZE for one in ranges)
        if cut.head or cut.tail or cut.num_bytes != cut.body_bytes or not is_paged:
            raise OSError(errno.EINVAL, "the block is not in whole pages")
        for extent in block.extents:
            extent.drive.check(extent)
        what = f"{self._purpose.prefix}{format_size(block.num_bytes)} of them ({block})"
        return map_ranges(ranges, block, what)

    def copy_view(self, block: Any, into: torch.UntypedStorage) -> None:
        """Fills a storage on the CPU with what a block's view shows.

        Raises:
            OSError: a drive failed.
        """
        memory = bytes_at(into.data_ptr(), into.nbytes())
        shown = memoryview(memory).cast("B")
        for start, extent in _places(block):
            extent.drive.copy_shown(extent, shown[start : start + extent.num_bytes])

    def renew(self, block: Any) -> None:
        """Writes changes through a block's view to the drives, with new checksums.

        Raises:
            OSError: a drive failed.
        """
        for extent in block.extents:
            extent.drive.renew(extent)

    def wait_for_writes(self, timeout_s: float | None = None) -> bool:
        """Returns at once: a write whose transfer has ended is complete."""
        return True

    def trim(self) -> None:
        """Gives the region of restored memory back, if this tier has one and it is empty."""
        self._access.trim()

    def free(self, block: Any) -> None:
        """Gives a block's extents back to their drives. Takes no lock: finalizers call it."""
        extents, block.extents = block.extents, []
        for extent in extents:
            extent.free()

    def close(self) -> None:
        """Cancels what is queued, waits for what is under way, frees the files' space."""
        for drive in self.drives:
            drive.close()
        if self._staging is not None:
            self._staging.close()

    def _allocate(self, num_bytes: int) -> list[Extent] | None:
        """Extents for a body, on the drives that take it; None: no drive has room."""
        if len(self.drives) == 1 and num_bytes:
            extent = self.drives[0].allocate(num_bytes)
            return None if extent is None else [extent]
        healthy = [drive for drive in self.drives if drive.health is not Health.FAILED]
        with_room = [drive for drive in healthy if not drive.lacks_room]
        extents = self._striped(num_bytes, with_room)
        if extents is None and len(with_room) < len(healthy):
            extents = self._striped(num_bytes, healthy)
        return extents

    def _striped(self, num_bytes: int, drives: list[Drive]) -> list[Extent] | None:
        """Extents on some of these drives; None: none has room."""
        drives = drives.copy()
        while drives:
            lanes = [Lane(d.statistics.writes.bytes_per_s, d.queued_bytes) for d in drives]
            # In whole pages, so that extents can be mapped.
            parts = stripe(num_bytes, lanes, max(self._alignment.offset, mmap.PAGESIZE))
            extents: list[Extent] = []
            for drive, part in zip(drives, parts, strict=True):
                if part:
                    extent = drive.allocate(part)
                    if extent is None:
                        refused = drive
                        break
                    extents.append(extent)
            else:
                return extents
            for extent in extents:
                extent.free()
            drives.remove(refused)
        return None

    def _open_file(self, directory: Path, io: str) -> DriveFile:
        return UnlinkedFile(directory, io, self._purpose)

    def _open_access(self, alignment: Alignment, num_threads: int) -> Access:
        device = self._device
        if device.is_host:
            return InPlace(alignment, in_pages=self._purpose.in_pages)
        more = min(num_threads, _COPIED_FROM * len(self.drives))
        self._staging = StagingPool(num_threads + more, device, purpose=self._purpose)
        return Staged(alignment, device, self._staging)


def threads_of(directories: Sequence[Path], num_threads: int | None) -> list[int]:
    """I/O threads for each directory: as many as asked for, or as suit its disks."""
    if num_threads is not None:
        return [num_threads] * len(directories)
    return [usual_num_threads(num_disks(directory)) for directory in directories]


def _places(block: SsdBlock) -> Iterator[tuple[int, Extent]]:
    """Each extent, and where its bytes begin in the body."""
    start = 0
    for extent in block.extents:
        yield start, extent
        start += extent.num_bytes
