# SPDX-License-Identifier: Apache-2.0
"""The file that a tier keeps its bytes in: `UnlinkedFile`.

Each `Drive` owns one. No name reaches the file (O_TMPFILE, or unlinked at once) and its mode is
0600: the kernel frees its space however the process ends, and no other user can open it. Reads and
writes move whole ranges, however many bytes the kernel moves per call. A write that returns has
reached the disk: bytes in the page cache would still take memory, and it reports no errors.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron.offload.directories import resolved_directory
from megatron.offload.errors import ConfigurationError
from megatron.offload.sizes import format_size
from megatron.offload.tiers.direct_io import BUFFERED, Alignment, direct_alignment
from megatron.offload.tiers.purpose import ACTIVATIONS, Purpose

logger = logging.getLogger(__name__)

_RWF_DONTCACHE = 0x80  # Linux 6.14: buffered I/O that leaves nothing in the page cache
_START = 2  # of sync_file_range: start to write what is not being written yet
_START_AND_WAIT = 1 | 2 | 4  # and wait for all of it


class Vector:
    """Pieces of memory that lie one behind the other in a file.

    Args:
        parts: none is empty.
    """

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._parts = parts
        self._num_bytes = sum(map(len, parts))

    def __len__(self) -> int:
        """Bytes of all parts."""
        return self._num_bytes

    def without_first(self, num_bytes: int) -> list[memoryview]:
        """The parts, without this many bytes at their beginning."""
        if not num_bytes:  # usually one call moves all
            return list(self._parts)
        left = []
        for part in self._parts:
            if num_bytes < len(part):
                left.append(part[num_bytes:])
            num_bytes = max(num_bytes - len(part), 0)
        return left


class DriveFile(Protocol):
    """A file as a drive needs it: `UnlinkedFile`, or one that takes device memory."""

    directory: Path
    kind: str  # of I/O, for sentences
    alignment: Alignment
    size_bytes: int

    @property
    def fd(self) -> int:
        """The file descriptor, for mapping the file."""

    def grow(self, num_bytes: int) -> None:
        """Allocates `num_bytes` more at the file's end. Raises OSError and stays as it was."""

    def write(self, body: Any, offset: int) -> None:
        """Writes all of `body` at `offset` bytes into the file. Raises OSError.

        The body is memory of a view, or several pieces of host memory as a `Vector`.
        """

    def read(self, body: Any, offset: int) -> None:
        """Fills all of `body` from `offset` bytes into the file. Raises OSError."""

    def read_cached(self, body: memoryview, offset: int) -> None:
        """Fills all of `body` with what a mapping of the file shows. Raises OSError."""

    def sync(self, offset: int, num_bytes: int) -> None:
        """Writes changes through a mapping to the disk. Raises OSError if that fails."""

    def close(self) -> None:
        """Closes the file, which frees its space on the disk."""


