# SPDX-License-Identifier: Apache-2.0
"""A CUDA runtime for machines without one: `FakeCuda`, behind torch's own functions.

It page-locks nothing and allocates nothing: it notes which host memory is registered, remembers an
error until somebody asks for it, as CUDA does, and counts device memory as torch's allocator does.
Streams and events do nothing, and copies go from host memory to host memory; what is asked of them
is noted, and on which GPUs a context would be opened. torch's own contexts for devices and streams
run on top, unchanged. It shows what the package asks of CUDA, in which order, and what a refusal
leads to; not that CUDA accepts it. The fixture `fake_cuda` installs one; nothing outside the tests
knows it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron.offload.device import platform
from megatron.offload.device.cuda import CudaPlatform

_OUT_OF_MEMORY = 2


class FakeStream:
    """A stream, as torch hands it out."""

    def __init__(self, cuda: FakeCuda, device: int, name: str) -> None:
        self.device = torch.device("cuda", device)
        self.stream_id, self.device_index, self.device_type = name, self.device.index, 1
        self._cuda = cuda

    def __str__(self) -> str:
        return f"{self.stream_id} of {self.device}"

    def wait_event(self, event: FakeEvent) -> None:
        """Notes it."""
        self._cuda.note(f"{self} waits for {event}")


class FakeEvent:
    """An event that has come as soon as it is recorded."""

    def __init__(self, cuda: FakeCuda, name: str, **options: bool) -> None:
        self.name = name
        self._cuda = cuda
        cuda.note(f"{self} is made", **options)

    def __str__(self) -> str:
        return self.name

    def record(self, stream: FakeStream) -> None:
        """Notes it."""
        self._cuda.note(f"{self} is recorded in {stream}")

    def synchronize(self) -> None:
        """Notes it. Of whatever GPU the event is, the driver works in the current one's context."""
        self._cuda.note(f"a thread waits for {self}")
        self._cuda.open_context()

    def query(self) -> bool:
        """Notes it. The driver works in the current GPU's context."""
        self._cuda.note(f"has {self} come?")
        self._cuda.open_context()
        return True

    def elapsed_time(self, later: FakeEvent) -> float:
        """Notes it."""
        self._cuda.note(f"from {self} to {later}")
        return 2000.0


