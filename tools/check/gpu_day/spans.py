# SPDX-License-Identifier: Apache-2.0
"""What the device did in a step, from torch's profiler: `device_spans`, and how busy each lane was.

Kernels of one lane that follow each other closely are one span: thousands of them would say no
more. `training.py` calls it, `pictures.py` draws it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from check.gpu_day.link import finish
from check.gpu_day.settings import Settings
from megatron.offload.device.open import open_device

LANES = ("compute", "to host", "from host")
_GAP_US = 20.0  # shorter ones are not shown
_COPIES = {"to host": ("DtoH", "dtoh"), "from host": ("HtoD", "htod")}


def device_spans(step: Callable[[], None], settings: Settings) -> dict[str, Any]:
    """Milliseconds of what ran, by lane, and the share of the step in which each lane was busy."""
    activities = torch.profiler.ProfilerActivity
    device = open_device(settings.device)
    wanted = [activities.CUDA] if settings.on_gpu else [activities.CPU]
    with torch.profiler.profile(activities=wanted) as profile:
        step()
        finish(device)
    events = [
        (event.name, float(event.time_range.start), float(event.time_range.end))
        for event in profile.events()
        if not settings.on_gpu or _is_of_gpu(event)
    ]
    return by_lane(events)


def _is_of_gpu(event: Any) -> bool:
    """A kernel or a copy; ranges that code names are shown on the device as well."""
    is_range = getattr(event, "is_user_annotation", False)
    return str(event.device_type).endswith("CUDA") and not is_range


def by_lane(events: Iterable[tuple[str, float, float]]) -> dict[str, Any]:
    """The same from events: name, beginning and end in microseconds."""
    lanes: dict[str, list[tuple[float, float]]] = {lane: [] for lane in LANES}
    for name, began, ended in events:
        lanes[lane_of(name)].append((began, ended))
    every = [span for spans in lanes.values() for span in spans]
    if not every:
        return {"step_ms": 0.0, "busy": dict.fromkeys(LANES, 0.0), "lanes": lanes}
    first, last = min(span[0] for span in every), max(span[1] for span in every)
    total = max(last - first, 1e-9)
    return {
        "step_ms": total / 1e3,
        "busy": {lane: sum(e - b for b, e in merged(s, 0.0)) / total for lane, s in lanes.items()},
        "lanes": {
            lane: [[(b - first) / 1e3, (e - b) / 1e3] for b, e in merged(spans, _GAP_US)]
            for lane, spans in lanes.items()
        },
    }


def lane_of(name: str) -> str:
    """The lane of an event by its name."""
    for lane, words in _COPIES.items():
        if any(word in name for word in words):
            return lane
    return "compute"


def merged(spans: Iterable[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Spans in order, those that overlap or are no further apart than `gap` as one."""
    found: list[tuple[float, float]] = []
    for began, ended in sorted(spans):
        if found and began <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(found[-1][1], ended))
        else:
            found.append((began, ended))
    return found
