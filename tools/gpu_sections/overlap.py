# SPDX-License-Identifier: Apache-2.0
"""Section `overlap`: copies run while the GPU computes; what does not is a stall.

From traces of torch's profiler. The stack of the memory section runs with offload off; with every
layer offloaded; one after the other (each layer waits for its writes, nothing is read ahead), which
is what no overlap looks like; and with as many layers as the measured link can carry under the
forward pass, where hiding is possible at all.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_sections.result import Section
from gpu_sections.settings import Settings, Size
from gpu_sections.stack import Stack, opened
from gpu_sections.timeline import Timeline
from megatron.offload import OffloadConfig, OffloadEngine, Placement, Policy, Scope
from megatron.offload.config import MIB
from megatron.offload.device.open import open_device
from megatron.offload.placement.policy import FixedPolicy
from megatron.offload.saved.save_order import SaveOrder

_MODES = ("host", "ssd")
_NUM_WARM_UP, _NUM_TRACED = 2, 2
_MOST_OF_FORWARD = 0.5  # the copies of `some layers` take so much of the time that forward takes
_LEAST_OVERLAP = 0.5
_HEADERS = (
    "mode",
    "layers",
    "step s",
    "/ off",
    "compute s",
    "idle s",
    "copies s",
    "of it hidden",
    "store hidden",
    "load hidden",
    "stall s (trace)",
    "stall s (engine)",
)


@dataclass(frozen=True)
class FirstLayers:
    """A policy: the first few layers go, the others stay."""

    num_layers: int
    placement: Placement
    min_bytes: int = MIB

    def place_layer(self, scope: Scope) -> Placement:
        """See `Policy`."""
        return self.placement if int(scope.layer or 0) < self.num_layers else Placement.KEEP

    def place(self, scope: Scope, num_bytes: int) -> Placement:
        """See `Policy`. The stack names its layers by number."""
        goes = num_bytes >= self.min_bytes and int(scope.layer or 0) < self.num_layers
        return self.placement if goes else Placement.KEEP


class OneAfterTheOther(OffloadEngine):
    """Nothing overlaps: layers wait for their writes, reads begin when they are needed."""

    def capture(
        self, scope: Scope, outputs: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]
    ) -> None:
        """Returns when everything is on its tier."""
        super().capture(scope, outputs, inputs)
        while self._inflight.taken_bytes:
            time.sleep(0.0001)

    @contextlib.contextmanager
    def backward(self, save_order: SaveOrder) -> Iterator[None]:
        """Reads nothing ahead."""
        yield


def trace_run(
    stack: Stack, engine: OffloadEngine | None, settings: Settings, copy_to: Path | None
) -> dict[str, Any]:
    """Figures of the traced steps, for one step."""
    for _ in range(_NUM_WARM_UP):
        stack.step(engine)
    settings.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if settings.on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    stalled_s = 0.0
    with torch.profiler.profile(activities=activities) as profile:
        began_s = time.perf_counter()
        for _ in range(_NUM_TRACED):
            stack.step(engine)
            stalled_s += engine.statistics.stall_s if engine is not None else 0.0
        settings.synchronize()
        step_s = (time.perf_counter() - began_s) / _NUM_TRACED
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        if copy_to is not None:
            shutil.copyfile(path, copy_to)
        timeline = Timeline.from_events(json.loads(path.read_text())["traceEvents"])
    figures: dict[str, Any] = {
        name: value / _NUM_TRACED if value is not None and name.endswith("_s") else value
        for name, value in timeline.figures().items()
    }
    moved = engine.statistics.offloaded_bytes if engine is not None else 0
    return figures | {
        "step_s": step_s,
        "engine_stall_s": stalled_s / _NUM_TRACED,
        "offloaded_bytes": moved,
    }


def run(settings: Settings, section: Section) -> None:
    """Off, then both modes in three ways."""
    if settings.on_gpu:
        size = Size(4096, 4 if settings.quick else 8, 2048, 4)
    else:
        size = Size(64, 2, 64, 2)
    stack = Stack(size, torch.bfloat16 if settings.on_gpu else torch.float32, settings.device)
    device = open_device(settings.device)
    inflight_bytes = max(2 * stack.saved_bytes // size.num_layers, MIB)
    num_runs, done = 1 + 3 * len(_MODES), 0

    def traced(mode: str, kind: type[OffloadEngine], policy: Policy, trace: Path | None) -> Any:
        nonlocal done
        done += 1
        section.progress.show(done / num_runs, mode)
        config = OffloadConfig(
            mode=mode,
            directories=(settings.directory,),
            inflight_bytes=inflight_bytes,
            host_budget=2 * stack.saved_bytes,
        )
        with opened(kind(config, device, policy=policy)) as engine:
            return trace_run(stack, engine, settings, trace)

    section.progress.show(0.0, "off")
    off = trace_run(stack, None, settings, None)
    section.data |= {"size": str(size), "off": off, "modes": {}}
    rows = [_row("off", "", off, off)]
    least_bytes = MIB if settings.on_gpu else 1
    for mode in _MODES:
        placement = Placement(mode)
        trace = settings.trace if mode == _MODES[0] else None
        every = traced(mode, OffloadEngine, FixedPolicy(least_bytes, placement), trace)
        serial = traced(mode, OneAfterTheOther, FixedPolicy(least_bytes, placement), None)
        fitting = layers_that_fit(off, every, size.num_layers)
        few = FirstLayers(fitting, placement, least_bytes)
        some = traced(mode, OffloadEngine, few, None)
        section.data["modes"][mode] = {
            "all": every,
            "one after the other": serial,
            "some": some,
            "layers that fit": fitting,
        }
        rows += [
            _row(mode, "all", every, off),
            _row(mode, "one after the other", serial, off),
            _row(mode, f"first {fitting}", some, off),
        ]
        section.table(
            f"A step of {size}, plain layers, traced; hidden: part of the copy time under kernels",
            _HEADERS,
            rows,
        )
        if not settings.on_gpu:
            section.skip(mode, "a CPU has no copies that could overlap kernels")
            continue
        section.check(
            f"{mode}: copies that the link can carry are hidden",
            some["overlap"] is not None
            and some["overlap"] >= _LEAST_OVERLAP
            and some["overlap"] > (serial["overlap"] or 0.0),
            f"{_percent(some['overlap'])} of the copy time of {fitting} layers is under kernels, "
            f"{_percent(serial['overlap'])} one after the other",
        )
        section.check(
            f"{mode}: overlapping saves time",
            every["step_s"] < serial["step_s"],
            f"a step takes {every['step_s']:.3f} s, one after the other {serial['step_s']:.3f} s, "
            f"off {off['step_s']:.3f} s",
        )


def layers_that_fit(off: dict[str, Any], every: dict[str, Any], num_layers: int) -> int:
    """How many layers' stores the link carries in a part of the forward pass; at least one.

    Forward is a third of a step's compute time.
    """
    if not every["store_s"]:
        return 1
    store_s = every["store_s"] / num_layers
    return max(1, min(num_layers, int(_MOST_OF_FORWARD * off["compute_s"] / 3 / store_s)))


def _row(mode: str, layers: str, figures: dict[str, Any], off: dict[str, Any]) -> list[str]:
    seconds = (f"{figures[name]:.3f}" for name in ("compute_s", "idle_s", "copy_s"))
    shares = (_percent(figures[name]) for name in ("overlap", "store_overlap", "load_overlap"))
    return [
        mode,
        layers,
        f"{figures['step_s']:.3f}",
        f"{figures['step_s'] / off['step_s']:.3f}",
        *seconds,
        *shares,
        f"{figures['stall_s']:.3f}",
        f"{figures['engine_stall_s']:.3f}",
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"
