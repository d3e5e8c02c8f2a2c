# SPDX-License-Identifier: Apache-2.0
"""Section `memory`: device memory really falls, and host memory stays within its budget.

A stack of plain transformer layers, without and with offload. What it saves is counted by hand and
must agree with what is measured without offload; with offload the peak must stay below a bound that
is derived term by term and does not grow with the number of layers.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch

from check.gpu.result import Section
from check.gpu.settings import Settings, Size
from check.gpu.stack import Stack, opened
from megatron.offload import OffloadConfig, OffloadEngine
from megatron.offload.activations.placement.policy import Placement
from megatron.offload.device.device import Device
from megatron.offload.device.open import open_device
from megatron.offload.sizes import KIB, MIB, format_size
from megatron.offload.stats.memory import PeakMemory
from megatron.offload.tiers.host import HostTier

MODES = ("host", "ssd", "tiered")
_MIN_BYTES = 256 * KIB
_NUM_STEPS = 2  # the last one is measured: before it pools and workspaces grow
_GPU_SLACK_BYTES = 96 * MIB  # workspaces of cuBLAS, rounding of torch's allocator
_CPU_SLACK_BYTES = 16 * MIB  # what the allocator keeps for reuse
# What the GPU's allocator holds at the step's end, and what of it the step never used at once.
_RESERVED = {"reserved": "reserved_bytes", "more than its peak": "fragmented_bytes"}
_HOST_SLACK_BYTES = 256 * MIB  # threads, Python's own objects


def peak_of(stack: Stack, device: Device, engine: OffloadEngine | None) -> tuple[int, int]:
    """Peak of the last of a few steps above the state before it, and what is left after it."""
    for _ in range(_NUM_STEPS - 1):
        stack.step(engine)
    gc.collect()
    peak = PeakMemory(device)
    before_bytes = device.allocated_bytes()
    peak.begin_step()
    stack.step(engine)
    peak_bytes = peak.end_step()
    device.return_freed_memory()
    return peak_bytes, device.allocated_bytes() - before_bytes


def config_of(mode: str, inflight_bytes: int, host_bytes: int, directory: Path) -> OffloadConfig:
    """A configuration that offloads everything of some size."""
    return OffloadConfig(
        mode=mode,
        directories=(directory,),
        min_bytes=_MIN_BYTES,
        inflight_bytes=inflight_bytes,
        host_budget=host_bytes,
    )


def run(settings: Settings, section: Section) -> None:
    """Runs the section: without offload, every mode, a host budget that is too small."""
    device = open_device(settings.device)
    if settings.on_gpu:
        size = Size(2048, 8 if settings.quick else 16, 1024, 8)
    else:
        size = Size(256, 6, 128, 4)
    stack = Stack(size, torch.bfloat16 if settings.on_gpu else torch.float32, settings.device)
    inflight_bytes = 8 * stack.unit_bytes
    terms = stack.bound_terms(inflight_bytes, _MIN_BYTES)
    terms["slack"] = _GPU_SLACK_BYTES if settings.on_gpu else _CPU_SLACK_BYTES
    bound_bytes = sum(terms.values())
    keep_bytes, _ = peak_of(stack, device, None)
    section.data |= {
        "size": str(size),
        "inflight_bytes": inflight_bytes,
        "counted_bytes": stack.saved_bytes,
        "keep_peak_bytes": keep_bytes,
        "bound_bytes": bound_bytes,
        "bound_terms": terms,
        "modes": {},
    }
    section.table(
        f"Bound on the peak with offload, {size}, bytes in flight {format_size(inflight_bytes)}",
        ["term", "bytes"],
        [
            *([name, format_size(value)] for name, value in terms.items()),
            ["sum", format_size(bound_bytes)],
        ],
    )
    rows = [
        [
            "counted by hand",
            format_size(stack.saved_bytes),
            f"{stack.saved_bytes / keep_bytes:.3f}",
            *[""] * 5,
        ],
        ["off", format_size(keep_bytes), "1.000", *[""] * 5],
    ]
    # Beside what is saved: gradients on their way through a layer, as in the bound.
    extra_bytes = sum(value for name, value in terms.items() if name.startswith("gradient"))
    section.check(
        "what the layers save was counted right",
        stack.saved_bytes * 0.95 < keep_bytes < stack.saved_bytes + extra_bytes + terms["slack"],
        f"by hand {format_size(stack.saved_bytes)}, peak of off {format_size(keep_bytes)}; "
        f"gradients may add {format_size(extra_bytes + terms['slack'])}",
    )
    for mode in MODES:
        found = _with_offload(stack, device, mode, 2 * stack.saved_bytes, settings)
        section.data["modes"][mode] = found
        peak_bytes = found["peak_bytes"]
        rows.append(_row(mode, found, keep_bytes))
        section.check(
            f"{mode}: device memory falls below the bound",
            peak_bytes <= bound_bytes < keep_bytes,
            f"peak {format_size(peak_bytes)}, bound {format_size(bound_bytes)}, "
            f"off {format_size(keep_bytes)}",
        )
        section.check(
            f"{mode}: nothing is left after a step",
            found["left_bytes"] <= (MIB if settings.on_gpu else _CPU_SLACK_BYTES)
            and found["statistics"]["tier_used_bytes"] == 0,
            f"{format_size(found['left_bytes'])} more on the device than before, "
            f"{found['statistics']['tier_used_bytes']} bytes on the tiers",
        )
        _check_host(section, mode, found)
    small_bytes = stack.saved_bytes // 2 // MIB * MIB
    found = _with_offload(stack, device, "host", small_bytes, settings)
    section.data["small host budget"] = found
    rows.append(_row("host, half the budget", found, keep_bytes))
    _check_host(section, "host, half the budget", found)
    section.check(
        "what does not fit into the host budget stays on the device",
        found["statistics"]["rejected_bytes"] > 0 and found["peak_bytes"] < keep_bytes,
        f"{format_size(found['statistics']['rejected_bytes'])} of a step stayed",
    )
    section.table(
        "Peak of a step above the state before it",
        ["placement", "peak", "/ off", "offloaded", "host arena", "its budget", *_RESERVED],
        rows,
    )


def _with_offload(
    stack: Stack, device: Device, mode: str, host_bytes: int, settings: Settings
) -> dict[str, Any]:
    """What was measured in one mode."""
    resident_bytes = _resident_bytes()
    config = config_of(mode, 8 * stack.unit_bytes, host_bytes, settings.directory)
    with opened(OffloadEngine(config, device)) as engine:
        peak_bytes, left_bytes = peak_of(stack, device, engine)
        arena_bytes = sum(
            tier.capacity_bytes for tier in engine.tiers.values() if isinstance(tier, HostTier)
        )
        drives = engine.tiers.get(Placement.SSD)
        buffers = [getattr(drives, name, None) for name in ("_staging", "_pool")]
        return {
            "peak_bytes": peak_bytes,
            "left_bytes": max(left_bytes, 0),
            "host_budget_bytes": host_bytes if config.uses_host else 0,
            "host_arena_bytes": arena_bytes,
            "staging_bytes": sum(held.size_bytes for held in buffers if held is not None),
            "resident_growth_bytes": max(_resident_bytes() - resident_bytes, 0),
            "is_on_host": device.is_host,
            "statistics": engine.statistics.as_dict(),
        }


def _check_host(section: Section, mode: str, found: dict[str, Any]) -> None:
    """The arena within its budget; the process grows by what the arenas account for."""
    budget, arena = found["host_budget_bytes"], found["host_arena_bytes"]
    growth = found["resident_growth_bytes"]
    expected = arena + found["staging_bytes"] + _HOST_SLACK_BYTES
    section.check(
        f"{mode}: host memory stays within its budget",
        # On a CPU the activations themselves are in the resident set.
        arena <= budget and (found["is_on_host"] or growth <= expected),
        f"arena {format_size(arena)} of {format_size(budget)}, before drives "
        f"{format_size(found['staging_bytes'])}; the process grew by {format_size(growth)}",
    )


def _row(mode: str, found: dict[str, Any], keep_bytes: int) -> list[str]:
    on_gpu = not found["is_on_host"]
    return [
        mode,
        format_size(found["peak_bytes"]),
        f"{found['peak_bytes'] / keep_bytes:.3f}",
        format_size(found["statistics"]["offloaded_bytes"]),
        format_size(found["host_arena_bytes"]),
        format_size(found["host_budget_bytes"]),
        *(format_size(found["statistics"][name]) if on_gpu else "" for name in _RESERVED.values()),
    ]


def _resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * KIB
    return 0
