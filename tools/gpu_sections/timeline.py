# SPDX-License-Identifier: Apache-2.0
"""What ran at the same time, from a profiler's trace: intervals, and `Timeline`.

The overlap section reads one per run. Times are seconds; nothing here knows of torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Interval = tuple[float, float]  # begin and end

WAIT = "activation offload: wait for a read"  # the engine's name for it in traces
_SMALL_BYTES = 64 << 10  # copies of a loss, of a seed
_US = 1e-6


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points in time, in order, none of them twice."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Of intervals that do not overlap."""
    return sum(end - begin for begin, end in intervals)


def common(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """What lies in both of two unions."""
    found: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            found.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


@dataclass(frozen=True)
class Timeline:
    """Unions of what the device and the training thread did."""

    compute: list[Interval]  # kernels
    stores: list[Interval]  # copies from the device to the host
    loads: list[Interval]
    waits: list[Interval]  # of the training thread, for reads

    @classmethod
    def from_events(cls, events: Iterable[Mapping[str, Any]]) -> Timeline:
        """From `traceEvents` of a Chrome trace that torch's profiler wrote (times in us)."""
        compute, stores, loads, waits = [], [], [], []
        for event in events:
            if event.get("ph") != "X":
                continue
            begin = float(event["ts"]) * _US
            interval = (begin, begin + float(event.get("dur", 0)) * _US)
            category, name = event.get("cat", ""), event.get("name", "")
            if category == "kernel":
                compute.append(interval)
            elif category == "gpu_memcpy" and _is_large(event):
                if "DtoH" in name:
                    stores.append(interval)
                elif "HtoD" in name:
                    loads.append(interval)
            elif name == WAIT and not category.startswith("gpu"):
                waits.append(interval)
        return cls(union(compute), union(stores), union(loads), union(waits))

    @property
    def copies(self) -> list[Interval]:
        """In either direction."""
        return union([*self.stores, *self.loads])

    @property
    def span_s(self) -> float:
        """From the first kernel or copy to the last."""
        everything = [*self.compute, *self.stores, *self.loads]
        if not everything:
            return 0.0
        return max(end for _, end in everything) - min(begin for begin, _ in everything)

    def figures(self) -> dict[str, float | None]:
        """Seconds, and fractions of copy time during which a kernel ran (None: no copies)."""
        copies = self.copies
        hidden_s = length(common(copies, self.compute))
        return {
            "span_s": self.span_s,
            "compute_s": length(self.compute),
            "idle_s": self.span_s - length(self.compute),
            "store_s": length(self.stores),
            "load_s": length(self.loads),
            "copy_s": length(copies),
            "hidden_s": hidden_s,
            "exposed_s": length(copies) - hidden_s,
            "wait_s": length(self.waits),
            "stall_s": length(self.waits) - length(common(self.waits, self.compute)),
            "store_overlap": _share(self.stores, self.compute),
            "load_overlap": _share(self.loads, self.compute),
            "overlap": _share(copies, self.compute),
        }


def _is_large(event: Mapping[str, Any]) -> bool:
    num_bytes = event.get("args", {}).get("bytes")
    return num_bytes is None or int(num_bytes) >= _SMALL_BYTES


def _share(part: list[Interval], of: list[Interval]) -> float | None:
    return length(common(part, of)) / length(part) if part else None
