# SPDX-License-Identifier: Apache-2.0
"""Storages over memory of no allocator: `storage_at`, `own_pages`, and `map_ranges` of files.

Tiers show blocks with `map_ranges` (`Tier.view`): whoever looks at more than fits into memory reads
pages as they are touched, and the system takes their memory back when it wants to.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from megatron.offload.device.device import bytes_at

_PROT_NONE = 0
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # <asm-generic/mman.h>
_FAILED = ctypes.c_void_p(-1).value


class FileRange(NamedTuple):
    """Bytes of an open file, in whole pages."""

    fd: int
    offset: int
    num_bytes: int


def storage_at(address: int, num_bytes: int, owner: object) -> torch.UntypedStorage:
    """A storage on the CPU of memory that `owner` keeps, and that it keeps alive."""
    window = bytes_at(address, num_bytes)
    window.owner = owner  # type: ignore[attr-defined]  # lives as long as the storage
    return torch.frombuffer(window, dtype=torch.uint8).untyped_storage()


def own_pages(num_bytes: int) -> torch.UntypedStorage:
    """A storage of fresh pages, contents undefined, that go back to the system when it is freed.

    For what is large and stays: an allocator would keep much of it, whoever frees it. Behind it is
    a spare page, which takes no memory: vector kernels may read past the end of a tensor (torch
    2.13's fused SGD does, of a bf16 momentum on a CPU).
    """
    size = num_bytes + mmap.PAGESIZE
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    prefer_huge_pages(pages)
    return torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes).untyped_storage()


class Pages:
    """Addresses for good, and memory behind them that comes and goes.

    Attributes:
        storage: over them, on the CPU. After `release` it reads as zeros.
    """

    def __init__(self, num_bytes: int) -> None:
        self._mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        prefer_huge_pages(self._mapping)
        self.storage = torch.frombuffer(self._mapping, dtype=torch.uint8).untyped_storage()

    def obtain(self) -> None:
        """Does nothing: what is written takes memory."""

    def release(self) -> None:
        """Gives the memory back to the system; what is written to it next takes new memory."""
        self._mapping.madvise(mmap.MADV_DONTNEED)


def prefer_huge_pages(pages: mmap.mmap) -> None:
    """Asks for huge pages, where the system has them: fewer page faults, and faster I/O."""
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)


def map_ranges(ranges: Sequence[FileRange], owner: object) -> torch.UntypedStorage:
    """A storage that is ranges of files, one behind the other; what is written to it is theirs.

    Args:
        ranges: at least one.
        owner: kept alive by the storage: whoever keeps the ranges from being used otherwise.

    Raises:
        OSError: the system refuses.
    """
    total = sum(one.num_bytes for one in ranges)
    # Addresses first, so that the ranges come to lie side by side.
    address = _mmap(None, total, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    mapping = _Mapping(address, total, owner)
    for one in ranges:
        flags = mmap.MAP_SHARED | _MAP_FIXED
        _mmap(address, one.num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, one.fd, one.offset)
        address += one.num_bytes
    return storage_at(mapping.address, total, mapping)


class _Mapping:
    """Addresses that are given back when nobody refers to this any more."""

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        self.address = address
        self._owner = owner
        weakref.finalize(self, _libc().munmap, address, num_bytes).atexit = False


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
