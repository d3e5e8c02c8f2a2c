# SPDX-License-Identifier: Apache-2.0
"""One mount point: `Drive`, an unlinked file with its free space, its I/O threads and its health.

The SSD tier owns one per directory and spreads storages over them. A drive moves byte ranges
between memory and extents of its file; it knows no tensors.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import errno
import logging
import operator
import sys
import threading
from collections.abc import Callable, Iterator

from megatron.offload.sizes import MIB, format_size
from megatron.offload.tiers.access import View
from megatron.offload.tiers.budget import ByteBudget, RateLimit, SpaceBudget
from megatron.offload.tiers.checksum import Checksum, checksum_in_parts
from megatron.offload.tiers.extents import ExtentAllocator
from megatron.offload.tiers.file import DriveFile, Vector, no_space
from megatron.offload.tiers.io_threads import IoThreads, Piece
from megatron.offload.tiers.purpose import ACTIVATIONS, Purpose
from megatron.offload.tiers.tier import TierStatistics
from megatron.offload.tiers.transfer import Transfer
from megatron.offload.tiers.wear import WEAR

logger = logging.getLogger(__name__)

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # other errors mean that the drive failed

GROWTH_BYTES = 256 * MIB  # the file grows by this much at a time, so that its parts are large
FILE_BLOCK_BYTES = 4096
_CHECKED_BYTES = MIB  # read at a time, only to compute checksums


class Health(enum.Enum):
    """What a drive can still be used for. Members name the transitions into them."""

    GOOD = "good"
    FULL = "full"  # the disk had no room for growth or for a write: the file keeps its space
    FAILED = "failed"  # a write or growth failed: no more writes, reads go on


class Extent:
    """A range of a drive's file. Its owner frees it with `free`."""

    __slots__ = ("__weakref__", "checksums", "drive", "num_bytes", "offset", "piece_bytes")

    def __init__(self, drive: Drive, offset: int, num_bytes: int) -> None:
        self.drive = drive
        self.offset = offset
        self.num_bytes = num_bytes
        self.checksums: list[int] = []  # of the pieces that were written, if the drive verifies
        self.piece_bytes = 0  # of each piece but the last

    def __str__(self) -> str:
        return f"file in {self.drive.directory}, offset {self.offset}, length {self.num_bytes}"

    def free(self) -> None:
        """Gives the range back. Takes no lock: finalizers call it."""
        self.drive._freed.append(self.offset)


class _Work:
    """The work of an I/O thread: one piece of a write, or all of a read.

    Keeps the view, and the extent's owner, alive until it is done.
    """

    __slots__ = ("_do", "_owner", "extent", "num_bytes", "offset", "reads", "start", "view")

    def __init__(
        self,
        do: Callable[[_Work], None],
        view: View,
        start: int,
        extent: Extent,
        done: int,
        num_bytes: int,
        owner: object,
        *,
        reads: bool,
    ) -> None:
        self._do = do
        self.reads = reads  # or writes
        self.view = view
        self.start = start  # in the view's body
        self.extent = extent
        self.offset = extent.offset + done  # in the file
        self.num_bytes = num_bytes
        self._owner = owner

    def __call__(self) -> None:
        self._do(self)


