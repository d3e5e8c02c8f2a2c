# SPDX-License-Identifier: Apache-2.0
"""Storages over memory of no allocator: `storage_at`, `own_pages`, and `map_ranges` of files.

Tiers show blocks with `map_ranges` (`Tier.view`): pages are read when they are touched, and the
system takes their memory back when it needs to, so a block may be larger than memory. The price:
where the file fails, the read that touches a page ends the process (`bus_error.py`). So what is
shown is for other code, and our own reads of it go through `Tier.copy_view`.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from megatron.offload.device.device import bytes_at
from megatron.offload.sizes import format_size
from megatron.offload.tiers import bus_error

_PROT_NONE = 0
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # <asm-generic/mman.h>
_FAILED = ctypes.c_void_p(-1).value

# The end of what is said where a mapped file fails.
_FAILED_IN_USE = (
    "could not be read or written while they were shown: the drive failed, the disk is full, or "
    "another process cut the file short; mapped memory can report that only by the signal SIGBUS, "
    "which ends this process now; check the disk and resume from the last checkpoint"
)


class FileRange(NamedTuple):
    """Bytes of an open file, in whole pages."""

    fd: int
    offset: int
    num_bytes: int


def storage_at(address: int, num_bytes: int, owner: object) -> torch.UntypedStorage:
    """A storage on the CPU over memory that `owner` keeps; the storage keeps the owner alive."""
    window = bytes_at(address, num_bytes)
    window.owner = owner  # type: ignore[attr-defined]  # lives as long as the storage
    return torch.frombuffer(window, dtype=torch.uint8).untyped_storage()


def own_pages(num_bytes: int, skipped_bytes: int = 0) -> torch.UntypedStorage:
    """A storage of new pages, uninitialised, which go back to the system when it is freed.

    For storages that are large and stay long: an allocator would keep much of their memory. After
    the bytes there is a spare page, which takes no memory: vector kernels may read past the end of
    a tensor (torch 2.13's fused SGD does, with a bf16 momentum on a CPU).

    Args:
        num_bytes: of the storage.
        skipped_bytes: of the first page that are before it, for one that begins within a page.

    Raises:
        torch.OutOfMemoryError: the system refuses.
    """
    size = skipped_bytes + num_bytes + mmap.PAGESIZE
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise torch.OutOfMemoryError(
            f"the host has no memory for {format_size(num_bytes)}: {error.strerror}"
        ) from error
    prefer_huge_pages(pages)
    made = torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes, offset=skipped_bytes)
    return made.untyped_storage()


class Pages:
    """Addresses that stay, and memory behind them that is released and allocated again.

    Attributes:
        storage: over them, on the CPU. After `release` it reads as zeros.
    """

    def __init__(self, num_bytes: int) -> None:
        self._mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        prefer_huge_pages(self._mapping)
        self.storage = torch.frombuffer(self._mapping, dtype=torch.uint8).untyped_storage()

    def release(self) -> None:
        """Returns the memory to the system; the next writes take new memory."""
        self._mapping.madvise(mmap.MADV_DONTNEED)


def prefer_huge_pages(pages: mmap.mmap) -> None:
    """Asks for huge pages, where the system has them: fewer page faults, and faster I/O."""
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)


def map_ranges(ranges: Sequence[FileRange], owner: object, what: str) -> torch.UntypedStorage:
    """A storage of ranges of files, one behind the other; writes to it change the files.

    In a child process that is forked meanwhile, writes stay private: the files belong to the
    parent, which would read the child's bytes as its own.

    Args:
        ranges: at least one.
        owner: kept alive by the storage: the block that keeps the ranges from being reused. None:
            the ranges belong to no block, and a child may write to them.
        what: they are, as it stands before "could not be read" in a sentence.

    Raises:
        OSError: the system refuses.
    """
    total = sum(one.num_bytes for one in ranges)
    # Reserves the addresses first, so that the ranges lie side by side.
    address = _mmap(None, total, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    mapping = _Mapping(address, total, owner)
    bus_error.explain(address, total, f"{what} {_FAILED_IN_USE}")
    for one in ranges:
        mapping.add(address, one)
        address += one.num_bytes
    return storage_at(mapping.address, total, mapping)


class _OpenFile:
    """A descriptor of our own, for mappings that outlive the tier's. One for each file."""

    def __init__(self, fd: int) -> None:
        self.fd = os.dup(fd)
        weakref.finalize(self, os.close, self.fd).atexit = False


class _Mapping:
    """Addresses that are unmapped when nothing refers to this object any more."""

    # The mappings that become private in a child, and their files by device and inode.
    _of_blocks: ClassVar[weakref.WeakSet[_Mapping]] = weakref.WeakSet()
    _files: ClassVar[weakref.WeakValueDictionary[tuple[int, int], _OpenFile]] = (
        weakref.WeakValueDictionary()
    )

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        self.address = address
        self._owner = owner
        self._parts: list[tuple[int, FileRange, _OpenFile]] = []
        weakref.finalize(self, _unmap, address, num_bytes).atexit = False
        if owner is not None:
            self._of_blocks.add(self)

    def add(self, address: int, one: FileRange) -> None:
        """Maps a range of a file there, shared with all other readers of the file."""
        if self._owner is not None:
            found = os.fstat(one.fd)
            key = found.st_dev, found.st_ino
            file = self._files.get(key)
            if file is None:
                self._files[key] = file = _OpenFile(one.fd)
            self._parts.append((address, one, file))
        _map(address, one, one.fd, mmap.MAP_SHARED)

    @classmethod
    def make_private(cls) -> None:
        """Runs in a child: makes its writes private."""
        for mapping in list(cls._of_blocks):
            for address, one, file in mapping._parts:
                _map(address, one, file.fd, mmap.MAP_PRIVATE)


os.register_at_fork(after_in_child=_Mapping.make_private)


def _unmap(address: int, num_bytes: int) -> None:
    bus_error.forget(address)  # first: another thread may be given the same address
    _libc().munmap(address, num_bytes)


def _map(address: int, one: FileRange, fd: int, flags: int) -> None:
    access = mmap.PROT_READ | mmap.PROT_WRITE
    _mmap(address, one.num_bytes, access, flags | _MAP_FIXED, fd, one.offset)


def _mmap(address: int | None, num_bytes: int, prot: int, flags: int, fd: int, offset: int) -> int:
    found = _libc().mmap(address, num_bytes, prot, flags | _MAP_NORESERVE, fd, offset)
    if found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc
