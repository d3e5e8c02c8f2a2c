# SPDX-License-Identifier: Apache-2.0
"""What a file can do, tried for a few seconds: `measure_bandwidth`, `has_fallocate`.

`doctor` calls it before a run. It moves blocks of the size of a small activation from several
threads at once, as the SSD tier does, in an `UnlinkedFile`, so nothing is left behind.
"""

from __future__ import annotations

import collections
import concurrent.futures
import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.offload.sizes import MIB
from megatron.offload.tiers.direct_io import BUFFERED
from megatron.offload.tiers.file import UnlinkedFile

BLOCK_BYTES = 4 * MIB
DEPTHS = (1, 4, 16)
SAMPLE_BYTES = 256 * MIB  # moved for each measurement
LIMIT_S = 1.5  # and for no longer than this, if the drive is slow

Move = Callable[[memoryview, int], None]


@dataclass(frozen=True)
class Bandwidth:
    """What a drive achieved with `depth` blocks in flight."""

    depth: int
    write_bytes_per_s: float
    read_bytes_per_s: float


def measure_bandwidth(
    file: UnlinkedFile,
    num_bytes: int = SAMPLE_BYTES,
    depths: Sequence[int] = DEPTHS,
    limit_s: float = LIMIT_S,
    advance: Callable[[], object] = lambda: None,
) -> list[Bandwidth]:
    """Writes and reads up to `num_bytes` for each depth, each for at most about `limit_s`.

    Args:
        file: an empty file; it grows to `num_bytes`.
        advance: called after each of the `1 + 2 * len(depths)` passes.

    Raises:
        OSError: the file system refused to allocate, write or read.
    """
    num_blocks = max(num_bytes // BLOCK_BYTES, 1)
    file.grow(num_blocks * BLOCK_BYTES)
    buffers = _buffers(max(depths))
    # Not timed: the first write to a block is slower, and a run writes each block many times.
    num_blocks = _move_blocks(file.write, num_blocks, buffers, limit_s)
    advance()
    measured = []
    for depth in depths:
        written = _timed(file, file.write, num_blocks, buffers[:depth], limit_s)
        advance()
        if file.alignment == BUFFERED:
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        read = _timed(file, file.read, num_blocks, buffers[:depth], limit_s)
        advance()
        measured.append(Bandwidth(depth, written, read))
    return measured


def has_fallocate(file: UnlinkedFile) -> bool:
    """Whether the file system can reserve space; else the C library writes to every block."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    failed = fallocate(file.fd, 0, 0, mmap.PAGESIZE)
    is_missing = bool(failed) and ctypes.get_errno() in (errno.EOPNOTSUPP, errno.ENOSYS)
    os.ftruncate(file.fd, file.size_bytes)
    return not is_missing


def _buffers(num_buffers: int) -> list[memoryview]:
    """Aligned memory, filled with bytes that no drive or file system can compress."""
    sample = os.urandom(BLOCK_BYTES)
    buffers = [memoryview(mmap.mmap(-1, BLOCK_BYTES)) for _ in range(num_buffers)]
    for buffer in buffers:
        buffer[:] = sample
    return buffers


def _timed(
    file: UnlinkedFile, move: Move, num_blocks: int, buffers: list[memoryview], limit_s: float
) -> float:
    """Bytes per second."""
    started = time.monotonic()
    num_moved = _move_blocks(move, num_blocks, buffers, limit_s)
    if file.alignment == BUFFERED:
        os.fdatasync(file.fd)  # else it is the page cache's speed
    return num_moved * BLOCK_BYTES / (time.monotonic() - started)


def _move_blocks(move: Move, num_blocks: int, buffers: list[memoryview], limit_s: float) -> int:
    """Moves the first blocks of the file, with one thread for each buffer, until all are moved or
    time is up. Returns the number of blocks moved."""
    deadline = time.monotonic() + limit_s
    offsets = collections.deque(index * BLOCK_BYTES for index in range(num_blocks))

    # Runs in one thread for each buffer; waits for nothing but the drive. `popleft` is atomic.
    def work(buffer: memoryview) -> int:
        num_moved = 0
        while True:
            try:
                offset = offsets.popleft()
            except IndexError:
                return num_moved
            move(buffer, offset)
            num_moved += 1
            if time.monotonic() > deadline:
                return num_moved

    name = "activation-offload-probe"
    with concurrent.futures.ThreadPoolExecutor(len(buffers), name) as threads:
        return sum(threads.map(work, buffers))
