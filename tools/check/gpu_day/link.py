# SPDX-License-Identifier: Apache-2.0
"""Jobs about host memory and the link: page-locking, copies either way, products beside copies.

`parts.py` lists them. All of it goes through the package's own device layer, which is what training
uses. On a CPU the same lines copy within host memory, and say nothing of a GPU.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from check.gpu_day.settings import Settings
from megatron.offload.device.device import Device
from megatron.offload.device.open import open_device
from megatron.offload.sizes import GIB, MIB
from megatron.offload.tiers.arena import GROWTH_BYTES, HostArena

Note = Callable[[dict[str, Any]], None]
_PIECE_BYTES = 16 * MIB  # as staging buffers are


def finish(device: Device) -> None:
    """Waits until the device has done all that the current stream was given."""
    device.wait_for_event(device.record_event())
    if not device.is_host:
        torch.accelerator.synchronize(device.device)


def copies(settings: Settings, note: Note) -> dict[str, Any]:
    """GB/s to the host, from it, both ways at once, in pieces; TFLOP/s of a product beside them."""
    device = open_device(settings.device)
    size = settings.few(256 * MIB, 1 * MIB)
    piece = min(_PIECE_BYTES, size // 4)
    found: dict[str, Any] = {"GB_per_s": {}, "product_TFLOP_per_s": {}}
    arena = HostArena(4 * size + GROWTH_BYTES, device)
    to_host, from_host = arena.allocate(size), arena.allocate(size)
    if to_host is None or from_host is None:
        raise RuntimeError(f"host memory of {2 * size} bytes cannot be page-locked")
    source = torch.ones(size, dtype=torch.uint8, device=settings.device).untyped_storage()
    target = device.new_restored(size)
    finish(device)

    def out() -> None:
        device.copy_to_host(source, arena.address(to_host), None)

    def back() -> None:
        device.copy_from_host(arena.address(from_host), target)

    def out_in_pieces() -> None:
        for start in range(0, size, piece):
            part = slice(start, start + piece)
            device.copy_to_host(source, arena.address(to_host) + start, None, part)

    for name, calls in {
        "to host": [out],
        "from host": [back],
        "each way, both at once": [out, back],
        "to host, in pieces of 16 MiB": [out_in_pieces],
    }.items():
        found["GB_per_s"][name] = _rate(device, calls, size, settings.few(20, 2))
        note(found)
    side = settings.few(8192, 64)
    a, b = (torch.randn(side, side, device=settings.device).bfloat16() for _ in range(2))

    def product() -> None:
        a @ b

    for name, beside in {"alone": [], "copies beside it": [out, back]}.items():
        seconds = _seconds(device, [*beside, product], settings.few(30, 2), waits_for_all=False)
        found["product_TFLOP_per_s"][name] = 2 * side**3 / seconds / 1e12
        note(found)
    finish(device)
    arena.close()
    return found


def page_locking(settings: Settings, note: Note) -> dict[str, Any]:
    """Seconds to page-lock a GiB in the arena's own steps; launches of another thread meanwhile."""
    device = open_device(settings.device)
    step = GROWTH_BYTES if not settings.is_tiny else MIB
    steps = settings.few(28, 4)
    began_s = time.perf_counter()
    arena = HostArena(steps * step, device)
    taken = sum(arena.allocate(step) is not None for _ in range(steps))
    seconds = time.perf_counter() - began_s
    found: dict[str, Any] = {
        "GiB": taken * step / GIB,
        "s_per_GiB": seconds / max(taken * step / GIB, 1e-9),
    }
    arena.close()
    note(found)
    found["launch_us"] = _launches(settings, device, step, steps // 2)
    return found


def _launches(settings: Settings, device: Device, step: int, steps: int) -> dict[str, float]:
    """Microseconds that a launch takes while another thread page-locks memory."""
    tiny = torch.ones(8, device=settings.device)
    arena = HostArena(max(steps, 1) * step, device)
    done = threading.Event()

    def lock() -> None:  # waits for nothing of the loop below
        for _ in range(steps):
            arena.allocate(step)
        done.set()

    def timed(until: Callable[[], bool]) -> list[float]:
        spent = []
        while not until() or not spent:
            began_s = time.perf_counter()
            tiny.add_(1)
            spent.append((time.perf_counter() - began_s) * 1e6)
            if len(spent) % 256 == 0:
                finish(device)  # else the queue is full and a launch waits for the device
        return sorted(spent)

    finish(device)
    stop_s = time.perf_counter() + (0.5 if not settings.is_tiny else 0.01)
    alone = timed(lambda: time.perf_counter() > stop_s)
    thread = threading.Thread(target=lock)
    thread.start()
    beside = timed(done.is_set)
    thread.join()
    finish(device)
    arena.close()
    return {
        "median, alone": statistics.median(alone),
        "longest, alone": alone[-1],
        "median, beside": statistics.median(beside),
        "longest, beside": beside[-1],
    }


def _rate(device: Device, calls: list[Callable[[], None]], num_bytes: int, rounds: int) -> float:
    """GB/s of each of the calls, which run at the same time."""
    return num_bytes / _seconds(device, calls, rounds, waits_for_all=True) / 1e9


def _seconds(
    device: Device, calls: list[Callable[[], None]], rounds: int, *, waits_for_all: bool
) -> float:
    """Seconds of device time for one round of calls.

    Args:
        waits_for_all: until all streams are done; else until the current one is.
    """
    for call in calls:
        call()
    finish(device)
    if waits_for_all:
        # Copies run on streams of their own, where no timestamp of ours is.
        began_s = time.perf_counter()
        for _ in range(rounds):
            for call in calls:
                call()
        finish(device)
        return max(time.perf_counter() - began_s, 1e-9) / rounds
    first = device.timestamp()
    for _ in range(rounds):
        for call in calls:
            call()
    last = device.timestamp()
    seconds = device.seconds_between(first, last) / rounds
    finish(device)
    return max(seconds, 1e-9)