class UnlinkedFile:
    """A file without a name on the file system of `directory`.

    Args:
        directory: must exist and be writable.
        io: `direct` (O_DIRECT or an error), `buffered`, `auto` (direct where it works).
        purpose: what it is for, in sentences.

    Raises:
        ConfigurationError: the directory or the I/O mode cannot work; the message says why.
    """

    def __init__(self, directory: Path, io: str = "auto", purpose: Purpose = ACTIVATIONS) -> None:
        self.directory = resolved_directory(directory, purpose.prefix, purpose.flag("dir"))
        self._purpose = purpose
        self.fd = -1
        self._cached_fd = -1  # the same file without direct I/O, opened when it is needed
        self.size_bytes = 0
        self._flags = 0  # of every read and write
        self._drops_cache_itself = False
        # Held while a thread asks whether buffered writes reached the disk; protects the answer
        # below. The disk works meanwhile, which needs no thread of ours.
        self._sync_lock = threading.Lock()
        self._write_error: OSError | None = None  # of any buffered write so far
        try:
            self._open(self.directory, io)
        except BaseException:
            self.close()
            raise

    def _open(self, directory: Path, io: str) -> None:
        direct_fd = (
            None if io == "buffered" else _open_unnamed(directory, os.O_DIRECT, self._purpose)
        )
        if direct_fd is not None:
            self.fd = direct_fd
            alignment = direct_alignment(direct_fd)
            if alignment is not None and self._works(max(alignment.offset, mmap.PAGESIZE)):
                self.alignment, self.kind = alignment, "direct I/O"
                return
            self.close()
        if io == "direct":
            raise self._purpose.refusal(
                f"the file system of {directory} has no direct I/O (O_DIRECT); choose a directory "
                f"on a local SSD or {self._purpose.flag('io')} buffered"
            )
        if io == "auto":
            logger.warning(
                "%s%s has no direct I/O; using buffered I/O instead, which copies every byte "
                "through the page cache",
                self._purpose.prefix,
                directory,
            )
        buffered_fd = _open_unnamed(directory, 0, self._purpose)
        assert buffered_fd is not None  # only O_DIRECT may be refused
        self.fd, self.alignment, self.kind = buffered_fd, BUFFERED, "buffered I/O"
        # Whole ranges are read, so the kernel should read nothing ahead of them.
        os.posix_fadvise(buffered_fd, 0, 0, os.POSIX_FADV_RANDOM)
        if self._works(mmap.PAGESIZE, _RWF_DONTCACHE):
            self._flags = _RWF_DONTCACHE
        else:
            self._drops_cache_itself = True

    def _works(self, num_bytes: int, flags: int = 0) -> bool:
        """Tries one write: some file systems accept a flag when opened and refuse the I/O."""
        with mmap.mmap(-1, num_bytes) as page:
            try:
                return os.pwritev(self.fd, [page], 0, flags) == num_bytes
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                    return False
                raise self._purpose.refusal(
                    f"a trial write in {self.directory} failed: {error.strerror}; free some space, "
                    f"or choose another disk with {self._purpose.flag('dir')}"
                ) from None
            finally:
                os.ftruncate(self.fd, 0)

    def grow(self, num_bytes: int) -> None:
        """Allocates `num_bytes` more on the disk.

        Raises:
            OSError: there is no room (ENOSPC, EFBIG, EDQUOT); the file is as it was.
        """
        if num_bytes:
            _check_free(self.fd, num_bytes)
            try:
                _allocate(self.fd, self.size_bytes, num_bytes)
            except OSError:
                os.ftruncate(self.fd, self.size_bytes)
                raise
            self.size_bytes += num_bytes

    def write(self, body: memoryview | Vector, offset: int) -> None:
        """Writes all of `body` at `offset`. Raises OSError."""
        done = 0
        while done < len(body):
            count = os.pwritev(self.fd, _left(body, done), offset + done, self._flags)
            if count == 0:
                raise OSError(errno.EIO, f"the drive took {done} of {len(body)} bytes")
            done += count
        if self.alignment == BUFFERED:
            self._wait_for_disk(offset, len(body))
        if self._drops_cache_itself:
            self._drop_cache(offset, len(body))

    def read(self, body: memoryview | Vector, offset: int) -> None:
        """Fills all of `body` from `offset`. Raises OSError, also when the file ends early."""
        _fill(self.fd, body, offset, self._flags)
        if self._drops_cache_itself:
            self._drop_cache(offset, len(body))

    def read_cached(self, body: memoryview, offset: int) -> None:
        """Fills all of `body` with what a mapping of the file shows. Raises OSError.

        What it reads stays in the page cache until the system needs the memory. Not thread-safe.
        """
        if self._cached_fd < 0:
            self._cached_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        _fill(self._cached_fd, body, offset)

    def sync(self, offset: int, num_bytes: int) -> None:
        """Writes changes through a mapping to the disk. Raises OSError if that fails."""
        self._wait_for_disk(offset, num_bytes)

    def close(self) -> None:
        """Closes the file, which frees its space. Later calls fail: the number may be reused."""
        fds, self.fd, self._cached_fd = (self.fd, self._cached_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def _wait_for_disk(self, offset: int, num_bytes: int) -> None:
        """Returns when a buffered range is on the disk. Raises OSError if it, or another, is not.

        The kernel reports a failed write once, to the next thread that waits, even if that waits
        for another range. So threads wait one after another, and an error holds for all later ones.
        """
        _sync_file_range(self.fd, offset, num_bytes, _START)  # starts all ranges; errors: below
        with self._sync_lock:
            if self._write_error is None:
                code = _sync_file_range(self.fd, offset, num_bytes, _START_AND_WAIT)
                try:
                    if code in (errno.ENOSYS, errno.ESPIPE):
                        os.fdatasync(self.fd)  # this system cannot sync a range
                    elif code:
                        raise OSError(code, os.strerror(code))
                except OSError as error:
                    self._write_error = OSError(error.errno, error.strerror)
            failed = self._write_error
        if failed is not None:
            raise OSError(failed.errno, failed.strerror)

    def _drop_cache(self, offset: int, num_bytes: int) -> None:
        """Drops the page cache of a range; otherwise buffered offload would free no memory."""
        os.posix_fadvise(self.fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)


def _fill(fd: int, body: memoryview | Vector, offset: int, flags: int = 0) -> None:
    """Reads all of `body`, however many calls that takes. Raises OSError."""
    done = 0
    while done < len(body):
        count = os.preadv(fd, _left(body, done), offset + done, flags)
        if count == 0:
            raise OSError(errno.EIO, f"short read: got {done} of {len(body)} bytes")
        done += count


def _left(body: memoryview | Vector, done: int) -> list[memoryview]:
    """The rest of a body that is still to be moved."""
    return body.without_first(done) if isinstance(body, Vector) else [body[done:]]


def check_room(directory: Path, io: str, num_bytes: int) -> None:
    """Tries the directory and the I/O mode, and checks for `num_bytes` of free space.

    Raises:
        ConfigurationError: the directory, the mode or the space cannot work.
    """
    UnlinkedFile(directory, io).close()
    disk = os.statvfs(directory)
    if disk.f_bavail * disk.f_frsize < num_bytes:
        raise no_space(directory, num_bytes, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def _open_unnamed(directory: Path, extra_flags: int, purpose: Purpose) -> int | None:
    """A descriptor of a new nameless file; None: O_DIRECT is refused."""
    flags = os.O_RDWR | os.O_CLOEXEC | extra_flags
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise _cannot_create(directory, error, purpose) from None
    # No O_TMPFILE here (NFS, overlay): a named file, unlinked at once. EINVAL: no O_DIRECT.
    try:
        named_fd, name = tempfile.mkstemp(prefix=f".{purpose.thread_name}-", dir=directory)
    except OSError as error:
        raise _cannot_create(directory, error, purpose) from None
    try:
        # Opened by its number: in a directory that other users may write to, the name may be a link
        # to any file by now.
        return os.open(f"/proc/self/fd/{named_fd}", flags)
    except OSError as error:
        if extra_flags and error.errno == errno.EINVAL:
            return None
        raise _cannot_create(directory, error, purpose) from None
    finally:
        with contextlib.suppress(FileNotFoundError):  # another process may have renamed it
            os.unlink(name)
        os.close(named_fd)


def _cannot_create(directory: Path, error: OSError, purpose: Purpose) -> ConfigurationError:
    return purpose.refusal(
        f"no file can be created in {directory} ({error.strerror}); "
        f"give a writable directory on an SSD with {purpose.flag('dir')}"
    )


def _check_free(fd: int, num_bytes: int) -> None:
    """Raises OSError if the disk has less free space, before anything is allocated.

    Otherwise the kernel takes all space before it fails, and other processes find a full disk.
    """
    disk = os.fstatvfs(fd)
    if disk.f_blocks and disk.f_bavail * disk.f_frsize < num_bytes:  # 0 blocks: it does not say
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _allocate(fd: int, offset: int, num_bytes: int) -> None:
    """Reserves space on the disk. Raises OSError."""
    try:
        os.posix_fallocate(fd, offset, num_bytes)
        return
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # No fallocate here (NFS, ext3): the C library writes a byte into every block instead, which
    # direct I/O refuses. A second, buffered descriptor of the same file takes them.
    buffered_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_fallocate(buffered_fd, offset, num_bytes)
        os.fdatasync(buffered_fd)
        os.posix_fadvise(buffered_fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(buffered_fd)


def _sync_file_range(fd: int, offset: int, num_bytes: int, flags: int) -> int:
    """The system call of that name, which Python lacks; 0 or an error number."""
    call = ctypes.CDLL(None, use_errno=True).sync_file_range
    failed = call(fd, ctypes.c_int64(offset), ctypes.c_int64(num_bytes), flags)
    return ctypes.get_errno() if failed else 0


def no_space(
    directory: Path, wanted_bytes: int, error: OSError, purpose: Purpose = ACTIVATIONS
) -> ConfigurationError:
    """The error for a disk that is too small, found before training."""
    disk = os.statvfs(directory)
    free_bytes = disk.f_bavail * disk.f_frsize
    return purpose.refusal(
        f"{directory} cannot hold {purpose.bytes_name} ({error.strerror}); needed "
        f"{format_size(wanted_bytes)}, free {format_size(free_bytes)}; "
        f"free some space, choose another disk with {purpose.flag('dir')}, or set a smaller "
        f"{purpose.flag('ssd-budget')}"
    )
