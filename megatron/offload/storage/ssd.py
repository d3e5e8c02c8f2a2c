# SPDX-License-Identifier: Apache-2.0
"""Activations in a file on an SSD: `SsdTier`.

The engine opens one per rank. It owns the file, the extents in it and the I/O threads. On a CPU it
writes straight from, and reads straight into, the memory that tensors use (`direct.py` says how).
"""

from __future__ import annotations

import collections
import ctypes
import logging
import threading
from pathlib import Path

import torch

from megatron.offload.config import MIB, format_size
from megatron.offload.storage.direct import Edges, aligned_storage, cut, memory_at
from megatron.offload.storage.extents import ExtentAllocator
from megatron.offload.storage.file import UnlinkedFile, no_space
from megatron.offload.storage.tier import TierStatistics
from megatron.offload.storage.transfer import ByteBudget, IoThreads, Priority, Transfer

logger = logging.getLogger(__name__)

GROWTH_BYTES = 256 * MIB  # the file grows by so much at a time, to lie on the disk in few pieces
FILE_BLOCK_BYTES = 4096


class SsdBlock:
    """One storage's bytes in the file: an extent for the aligned body, the edges in memory."""

    def __init__(self, tier: SsdTier, offset: int, edges: Edges, head: bytes, tail: bytes) -> None:
        self._tier = tier
        self.offset = offset
        self.edges = edges
        self.head = head
        self.tail = tail
        self.num_bytes = sum(edges)

    def __del__(self) -> None:
        # May run in any thread, even inside an allocation under the tier's lock: only append.
        self._tier._freed.append(self.offset)

    def __str__(self) -> str:
        return (
            f"file in {self._tier.directory}, offset {self.offset}, length {self.edges.body_bytes}"
        )


