# SPDX-License-Identifier: Apache-2.0
"""Frozen features in a directory: `FeatureStore`, a file for each row, named by its key.

Files outlive the run, and the ranks of a node share them: a row that one has stored is there for
all. A file gets its name when it is whole, so one that a killed process was writing is not there.
What cannot be stored (the disk is full, the budget is used, the drive is behind) is not stored, and
is computed again: storing never fails a training. Reading raises no errors either.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.offload.frozen.entry import Entry, decode, encode
from megatron.offload.sizes import MIB, format_size
from megatron.offload.tiers.io_threads import IoThreads, Piece, usual_num_threads
from megatron.offload.tiers.purpose import FEATURES
from megatron.offload.tiers.transfer import TRANSFER_ERRORS, Transfer
from megatron.offload.tiers.wear import WEAR

logger = logging.getLogger(__name__)

_QUEUED_BYTES = 256 * MIB  # most that waits to be written; what is beyond is not stored
_SPARE_BYTES = 64 * MIB  # of a disk, that others need too
_UNFINISHED = ".unfinished-"
_ABANDONED_S = 3600.0  # a file without its name for so long is a dead process's
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Read:
    """A file that a thread reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entry: Entry | None = None

    def run(self) -> None:
        """Raises OSError: it is not there, or not whole."""
        number = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        with open(number, "rb", buffering=0) as file:
            body = bytearray(os.fstat(number).st_size)
            view, done = memoryview(body), 0
            while done < len(body):
                count = file.readinto(view[done:])
                if not count:
                    raise OSError(errno.EIO, "the file ends early")
                done += count
        self.entry = decode(body)


