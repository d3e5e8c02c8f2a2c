# SPDX-License-Identifier: Apache-2.0
"""Peak memory by length, a line for each way, and where it meets the budget: `draw`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatron.offload.commands.drawing import figure
from megatron.offload.commands.longest.search import Found
from megatron.offload.commands.longest.text import UNITS
from megatron.offload.commands.longest.ways import WAYS
from megatron.offload.sizes import format_size

_GIB = 1 << 30
# Colours of Okabe and Ito, which colour-blind people can tell apart.
_COLOURS = ("#999999", "#E69F00", "#CC79A7", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#000000")


def draw(found: Mapping[str, Found], path: Path, *, by: str, budget_bytes: int) -> None:
    """Writes the picture, PNG or SVG by the file's name. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with figure(path, figsize=(8, 5), layout="constrained") as (_, axes):
        axes.axhline(budget_bytes / _GIB, color="black", linestyle=":", linewidth=1)
        axes.annotate(
            f"{format_size(budget_bytes)}",
            (0.01, budget_bytes / _GIB),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            xytext=(0, 4),
        )
        for colour, (name, one) in zip(_COLOURS, found.items(), strict=False):
            if not one.runs:
                continue
            label = WAYS[name].title
            runs = sorted(
                [*one.runs, *([one.checked] if one.checked else [])], key=lambda run: run.number
            )
            numbers = [run.number for run in runs]
            peaks = [run.peak_bytes / _GIB for run in runs]
            axes.plot(numbers, peaks, "o-", color=colour, markersize=4, label=label)
            if not one.longest:
                continue
            peak = one.checked.peak_bytes if one.checked else one.predicted_bytes
            if one.longest > numbers[-1]:
                ends = [numbers[-1], one.longest], [peaks[-1], peak / _GIB]
                axes.plot(*ends, "--", color=colour)
            axes.plot(one.longest, peak / _GIB, "*", color=colour, markersize=13)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_xlabel(f"{UNITS[by]}; a star is the most that fits")
        axes.set_ylabel("peak of device memory, GiB")
        axes.set_ylim(0, 1.3 * budget_bytes / _GIB)
        axes.grid(alpha=0.3)
        if any(one.runs for one in found.values()):
            axes.legend(fontsize=9)
