# SPDX-License-Identifier: Apache-2.0
"""`torch.lag`: what `torch.cuda` is for CUDA, and what tests do to the device: `LagModule`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch

_PRIVATE_USE_1 = 20  # torch's number for the type of the device
DEFAULT_SEED = 7


@dataclass(frozen=True)
class DeviceProperties:
    """What `get_device_properties` gives."""

    name: str
    total_memory: int
    major: int = 0
    minor: int = 0
    multi_processor_count: int = 1


class Span(NamedTuple):
    """What a stream did from one moment until another, in seconds of `time.monotonic`."""

    device: int
    stream: int
    kind: str  # kernel, copy or sleep
    began_s: float
    ended_s: float


class LagModule:
    """A device is a number, a name or None, which is the current one."""

    __name__ = "torch.lag"
    Stream, Event = torch.Stream, torch.Event

    def __init__(self, extension: ModuleType) -> None:
        self._extension: Any = extension
        self.memory = self  # as `torch.cuda.memory`
        # Of host memory, by address; `host_unregister` waits for all devices.
        self.host_register = extension.host_register
        self.host_unregister = extension.host_unregister

    # -- Devices ----------------------------------------------------------------------------------

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return self._extension.device_count()

    def current_device(self) -> int:
        return self._extension.current_device()

    def set_device(self, device: Any) -> None:
        self._extension.set_device(self._index(device))

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        outer = self.current_device()
        self._extension.set_device(self._index(device))
        try:
            yield
        finally:
            self._extension.set_device(outer)

    def get_device_name(self, device: Any = None) -> str:
        return f"lag {self._index(device)}"

    def get_device_properties(self, device: Any = None) -> DeviceProperties:
        return DeviceProperties(self.get_device_name(device), self._use(device)["total"])

    def _index(self, device: Any) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return self.current_device() if index is None else index

    # -- Streams ----------------------------------------------------------------------------------

    def current_stream(self, device: Any = None) -> torch.Stream:
        return self._stream(self._extension.current_stream(self._index(device)), device)

    def default_stream(self, device: Any = None) -> torch.Stream:
        return self._stream(0, device)

    def _stream(self, number: int, device: Any) -> torch.Stream:
        return torch.Stream(
            stream_id=number, device_index=self._index(device), device_type=_PRIVATE_USE_1
        )

    def set_stream(self, stream: torch.Stream) -> None:
        torch.accelerator.set_stream(stream)

    @contextlib.contextmanager
    def stream(self, stream: torch.Stream | None) -> Iterator[None]:
        # `with stream:` keeps the outer one in the stream's object, which threads may share.
        if stream is None:
            yield
            return
        outer, device = self.current_stream(stream.device_index), self.current_device()
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(outer)
            self._extension.set_device(device)

    def synchronize(self, device: Any = None) -> None:
        self._extension.synchronize(self._index(device))

    # -- Memory -----------------------------------------------------------------------------------

    def memory_allocated(self, device: Any = None) -> int:
        return self._use(device)["allocated_bytes"]["current"]

    def max_memory_allocated(self, device: Any = None) -> int:
        return self._use(device)["allocated_bytes"]["peak"]

    def memory_reserved(self, device: Any = None) -> int:
        return self._use(device)["reserved_bytes"]["current"]

    def max_memory_reserved(self, device: Any = None) -> int:
        return self._use(device)["reserved_bytes"]["peak"]

    def memory_stats_as_nested_dict(self, device: Any = None) -> dict[str, Any]:
        use = self._use(device)
        bytes_by_name = {name: {"all": of} for name, of in use.items() if isinstance(of, dict)}
        counts = {name: use[name] for name in ("num_alloc_retries", "num_ooms", "num_reused")}
        return {**bytes_by_name, **counts}

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        flat: dict[str, int] = {}
        for name, of in self.memory_stats_as_nested_dict(device).items():
            if isinstance(of, dict):
                flat |= {f"{name}.all.{kind}": count for kind, count in of["all"].items()}
            else:
                flat[name] = of
        return flat

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._extension.reset_peak(self._index(device))

    def reset_accumulated_memory_stats(self, device: Any = None) -> None:
        self._extension.reset_accumulated(self._index(device))

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        use = self._use(device)
        return use["total"] - use["reserved_bytes"]["current"], use["total"]

    def empty_cache(self) -> None:
        for device in range(self.device_count()):
            self._extension.empty_cache(device)

    def _use(self, device: Any) -> dict[str, Any]:
        return self._extension.memory_use(self._index(device))

    # -- Random numbers: kernels are seeded by the host's generator -------------------------------

    def manual_seed(self, seed: int) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def _is_in_bad_fork(self) -> bool:
        return self._extension.was_forked()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    # -- What a test does to the device -----------------------------------------------------------

    def late(self, stream: torch.Stream, seconds: float, unasked_seconds: float = 0) -> None:
        """Nothing that is queued on a stream from here on runs before so many seconds from now.

        Args:
            unasked_seconds: what neither a stream waits for, nor a thread that calls this, does not
                run before so many seconds either. A missing wait then shows however slow the host
                is, and one that is there costs no time.
        """
        self._extension.late(
            stream.device_index, stream.stream_id, seconds * 1e6, unasked_seconds * 1e6
        )

    @contextlib.contextmanager
    def held(self, stream: torch.Stream) -> Iterator[None]:
        """Nothing that is queued on a stream from here on runs before the end of the context."""
        self._extension.hold(stream.device_index, stream.stream_id)
        try:
            yield
        finally:
            self._extension.release(stream.device_index, stream.stream_id)

    def sleep(self, seconds: float, stream: torch.Stream | None = None) -> None:
        """Queues work of so many seconds, on the current stream unless another is given."""
        on = self.current_stream() if stream is None else stream
        self._extension.sleep(on.device_index, on.stream_id, seconds * 1e6)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[list[Span]]:
        """From its end on the list has what streams did in the context, by when that began."""
        self._extension.take_spans()
        self._extension.record_spans(True)
        spans: list[Span] = []
        try:
            yield spans
        finally:
            self._extension.record_spans(False)
            taken = itertools.starmap(Span, self._extension.take_spans())
            spans += sorted(taken, key=lambda span: span.began_s)

    def set_delays(
        self, kernel_us: float, copy_us: float, jitter: bool = True, seed: int = DEFAULT_SEED
    ) -> None:
        """Each kernel, and each copy to or from the host, begins so much later on its stream.

        Args:
            jitter: by a random part of that, which the seed decides for each stream.
        """
        self._extension.set_delays(kernel_us, copy_us, jitter, seed)

    def set_launch_cost(self, us: float) -> None:
        """The host is busy for so many microseconds with each kernel and copy that it queues."""
        self._extension.set_launch_cost(us)

    def set_bandwidth(self, to_host: float = 0, from_host: float = 0) -> None:
        """Bytes a second between a device and the host, for all copies of a direction; 0: any.

        A copy ends no sooner on its stream; those of the same direction take turns.
        """
        self._extension.set_bandwidth(to_host, from_host)

    def set_poison(self, poison: bool) -> None:
        """Whether memory that is fresh or freed is overwritten; it is unless a test says no."""
        self._extension.set_poison(poison)

    def limit_memory(self, num_bytes: int, device: Any = None) -> None:
        """The device has that much memory."""
        self._extension.limit_memory(self._index(device), num_bytes)

    def counters(self) -> dict[str, int]:
        """What was done since the process began: kernels, copies, waits of the host."""
        return self._extension.counters()

    def host_waits_by_thread(self) -> dict[int, int]:
        """How often each thread waited for a stream, event or device, by its `native_id`."""
        return self._extension.host_waits_by_thread()

    def reset(self) -> None:
        """Releases what is held, and undoes all that a test has set. Does not wait."""
        self._extension.release_all()
        self.set_delays(0, 0)
        self.set_launch_cost(0)
        self.set_bandwidth()
        self.set_poison(True)
        for device in range(self.device_count()):
            self.limit_memory(1 << 62, device)
