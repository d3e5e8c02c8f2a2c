# SPDX-License-Identifier: Apache-2.0
"""Host buffers through which a device's bytes pass on their way to and from drives: `StagingPool`.

An SSD tier has one if its device has memory of its own; `access.py` borrows a buffer while a thread
works on a transfer. The pool moves no bytes.

Note [Staging in pieces]
A thread copies a piece to a buffer, writes it to the drive, copies the next: while one thread
copies, the others write, so the drive is always busy. A thread that reads fills a buffer from the
drive, queues the copy to the device, and fills another buffer meanwhile. A buffer that is returned
while a copy from it is queued keeps the copy's event, and its next user waits for that event. There
are more buffers than threads, and the buffer that was returned first is used first.
Between two pieces of a write a thread may take a read (Note [Writes in pieces] in `io_threads.py`),
in place too. So page-locked memory depends on the number of threads and not on the bytes in flight.
A piece must be so large that the other costs of a copy are small: two calls of the driver, an event
and the wake-up of a thread, some 50 to 100 microseconds together. 16 MiB take 0.7 ms at the 25 GB/s
that a PCIe 4.0 x16 link reaches, 0.3 ms at PCIe 5.0's 50 GB/s, and 2 ms or more at the drive. These
numbers are computed, not measured; `bandwidthTest --mode=shmoo` of NVIDIA's CUDA samples shows a
machine's rate by size.
"""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.offload.device.device import Device
from megatron.offload.sizes import MIB, format_size
from megatron.offload.tiers.arena import HostArena
from megatron.offload.tiers.purpose import ACTIVATIONS, Purpose

logger = logging.getLogger(__name__)

PIECE_BYTES = 16 * MIB


@dataclass(slots=True)
class StagingBuffer:
    """A buffer of the pool, used by one thread at a time.

    Attributes:
        address: of its first byte.
        event: of the last copy from it; None: no copy uses it.
    """

    address: int
    event: Any = None


class StagingPool:
    """Page-aligned host buffers of equal size. Thread-safe.

    Args:
        num_buffers: one for each thread that may need one, and some that are copied from; a thread
            that finds none waits.
        device: copies from and to them. If it pins host memory, they are page-locked for it;
            pageable, with a line in the log, if the system refuses that.
        piece_bytes: size of a buffer, a multiple of the files' alignment.
        purpose: what it is for, in sentences.
    """

    def __init__(
        self,
        num_buffers: int,
        device: Device,
        *,
        piece_bytes: int = PIECE_BYTES,
        purpose: Purpose = ACTIVATIONS,
    ) -> None:
        self._device = device
        self.piece_bytes = piece_bytes
        self.size_bytes = num_buffers * piece_bytes
        self._arena = HostArena(self.size_bytes, device, purpose)
        start = self._arena.allocate(self.size_bytes)
        if start is None:
            self._arena.close()
            logger.warning(
                "%sthe %s of staging buffers are pageable memory, so copies between device and SSD "
                "are slower; raise the limit of locked memory (ulimit -l)",
                purpose.prefix,
                format_size(self.size_bytes),
            )
            self._arena = HostArena(self.size_bytes, purpose=purpose)
            start = self._arena.allocate(self.size_bytes)
        assert start is not None
        # A `SimpleQueue`, because a finalizer may put into it at any moment.
        self._free: queue.SimpleQueue[StagingBuffer] = queue.SimpleQueue()
        for number in range(num_buffers):
            self._free.put(StagingBuffer(self._arena.address(start) + number * piece_bytes))

    @contextlib.contextmanager
    def buffer(self) -> Iterator[StagingBuffer]:
        """A context with a buffer; the caller sets `event` if it queues a copy from it."""
        buffer = self._free.get()
        try:
            if buffer.event is not None:
                self._device.wait_for_event(buffer.event)
                buffer.event = None
            yield buffer
        finally:
            self._free.put(buffer)

    def close(self) -> None:
        """Frees the memory when no copy uses it. No buffer may be taken after it."""
        while not self._free.empty():
            buffer = self._free.get()
            if buffer.event is not None:
                self._device.wait_for_event(buffer.event)
        self._arena.close()