class Drive:
    """A preallocated, unlinked file on one mount point.

    Args:
        file: empty; the drive closes it.
        space: bounds how much the file may grow; shared with the other drives.
        num_threads: I/O threads, the queue depth that the drive sees.
        write_limit: bounds the write bandwidth of all drives together; None: no bound.
        checksum: computed when writing and compared when reading; None: neither.
        purpose: what it is for, in sentences.
    """

    def __init__(
        self,
        file: DriveFile,
        *,
        space: SpaceBudget,
        num_threads: int,
        write_limit: RateLimit | None = None,
        checksum: Checksum | None = None,
        purpose: Purpose = ACTIVATIONS,
    ) -> None:
        self.file = file
        self._purpose = purpose
        self.directory = file.directory
        self.health = Health.GOOD
        self.lacks_room = False  # the last write found no room within the file
        self.statistics = TierStatistics()
        self.extents = ExtentAllocator(max(file.alignment.offset, FILE_BLOCK_BYTES))
        self._space = space
        self._space_is_used_up = False
        self._growth_bytes = GROWTH_BYTES  # halved when the disk refuses it
        self._checksum = checksum
        # Offsets of freed extents; the next allocation takes them in.
        self._freed: collections.deque[int] = collections.deque()
        self._expected = ByteBudget(sys.maxsize)
        # Protects extents and health. Held for microseconds (or one fallocate,
        # when the file grows); the space budget's lock is taken under it, no other.
        self._lock = threading.Lock()
        try:
            name = f"{purpose.thread_name} {file.directory}"
            self._threads = IoThreads(
                num_threads,
                name,
                write_limit,
                purpose,
                # With checksums, each transfer needs its own pieces.
                self._move_together if checksum is None else None,
            )
        except BaseException:  # the system starts no more threads
            file.close()
            raise

    def __str__(self) -> str:
        state = "" if self.health is Health.GOOD else f", {self.health.value}"
        return f"{self.directory} ({self.file.kind}{state})"

    @property
    def used_bytes(self) -> int:
        """Bytes of the file that are taken."""
        with self._lock:
            self._take_in_freed()
            return self.extents.used_bytes

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be written, and those that `expect` has announced."""
        return self._threads.queued_write_bytes + self._expected.taken_bytes

    def expect(self, extent: Extent) -> None:
        """Announces that an extent will be written, until `expect_no_more`: for striping."""
        self._expected.acquire(extent, extent.num_bytes)

    def expect_no_more(self, extent: Extent) -> None:
        """Takes back what `expect` announced."""
        self._expected.release(extent)

    def reserve(self, num_bytes: int) -> None:
        """Grows the file now, so that a disk that is too small is noticed before training.

        Raises:
            ConfigurationError: the disk is too small.
        """
        wanted = self.extents.round_up(num_bytes)
        granted = self._space.take(wanted, self.extents.granule)
        try:
            self._grow(granted)
        except OSError as error:
            raise no_space(self.directory, wanted, error, self._purpose) from None

    def allocate(self, num_bytes: int) -> Extent | None:
        """A free extent; grows the file if needed. None: the drive takes no more."""
        with self._lock:
            self._take_in_freed()
            if self._threads.have_died and self.health is not Health.FAILED:
                self._become_failed("all I/O threads died", "the system starts no more")
            if self.health is Health.FAILED:
                return None
            offset = self.extents.allocate(num_bytes)
            if offset is None and self._make_room(num_bytes):
                offset = self.extents.allocate(num_bytes)
            return None if offset is None else Extent(self, offset, num_bytes)

    def begin_write(self, view: View, start: int, extent: Extent, owner: object) -> Transfer:
        """Starts to write the part of a view's body that begins at `start`, into `extent`.

        The transfer keeps the view, and the extent's owner, alive until it ends.
        """
        extent.piece_bytes = view.piece_bytes
        pieces = []
        for done in range(0, extent.num_bytes, view.piece_bytes):
            num_bytes = min(view.piece_bytes, extent.num_bytes - done)
            work = _Work(
                self._write, view, start + done, extent, done, num_bytes, owner, reads=False
            )
            pieces.append(Piece(num_bytes, work))
        return self._threads.submit_write(pieces)

    def begin_read(
        self, view: View, start: int, extent: Extent, owner: object, deadline: float
    ) -> Transfer:
        """Starts to fill the part of a view's body that begins at `start`, from `extent`."""
        work = _Work(self._read, view, start, extent, 0, extent.num_bytes, owner, reads=True)
        return self._threads.submit_read(work, deadline, extent.num_bytes)

    def check(self, extent: Extent) -> None:
        """Compares what a mapping shows of an extent with its checksums, if it has any.

        Raises:
            OSError: the bytes differ, or cannot be read.
        """
        if self._checksum is not None and self._cached_checksums(extent) != extent.checksums:
            raise _other_bytes(extent)

    def renew(self, extent: Extent) -> None:
        """Writes what a mapping shows of an extent to the disk, with new checksums.

        Raises:
            OSError: it cannot be written or read.
        """
        self.file.sync(extent.offset, extent.num_bytes)
        if self._checksum is not None:
            extent.checksums = self._cached_checksums(extent)

    def copy_shown(self, extent: Extent, body: memoryview) -> None:
        """Fills `body` with what a mapping shows of an extent, whether it was changed or not.

        Raises:
            OSError: it cannot be read.
        """
        try:
            self.file.read_cached(body, extent.offset)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror} ({extent})") from None

    def _cached_checksums(self, extent: Extent) -> list[int]:
        # Not closed: the error of a read may refer to a part of it while it is handled.
        buffer = memoryview(bytearray(_CHECKED_BYTES))

        def parts(start: int) -> Iterator[memoryview]:
            stop = min(start + extent.piece_bytes, extent.num_bytes)
            for at in range(start, stop, _CHECKED_BYTES):
                part = buffer[: min(_CHECKED_BYTES, stop - at)]
                self.file.read_cached(part, extent.offset + at)
                yield part

        starts = range(0, extent.num_bytes, extent.piece_bytes)
        return [checksum_in_parts(parts(start)) for start in starts]

    def close(self) -> None:
        """Cancels what is queued, waits for what is under way, frees the file's space."""
        self._threads.close()
        self.file.close()

    # Runs in an I/O thread.
    def _write(self, work: _Work) -> None:
        """Writes one piece of a view's body."""
        view, extent = work.view, work.extent
        offset = work.offset
        with contextlib.closing(view.pieces_to_write(work.start, work.num_bytes)) as pieces:
            for body in pieces:
                try:
                    with self.statistics.writes.moving(len(body)):
                        self.file.write(body, offset)
                    WEAR.add(self.directory, len(body))
                except Exception as error:
                    view.check()  # raises if the memory was freed: then the drive did not fail
                    self._fail(error)
                    raise
                if self._checksum is not None:
                    extent.checksums.append(self._checksum(body))
                offset += len(body)
        self.lacks_room = False

    # Runs in an I/O thread.
    def _read(self, work: _Work) -> None:
        view, extent = work.view, work.extent
        offset, checksums = extent.offset, iter(extent.checksums)
        with contextlib.closing(view.pieces_to_fill(work.start, extent.num_bytes)) as pieces:
            for body in pieces:
                try:
                    with self.statistics.reads.moving(len(body)):
                        self.file.read(body, offset)
                except OSError as error:
                    raise OSError(error.errno, f"{error.strerror} ({extent})") from None
                if self._checksum is not None and not all(
                    self._checksum(body[at : at + view.piece_bytes]) == next(checksums)
                    for at in range(0, len(body), view.piece_bytes)
                ):
                    raise _other_bytes(extent)
                offset += len(body)

    # Runs in an I/O thread.
    def _move_together(self, works: list[_Work]) -> None:
        """Moves neighbours in the file with one call, the others one by one.

        Raises:
            Exception: of one of them; others may have been moved. It does not mark the drive as
                failed: the caller moves each again by itself.
        """
        is_read = works[0].reads
        works.sort(key=operator.attrgetter("offset"))
        runs: list[tuple[int, list[memoryview]]] = []  # offset in the file, and memory, of each
        end = -1  # of the last one
        for work in works:
            body, offset = work.view.memory(work.start, work.num_bytes), work.offset
            if body is None:
                raise ValueError("it is not in host memory")
            if offset != end:
                runs.append((offset, []))
            runs[-1][1].append(body)
            end = offset + work.num_bytes
        move = self.file.read if is_read else self.file.write
        meter = self.statistics.reads if is_read else self.statistics.writes
        with meter.moving(sum(work.num_bytes for work in works)):
            for offset, bodies in runs:
                move(bodies[0] if len(bodies) == 1 else Vector(bodies), offset)
                if not is_read:
                    WEAR.add(self.directory, sum(map(len, bodies)))

    def _make_room(self, num_bytes: int) -> bool:
        """Called under the lock. Grows the file for a request; whether it did."""
        if self.health is Health.FULL:
            return False
        missing = self.extents.round_up(num_bytes) - self.extents.free_at_end_bytes
        granted = self._space.take(max(missing, self._growth_bytes), self.extents.granule)
        if granted < missing:
            self._space.give_back(granted)
            self._warn_used_up()
            return False
        wanted = granted
        while True:
            try:
                self._grow(wanted)
            except OSError as error:
                # Not the error itself: its traceback refers to this frame and to what its callers
                # hold, memory that should be freed soon.
                reason, number = str(error), error.errno
            else:
                self._space.give_back(granted - wanted)
                return True
            if wanted == missing:
                break
            self._growth_bytes = wanted // 2
            wanted = max(missing, self.extents.round_up(self._growth_bytes))
        self._space.give_back(granted)
        if number not in _NO_ROOM:
            self._become_failed("the file cannot grow", reason)
            return False
        self._become_full(reason)
        return False

    def _grow(self, num_bytes: int) -> None:
        self.file.grow(num_bytes)
        self.extents.grow(num_bytes)

    def _warn_used_up(self) -> None:
        if not self._space_is_used_up:
            self._space_is_used_up = True
            logger.warning(
                "%s%s: %s is used up; the file holds %s, and what does not fit goes to another "
                "tier or stays in memory",
                self._purpose.prefix,
                self.directory,
                self._purpose.flag("ssd-budget"),
                format_size(self.file.size_bytes),
            )

    def _fail(self, error: Exception) -> None:
        """A write has failed. File systems that copy on write may find only then that they are
        full.

        A full drive is written to again where no other has room, because other files may have been
        removed.
        """
        with self._lock:
            self.statistics.failed_writes += 1
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                self.lacks_room = True
                if self.health is Health.GOOD:
                    self._become_full(str(error))
            elif self.health is not Health.FAILED:
                self._become_failed("a write failed", str(error))

    def _become_full(self, reason: str) -> None:
        """Called under the lock."""
        self.health = Health.FULL
        logger.warning(
            "%s%s is full (%s); its file holds %s, and what does not fit goes to another tier or "
            "stays in memory; nothing is lost",
            self._purpose.prefix,
            self.directory,
            reason,
            format_size(self.file.size_bytes),
        )

    def _become_failed(self, what: str, reason: str) -> None:
        """Called under the lock."""
        self.health = Health.FAILED
        logger.warning(
            "%s%s: %s (%s); what was to go there is still in memory and nothing is lost; from now "
            "on nothing is written there; check the disk",
            self._purpose.prefix,
            self.directory,
            what,
            reason,
        )

    def _take_in_freed(self) -> None:
        """Called under the lock."""
        while self._freed:
            self.extents.free(self._freed.popleft())


def _other_bytes(extent: Extent) -> OSError:
    return OSError(errno.EBADMSG, f"checksum mismatch: the drive gave back other bytes ({extent})")
