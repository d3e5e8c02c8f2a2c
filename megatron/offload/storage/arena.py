# SPDX-License-Identifier: Apache-2.0
"""Memory for activations that come back: `Arena`.

The SSD tier reads into it. Every layer brings back storages of the same sizes, so a mapping that
one layer is done with serves the next: no page is faulted in anew, and huge pages make the first
touch cheap. `trim` returns it all to the system at the end of a step.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import mmap
import weakref

import torch


class Arena:
    """Page-aligned anonymous memory, reused by exact size (rounded up to pages).

    Thread-safe without a lock: a mapping is given back by a finalizer, which may run in any
    thread at any moment, so free mappings live in deques, whose append and pop are atomic.
    """

    def __init__(self) -> None:
        self._free: dict[int, collections.deque[mmap.mmap]] = collections.defaultdict(
            collections.deque
        )

    def take(self, num_bytes: int, start: int = 0) -> torch.UntypedStorage:
        """A storage of `num_bytes` that begins `start` bytes after a page boundary.

        Its memory comes back to the arena when the storage and every tensor on it are gone.
        Contents are undefined.
        """
        size = -(-(start + num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        free = self._free[size]
        try:
            mapping = free.pop()
        except IndexError:
            mapping = _map(size)
        lease = (ctypes.c_char * size).from_buffer(mapping)
        weakref.finalize(lease, free.append, mapping).atexit = False
        return torch.frombuffer(
            lease, dtype=torch.uint8, offset=start, count=num_bytes
        ).untyped_storage()

    @property
    def idle_bytes(self) -> int:
        """Bytes that wait for reuse."""
        return sum(size * len(free) for size, free in self._free.items())

    def trim(self) -> None:
        """Returns idle memory to the system."""
        for free in self._free.values():
            while free:
                try:
                    mapping = free.pop()
                except IndexError:
                    break
                del mapping  # the last reference unmaps it


def _map(size: int) -> mmap.mmap:
    mapping = mmap.mmap(-1, size)
    for advice in (
        "MADV_HUGEPAGE",  # fewer page faults
        "MADV_DONTFORK",  # a fork during direct I/O would give the copy, not us, the bytes
    ):
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # a kernel without transparent huge pages
                mapping.madvise(getattr(mmap, advice))
    return mapping
