# SPDX-License-Identifier: Apache-2.0
"""An accelerator as the tiers see it: `AcceleratorDevice`, the same for every kind.

See Note [Who waits for whom] in `device.py`. Copies run on streams of their own, so that they
overlap compute and each other; host memory should be pinned (`pin`), else the driver copies through
a buffer of its own and blocks the copying thread. Everything goes through torch's module of the
device's kind, on CUDA `torch.cuda`; the rest is the kind's `Platform`.

Note [Threads and devices]
A new thread stands on the first device. What it does there, even to leave a stream of another
device, opens a context on that device: on CUDA about half a gigabyte, once for each process that
trains on another one. So whatever may run in a thread of ours first puts it on this device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from megatron.offload.device.device import WHOLE, memory_at
from megatron.offload.device.graph_memory import GraphMemory
from megatron.offload.device.platform import PeakReader, Platform
from megatron.offload.device.room import Room


class AcceleratorDevice:
    """An accelerator, with streams of its own for copies in either direction. Thread-safe.

    `open_device` makes one for a process: torch's allocator gives memory that it holds for one
    stream to no other stream, so activations, states, parameters and gradients, which share these
    streams, share the memory too.

    Args:
        device: of any kind but the CPU; without an index the current one.
        platform: of its kind.
    """

    is_host = False
    pins_host_memory = True

    def __init__(self, device: torch.device, platform: Platform) -> None:
        self._module = torch.get_device_module(device)
        self.platform = platform
        self.room = Room()
        index = self._module.current_device() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        self._index: int = index
        self._graph_memory = GraphMemory(index)
        # Device to host, while forward computes: whole storages, each after its producer, and
        # pieces whose producers were waited for, which are not to wait behind those.
        self._store = self._module.Stream(self.device)
        self._pieces = self._module.Stream(self.device)
        self._load = self._module.Stream(self.device)  # host to device, while backward computes

    def current_stream(self) -> Any:
        """The stream that the calling thread is on, on this device."""
        return self._module.current_stream(self.device)

    @contextlib.contextmanager
    def use_stream(self, stream: Any) -> Iterator[None]:
        """Puts the calling thread on this device and one of its streams, as a context."""
        with self._on_device(), self._module.stream(stream):
            yield

    def record_event(self, stream: Any = None) -> Any:
        """An event in a stream, recorded now; a thread that waits for it sleeps. See `Device`."""
        event = self.platform.new_event()
        event.record(self.current_stream() if stream is None else stream)
        return event

    def wait_for_event(self, event: Any) -> None:
        """Blocks the calling thread, asleep, until the device has passed an event, if given one."""
        if event is not None:
            with self._on_device():
                event.synchronize()

    def copy_to_host(
        self, source: torch.UntypedStorage, address: int, after: Any, part: slice = WHOLE
    ) -> Any:
        """Queues a copy of the bytes `part` of a storage to `address`, after an event."""
        content = _bytes_of(source)[part]
        stream = self._pieces if after is None else self._store
        with self.use_stream(stream):
            if after is not None:
                stream.wait_event(after)
            _bytes_at(address, content.nbytes).copy_(content, non_blocking=True)
            return self.record_event(stream)

    def new_restored(self, num_bytes: int) -> torch.UntypedStorage:
        """Fresh device memory of `num_bytes` that belongs to the stream of copies from the host."""
        with self.use_stream(self._load):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device).untyped_storage()

    def alloc_storage(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Gives an emptied storage memory that belongs to the stream of copies from the host."""
        with self.use_stream(self._load):
            storage.resize_(num_bytes)

    def free_storage(self, storage: torch.UntypedStorage) -> None:
        """Gives a storage's memory to the allocator, which waits for the streams that used it."""
        with self._on_device():
            storage.resize_(0)

    def restored_is_free(self) -> Any:
        """An event behind the copies that may still fill what was freed of that memory."""
        return self.record_event(self._load)

    def copy_from_host(
        self, address: int, target: torch.UntypedStorage, part: slice = WHOLE
    ) -> Any:
        """Queues a copy that fills the bytes `part` of a storage from `address`."""
        content = _bytes_of(target)[part]
        with self.use_stream(self._load):
            content.copy_(_bytes_at(address, content.nbytes), non_blocking=True)
            return self.record_event(self._load)

    def gets_back(self, storage: torch.UntypedStorage) -> bool:
        """Whether torch's allocator gave the memory, and no captured graph has it."""
        return storage.resizable() and not self._graph_memory.has(storage)

    def use_after(self, storage: torch.UntypedStorage, events: Iterable[Any]) -> None:
        """The calling thread's stream waits for events, and the memory is kept until it has run."""
        self.wait_on_stream(events)
        _bytes_of(storage).record_stream(self.current_stream())

    def wait_on_stream(self, events: Iterable[Any]) -> None:
        """The calling thread's stream waits for events."""
        stream = self.current_stream()
        for event in events:
            stream.wait_event(event)

    def refill_after(self, streams: Iterable[Any]) -> None:
        """The stream of copies from the host waits for what these have queued."""
        for stream in streams:
            self._load.wait_event(self.record_event(stream))

    def used_on(self, tensor: torch.Tensor, stream: Any) -> None:
        """Has the allocator keep a tensor's memory, once it is freed, until the stream has run."""
        if self._graph_memory.has(tensor.untyped_storage()):
            return  # only replays use it anew, in the order that the script gives them
        tensor.record_stream(stream)  # the allocator ignores the stream that owns the memory

    def pin(self, address: int, num_bytes: int) -> None:
        """Page-locks a range of host memory for this device.

        Raises:
            RuntimeError: the system or the driver refuses.
        """
        with self._on_device():
            self.platform.pin(address, num_bytes)

    def unpin(self, address: int) -> None:
        """Ends what `pin` began at this address."""
        with self._on_device():
            self.platform.unpin(address)

    def allocated_bytes(self) -> int:
        """Bytes that tensors take on this device, without what the allocator holds for reuse."""
        # Not `memory_allocated`: torch makes a sorted table of all counters for it.
        stats = self._module.memory_stats_as_nested_dict(self._index)
        return int(stats["allocated_bytes"]["all"]["current"]) if stats else 0

    def reusable_bytes(self) -> int:
        """Bytes that the allocator holds for reuse, fragments among them."""
        return int(self._module.memory_reserved(self.device)) - self.allocated_bytes()

    def peak_reader(self) -> PeakReader:
        """Reads the most bytes that tensors took, from now on: others read torch's counters too."""
        return self.platform.peak_reader(self.device)

    def return_freed_memory(self) -> None:
        """Does nothing: `allocated_bytes` counts no freed memory."""

    def begin_phase(self, name: str) -> None:
        """Does nothing: `allocated_bytes` counts no freed memory."""

    def free_bytes(self) -> int:
        """Bytes that the driver has left, and those that the allocator holds for reuse."""
        free, _ = self._module.mem_get_info(self.device)
        return int(free) + self.reusable_bytes()

    def timestamp(self) -> Any:
        """An event with a time, in the calling thread's stream."""
        event = self._module.Event(enable_timing=True)
        event.record(self.current_stream())
        return event

    def has_passed(self, timestamp: Any) -> bool:
        """Whether the device has come to a timestamp. Does not wait."""
        with self._on_device():
            return bool(timestamp.query())

    def number(self, tensor: torch.Tensor) -> float:
        """What a tensor of one element holds: copied on a stream that nothing else waits on."""
        with self.use_stream(self._numbers):
            return tensor.item()

    @functools.cached_property
    def _numbers(self) -> Any:
        return self._module.Stream(self.device)

    def seconds_between(self, earlier: Any, later: Any) -> float:
        """Seconds that the device took between two timestamps. Waits until it has passed both."""
        with self._on_device():
            earlier.synchronize()
            later.synchronize()
            return float(earlier.elapsed_time(later)) / 1000.0

    @contextlib.contextmanager
    def annotate(self, name: str) -> Iterator[None]:
        """A range with this name in the vendor's and in torch's profiler, as a context."""
        with torch.profiler.record_function(name), self.platform.annotate(name):
            yield

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        """See Note [Threads and devices]."""
        return self._module.device(self._index)  # by its number: torch looks at anything else first


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _bytes_at(address: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(memory_at(address, num_bytes), dtype=torch.uint8)
