# SPDX-License-Identifier: Apache-2.0
"""Memory for what is read back if device memory is the process's: `RestoredMemory`.

Restored storages live for milliseconds, in the order in which backward uses them, between the
blocks that operations allocate. In one allocator both fragment each other's free memory, which then
stays with the process unused. So restored storages have a region of their own with best-fit
extents, whose memory goes back to the system when its last storage is freed. `InPlace` calls it.
"""

from __future__ import annotations

import collections
import ctypes
import logging
import mmap
import os
import resource
import threading
import weakref
from pathlib import Path
from typing import Any

import torch

from megatron.offload.device.device import bytes_at
from megatron.offload.machine.kernel_text import kernel_text
from megatron.offload.tiers.extents import ExtentAllocator
from megatron.offload.tiers.mapped import prefer_huge_pages

logger = logging.getLogger(__name__)

_MAP_NORESERVE = 0x4000  # <asm-generic/mman.h>: addresses, not memory, until a page is touched
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_NEVER = "2"  # overcommit: every writable mapping counts as used memory, touched or not


class _Window(weakref.ref[Any]):
    """Of the memory of a storage."""

    offset: int  # of its extent


class RestoredMemory:
    """Hands out storages of one region of addresses, as large as the machine's memory.

    If addresses are limited, or count as memory, there is no region and it hands out nothing: a
    region would take them from other users of the process or the machine.

    Thread-safe. A storage may be freed in any thread at any moment, also within the calls of this
    class, so giving its extent back takes no lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._extents = ExtentAllocator(mmap.PAGESIZE)
        # Storages that are there, and those of them that were freed. A reference calls `append`,
        # which is of C: a signal's handler cannot raise within it, and nothing stays taken.
        self._windows: dict[int, _Window] = {}  # by their offset
        self._freed: collections.deque[_Window] = collections.deque()
        self._most_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._region: mmap.mmap | None = None
        self._address = 0
        why_not = _why_not_reserved()
        if not why_not:
            try:
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
                self._region = mmap.mmap(-1, self._most_bytes, flags=flags)
                self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._region))
                prefer_huge_pages(self._region)
            except OSError as error:
                why_not = error.strerror or str(error)
        if why_not:
            logger.info(
                "activation offload: no addresses for a region of restored memory: %s; what is "
                "read back comes from the allocator instead",
                why_not,
            )

    def new_storage(
        self, num_bytes: int, head_bytes: int, alignment: int
    ) -> torch.UntypedStorage | None:
        """An uninitialised storage; None if there is no room for it.

        Args:
            num_bytes: of the storage.
            head_bytes: the bytes after these are aligned.
            alignment: of memory, in bytes; divides a page.
        """
        shift = -head_bytes % alignment
        with self._lock:
            self._trim()
            offset = self._allocate(num_bytes + shift)
        if offset is None:
            return None
        window = bytes_at(self._address + offset + shift, num_bytes)
        window.owner = self  # type: ignore[attr-defined]  # the region outlives its storages
        reference = _Window(window, self._freed.append)
        reference.offset = offset
        self._windows[offset] = reference
        return torch.frombuffer(window, dtype=torch.uint8).untyped_storage()

    def trim(self) -> None:
        """Returns the region's memory to the system, if no storage is left in it."""
        if self._freed:
            with self._lock:
                self._trim()

    def _allocate(self, num_bytes: int) -> int | None:
        if self._region is None:
            return None
        offset = self._extents.allocate(num_bytes)
        if offset is None:
            more = self._extents.round_up(num_bytes) - self._extents.free_at_end_bytes
            if self._extents.size_bytes + more > self._most_bytes:
                return None
            self._extents.grow(more)
            offset = self._extents.allocate(num_bytes)
        return offset

    def _trim(self) -> None:
        while self._freed:
            offset = self._freed.popleft().offset
            del self._windows[offset]
            self._extents.free(offset)
            if self._region is not None and not self._extents.used_bytes:
                self._region.madvise(mmap.MADV_DONTNEED, 0, self._extents.size_bytes)
                self._extents = ExtentAllocator(mmap.PAGESIZE)


def _why_not_reserved() -> str:
    """Why reserving addresses has a price here; empty: it has none."""
    for name, limit in (("-v", resource.RLIMIT_AS), ("-d", resource.RLIMIT_DATA)):
        if resource.getrlimit(limit)[0] != resource.RLIM_INFINITY:
            return f"`ulimit {name}` is set"
    if _OVERCOMMIT.exists() and kernel_text(_OVERCOMMIT).strip() == _NEVER:
        return "vm.overcommit_memory is 2"
    return ""