class SsdTier:
    """One preallocated, unlinked file on one mount point. See `Tier` for the calls.

    Args:
        directory: an existing directory on the SSD.
        reserve_bytes: allocated now, so that a disk that is too small shows before training.
        budget_bytes: the file never grows beyond it; None: until the disk is full.
        inflight_bytes: most bytes queued or being written; beyond it `begin_write` waits.
        num_threads: I/O threads, the queue depth that the drive sees.
        io: `auto`, `direct` or `buffered`, see `OffloadConfig.io`.

    Raises:
        ConfigurationError: the directory cannot hold the file; the message says why.
    """

    def __init__(
        self,
        directory: Path,
        *,
        reserve_bytes: int = 0,
        budget_bytes: int | None = None,
        inflight_bytes: int = 512 * MIB,
        num_threads: int = 4,
        io: str = "auto",
    ) -> None:
        self.directory = directory
        self.budget_bytes = budget_bytes
        self.statistics = TierStatistics()
        self.degraded = False
        self._full = False
        self._file = UnlinkedFile(directory, io)
        self._extents = ExtentAllocator(max(self._file.alignment.offset, FILE_BLOCK_BYTES))
        self._budget = ByteBudget(inflight_bytes)
        # Extents of dead blocks, taken in at the next allocation.
        self._freed: collections.deque[int] = collections.deque()
        # Protects extents, statistics and the two flags. Held for microseconds (or one fallocate,
        # when the file grows); nothing waits for I/O or takes another lock under it.
        self._lock = threading.Lock()
        reserve = self._extents.round_up(reserve_bytes) if reserve_bytes else 0
        try:
            self._file.grow(reserve)
        except OSError as error:
            self._file.close()
            raise no_space(directory, reserve, error) from None
        if reserve:
            self._extents.grow(reserve)
        self._threads = IoThreads(num_threads, name="activation-offload-io")

    def __str__(self) -> str:
        kind = "direct I/O" if self._file.is_direct else "buffered I/O"
        return f"{self.directory} ({kind})"

    @property
    def used_bytes(self) -> int:
        """Bytes of the file taken by live blocks."""
        with self._lock:
            self._take_in_freed()
            return self._extents.used_bytes

    @property
    def capacity_bytes(self) -> int:
        """The file's present size; it grows up to the budget."""
        return self._file.size_bytes

    def begin_write(self, source: torch.UntypedStorage) -> tuple[SsdBlock, Transfer] | None:
        """See `Tier.begin_write`. The edges are copied now, the body by an I/O thread."""
        address, num_bytes = source.data_ptr(), source.nbytes()
        edges = cut(address, num_bytes, self._file.alignment)
        with self._lock:
            self._take_in_freed()
            offset = None if self.degraded else self._allocate(edges.body_bytes)
        if offset is None:
            return None
        head = ctypes.string_at(address, edges.head_bytes)
        tail = ctypes.string_at(address + num_bytes - edges.tail_bytes, edges.tail_bytes)
        block = SsdBlock(self, offset, edges, head, tail)
        self._budget.acquire(num_bytes)
        transfer = self._threads.submit(Priority.WRITE, lambda: self._write(source, block))
        transfer.add_done_callback(lambda _: self._budget.release(num_bytes))
        return block, transfer

    def begin_read(self, block: SsdBlock) -> tuple[torch.UntypedStorage, Transfer]:
        """See `Tier.begin_read`. The target is aligned like the source was."""
        target = aligned_storage(block.num_bytes, block.edges.head_bytes, self._file.alignment)
        return target, self._threads.submit(Priority.READ, lambda: self._read(target, block))

    def close(self) -> None:
        """Waits for the transfers under way, then closes the file, which frees its space."""
        self._threads.close()
        self._file.close()

    # Runs in an I/O thread.
    def _write(self, source: torch.UntypedStorage, block: SsdBlock) -> None:
        head, body, _ = block.edges
        try:
            self._file.write(memory_at(source.data_ptr() + head, body), block.offset)
        except OSError as error:
            with self._lock:
                self._degrade(error)
            raise
        with self._lock:
            self.statistics.written_bytes += body

    # Runs in an I/O thread.
    def _read(self, target: torch.UntypedStorage, block: SsdBlock) -> None:
        address = target.data_ptr()
        head, body, tail = block.edges
        ctypes.memmove(address, block.head, head)
        ctypes.memmove(address + head + body, block.tail, tail)
        self._file.read(memory_at(address + head, body), block.offset)
        with self._lock:
            self.statistics.read_bytes += body

    def _allocate(self, num_bytes: int) -> int | None:
        """Called under the lock. An extent, growing the file where there is none free."""
        offset = self._extents.allocate(num_bytes)
        if offset is not None:
            return offset
        wanted = max(self._extents.round_up(num_bytes), GROWTH_BYTES)
        if self.budget_bytes is not None:
            granule = self._extents.granule
            left = (self.budget_bytes - self._file.size_bytes) // granule * granule
            wanted = min(wanted, left)
        try:
            if wanted > 0:
                self._file.grow(wanted)
                self._extents.grow(wanted)
        except OSError as error:
            self._warn_full(f"the disk is full ({error.strerror})")
            return None
        offset = self._extents.allocate(num_bytes)
        if offset is None:
            self._warn_full("--activation-offload-ssd-budget is used up")
        return offset

    def _warn_full(self, reason: str) -> None:
        if not self._full:
            self._full = True
            logger.warning(
                "activation offload: %s: %s; the file holds %s; what does not fit stays in device "
                "memory",
                self.directory,
                reason,
                format_size(self._file.size_bytes),
            )

    def _degrade(self, error: OSError) -> None:
        """Called under the lock."""
        self.statistics.failed_writes += 1
        if not self.degraded:
            self.degraded = True
            logger.warning(
                "activation offload: a write in %s failed (%s); its bytes are still in memory and "
                "nothing is lost; from now on activations stay in device memory; check the disk",
                self.directory,
                error,
            )

    def _take_in_freed(self) -> None:
        """Called under the lock."""
        while self._freed:
            self._extents.free(self._freed.popleft())
