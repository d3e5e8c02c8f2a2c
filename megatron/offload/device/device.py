# SPDX-License-Identifier: Apache-2.0
"""What tiers need of the device that computes: the `Device` protocol, and `CpuDevice`.

`cuda.py` has the CUDA one; the tests have one that only simulates an asynchronous device. Nothing
else in the package calls `torch.cuda`.

Note [Who waits for whom]
Compute queues its operations and runs ahead of the device. A `Mark` is a moment in that queue.
- A copy to the host must not read what is still being produced: it waits for a mark set after the
  storage was saved.
- A copy from the host must not fill memory that the allocator took from a storage whose last
  operations are still queued: it waits for the mark set when the memory was allocated.
- Both copies return when the bytes have arrived, in the I/O thread that made them. So whoever waits
  for a transfer may use its memory at once, or let it be reused, and needs no mark of its own.
A record knows the queue that its operation was in, to which its backward belongs too. Whoever
starts a transfer of it, the dispatcher's thread as a rule, sets marks and allocates memory on that
queue. The thread that trains waits for transfers only, never for the device. A transfer holds the
memory at both of its ends, so the allocator never sees a storage that a copy still touches.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron.offload.device.allocator import return_freed_memory
from megatron.offload.device.memory_limit import memory_limit
from megatron.offload.errors import ConfigurationError

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"

WHOLE = slice(None)  # all bytes of a storage


class Device(Protocol):
    """The memory that activations live in, and the queue of work that uses it."""

    device: torch.device
    is_host: bool  # its memory is host memory: I/O may work on it in place
    pins_host_memory: bool  # copies overlap only with page-locked host memory

    def queue(self) -> Any:
        """The queue that the calling thread is on: there go its operations, memory and marks."""
        ...

    def on(self, queue: Any) -> contextlib.AbstractContextManager[Any]:
        """Puts the calling thread on a queue."""
        ...

    def new_storage(self, num_bytes: int) -> torch.UntypedStorage:
        """Fresh memory on the device for the calling thread's queue, contents undefined."""
        ...

    def mark(self) -> Any:
        """This moment in the calling thread's queue."""
        ...

    def wait_for(self, mark: Any) -> None:
        """Blocks until the device has passed a mark, so that a wait need not count as a copy."""
        ...

    def copy_to_host(
        self, source: torch.UntypedStorage, address: int, after: Any, part: slice = WHOLE
    ) -> None:
        """Copies a part of a storage's bytes to host memory, after a mark. Returns when done."""
        ...

    def copy_from_host(
        self, address: int, target: torch.UntypedStorage, after: Any, part: slice = WHOLE
    ) -> None:
        """Fills a part of a storage's bytes from host memory, after a mark. Returns when done."""
        ...

    def allocated_bytes(self) -> int:
        """Device memory that this process uses."""
        ...

    def reset_peak(self) -> None:
        """`peak_bytes` counts from now on."""
        ...

    def peak_bytes(self) -> int:
        """The most of `allocated_bytes` at any moment since `reset_peak`."""
        ...

    def return_freed_memory(self) -> None:
        """Makes `allocated_bytes` free of what is only held for reuse, where it counts that."""
        ...

    def free_bytes(self) -> int:
        """Device memory that this process could still take."""
        ...

    def timestamp(self) -> Any:
        """This moment in the calling thread's queue, to measure durations with."""
        ...

    def seconds_between(self, earlier: Any, later: Any) -> float:
        """From one timestamp to another, as the device saw it. Waits until it has passed both."""
        ...

    def annotate(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """A range with this name in profiles and traces."""
        ...


class CpuDevice:
    """A CPU: operations are done when they return; its memory is the process's resident set."""

    device = torch.device("cpu")
    is_host = True
    pins_host_memory = False

    def queue(self) -> None:
        """Nothing is ever queued."""

    def on(self, queue: None) -> contextlib.AbstractContextManager[Any]:
        """See `Device`."""
        return contextlib.nullcontext()

    def new_storage(self, num_bytes: int) -> torch.UntypedStorage:
        """See `Device`."""
        return torch.empty(num_bytes, dtype=torch.uint8).untyped_storage()

    def mark(self) -> None:
        """Nothing is ever queued."""

    def wait_for(self, mark: None) -> None:
        """Nothing is ever queued."""

    def copy_to_host(
        self, source: torch.UntypedStorage, address: int, after: None, part: slice = WHOLE
    ) -> None:
        """See `Device`. Releases the interpreter lock meanwhile."""
        start, stop, _ = part.indices(source.nbytes())
        ctypes.memmove(address, source.data_ptr() + start, stop - start)

    def copy_from_host(
        self, address: int, target: torch.UntypedStorage, after: None, part: slice = WHOLE
    ) -> None:
        """See `Device`. Releases the interpreter lock meanwhile."""
        start, stop, _ = part.indices(target.nbytes())
        ctypes.memmove(target.data_ptr() + start, address, stop - start)

    def allocated_bytes(self) -> int:
        """The resident set."""
        return _status_bytes("VmRSS")

    def reset_peak(self) -> None:
        """The kernel tracks the peak, so short ones are not missed."""
        _CLEAR_REFS.write_text(_RESET_PEAK)

    def peak_bytes(self) -> int:
        """The resident set's peak."""
        return _status_bytes("VmHWM")

    def return_freed_memory(self) -> None:
        """See `allocator.py`."""
        return_freed_memory()

    def free_bytes(self) -> int:
        """Of the machine or the container: other processes may take it too."""
        return memory_limit().available_bytes

    def timestamp(self) -> float:
        """See `Device`."""
        return time.perf_counter()

    def seconds_between(self, earlier: float, later: float) -> float:
        """See `Device`."""
        return later - earlier

    def annotate(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """See `Device`."""
        return torch.profiler.record_function(name)


def open_device(device: torch.device | str) -> Device:
    """The layer for a torch device.

    Raises:
        ConfigurationError: there is none for its kind.
    """
    from megatron.offload.device.cuda import CudaDevice

    device = torch.device(device)
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "cuda":
        return CudaDevice(device)
    raise ConfigurationError(
        f"activations on a {device.type} device cannot be offloaded, only on cuda and cpu; use "
        "--activation-offload off"
    )


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {field}: peak memory on a CPU needs Linux")
