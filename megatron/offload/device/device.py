# SPDX-License-Identifier: Apache-2.0
"""What tiers need of the device that computes: the `Device` protocol.

`cpu.py` and `accelerator.py` implement it, `open.py` chooses; the tests have one that only
simulates an asynchronous device.

Note [Who waits for whom]
Compute queues its operations on a stream and runs ahead of the device. An event is recorded in a
stream and comes when everything queued there before it has run. Copies are queued too, on streams
of their own: whole storages to the host, pieces to the host, and all that comes back. An event
comes when their bytes have arrived.
- A copy to the host must not read what is still being produced. The thread that captures records
  one event for all that it hands over; each copy waits for it: on the device where a storage is
  copied as a whole, and else in the I/O thread that wants a piece, because what is queued behind a
  copy that waits would wait as well.
- A copy from the host fills memory that belongs to the stream of these copies, so no other stream's
  operations can still be queued for it and it waits for nothing. Compute's stream is told to wait
  for the copy when the memory is used, and the memory is not reused before that stream is done with
  it (`use_after`). That is the stream that is current in `unpack`: a layer may have parts on
  streams of their own, and backward runs each operation on the stream that it had in forward.
- Autograd holds what it saved until backward, so a script may use it on a stream beside the one
  that the memory belongs to, and not say so to the allocator. Offload and replay free that memory
  sooner. So what moves is kept for each stream that saves it and that backward uses it on
  (`used_on`, `Reader.note_use`). An operation that saves nothing of what it reads is seen by no
  hook: where it is on a stream of its own, the script has to hold the tensor until the streams have
  met, or to call `record_stream`.
- Parameters leave long before the device has come to their last use, and the next ones are to come
  into their memory. There the copies from the host wait, on the device, for the streams that have
  used it (`refill_after`), and the allocator need not.
- The host memory at the other end of a copy is reused when the copy's event has come. A thread that
  wants a staging buffer waits for that; for whole storages a thread of the tier does.
So the thread that trains never waits for a copy back. In backward it waits for a drive's read that
it needs, and for the device where it is too far ahead of it
(`activations/transfer/run_ahead_limit.py`); in forward only at the bound on bytes in flight, for
the oldest writes. A write's transfer holds the memory until the copy from it has ended, so the
allocator never sees a storage that a copy still reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from megatron.offload.device.platform import PeakReader
from megatron.offload.device.room import Room

WHOLE = slice(None)  # all bytes of a storage


def memory_at(address: int, num_bytes: int) -> memoryview:
    """A writable view of `num_bytes` of raw host memory. The caller keeps its owner alive."""
    return memoryview(_bytes_type(num_bytes).from_address(address)).cast("B")


def bytes_at(address: int, num_bytes: int) -> ctypes.Array[ctypes.c_char]:
    """The same as an object of `ctypes`, which attributes and finalizers can be given to."""
    return _bytes_type(num_bytes).from_address(address)


# Python makes a type for each length and soon forgets it; to make one takes longer than its use.
@functools.lru_cache(maxsize=1024)
def _bytes_type(num_bytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * num_bytes


class Device(Protocol):
    """The memory that activations live in, and the streams of work that use it."""

    device: torch.device
    is_host: bool  # its memory is host memory: I/O may work on it in place
    pins_host_memory: bool  # copies overlap only with page-locked host memory
    room: Room  # of all that reads ahead into its memory

    def current_stream(self) -> Any:
        """The stream that the calling thread is on: there go its operations, memory and events."""
        ...

    def use_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Puts the calling thread on this device and one of its streams, as a context."""
        ...

    def record_event(self, stream: Any = None) -> Any:
        """An event in a stream, recorded now; None: in that of the calling thread."""
        ...

    def wait_for_event(self, event: Any) -> None:
        """Blocks the calling thread until the device has passed an event.

        Raises:
            RuntimeError: an operation on the device has failed.
        """
        ...

    def copy_to_host(
        self, source: torch.UntypedStorage, address: int, after: Any, part: slice = WHOLE
    ) -> Any:
        """Queues a copy of a part of a storage's bytes to host memory.

        Args:
            source: on this device; not freed before the copy has ended.
            address: of host memory, where the part's first byte goes.
            after: an event; no byte is read before the device has passed it. None: the caller has
                waited for the storage's producer, and this copy is to pass those that wait.
            part: bytes of the storage, with a step of 1; what lies beyond its end is left out.

        Returns:
            An event that comes when the bytes have arrived.
        """
        ...

    def new_restored(self, num_bytes: int) -> torch.UntypedStorage:
        """Fresh memory to copy to, contents undefined; for operations only after `use_after`."""
        ...

    def alloc_storage(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Gives a storage without memory what `new_restored` would; views of it stay valid."""
        ...

    def free_storage(self, storage: torch.UntypedStorage) -> None:
        """Takes a storage's memory, which is reused once the streams of `use_after` have run."""
        ...

    def restored_is_free(self) -> Any:
        """An event after which the host or a drive may fill memory of `new_restored`."""
        ...

    def copy_from_host(
        self, address: int, target: torch.UntypedStorage, part: slice = WHOLE
    ) -> Any:
        """Queues a copy from host memory that fills a part of a storage's bytes.

        Args:
            address: of host memory, where the part's first byte comes from; not changed before the
                copy has ended.
            target: from `new_restored`.
            part: bytes of the storage, with a step of 1; what lies beyond its end is left out.

        Returns:
            An event that comes when the bytes have arrived.
        """
        ...

    def gets_back(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage's memory serves others once it is freed.

        Else its owner keeps it: a library that allocated it itself (Transformer Engine's grouped
        FP8 buffers), or a captured graph.
        """
        ...

    def use_after(self, storage: torch.UntypedStorage, events: Iterable[Any]) -> None:
        """Operations that the calling thread queues from now on may use a storage.

        On the device they wait for the events, and once the storage is freed, its memory is not
        reused before they have run.

        Args:
            storage: whose memory may belong to another stream.
            events: after which it has its bytes.
        """
        ...

    def wait_on_stream(self, events: Iterable[Any]) -> None:
        """Operations that the calling thread queues from now on wait for events, on the device."""
        ...

    def refill_after(self, streams: Iterable[Any]) -> None:
        """Copies from the host that are queued from now on wait for what streams have queued.

        So memory of `new_restored` that these streams have used, and no others, may be freed at
        once: the next owner of it waits for the event of `restored_is_free`.

        Args:
            streams: of `current_stream`.
        """
        ...

    def used_on(self, tensor: torch.Tensor, stream: Any) -> None:
        """A stream uses a tensor's memory: once freed, it is not reused before that has run.

        Args:
            tensor: it has its bytes already; its memory may belong to another stream.
            stream: of `current_stream`.
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

    def peak_reader(self) -> PeakReader:
        """Makes a reader of the most of `allocated_bytes` at any moment, from now on.

        Each user has its own, and does not notice when another resets its: they share a device.
        """
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

    def has_passed(self, timestamp: Any) -> bool:
        """Whether the device has come to a timestamp. Does not wait."""
        ...

    def seconds_between(self, earlier: Any, later: Any) -> float:
        """Seconds between two timestamps, as the device saw it. Waits until it has passed both."""
        ...

    def number(self, tensor: torch.Tensor) -> float:
        """What a tensor of one element holds, which the device has computed.

        Waits for nothing that is queued, see `has_passed`.
        """
        ...

    def annotate(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """A range with this name in profiles and traces."""
        ...