class FeatureStore:
    """Rows by key.

    Args:
        directory: exists and is writable; see `resolved_directory`.
        budget_bytes: most that the files of the directory may take; None: until the disk is full.
        num_threads: for I/O; None: what suits a disk.
        num_ranks: processes that store in this directory now; each stores its part of the budget.

    Attributes:
        stored_bytes: written by this process, like `num_stored`.
        read_bytes: of what was asked for.
        num_not_stored: rows for which there was no room, or no time.
    """

    def __init__(
        self,
        directory: Path,
        budget_bytes: int | None = None,
        num_threads: int | None = None,
        num_ranks: int = 1,
    ) -> None:
        self.directory = directory
        self.stored_bytes = self.read_bytes = 0
        self.num_stored = self.num_not_stored = 0
        self._left_bytes: int | None = None  # that this process may still store; None: no bound
        used_bytes = self._look()
        if budget_bytes is not None:
            self._left_bytes = max(budget_bytes - used_bytes, 0) // num_ranks
        # Protects the counts above and below; the I/O threads end writes. Nothing waits under it.
        self._lock = threading.Lock()
        self._pending: dict[bytes, Transfer] = {}  # writes by key
        self._pending_bytes = 0
        self._ahead: dict[bytes, tuple[_Read, Transfer]] = {}
        self._is_full = False
        threads = num_threads or usual_num_threads(1)
        self._threads = IoThreads(threads, FEATURES.thread_name, purpose=FEATURES)

    def has(self, keys: Sequence[bytes]) -> bool:
        """Whether all rows are there, whole."""
        return all(key in self._ahead or self._path(key).exists() for key in keys)

    def read_ahead(self, keys: Sequence[bytes]) -> None:
        """Starts to read rows that `read` will ask for; those of an earlier call are dropped."""
        before, self._ahead = self._ahead, {}
        for key in keys:
            if key in before:
                self._ahead[key] = before.pop(key)
            elif key not in self._ahead and self._path(key).exists():
                self._ahead[key] = self._begin_read(key)
        for _, transfer in before.values():
            transfer.abandon()

    def read(self, keys: Sequence[bytes]) -> list[Entry] | None:
        """These rows; None: one of them is not there."""
        if not self.has(keys):
            return None
        reads = [
            self._ahead.pop(key) if key in self._ahead else self._begin_read(key) for key in keys
        ]
        entries = []
        for read, transfer in reads:
            transfer.wait_until_done()
            if transfer.error is not None:
                self._cannot_read(read, transfer.error)
            elif read.entry is not None:
                entries.append(read.entry)
        if len(entries) < len(keys):
            return None
        self.read_bytes += sum(entry.num_bytes for entry in entries)
        return entries

    def begin_write(self, key: bytes, header: dict[str, Any], payload: Sequence[bytes]) -> None:
        """Stores a row, if there is room; one that is there, or on its way, is left as it is."""
        path = self._path(key)
        num_bytes = sum(map(len, payload))
        with self._lock:
            if key in self._pending or path.exists():
                return
            if not self._has_room(num_bytes):
                self.num_not_stored += 1
                return
            self._pending_bytes += num_bytes
            if self._left_bytes is not None:
                self._left_bytes -= num_bytes
            write = functools.partial(self._write, path, header, list(payload))
            transfer = self._threads.submit_write([Piece(num_bytes, write)])
            self._pending[key] = transfer
        transfer.add_done_callback(functools.partial(self._written, key, num_bytes))

    def wait_for_writes(self) -> None:
        """Blocks until all that was to be stored is, or could not be."""
        while pending := list(self._pending.values()):
            for transfer in pending:
                transfer.wait_until_done()

    def close(self) -> None:
        """Stores what is on its way; the files stay."""
        self.wait_for_writes()
        self.read_ahead([])
        self._threads.close()

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.directory / name[:2] / name[2:]

    def _begin_read(self, key: bytes) -> tuple[_Read, Transfer]:
        read = _Read(self._path(key))
        return read, self._threads.submit_read(read.run)

    def _cannot_read(self, read: _Read, error: BaseException) -> None:
        """A damaged file goes, so that what is computed now takes its place."""
        if isinstance(error, FileNotFoundError) or not isinstance(error, OSError):
            return
        logger.warning(
            "%s%s cannot be read (%s); its row is computed again",
            FEATURES.prefix,
            read.path,
            error.strerror,
        )
        with contextlib.suppress(OSError):
            read.path.unlink()

    def _has_room(self, num_bytes: int) -> bool:
        """Called under the lock."""
        if self._is_full or (self._pending and self._pending_bytes + num_bytes > _QUEUED_BYTES):
            return False
        if self._left_bytes is not None and num_bytes > self._left_bytes:
            self._stop_storing("the budget of this process is used")
            return False
        return True

    def _write(self, path: Path, header: dict[str, Any], payload: list[bytes]) -> None:
        """Raises OSError. Runs in an I/O thread."""
        body = encode(header, payload)
        _check_free(self.directory, sum(map(len, body)))
        path.parent.mkdir(exist_ok=True)
        with _Unnamed(path.parent) as file:
            file.write(body)
            file.give_name(path)

    def _written(self, key: bytes, num_bytes: int, transfer: Transfer) -> None:
        error = transfer.error
        with self._lock:
            self._pending.pop(key, None)
            self._pending_bytes -= num_bytes
            if error is None:
                self.num_stored += 1
                self.stored_bytes += num_bytes
                WEAR.add(self.directory, num_bytes)
                return
            self.num_not_stored += 1
            if self._left_bytes is not None:
                self._left_bytes += num_bytes
            if isinstance(error, TRANSFER_ERRORS) and not self._is_full:
                is_full = isinstance(error, OSError) and error.errno in _FULL
                self._stop_storing("the disk is full" if is_full else f"a write failed ({error})")

    def _stop_storing(self, why: str) -> None:
        """Called under the lock, once."""
        self._is_full = True
        logger.warning(
            "%s%s, so no more is stored in %s (%s in this run); what is there is used, the rest is "
            "computed",
            FEATURES.prefix,
            why,
            self.directory,
            format_size(self.stored_bytes),
        )

    def _look(self) -> int:
        """Bytes of the files that are there; takes away what dead processes left unfinished."""
        used_bytes = 0
        for folder in os.scandir(self.directory):
            if len(folder.name) != 2 or not folder.is_dir(follow_symlinks=False):
                continue
            for one in os.scandir(folder.path):
                with contextlib.suppress(FileNotFoundError):  # another process takes it away
                    found = one.stat(follow_symlinks=False)
                    used_bytes += found.st_size
                    is_old = found.st_mtime < time.time() - _ABANDONED_S
                    if one.name.startswith(_UNFINISHED) and is_old:
                        os.unlink(one.path)
        return used_bytes


class _Unnamed:
    """A new file in a folder, which has no name there, or none that a key has, until it is whole.

    On file systems without O_TMPFILE a killed process leaves it behind under the second kind.
    """

    def __init__(self, folder: Path) -> None:
        self._name: Path | None = None
        flags = os.O_WRONLY | os.O_CLOEXEC
        try:
            self._number = os.open(folder, flags | os.O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise
            self._name = folder / f"{_UNFINISHED}{secrets.token_hex(8)}"
            self._number = os.open(self._name, flags | os.O_CREAT | os.O_EXCL, 0o600)

    def __enter__(self) -> _Unnamed:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._number)
        if self._name is not None:
            self._name.unlink(missing_ok=True)

    def write(self, pieces: Sequence[memoryview]) -> None:
        """Writes all pieces. Raises OSError."""
        for piece in pieces:
            done = 0
            while done < len(piece):
                done += os.write(self._number, piece[done:])

    def give_name(self, path: Path) -> None:
        """It is whole. Where another process was faster, its file stays."""
        with contextlib.suppress(FileExistsError):
            if self._name is None:
                # With a descriptor of a folder Python calls linkat, which follows this link.
                os.link(f"/proc/self/fd/{self._number}", path, src_dir_fd=self._number)
            else:
                os.link(self._name, path)


def _check_free(directory: Path, num_bytes: int) -> None:
    """Raises OSError before the last of a disk's space is taken: others need it too."""
    disk = os.statvfs(directory)
    if disk.f_blocks and disk.f_bavail * disk.f_frsize < num_bytes + _SPARE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
