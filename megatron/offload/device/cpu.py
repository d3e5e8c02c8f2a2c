# SPDX-License-Identifier: Apache-2.0
"""The CPU as a device: `CpuDevice`. Its memory is this process's, its operations never queue."""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch

from megatron.offload.device.device import WHOLE
from megatron.offload.device.room import Room
from megatron.offload.machine.allocator import MIMALLOC, allocator_name, return_freed_memory
from megatron.offload.machine.kernel_text import kernel_text
from megatron.offload.machine.memory_limit import memory_limit

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_RETURNING_S = 2.0  # at least, from one time to the next: pages that come again cost time
_FIRST_STEPS = 2  # see `CpuDevice.begin_phase`


class CpuDevice:
    """A CPU: operations are done when they return; its memory is the process's resident set."""

    device = torch.device("cpu")
    is_host = True
    pins_host_memory = False

    def __init__(self) -> None:
        self.room = Room()
        self._keeps_by_size = allocator_name() == MIMALLOC
        self._returned_s: dict[str, float] = {}  # by phase of the step: when the last time
        self._num_steps = 0

    def current_stream(self) -> None:
        """None: operations are done when they return, so a CPU has no streams."""

    def use_stream(self, stream: None) -> contextlib.AbstractContextManager[Any]:
        """A context that does nothing: a CPU has no streams."""
        return contextlib.nullcontext()

    def record_event(self, stream: None = None) -> None:
        """None: whatever came before has been done."""

    def wait_for_event(self, event: None) -> None:
        """Returns at once: whatever came before has been done."""

    def copy_to_host(
        self, source: torch.UntypedStorage, address: int, after: None, part: slice = WHOLE
    ) -> None:
        """Copies the bytes `part` of a storage to `address` now, without the interpreter lock."""
        start, stop, _ = part.indices(source.nbytes())
        ctypes.memmove(address, source.data_ptr() + start, stop - start)

    def new_restored(self, num_bytes: int) -> torch.UntypedStorage:
        """Fresh host memory of `num_bytes`, contents undefined."""
        return torch.empty(num_bytes, dtype=torch.uint8).untyped_storage()

    def alloc_storage(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Gives a storage without memory fresh memory of `num_bytes`."""
        storage.resize_(num_bytes)

    def free_storage(self, storage: torch.UntypedStorage) -> None:
        """Takes a storage's memory."""
        storage.resize_(0)

    def restored_is_free(self) -> None:
        """None: fresh memory is free."""

    def copy_from_host(
        self, address: int, target: torch.UntypedStorage, part: slice = WHOLE
    ) -> None:
        """Fills the bytes `part` of a storage from `address` now, without the interpreter lock."""
        start, stop, _ = part.indices(target.nbytes())
        ctypes.memmove(target.data_ptr() + start, address, stop - start)

    def gets_back(self, storage: torch.UntypedStorage) -> bool:
        """Always: what moves is host memory, of any allocator."""
        return True

    def use_after(self, storage: torch.UntypedStorage, events: Iterable[None]) -> None:
        """Does nothing: whatever came before has been done."""

    def wait_on_stream(self, events: Iterable[None]) -> None:
        """Does nothing."""

    def refill_after(self, streams: Iterable[None]) -> None:
        """Does nothing."""

    def used_on(self, tensor: torch.Tensor, stream: None) -> None:
        """Does nothing: a CPU has no streams."""

    def pin(self, address: int, num_bytes: int) -> None:
        """Does nothing: copies from host memory to host memory are none the better for it."""

    def unpin(self, address: int) -> None:
        """Does nothing."""

    def allocated_bytes(self) -> int:
        """Bytes of the process's resident set."""
        return _status_bytes("VmRSS")

    def reusable_bytes(self) -> None:
        """None: what the allocator holds for reuse is a part of the resident set."""

    def peak_reader(self) -> ResidentPeakReader:
        """Has the kernel track the resident set's peak from now on; short peaks are not missed."""
        return ResidentPeakReader()

    def return_freed_memory(self) -> None:
        """Makes the allocator return to the system what it keeps for reuse."""
        return_freed_memory()

    def begin_phase(self, name: str) -> None:
        """Makes mimalloc return what the last phase has left, unless it did so just now.

        It keeps free blocks for others of about their size, which the next phase has few of. In the
        first steps it always does: states come between what the first step has left, the second
        takes other blocks, and how much both are together would depend on how long a step takes.
        """
        self._num_steps += name == "step"
        now_s = time.monotonic()
        last_s = self._returned_s.get(name, -math.inf)
        is_time = self._num_steps <= _FIRST_STEPS or now_s - last_s >= _RETURNING_S
        if self._keeps_by_size and is_time:
            self._returned_s[name] = now_s
            self.return_freed_memory()

    def free_bytes(self) -> int:
        """Bytes that the machine or the container has left; other processes may take them too."""
        return memory_limit().available_bytes

    def timestamp(self) -> float:
        """Seconds on a clock that only goes forward."""
        return time.perf_counter()

    def seconds_between(self, earlier: float, later: float) -> float:
        """Seconds from one timestamp to another."""
        return later - earlier

    def has_passed(self, timestamp: float) -> bool:
        """True: whatever came before has been done."""
        return True

    def number(self, tensor: torch.Tensor) -> float:
        """What a tensor of one element holds."""
        return tensor.item()

    def annotate(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """A range with this name in torch's profiler, as a context."""
        return torch.profiler.record_function(name)


class ResidentPeakReader:
    """Reads the peak of the process's resident set, as if no other reader reset it."""

    _all: ClassVar[weakref.WeakSet[ResidentPeakReader]] = weakref.WeakSet()  # share one counter
    _lock = threading.Lock()  # protects what they remember, from a look at the peak to its reset

    def __init__(self) -> None:
        self._remembered_bytes = 0  # since the last reset, until another reader's
        with self._lock:
            self._all.add(self)
        self.reset()

    def reset(self) -> None:
        """Makes `peak_bytes` count from now on."""
        with self._lock:
            peak_bytes = _status_bytes("VmHWM")
            for one in self._all:
                one._remembered_bytes = max(one._remembered_bytes, peak_bytes)
            self._remembered_bytes = 0
            _CLEAR_REFS.write_text(_RESET_PEAK)

    def peak_bytes(self) -> int:
        """The most bytes of the resident set at any moment since `reset`."""
        with self._lock:
            return max(self._remembered_bytes, _status_bytes("VmHWM"))


def _status_bytes(field: str) -> int:
    for line in kernel_text(_STATUS).split("\n"):
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {field}: peak memory on a CPU needs Linux")
