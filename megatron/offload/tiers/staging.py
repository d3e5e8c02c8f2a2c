# SPDX-License-Identifier: Apache-2.0
"""Host buffers through which a device's bytes pass on their way to and from drives: `StagingPool`.

An SSD tier has one if its device has memory of its own; `access.py` borrows a buffer for as long as
a thread works on a transfer. It moves no bytes.

Note [Staging in pieces]
A thread copies a piece to a buffer, writes it to the drive, copies the next: while one thread
copies, the others write, so the drive always has something to do. A thread that reads fills a
buffer from the drive, queues the copy to the device, and fills another one meanwhile. A buffer that
is given back while a copy from it is queued keeps the copy's event, and who takes it next waits for
that; there are more than threads, and the one that was given back first is taken first.
Between two pieces of a write a thread may turn to a read (Note [Writes in pieces] in
`io_threads.py`), in place too.
Page-locked memory then depends on how many threads there are and not on how much is in flight.
A piece has to be so large that what a copy costs besides its bytes does not count: two calls of the
driver, an event, a thread that sleeps and is woken, some 50 to 100 microseconds together. 16 MiB
take 0.7 ms at the 25 GB/s that a PCIe 4.0 x16 link reaches, 0.3 ms at PCIe 5.0's 50 GB/s, and 2 ms
or more at the drive. That is reckoned, not measured; `bandwidthTest --mode=shmoo` of NVIDIA's CUDA
samples shows a machine's rate by size.
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
    """A buffer, for whoever has taken it.

    Attributes:
        address: of its first byte.
        event: of the last copy from it; None: nobody copies from it.
    """

    address: int
    event: Any = None


class StagingPool:
    """Page-aligned host buffers of equal size. Thread-safe.

    Args:
        num_buffers: one for each thread that may want one, and some that are copied from; who finds
            none waits.
        device: that copies from and to them. If it pins host memory, they are page-locked for it;
            pageable, with a line in the log, where the system refuses that.
        piece_bytes: what a buffer holds, a multiple of whatever files ask for.
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
        # Of a kind that a finalizer may put something into, whatever it interrupts.
        self._free: queue.SimpleQueue[StagingBuffer] = queue.SimpleQueue()
        for number in range(num_buffers):
            self._free.put(StagingBuffer(self._arena.address(start) + number * piece_bytes))

    @contextlib.contextmanager
    def buffer(self) -> Iterator[StagingBuffer]:
        """A buffer that is the caller's until the end, which sets its event where it copies."""
        buffer = self._free.get()
        try:
            if buffer.event is not None:
                self._device.wait_for_event(buffer.event)
                buffer.event = None
            yield buffer
        finally:
            self._free.put(buffer)

    def close(self) -> None:
        """Gives the memory back when no copy uses it. Nobody may take a buffer any more."""
        while not self._free.empty():
            buffer = self._free.get()
            if buffer.event is not None:
                self._device.wait_for_event(buffer.event)
        self._arena.close()
