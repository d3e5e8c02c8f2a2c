# SPDX-License-Identifier: Apache-2.0
"""A device whose work lags behind, on a CPU: `SimulatedDevice`.

Its memory is host memory that nothing outside it may touch directly. Operations run when they are
queued; copies run later, in a thread for each direction. It keeps the time at which each storage
was last written, and by which stream, and what each stream and the host have waited for. So every
missing wait shows, as poison or as an AssertionError:
- a copy to the host that does not wait for its source's producer finds poison, as if that had still
  been queued, and so does one whose source was freed before it ran;
- an operation that uses memory which another stream wrote last, or which the copies from the host
  own, raises unless its stream was told to wait (`use_after`, and `wait_for_stream` for a model);
- fresh memory is poison, and copies take a while, so whoever does not wait for one reads poison;
- a staging buffer is poisoned when it is taken, so a copy that still needed it copies poison.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.offload.device.cpu import CpuDevice
from megatron.offload.device.device import WHOLE, Device
from megatron.offload.tiers.staging import StagingBuffer, StagingPool
from tests.support.waiting import SOON_S

POISON = 0xDB
STORE, LOAD = "store", "load"  # the streams of the copies

Times = dict[str, int]  # by stream: what was queued there before has been waited for


@dataclass(eq=False)
class Event:
    """A moment in the queue of a stream: what it had waited for by then.

    Attributes:
        happened: of a copy: it has run.
        error: it failed.
    """

    seen: Times
    happened: threading.Event | None = None
    error: Exception | None = None


@dataclass
class Write:
    """The last operation or copy that writes a storage."""

    time: int
    stream: str
    copied: list[Event] = field(default_factory=list)  # the copies into it
    users: set[str] = field(default_factory=set)  # streams that memory of the copies is used on


class CopyStream:
    """Runs copies one after the other, in a thread that there is only while there are some."""

    def __init__(self, before_each: Callable[[], None]) -> None:
        self._before_each = before_each
        self._queue: collections.deque[tuple[Callable[[], None], Event]] = collections.deque()
        self._is_running = False
        self._lock = threading.Lock()  # protects the above

    def put(self, work: Callable[[], None], event: Event) -> None:
        with self._lock:
            self._queue.append((work, event))
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="simulated copies", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._is_running = False
                    return
                work, event = self._queue.popleft()
            try:
                self._before_each()
                work()
            except Exception as error:
                event.error = error
            assert event.happened is not None
            event.happened.set()
            del work, event


class SimulatedDevice(CpuDevice):
    """See `Device` for the calls. Run the model under `computing()`.

    Attributes:
        num_copies: that were queued.
    """

    is_host = False

    def __init__(self, slowest_copy_s: float = 0.002) -> None:
        super().__init__()
        self.num_copies = 0
        self._own = threading.local()  # each thread's stream, if it has been put on one
        self._time = 0
        # The last operation, by storage identity until it is freed.
        self._written: dict[int, Write] = {}
        self._seen: dict[str, Times] = collections.defaultdict(dict)  # by each stream
        self._seen_by_host: Times = {}
        self._slowest_copy_s = slowest_copy_s
        self._random = random.Random(7)
        self._lock = threading.Lock()  # protects the above
        self._may_run = threading.Event()
        self._may_run.set()
        self._store, self._load = (CopyStream(self._take_a_while) for _ in range(2))

    # -- Compute ----------------------------------------------------------------------------------

    def computing(self) -> TorchDispatchMode:
        """A context in which every operation is queued work of this device."""
        return _Recording(self)

    def queued(self, storage: torch.UntypedStorage) -> None:
        """An operation that writes a storage was queued."""
        with self._lock:
            self._write(storage, self.stream)

    def check_use(self, storage: torch.UntypedStorage) -> None:
        """An operation that uses a storage is queued: runs when what its stream waits for has.

        Raises:
            AssertionError: its stream does not wait.
        """
        with self._lock:
            last = self._written.get(storage._cdata)
            if last is None or last.stream == self.stream:
                return
            has_waited = self._seen[self.stream].get(last.stream, 0) >= last.time
            copied = list(last.copied)
        assert has_waited, f"{self.stream} has not waited for memory that {last.stream} wrote"
        if last.stream == LOAD:
            assert self.stream in last.users, "memory of the copies, not kept for this stream"
            for event in copied:
                self._wait_for_copy(event)

    def wait_for_stream(self, other: str) -> None:
        """The calling thread's stream waits for another one, as a model has its streams wait."""
        with self._lock:
            self._merge(self._seen[self.stream], self._seen[other])
            self._seen[self.stream][other] = self._time

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

    # -- Events -----------------------------------------------------------------------------------

    def record_event(self, stream: Any = None) -> Any:
        with self._lock:
            return self._event(stream or self.stream)

    def wait_for_event(self, event: Any) -> None:
        """Operations have run when they were queued; copies run at their own time."""
        if event is None:
            return
        self._wait_for_copy(event)
        with self._lock:
            self._merge(self._seen_by_host, event.seen)

    def gets_back(self, storage: torch.UntypedStorage) -> bool:
        return self.is_host or storage.resizable()

    def use_after(self, storage: torch.UntypedStorage, events: Iterable[Any]) -> None:
        with self._lock:
            for event in events:
                self._merge(self._seen[self.stream], event.seen)
            last = self._written.get(storage._cdata)
            if last is not None:
                last.users.add(self.stream)

    # -- Copies -----------------------------------------------------------------------------------

    def copy_to_host(
        self, source: torch.UntypedStorage, address: int, after: Any, part: slice = WHOLE
    ) -> Any:
        start, stop, _ = part.indices(source.nbytes())
        place, weak = (source.nbytes(), source.data_ptr()), weakref.ref(source)

        def copy() -> None:
            alive = weak()
            is_there = alive is not None and (alive.nbytes(), alive.data_ptr()) == place
            if is_in_time and is_there:
                ctypes.memmove(address, place[1] + start, stop - start)
            else:
                ctypes.memset(address, POISON, stop - start)

        with self._lock:
            last = self._written.get(source._cdata)
            seen = self._seen_by_host if after is None else after.seen
            is_in_time = last is None or seen.get(last.stream, 0) >= last.time
            return self._queue_copy(copy, STORE, self._store)

    def new_restored(self, num_bytes: int) -> torch.UntypedStorage:
        storage = super().new_restored(num_bytes)
        ctypes.memset(storage.data_ptr(), POISON, num_bytes)
        with self._lock:
            self._write(storage, LOAD)
        return storage

    def restored_is_free(self) -> Any:
        with self._lock:
            return self._event(LOAD)

    def copy_from_host(
        self, address: int, target: torch.UntypedStorage, part: slice = WHOLE
    ) -> Any:
        start, stop, _ = part.indices(target.nbytes())

        def copy() -> None:  # it keeps the target, whose memory is in truth not the stream's own
            ctypes.memmove(target.data_ptr() + start, address, stop - start)

        with self._lock:
            last = self._written.get(target._cdata)
            assert last is not None and last.stream == LOAD, "not memory of the copies' stream"
            self._time += 1
            last.time = self._time
            last.copied.append(self._queue_copy(copy, LOAD, self._load))
            return last.copied[-1]

    @contextlib.contextmanager
    def copies_held(self) -> Iterator[None]:
        """No copy runs before the end."""
        self._may_run.clear()
        try:
            yield
        finally:
            self._may_run.set()

    def _take_a_while(self) -> None:
        """Before each copy, in its stream's thread."""
        assert self._may_run.wait(timeout=SOON_S)
        with self._lock:
            duration_s = self._random.uniform(0.0005, self._slowest_copy_s)
        time.sleep(duration_s)

    def annotate(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    # -- What has waited for what -----------------------------------------------------------------

    def _queue_copy(self, work: Callable[[], None], stream: str, runs: CopyStream) -> Event:
        """Called under the lock."""
        self.num_copies += 1
        event = self._event(stream)
        event.happened = threading.Event()
        runs.put(work, event)
        return event

    def _write(self, storage: torch.UntypedStorage, stream: str) -> None:
        """Called under the lock."""
        self._time += 1
        if storage._cdata not in self._written:
            weakref.finalize(storage, self._written.pop, storage._cdata, None)
        self._written[storage._cdata] = Write(self._time, stream)

    def _event(self, stream: str) -> Event:
        """Called under the lock."""
        return Event({**self._seen[stream], stream: self._time})

    @staticmethod
    def _merge(seen: Times, other: Times) -> None:
        for stream, moment in other.items():
            seen[stream] = max(seen.get(stream, 0), moment)

    @staticmethod
    def _wait_for_copy(event: Event) -> None:
        if event.happened is not None:
            assert event.happened.wait(timeout=SOON_S), "a copy did not run"
        if event.error is not None:
            raise event.error


class _Recording(TorchDispatchMode):
    """Notes which storages each operation writes."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = set()
        for storage in _storages((args, kwargs)):
            self._device.check_use(storage)
            read.add(storage._cdata)
        result = func(*args, **kwargs)
        if func.overloadpacket is torch.ops.aten.set_:
            return result  # it touches no bytes
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
    """Small host buffers that turn to poison as soon as somebody takes them, and at the end."""

    def __init__(self, num_buffers: int, device: Device, **told: Any) -> None:
        super().__init__(num_buffers, device, piece_bytes=8192, **told)

    @contextlib.contextmanager
    def buffer(self) -> Iterator[StagingBuffer]:
        with super().buffer() as buffer:
            ctypes.memset(buffer.address, POISON, self.piece_bytes)
            try:
                yield buffer
            finally:
                if buffer.event is None:
                    ctypes.memset(buffer.address, POISON, self.piece_bytes)


class GatedDevice(SimulatedDevice):
    """Its copies wait at a gate, and fail with `error` where it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def _take_a_while(self) -> None:
        assert self.gate.wait(timeout=SOON_S)
        if self.error is not None:
            raise self.error
