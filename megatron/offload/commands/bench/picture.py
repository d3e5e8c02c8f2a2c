# SPDX-License-Identifier: Apache-2.0
"""The benchmark's picture: `draw`.

`command.py` calls it for --plot. Bars are medians over the rounds, whiskers the smallest and the
largest round.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.offload.commands.drawing import BLUE, GRAY, figure
from megatron.offload.sizes import format_size

OURS, THEIRS = BLUE, GRAY
LABELS = {"gbps": "GB/s  (more is better)", "cpu_s_per_gb": "CPU s/GB  (less is better)"}


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws two rows of panels for each tier, one panel for each operation.

    Args:
        result: what `--json` writes.
        path: PNG or SVG, by its ending.
    """
    tiers = list(dict.fromkeys(each["tier"] for each in result["figures"]))
    operations = list(dict.fromkeys(each["operation"] for each in result["figures"]))
    groups = len({(each["block_bytes"], each["depth"]) for each in result["figures"]})
    size = (len(operations) * max(2.8, 0.5 * groups + 0.8), 5 * len(tiers) + 0.8)
    grid: dict[str, Any] = {"rows": 2 * len(tiers), "columns": len(operations), "squeeze": False}
    with figure(path, figsize=size, sharey="row", **grid) as (drawn, all_axes):
        rows = [(tier, value) for tier in tiers for value in LABELS]
        for axes, (tier, value) in zip(all_axes, rows, strict=True):
            own = [each for each in result["figures"] if each["tier"] == tier]
            _draw_row(axes, operations, own, value)
        machine = result["machine"]
        drawn.suptitle(
            f"{machine['cpu']}, {machine['cores']} cores, {machine['offload_filesystem']}; "
            "numbers are tier / reference",
            fontsize=9,
        )
        drawn.tight_layout(rect=(0, 0, 1, 1 - 0.15 / drawn.get_figheight()))


def _draw_row(
    row: Any, operations: Sequence[str], own: Sequence[dict[str, Any]], value: str
) -> None:
    """A panel for each operation of one tier."""
    for axes, operation in zip(row, operations, strict=True):
        chosen = [each for each in own if each["operation"] == operation]
        _draw_bars(axes, chosen, value)
        _mark_blocks(axes, chosen)
        if value == "gbps":
            axes.set_title(f"{own[0]['tier']}: {operation}")
        else:
            axes.set_xlabel("queue depth and block size", labelpad=15, fontsize=8)
    row[0].set_ylim(0, 1.15 * max(_highest(each, value) for each in own))
    row[0].set_ylabel(LABELS[value])
    row[-1].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _draw_bars(axes: Any, points: Sequence[dict[str, Any]], value: str) -> None:
    """Ours and the reference side by side for each block size and depth, their ratio above."""
    aside = 0.2 if points[0]["reference"] else 0.0
    for offset, part, color in ((-aside, "ours", OURS), (aside, "reference", THEIRS)):
        bars = [
            (place + offset, each[value][part], *_range(each["rounds"], part, value))
            for place, each in enumerate(points)
            if each[value][part] is not None
        ]
        if bars:
            places, heights, lows, highs = zip(*bars, strict=True)
            label = "tier" if part == "ours" else points[0]["reference"]
            axes.bar(places, heights, 0.4, color=color, label=label)
            axes.vlines(places, lows, highs, color="black", linewidth=0.8)
    for place, each in enumerate(points):
        compared = each[value]
        if compared["ratio"] is not None:
            axes.annotate(
                f"{compared['ratio']:.2f}",
                (place, _highest(each, value)),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=7.5,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
            )
    axes.set_xticks(range(len(points)), [str(each["depth"]) for each in points])
    room = max(2 - len(points), 0) / 2 + 0.5  # a single pair of bars is not to fill the panel
    axes.set_xlim(-room, len(points) - 1 + room)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _mark_blocks(axes: Any, points: Sequence[dict[str, Any]]) -> None:
    """The block size below the depths that belong to it, and a line between two sizes."""
    sizes = [each["block_bytes"] for each in points]
    for size in dict.fromkeys(sizes):
        first, num = sizes.index(size), sizes.count(size)
        axes.annotate(
            format_size(size),
            (first + (num - 1) / 2, 0),
            xycoords=("data", "axes fraction"),
            xytext=(0, -19),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=9,
        )
        if first:
            axes.axvline(first - 0.5, color="black", linewidth=0.6, alpha=0.5)


def _highest(point: dict[str, Any], value: str) -> float:
    """The upper end of the higher whisker."""
    parts = ["ours", "reference"] if point["reference"] else ["ours"]
    return max(_range(point["rounds"], part, value)[1] for part in parts)


def _range(rounds: Sequence[dict[str, Any]], part: str, value: str) -> tuple[float, float]:
    """Smallest and largest round."""
    values = []
    for sample in (each[part] for each in rounds):
        duration = sample["wall_s"] if value == "gbps" else sample["cpu_s"]
        gigabytes = sample["num_bytes"] / 1e9
        values.append(gigabytes / duration if value == "gbps" else duration / gigabytes)
    return min(values), max(values)