class FakeCuda:
    """Two GPUs, as far as the package asks torch for them.

    Attributes:
        accepts: how many more ranges may be page-locked; the next one is refused.
        pinned: bytes of each page-locked range, by its address, in the order they were locked.
        has_error: a call failed, and no later one has raised its error yet.
        allocated: bytes that tensors take, by GPU.
        peak: the most that they took since the last reset, by GPU.
        calls: what was asked of streams, events and devices, in order, a line each.
        contexts: GPUs on which the driver would have opened a context.
    """

    def __init__(self) -> None:
        self.accepts = 1 << 20
        self.pinned: dict[int, int] = {}
        self.has_error = False
        self.allocated, self.peak = [0, 0], [0, 0]
        self.calls: list[str] = []
        self.contexts: set[int] = set()
        self._num_streams = self._num_events = 0
        self._thread = threading.local()  # the GPU that a thread is on, and its stream on each

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts it behind torch's functions until the test ends."""
        # Another one: devices that were opened with it go with it.
        monkeypatch.setitem(platform._platforms, "cuda", CudaPlatform())
        cuda, memory = torch.cuda, torch.cuda.memory
        monkeypatch.setattr(cuda, "is_available", lambda: True)
        monkeypatch.setattr(cuda, "current_device", lambda: self.gpu)
        monkeypatch.setattr(cuda, "set_device", self.set_device)
        monkeypatch.setattr(cuda, "_exchange_device", self.exchange_device)
        monkeypatch.setattr(cuda, "_maybe_exchange_device", self.maybe_exchange_device)
        monkeypatch.setattr(cuda, "Stream", self.make_stream)
        monkeypatch.setattr(cuda, "current_stream", self.current_stream)
        monkeypatch.setattr(cuda, "set_stream", self.set_stream)
        monkeypatch.setattr(cuda, "Event", self.make_event)
        monkeypatch.setattr(cuda, "memory_reserved", lambda device: self.reserved_bytes)
        monkeypatch.setattr(cuda, "mem_get_info", lambda device: (self.free_bytes, 1 << 40))
        monkeypatch.setattr(cuda.nvtx, "range", self.nvtx_range)
        monkeypatch.setattr(cuda, "cudart", lambda: self)
        monkeypatch.setattr(cuda, "check_error", self.check_error)
        for module in (cuda, memory):
            for function in (self.memory_stats_as_nested_dict, self.reset_peak_memory_stats):
                monkeypatch.setattr(module, function.__name__, function)
        generic = torch.accelerator
        for module in (generic, getattr(generic, "memory", generic)):
            for name in ("memory_stats", "reset_peak_memory_stats"):
                if hasattr(module, name):  # as they are once the test has ended
                    monkeypatch.setattr(module, name, getattr(module, name))
        zeros, empty, copy = torch.zeros, torch.empty, torch.Tensor.copy_

        def launched(*size: Any, device: Any = None, **more: Any) -> torch.Tensor:
            if device is not None and torch.device(device).type == "cuda":
                self.note("a kernel")
                self.contexts.add(self._index(device))
                self._raise_error()
                device = "cpu"
            return zeros(*size, device=device, **more)

        def allocated(*size: Any, device: Any = None, **more: Any) -> torch.Tensor:
            if device is not None and torch.device(device).type == "cuda":
                self.note(f"{size[0]} bytes of {device} for {self.current_stream(device)}")
                device = "cpu"
            return empty(*size, device=device, **more)

        def copied(target: torch.Tensor, source: torch.Tensor, **options: bool) -> torch.Tensor:
            self.note(f"{source.nbytes} bytes are copied on {self.current_stream()}", **options)
            return copy(target, source, **options)

        def kept(tensor: torch.Tensor, stream: FakeStream) -> None:
            self.note(f"{tensor.nbytes} bytes are kept for {stream}")

        monkeypatch.setattr(torch.Tensor, "record_stream", kept)
        monkeypatch.setattr(torch, "zeros", launched)
        monkeypatch.setattr(torch, "empty", allocated)
        monkeypatch.setattr(torch.Tensor, "copy_", copied)

    def note(self, call: str, **options: bool) -> None:
        """Appends a line to `calls`."""
        self.calls.append(" ".join([call, *(f"{name}={value}" for name, value in options.items())]))

    # -- Devices and streams, by the names of torch ----------------------------------------------

    reserved_bytes, free_bytes = 1 << 30, 1 << 33

    @property
    def gpu(self) -> int:
        """The GPU that the calling thread is on; a new thread is on the first one."""
        return getattr(self._thread, "gpu", 0)

    def open_context(self) -> None:
        """A call of the driver that works on the calling thread's GPU."""
        self.contexts.add(self.gpu)

    def set_device(self, device: Any) -> None:
        """As torch does: a context is opened there."""
        self._thread.gpu = self._index(device)
        self.open_context()

    def exchange_device(self, index: int) -> int:
        """As torch does, when a device's context begins."""
        before = self.gpu
        self.note(f"on cuda:{index}")
        self.set_device(index)
        return before

    def maybe_exchange_device(self, index: int) -> int:
        """As torch does, when a device's context ends: opens no context on the former device."""
        before, self._thread.gpu = self.gpu, index
        self.note(f"back on cuda:{index}")
        return before

    def make_stream(self, device: Any = None) -> FakeStream:
        """A new stream, on which nobody is yet."""
        self._num_streams += 1
        return FakeStream(self, self._index(device), f"stream {self._num_streams}")

    def current_stream(self, device: Any = None) -> FakeStream:
        """The calling thread's stream on a GPU."""
        gpu = self._index(device)
        return self._streams.setdefault(gpu, FakeStream(self, gpu, "the first stream"))

    def set_stream(self, stream: FakeStream) -> None:
        """As torch does: puts the thread on the stream's GPU as well, with a context there."""
        self.note(f"on {stream}")
        self._streams[stream.device_index] = stream
        if stream.device_index != self.gpu:
            self.set_device(stream.device_index)

    def make_event(self, **options: bool) -> FakeEvent:
        """A new event."""
        self._num_events += 1
        return FakeEvent(self, f"event {self._num_events}", **options)

    @contextlib.contextmanager
    def nvtx_range(self, name: str) -> Iterator[None]:
        """Notes where it begins and ends."""
        self.note(f"range {name} begins")
        yield
        self.note(f"range {name} ends")

    @property
    def _streams(self) -> dict[int, FakeStream]:
        if not hasattr(self._thread, "streams"):
            self._thread.streams = {}
        streams: dict[int, FakeStream] = self._thread.streams
        return streams

    def _index(self, device: Any) -> int:
        """As torch takes it; without a number the calling thread's GPU."""
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return self.gpu if index is None else index

    # -- Page-locked memory, by the names of CUDA's runtime ------------------------------------

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        """Page-locks whole pages, while `accepts` lasts."""
        assert address % mmap.PAGESIZE == num_bytes % mmap.PAGESIZE == flags == 0
        assert address not in self.pinned
        self.open_context()
        if self.accepts == 0:
            self.has_error = True
            return _OUT_OF_MEMORY
        self.accepts -= 1
        self.pinned[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        """Ends the process if the range has been unmapped, fails if it was never registered."""
        ctypes.string_at(address, 1)
        self.open_context()
        del self.pinned[address]
        return 0

    def check_error(self, code: int) -> None:
        """As `torch.cuda.check_error`."""
        if code:
            raise RuntimeError("out of memory")

    def _raise_error(self) -> None:
        if self.has_error:
            self.has_error = False
            raise RuntimeError("an error of an earlier call")

    # -- Device memory, by the names of torch's allocator ---------------------------------------

    def use(self, num_bytes: int, gpu: int = 0) -> None:
        """Takes memory and gives it back at once."""
        self.peak[gpu] = max(self.peak[gpu], self.allocated[gpu] + num_bytes)

    def take(self, num_bytes: int, gpu: int = 0) -> None:
        """Takes memory for good."""
        self.use(num_bytes, gpu)
        self.allocated[gpu] += num_bytes

    def memory_stats_as_nested_dict(self, device: Any = None) -> dict[str, Any]:
        """As torch has them: pools of counters, and counters that are no pools."""
        gpu = self._index(device)
        counters = {"current": self.allocated[gpu], "peak": self.peak[gpu], "freed": 7}
        pools = {"all": counters, "large_pool": dict(counters)}
        return {"allocated_bytes": pools, "reserved_bytes": {"all": dict(counters)}, "num_ooms": 3}

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """As torch does: for everybody."""
        gpu = self._index(device)
        self.peak[gpu] = self.allocated[gpu]
