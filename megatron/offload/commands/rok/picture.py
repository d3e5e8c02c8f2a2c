# SPDX-License-Identifier: Apache-2.0
"""The recompute-offload-keep picture of what was measured: `draw`.

x: peak of activation memory, y: tokens a second; left and up is better, as in SSDTrain
(arXiv 2408.10013). Filled markers: offload's allocator, or the only one; hollow: the C library's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.offload.commands.drawing import begin_near, figure, look_of
from megatron.offload.commands.rok.measurements import MeasuredPoint
from megatron.offload.commands.rok.result import Result
from megatron.offload.commands.rok.strategy import STRATEGIES, TITLES
from megatron.offload.sizes import MIB

_LABELS = {
    **TITLES,
    "suffix": "first layers to ssd, rest kept",
    "auto": "auto, beside its budget",
}


def draw(result: Result, paths: Sequence[Path]) -> None:
    """Writes the picture to each of the files, PNG or SVG by their names. Raises OSError."""
    with figure(*paths, figsize=(8, 6), layout="constrained") as (drawn, axes):
        _draw(axes, result)
        drawn.legend(fontsize=8, loc="outside lower center", ncols=3)


def _draw(axes: Any, result: Result) -> None:
    sizes = sorted({one.micro_batch_size for one in result.measured})
    for number, size in enumerate(sizes):
        points = sorted(
            (p.peak_bytes / MIB, p.tokens_per_s)
            for p in result.frontier
            if p.micro_batch_size == size
        )
        if points:
            label = "auto, predicted for any budget" if number == 0 else None
            line = {"color": look_of("auto").color, "linewidth": 1, "label": label}
            axes.plot(*zip(*points, strict=True), "--", **line)
    for placement in STRATEGIES:
        _draw_strategy(axes, [one for one in result.measured if one.placement == placement], sizes)
    axes.set_xlabel("peak activation memory, MiB")
    axes.set_ylabel("tokens a second")
    axes.set_title(result.title, fontsize=10)
    axes.set_xlim(left=0, right=1.06 * axes.get_xlim()[1])
    speeds = [one.tokens_per_s for one in result.measured]
    begin_near(axes, [*speeds, *(point.tokens_per_s for point in result.frontier)])
    axes.grid(alpha=0.3)
    keep = [one.tokens_per_s for one in result.measured if one.placement == "off"]
    if keep and len(sizes) == 1:
        of_keep = (lambda y: 100 * y / max(keep)), (lambda percent: max(keep) * percent / 100)
        axes.secondary_yaxis("right", functions=of_keep).set_ylabel("% of keep all")
    if len({one.allocator for one in result.measured}) > 1:
        hollow = "hollow: with the C library's allocator"
        axes.plot([], [], "o", color="gray", markerfacecolor="none", label=hollow)


def _draw_strategy(axes: Any, measured: Sequence[MeasuredPoint], sizes: Sequence[int]) -> None:
    """Its points; several of one batch size are joined, by memory."""
    if not measured:
        return
    color, marker = look_of(measured[0].placement)
    label: str | None = _LABELS[measured[0].placement]
    two_allocators = len({one.allocator for one in measured}) > 1
    for one in measured:
        hollow = two_allocators and one.allocator == "default"
        axes.plot(
            one.peak_bytes / MIB,
            one.tokens_per_s,
            marker,
            color=color,
            markersize=8,
            markerfacecolor="none" if hollow else color,
            label=label if not hollow else None,
            zorder=3,
        )
        label = None if not hollow else label
        words = _words(one, len(sizes) > 1)
        if words:
            place = (one.peak_bytes / MIB, one.tokens_per_s)
            if one.is_rule:  # there are others close to it
                look = {"xytext": (24, -40), "arrowprops": {"arrowstyle": "-", "linewidth": 0.6}}
            else:
                look = {"xytext": (0, 8), "ha": "center", "color": color}
            axes.annotate(words, place, textcoords="offset points", fontsize=7, **look)
    for size in sizes:
        own = sorted(
            (one.peak_bytes / MIB, one.tokens_per_s)
            for one in measured
            if one.micro_batch_size == size and measured[0].placement in ("auto", "suffix")
        )
        if len(own) > 1:
            axes.plot(*zip(*own, strict=True), "-", color=color, linewidth=1, alpha=0.6)


def _words(one: MeasuredPoint, many_sizes: bool) -> str:
    """What is written beside a point."""
    parts = []
    if one.budget_bytes is not None and not many_sizes:
        parts.append(f"{one.budget_bytes / MIB:.0f} MiB")
    if many_sizes and one.placement in ("off", "recompute", "ssd"):
        parts.append(f"batch {one.micro_batch_size}")
    if one.is_rule:
        parts.append("TBA's rule")
    return ", ".join(parts)
