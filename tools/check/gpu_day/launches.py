# SPDX-License-Identifier: Apache-2.0
"""Job: microseconds of the launching thread for each call of the device layer that a step makes.

Host time on purpose: it is what the thread that launches pays, whatever the device does meanwhile.
`parts.py` lists it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from check.gpu_day.link import finish
from check.gpu_day.settings import Settings
from megatron.offload.device.open import open_device
from megatron.offload.sizes import MIB
from megatron.offload.tiers.arena import HostArena

Note = Callable[[dict[str, Any]], None]
_WARM = 20


def calls(settings: Settings, note: Note) -> dict[str, Any]:
    """Microseconds a call, the mean of many."""
    device = open_device(settings.device)
    tiny = torch.ones(8, device=settings.device)
    arena = HostArena(4 * MIB, device)
    place = arena.allocate(64 * 1024)
    assert place is not None
    small = torch.ones(64 * 1024, dtype=torch.uint8, device=settings.device).untyped_storage()
    event = device.record_event()
    stamps: list[Any] = []
    each: dict[str, tuple[Callable[[], object], int]] = {
        "a kernel": (lambda: tiny.add_(1), 2000),
        "record_event": (device.record_event, 2000),
        "timestamp": (lambda: stamps.append(device.timestamp()), 1000),
        "use_after": (lambda: device.use_after(small, (event,)), 2000),
        "new_restored, 8 MiB": (lambda: device.new_restored(8 * MIB), 500),
        "copy_to_host, 4 KiB": (
            lambda: device.copy_to_host(small, arena.address(place), None, slice(0, 4096)),
            500,
        ),
        "copy_from_host, 4 KiB": (
            lambda: device.copy_from_host(arena.address(place), small, slice(0, 4096)),
            500,
        ),
        "allocated_bytes": (device.allocated_bytes, 300),
        "wait_for_event, passed": (lambda: device.wait_for_event(event), 1000),
        "wait_for_event, just recorded": (
            lambda: device.wait_for_event(device.record_event()),
            200,
        ),
    }
    found: dict[str, Any] = {"us": {}}
    for name, (call, count) in each.items():
        for _ in range(_WARM):
            call()
        finish(device)
        count = settings.few(count, 3)
        began_s = time.perf_counter()
        for _ in range(count):
            call()
        found["us"][name] = (time.perf_counter() - began_s) / count * 1e6
        finish(device)
        stamps.clear()
        note(found)
    arena.close()
    return found
