# SPDX-License-Identifier: Apache-2.0
"""A device whose work lags behind, on a CPU: `SimulatedDevice`.

Its memory is host memory that nothing outside it may touch directly. It keeps the time at which
each storage was last written by an operation and makes every missing wait visible as poison:
- a copy to the host that does not wait for an event set after the storage's last operation finds
  poison in the host buffer, as if the producer had still been queued;
- a copy from the host that does not wait for an event set after its target was allocated leaves
  poison in the target, as if an operation of the memory's former user had run late;
- events and fresh memory belong to the stream that their thread is on: an event of another stream
  tells nothing, and an operation that uses memory of another stream raises;
- fresh memory is poison, and copies take a while, so whoever does not wait for one reads poison;
- a staging buffer is poisoned when it is given back, so whoever still needed it reads poison.
Copies of different threads end out of order.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.offload.device.cpu import CpuDevice
from megatron.offload.device.device import WHOLE, Device
from megatron.offload.tiers.staging import StagingPool

POISON = 0xDB


class Event(NamedTuple):
    """A moment in the queue of a stream: how many operations had been queued."""

    time: int
    stream: str


class SimulatedDevice(CpuDevice):
    """See `Device` for the calls. Run the model under `computing()`."""

    is_host = False

    def __init__(self, slowest_copy_s: float = 0.002) -> None:
        super().__init__()
        self.num_copies = 0
        self._own = threading.local()  # each thread's stream, if it has been put on one
        self._time = 0
        # The last operation, by storage identity until it is freed.
        self._written_at: dict[int, Event] = {}
        self._slowest_copy_s = slowest_copy_s
        self._random = random.Random(7)
        self._lock = threading.Lock()  # protects the above

    def computing(self) -> TorchDispatchMode:
        """A context in which every operation is queued work of this device."""
        return _Recording(self)

    def queued(self, storage: torch.UntypedStorage) -> None:
        """An operation that writes a storage was queued."""
        with self._lock:
            self._time += 1
            if storage._cdata not in self._written_at:
                weakref.finalize(storage, self._written_at.pop, storage._cdata, None)
            self._written_at[storage._cdata] = Event(self._time, self.stream)

    def check_stream(self, storage: torch.UntypedStorage) -> None:
        """An operation that uses a storage was queued. Raises AssertionError if it cannot."""
        with self._lock:
            last = self._written_at.get(storage._cdata)
        assert last is None or last.stream == self.stream, "memory of another stream"

    @property
    def stream(self) -> str:
        """The stream that the calling thread is on."""
        return getattr(self._own, "stream", "main")

    @stream.setter
    def stream(self, stream: str) -> None:
        self._own.stream = stream

    def current_stream(self) -> Any:
        return self.stream

    @contextlib.contextmanager
    def use_stream(self, stream: Any) -> Iterator[None]:
        outer, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = outer

    def new_storage(self, num_bytes: int) -> torch.UntypedStorage:
        storage = super().new_storage(num_bytes)
        ctypes.memset(storage.data_ptr(), POISON, num_bytes)
        self.queued(storage)  # the last operation of the memory's former user
        return storage

    def record_event(self) -> Any:
        with self._lock:
            return Event(self._time, self.stream)

    def wait_for_event(self, event: Any) -> None:
        """Operations have really run when they return; copies look at their events themselves."""

    def copy_to_host(
        self, source: torch.UntypedStorage, address: int, after: Any, part: slice = WHOLE
    ) -> None:
        self._take_a_while()
        if self._is_in_time(source, after):
            super().copy_to_host(source, address, None, part)
        else:
            start, stop, _ = part.indices(source.nbytes())
            ctypes.memset(address, POISON, stop - start)

    def copy_from_host(
        self, address: int, target: torch.UntypedStorage, after: Any, part: slice = WHOLE
    ) -> None:
        self._take_a_while()
        if self._is_in_time(target, after):
            super().copy_from_host(address, target, None, part)
        else:
            start, stop, _ = part.indices(target.nbytes())
            ctypes.memset(target.data_ptr() + start, POISON, stop - start)

    def _is_in_time(self, storage: torch.UntypedStorage, after: Any) -> bool:
        with self._lock:
            self.num_copies += 1
            last = self._written_at.get(storage._cdata)
            return isinstance(after, Event) and (
                last is None or (after.stream == last.stream and after.time >= last.time)
            )

    def _take_a_while(self) -> None:
        with self._lock:
            duration_s = self._random.uniform(0.0005, self._slowest_copy_s)
        time.sleep(duration_s)

    def annotate(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


class _Recording(TorchDispatchMode):
    """Notes which storages each operation writes."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        read = set()
        for storage in _storages((args, kwargs)):
            self._device.check_stream(storage)
            read.add(storage._cdata)
        for storage in _storages(result):
            # A view writes nothing; an operation in place writes what it was given.
            if storage._cdata not in read or func._schema.is_mutable:
                self._device.queued(storage)
        return result


def _storages(values: Any) -> list[torch.UntypedStorage]:
    leaves = torch.utils._pytree.tree_leaves(values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]


class PoisoningPool(StagingPool):
    """Small host buffers that turn to poison as soon as they are given back."""

    def __init__(self, num_buffers: int, device: Device | None = None) -> None:
        super().__init__(num_buffers, device, piece_bytes=8192)

    @contextlib.contextmanager
    def buffer(self) -> Iterator[int]:
        with super().buffer() as address:
            try:
                yield address
            finally:
                ctypes.memset(address, POISON, self.piece_bytes)
