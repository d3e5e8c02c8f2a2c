# SPDX-License-Identifier: Apache-2.0
"""Device memory over a step, stacked by what takes it: `draw`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.offload.activations.stats.memory_parts import (
    AHEAD,
    HELD,
    KEPT,
    OUTSIDE,
    PARTS,
    RECOMPUTED,
    REPLAYED,
    REST,
    USED,
    WRITING,
    Moment,
    StepMemory,
)
from megatron.offload.commands.drawing import (
    BLUE,
    GRAY,
    GREEN,
    ORANGE,
    PINK,
    RED,
    SKY,
    YELLOW,
    figure,
)
from megatron.offload.sizes import MIB

_COLOURS = {
    KEPT: BLUE,
    OUTSIDE: SKY,
    HELD: GRAY,
    WRITING: ORANGE,
    AHEAD: GREEN,
    USED: YELLOW,
    RECOMPUTED: PINK,
    REPLAYED: RED,
    REST: "#DDDDDD",
}
_SHADED = "backward"


def draw(shown: StepMemory, path: Path) -> None:
    """Writes the picture, PNG or SVG by the file's name. Raises OSError."""
    with figure(path, figsize=(9, 5), layout="constrained") as (drawn, axes):
        _draw(axes, shown)
        _label(axes, shown)
        drawn.legend(fontsize=8, loc="outside lower center", ncols=4, reverse=True)


def _draw(axes: Any, shown: StepMemory) -> None:
    times = [one.time_s for one in shown.moments]
    parts = [name for name in PARTS if any(one.parts.get(name) for one in shown.moments)]
    # Below zero is the rest where a step takes memory that was there before it.
    stacked = [[max(one.parts[name], 0) / MIB for one in shown.moments] for name in parts]
    axes.stackplot(times, stacked, labels=parts, colors=[_COLOURS[name] for name in parts])
    for began_s, ended_s in _backward_passes(shown.moments):
        axes.axvspan(began_s, ended_s, color="black", alpha=0.06, linewidth=0)
    axes.plot(shown.peak.time_s, shown.peak.num_bytes / MIB, "k^", markersize=6)
    axes.annotate(
        f"peak, {shown.peak.where}" if shown.peak.where else "peak",
        (shown.peak.time_s, shown.peak.num_bytes / MIB),
        textcoords="offset points",
        xytext=(0, 6),
        ha="center",
        fontsize=8,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8},
    )


def _label(axes: Any, shown: StepMemory) -> None:
    axes.axhline(shown.peak_bytes / MIB, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlim(0, max(shown.moments[-1].time_s, 1e-9))
    axes.set_ylim(0, 1.1 * shown.peak_bytes / MIB)
    axes.set_xlabel("seconds since the step began; shaded: backward")
    axes.set_ylabel("device memory, MiB")
    axes.set_title(
        f"step {shown.step}, rank {shown.rank}; dotted: the peak, between samples too", fontsize=10
    )


def _backward_passes(moments: tuple[Moment, ...]) -> list[tuple[float, float]]:
    """When backward passes began and ended."""
    found: list[tuple[float, float]] = []
    before = ""
    for one in moments:
        if one.phase == _SHADED and before == _SHADED:
            found[-1] = found[-1][0], one.time_s
        elif one.phase == _SHADED:
            found.append((one.time_s, one.time_s))
        before = one.phase
    return found
