# SPDX-License-Identifier: Apache-2.0
"""A CUDA GPU as the tiers see it: `CudaDevice`. The only file that calls `torch.cuda`.

See Note [Who waits for whom] in `device.py`. Copies run on two streams of their own, so that they
overlap compute and each other; host memory should be pinned (`pin`), else CUDA copies through a
buffer of its own and holds the copying thread up. What the rest of the package wants to know of
CUDA without having a device it asks the functions here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from megatron.offload.device.cuda_peak import PeakReader, shared_counters
from megatron.offload.device.device import WHOLE, memory_at


class CudaDevice:
    """A CUDA GPU, with a stream of its own for copies in either direction. Thread-safe."""

    is_host = False
    pins_host_memory = True

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._store = torch.cuda.Stream(self.device)  # device to host, while forward computes
        self._load = torch.cuda.Stream(self.device)  # host to device, while backward computes

    def current_stream(self) -> torch.cuda.Stream:
        """The CUDA stream that the calling thread is on, on this GPU."""
        return torch.cuda.current_stream(self.device)

    def use_stream(self, stream: torch.cuda.Stream) -> contextlib.AbstractContextManager[Any]:
        """Puts the calling thread on a CUDA stream, as a context."""
        return torch.cuda.stream(stream)

    def new_storage(self, num_bytes: int) -> torch.UntypedStorage:
        """Fresh device memory of `num_bytes` that belongs to the calling thread's stream."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device).untyped_storage()

    def record_event(self) -> torch.cuda.Event:
        """An event in the calling thread's stream, recorded now; who waits for it sleeps."""
        event = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait_for_event(self, event: torch.cuda.Event) -> None:
        """Blocks the calling thread, asleep, until the GPU has passed an event."""
        with torch.cuda.device(self.device):  # see `_copy`
            event.synchronize()

    def copy_to_host(
        self,
        source: torch.UntypedStorage,
        address: int,
        after: torch.cuda.Event,
        part: slice = WHOLE,
    ) -> None:
        """Copies the bytes `part` of a storage to `address`, after an event. Returns when done."""
        content = _bytes_of(source)[part]
        self._copy(_bytes_at(address, content.nbytes), content, self._store, after)

    def copy_from_host(
        self,
        address: int,
        target: torch.UntypedStorage,
        after: torch.cuda.Event,
        part: slice = WHOLE,
    ) -> None:
        """Fills the bytes `part` of a storage from `address`, after an event. Returns when done."""
        content = _bytes_of(target)[part]
        self._copy(content, _bytes_at(address, content.nbytes), self._load, after)

    def allocated_bytes(self) -> int:
        """Bytes that tensors take on this GPU, without what the allocator holds for reuse."""
        return torch.cuda.memory_allocated(self.device)

    def reusable_bytes(self) -> int:
        """Bytes that the allocator holds for reuse, fragments among them."""
        return torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    def reset_peak(self) -> None:
        """Starts `peak_bytes` anew for this object alone: others read torch's counters too."""
        self._peak.reset()

    def peak_bytes(self) -> int:
        """The most bytes that tensors took at any moment since `reset_peak`."""
        return self._peak.peak_bytes()

    @functools.cached_property
    def _peak(self) -> PeakReader:
        return shared_counters().reader(self.device.index)

    def return_freed_memory(self) -> None:
        """Does nothing: `allocated_bytes` counts no freed memory."""

    def begin_phase(self, name: str) -> None:
        """Does nothing: `allocated_bytes` counts no freed memory."""

    def free_bytes(self) -> int:
        """Bytes that the driver has left, and those that the allocator holds for reuse."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + self.reusable_bytes()

    def timestamp(self) -> torch.cuda.Event:
        """An event with a time, in the calling thread's stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.current_stream())
        return event

    def seconds_between(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        """Seconds that the GPU took from one event to another. Waits until it has passed both."""
        earlier.synchronize()
        later.synchronize()
        return float(earlier.elapsed_time(later)) / 1000.0

    @contextlib.contextmanager
    def annotate(self, name: str) -> Iterator[None]:
        """A range with this name in NVTX (Nsight) and in torch's profiler, as a context."""
        with torch.profiler.record_function(name), torch.cuda.nvtx.range(name):
            yield

    def _copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        stream: torch.cuda.Stream,
        after: torch.cuda.Event,
    ) -> None:
        """Runs in an I/O thread. Its own event, not the stream: other threads queue copies too."""
        # A new thread stands on the first device, and would open a context there.
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event(blocking=True)  # the thread sleeps instead of spinning
            done.record(stream)
            done.synchronize()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _bytes_at(address: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(memory_at(address, num_bytes), dtype=torch.uint8)


# -- Without a device -----------------------------------------------------------------------------


def has_cuda() -> bool:
    """Whether torch sees a CUDA device."""
    return torch.cuda.is_available()


def all_properties() -> list[Any]:
    """What torch tells of each CUDA device. Raises whatever a broken driver raises."""
    return [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]


def pin(address: int, num_bytes: int) -> None:
    """Page-locks a range of host memory, for the device that the calling thread is on.

    Raises:
        RuntimeError: the system or the driver refuses.
    """
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
    except RuntimeError:
        _forget_error()
        raise


def unpin(address: int) -> None:
    """Ends what `pin` began at this address."""
    # What it returns changes nothing: at exit the driver may be gone already.
    torch.cuda.cudart().cudaHostUnregister(address)


def _forget_error() -> None:
    """CUDA remembers a failed call, and torch would raise it at its next kernel: raise it here."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
