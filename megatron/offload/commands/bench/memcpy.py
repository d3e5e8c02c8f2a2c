# SPDX-License-Identifier: Apache-2.0
"""What the tier in host memory is compared with: `Memcpy`, plain copies by as many threads.

`command.py` makes one for each block size and depth, on a CPU only.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import itertools
import mmap
import time

from megatron.offload.commands.bench.sample import Sample, Stopwatch, random_storage


class Memcpy:
    """The least that copies to host memory cost: memmove in `depth` threads, huge pages."""

    def __init__(self, block_bytes: int, num_blocks: int, depth: int) -> None:
        self._block_bytes = block_bytes
        self._num_blocks = num_blocks
        self._buffers = [random_storage(block_bytes) for _ in range(depth)]
        memory = mmap.mmap(-1, block_bytes * num_blocks)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = (ctypes.c_char * len(memory)).from_buffer(memory)
        self.run("write", None)

    def run(self, operation: str, seconds: float | None) -> Sample:
        """One timed piece: all blocks once, or over and over for `seconds`."""
        watch = Stopwatch()
        end = None if seconds is None else time.perf_counter() + seconds
        depth = len(self._buffers)
        with concurrent.futures.ThreadPoolExecutor(depth) as threads:
            counts = threads.map(lambda index: self._copy(index, operation, end), range(depth))
            return watch.stop(sum(counts) * self._block_bytes)

    # Runs in one thread for each buffer; waits for nothing.
    def _copy(self, index: int, operation: str, end: float | None) -> int:
        buffer, start = self._buffers[index].data_ptr(), ctypes.addressof(self._memory)
        places = range(index, self._num_blocks, len(self._buffers))
        num_copied = 0
        for place in places if end is None else itertools.cycle(places):
            if num_copied and end is not None and time.perf_counter() >= end:
                break
            memory = start + place * self._block_bytes
            is_read = operation == "read" or (operation == "mixed" and num_copied % 2 == 1)
            target, source = (buffer, memory) if is_read else (memory, buffer)
            ctypes.memmove(target, source, self._block_bytes)
            num_copied += 1
        return num_copied
