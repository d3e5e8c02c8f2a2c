# SPDX-License-Identifier: Apache-2.0
"""The recompute-offload-keep picture of what was measured: `draw`.

x: peak of activation memory, y: throughput; left and up is better, as in SSDTrain (arXiv
2408.10013). Filled markers: offload's allocator, or the only one; hollow: the C library's. Bars:
the middle half of the steps that count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.offload.commands.drawing import Label, begin_near, figure, label_points, look_of
from megatron.offload.commands.rok.measurements import MeasuredPoint
from megatron.offload.commands.rok.result import Result
from megatron.offload.commands.rok.strategy import STRATEGIES, TITLES
from megatron.offload.commands.rok.throughput import flops_per_token
from megatron.offload.sizes import MIB

_LABELS = {
    **TITLES,
    "suffix": "first layers to ssd, rest kept",
    "auto": "auto, beside its budget",
}


def draw(result: Result, paths: Sequence[Path]) -> None:
    """Writes the picture to each of the files, PNG or SVG by their names. Raises OSError."""
    with figure(*paths, figsize=(9, 6.5), layout="constrained") as (drawn, axes):
        _draw(axes, result)
        if result.measured or result.frontier:
            drawn.legend(fontsize=8, loc="outside lower center", ncols=3)
        many_sizes = len({one.micro_batch_size for one in result.measured}) > 1
        taken = [point for one in result.measured for point in _covered_by(one)]
        label_points(drawn, axes, list(_labels(result.measured, many_sizes)), taken)


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
    axes.set_title(f"Speed against peak activation memory\n{result.title}", fontsize=10)
    axes.set_xlim(left=0, right=1.06 * axes.get_xlim()[1])
    speeds = [speed for one in result.measured for _, speed in _covered_by(one)]
    begin_near(axes, [*speeds, *(point.tokens_per_s for point in result.frontier)])
    axes.grid(alpha=0.3)
    _draw_other_units(axes, result, len(sizes) == 1)
    if any(one.fast_step_s for one in result.measured):
        bars = "bars: the middle half of the steps"
        axes.errorbar([], [], [], fmt="none", ecolor="gray", capsize=3, elinewidth=1, label=bars)
    if len({one.allocator for one in result.measured}) > 1:
        hollow = "hollow: with the C library's allocator"
        axes.plot([], [], "o", color="gray", markerfacecolor="none", label=hollow)


def _draw_other_units(axes: Any, result: Result, has_one_size: bool) -> None:
    """What tokens a second are in the paper's unit, and of the speed of keeping everything."""
    place = 1.0
    keep = [one.tokens_per_s for one in result.measured if one.placement == "off"]
    if keep and has_one_size:
        of_keep = (lambda y: 100 * y / max(keep)), (lambda percent: max(keep) * percent / 100)
        axes.secondary_yaxis(place, functions=of_keep).set_ylabel("% of keep all")
        place = 1.12
    flops = flops_per_token(result.conditions.get("trainer_flags", ()))
    if flops is not None:
        prefix, unit = ("T", 1e12) if max(axes.get_ylim()) * flops >= 1e12 else ("G", 1e9)
        in_flops = (lambda y: y * flops / unit), (lambda y: y * unit / flops)
        label = f"model throughput, {prefix}FLOP/s (no recomputation counts)"
        axes.secondary_yaxis(place, functions=in_flops).set_ylabel(label)


def _labels(measured: Sequence[MeasuredPoint], many_sizes: bool) -> Iterator[Label]:
    for one in measured:
        if words := _words(one, many_sizes):
            color = look_of(one.placement).color
            yield Label(one.peak_bytes / MIB, one.tokens_per_s, words, color)


def _ends_of_bar(one: MeasuredPoint) -> tuple[float, ...]:
    """Tokens a second of its slower and of its faster steps; none: there is no spread."""
    if one.fast_step_s is None or one.slow_step_s is None:
        return ()
    tokens = one.tokens_per_s * one.step_s
    return tokens / one.slow_step_s, tokens / one.fast_step_s


def _covered_by(one: MeasuredPoint) -> Iterator[tuple[float, float]]:
    """Its marker, and points along its bar that words beside it are not to cover."""
    x = one.peak_bytes / MIB
    yield x, one.tokens_per_s
    if ends := _ends_of_bar(one):
        yield from ((x, ends[0] + (ends[1] - ends[0]) * part / 8) for part in range(9))


def _draw_bar(axes: Any, one: MeasuredPoint, color: str) -> None:
    if not (ends := _ends_of_bar(one)):
        return
    beside = [[max(one.tokens_per_s - ends[0], 0.0)], [max(ends[1] - one.tokens_per_s, 0.0)]]
    look = {"fmt": "none", "ecolor": color, "elinewidth": 1, "capsize": 3, "alpha": 0.7}
    axes.errorbar(one.peak_bytes / MIB, one.tokens_per_s, beside, zorder=2, **look)


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
        _draw_bar(axes, one, color)
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
