# SPDX-License-Identifier: Apache-2.0
"""The peak of a device's allocated memory, for several readers: `shared_counters`.

torch has one set of peak counters for each device, and a reset by one reader changes what all
others read. Planning wants the peak of each step; trainers log the peak of the run (Megatron-LM
from `memory_stats` and `max_memory_allocated`). So before a reset the peaks of all other readers
are remembered, and from the first one on torch's own functions answer as if only their own callers
had reset anything.

Platforms call it, with torch's module of their kind. Two readers never see each other either.
"""

from __future__ import annotations

import collections
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

_PEAK = "peak"


class SharedCounters:
    """torch's peak counters, shared by readers and by all others who read or reset them.

    Made once for a process: it replaces torch's functions.

    Args:
        module: torch's, of a kind of device, with the file `memory` in it.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._stats = module.memory.memory_stats_as_nested_dict
        self._reset = module.memory.reset_peak_memory_stats
        self._readers: weakref.WeakSet[SharedPeakReader] = weakref.WeakSet()
        self._of_others: dict[int, dict[str, Any]] = {}  # what they saw before the last reset
        # Protects all of the above, and the time from a look at a peak to its reset. Nothing else
        # is locked under it but the allocator.
        self._lock = threading.Lock()
        for place in (module, module.memory):
            for function in (self.memory_stats_as_nested_dict, self.reset_peak_memory_stats):
                setattr(place, function.__name__, function)
        for place in (torch.accelerator, torch.accelerator.memory):
            for name in ("memory_stats", "reset_peak_memory_stats"):
                setattr(place, name, self._generic(getattr(place, name), getattr(self, name)))

    def _generic(self, plain: Callable[..., Any], shared: Callable[..., Any]) -> Callable[..., Any]:
        """A function of `torch.accelerator`, which usually is of this kind of device."""

        @functools.wraps(plain)
        def call(device_index: Any = None, /) -> Any:
            accelerator = torch.accelerator.current_accelerator()
            if accelerator is None or torch.get_device_module(accelerator) is not self._module:
                return plain(device_index)
            return shared(device_index)

        return call

    def memory_stats(self, device: Any = None) -> collections.OrderedDict[str, Any]:
        """Stands in for `torch.accelerator`'s function; torch's module of the kind has its own."""
        return collections.OrderedDict(sorted(_flat(self.memory_stats_as_nested_dict(device))))

    def reader(self, index: int) -> SharedPeakReader:
        """Makes a reader for the device with that number; its peak counts from now on."""
        reader = SharedPeakReader(self, index)
        with self._lock:
            self._readers.add(reader)
        reader.reset()
        return reader

    def reset(self, reader: SharedPeakReader) -> None:
        """Starts the peak anew for one reader; other readers do not notice."""
        with self._lock:
            stats = self._remember(reader.index)
            self._of_others[reader.index] = _with_peaks(stats, self._of_others.get(reader.index))
            reader.remembered_bytes = 0
            self._reset(reader.index)

    def peak_bytes(self, reader: SharedPeakReader) -> int:
        """The most bytes of tensors at any moment since the reader's last reset."""
        with self._lock:
            return max(reader.remembered_bytes, _peak_of(self._stats(reader.index)))

    def memory_stats_as_nested_dict(self, device: Any = None) -> dict[str, Any]:
        """Stands in for torch's function: its peaks are those since others have reset them."""
        with self._lock:
            stats = self._stats(device)
            return _with_peaks(stats, self._of_others.get(self._index(device)) if stats else None)

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Stands in for torch's function: readers do not notice the reset."""
        with self._lock:
            index = self._index(device)
            self._remember(index)
            self._of_others.pop(index, None)
            self._reset(device)

    def _remember(self, index: int) -> dict[str, Any]:
        """Notes the peak for all readers of a device, under the lock; returns the counters."""
        stats = self._stats(index)
        for one in self._readers:
            if one.index == index:
                one.remembered_bytes = max(one.remembered_bytes, _peak_of(stats))
        return stats

    def _index(self, device: Any) -> int:
        """As torch takes it: a number, a name, a device or None, the current one."""
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return int(self._module.current_device()) if index is None else index


class SharedPeakReader:
    """Reads the peak of one device's allocated memory, as if no other reader reset it.

    Made by `SharedCounters.reader`.
    """

    def __init__(self, counters: SharedCounters, index: int) -> None:
        self.index = index
        self.remembered_bytes = 0  # since the last reset, until others reset
        self._counters = counters

    def reset(self) -> None:
        """Makes `peak_bytes` count from now on."""
        self._counters.reset(self)

    def peak_bytes(self) -> int:
        """Most bytes of tensors at any moment since `reset`."""
        return self._counters.peak_bytes(self)


@functools.cache
def shared_counters(module: ModuleType) -> SharedCounters:
    """The counters of this process for a kind of device; the first call replaces its functions."""
    return SharedCounters(module)


def _flat(stats: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in stats.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _peak_of(stats: dict[str, Any]) -> int:
    return int(stats["allocated_bytes"]["all"][_PEAK]) if stats else 0


def _with_peaks(stats: dict[str, Any], earlier: dict[str, Any] | None) -> dict[str, Any]:
    """The same with each peak the larger of both."""
    if earlier is None:
        return stats
    result = dict(stats)
    for name, value in stats.items():
        if isinstance(value, dict):
            result[name] = _with_peaks(value, earlier.get(name))
        elif name == _PEAK:
            result[name] = max(value, earlier.get(name, 0))
    return result
