# SPDX-License-Identifier: Apache-2.0
"""Peak memory by length, a line for each way, and where it meets the budget: `draw`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatron.offload.commands.drawing import BLUE, GRAY, GREEN, Look, figure, look_of
from megatron.offload.commands.longest.search import Found
from megatron.offload.commands.longest.text import UNITS
from megatron.offload.commands.longest.ways import WAYS
from megatron.offload.sizes import GIB, format_size

_LOOKS = {
    "none": look_of("off"),
    "checkpointing": look_of("recompute"),
    "checkpointing-host": look_of("recompute-host"),
    "ssd": look_of("ssd"),
    "inputs": look_of("recompute-ssd"),
    "chunked": Look(GREEN, "o"),
    "tiled": Look(BLUE, "P"),
    "script": Look(GRAY, "p"),
}


def draw(found: Mapping[str, Found], path: Path, *, by: str, budget_bytes: int) -> None:
    """Writes the picture, PNG or SVG by the file's name. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    budget = format_size(budget_bytes)
    with figure(path, figsize=(8, 5), layout="constrained") as (_, axes):
        axes.axhline(budget_bytes / GIB, color="black", linestyle=":", linewidth=1)
        axes.annotate(
            budget,
            (0.01, budget_bytes / GIB),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            xytext=(0, 4),
        )
        for name, one in found.items():
            if not one.runs:
                continue
            color, marker = _LOOKS[name]
            label = WAYS[name].title
            runs = sorted(
                [*one.runs, *([one.checked] if one.checked else [])], key=lambda run: run.number
            )
            numbers = [run.number for run in runs]
            peaks = [run.peak_bytes / GIB for run in runs]
            style = {"marker": marker, "markersize": 5, "markerfacecolor": "none"}
            axes.plot(numbers, peaks, "-", color=color, label=label, **style)
            if not one.longest:
                continue
            peak = one.checked.peak_bytes if one.checked else one.predicted_bytes
            if one.longest > numbers[-1]:
                ends = [numbers[-1], one.longest], [peaks[-1], peak / GIB]
                axes.plot(*ends, "--", color=color)
            axes.plot(one.longest, peak / GIB, "*", color=color, markersize=13)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_xlabel(f"{UNITS[by]}; a star is the most that fits")
        axes.set_ylabel("peak of device memory, GiB")
        axes.set_title(f"Device memory by length; what fits into {budget}", fontsize=10)
        axes.set_ylim(0, 1.3 * budget_bytes / GIB)
        axes.grid(alpha=0.3)
        if any(one.runs for one in found.values()):
            axes.legend(fontsize=9)
