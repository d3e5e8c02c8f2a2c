# SPDX-License-Identifier: Apache-2.0
"""What tiers need of the device that computes: the `Device` protocol.

`cpu.py` and `accelerator.py` implement it, `open.py` chooses; the tests have one that only
simulates an asynchronous device.

Note [Who waits for whom]
Compute queues its operations on a stream and runs ahead of the device. An event is recorded in a
stream and comes when everything queued there before it has run.
- A copy to the host must not read what is still being produced: it waits for an event recorded
  after the storage was saved.
- A copy from the host must not fill memory that the allocator took from a storage whose last
  operations are still queued: it waits for the event recorded when the memory was allocated.
- Both copies return when the bytes have arrived, in the I/O thread that made them. So whoever waits
  for a transfer may use its memory at once, or let it be reused, and needs no event of its own.
A record knows the stream that its operation was on, to which its backward belongs too. Whoever
starts a transfer of it, the dispatcher's thread as a rule, records events and allocates memory on
that stream. The thread that trains waits for transfers only, never for the device. A transfer holds
the memory at both of its ends, so the allocator never sees a storage that a copy still touches.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any, Protocol

import torch

WHOLE = slice(None)  # all bytes of a storage


def memory_at(address: int, num_bytes: int) -> memoryview:
    """A writable view of `num_bytes` of raw host memory. The caller keeps its owner alive."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


class Device(Protocol):
    """The memory that activations live in, and the streams of work that use it."""

    device: torch.device
    is_host: bool  # its memory is host memory: I/O may work on it in place
    pins_host_memory: bool  # copies overlap only with page-locked host memory

    def current_stream(self) -> Any:
        """The stream that the calling thread is on: there go its operations, memory and events."""
        ...

    def use_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Puts the calling thread on this device and one of its streams, as a context."""
        ...

    def new_storage(self, num_bytes: int) -> torch.UntypedStorage:
        """Fresh memory on the device for the calling thread's stream, contents undefined."""
        ...

    def record_event(self) -> Any:
        """An event in the calling thread's stream, recorded now."""
        ...

    def wait_for_event(self, event: Any) -> None:
        """Blocks until the device has passed an event, so that a wait need not count as a copy."""
        ...

    def copy_to_host(
        self, source: torch.UntypedStorage, address: int, after: Any, part: slice = WHOLE
    ) -> None:
        """Copies a part of a storage's bytes to host memory, after an event. Returns when done.

        Args:
            source: on this device.
            address: of host memory, where the part's first byte goes.
            after: from `record_event`; no byte is read before the device has passed it.
            part: bytes of the storage, with a step of 1; what lies beyond its end is left out.
        """
        ...

    def copy_from_host(
        self, address: int, target: torch.UntypedStorage, after: Any, part: slice = WHOLE
    ) -> None:
        """Fills a part of a storage's bytes from host memory, after an event. Returns when done.

        Args:
            address: of host memory, where the part's first byte comes from.
            target: on this device.
            after: from `record_event`; no byte is written before the device has passed it.
            part: bytes of the storage, with a step of 1; what lies beyond its end is left out.
        """
        ...

    def pin(self, address: int, num_bytes: int) -> None:
        """Page-locks whole pages of host memory for this device. Only if it `pins_host_memory`.

        Raises:
            RuntimeError: the system or the driver refuses.
        """
        ...

    def unpin(self, address: int) -> None:
        """Ends what `pin` began at this address."""
        ...

    def allocated_bytes(self) -> int:
        """Device memory that this process uses."""
        ...

    def reusable_bytes(self) -> int | None:
        """Bytes that the allocator holds for reuse beside these; None: not known."""
        ...

    def reset_peak(self) -> None:
        """Makes `peak_bytes` count from now on."""
        ...

    def peak_bytes(self) -> int:
        """The most of `allocated_bytes` at any moment since `reset_peak`."""
        ...

    def return_freed_memory(self) -> None:
        """Makes `allocated_bytes` free of what is only held for reuse, where it counts that."""
        ...

    def begin_phase(self, name: str) -> None:
        """A phase of the step begins, whose blocks are of other sizes than those of the last one.

        Args:
            name: of the phase; it comes back in each step.
        """
        ...

    def free_bytes(self) -> int:
        """Device memory that this process could still take."""
        ...

    def timestamp(self) -> Any:
        """This moment in the calling thread's stream, to measure durations with."""
        ...

    def seconds_between(self, earlier: Any, later: Any) -> float:
        """Seconds between two timestamps, as the device saw it. Waits until it has passed both."""
        ...

    def annotate(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """A range with this name in profiles and traces."""
        ...
