# SPDX-License-Identifier: Apache-2.0
"""Shows what bench_storage.py measured: tables, and a plot of bandwidth and processor time.

    tools/plot_storage.py bench.json --output bench.png

bench_storage.py calls it for what it prints and for --plot. Bars are medians over the rounds,
whiskers the smallest and the largest round.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from tabulate import tabulate

from megatron.offload.config import format_size

OURS, THEIRS = "tab:blue", "tab:gray"
LABELS = {"gbps": "GB/s  (more is better)", "cpu_s_per_gb": "CPU s/GB  (less is better)"}


def system_lines(facts: dict[str, Any]) -> str:
    """What the figures depend on, for people."""
    drives = ", ".join(facts["drives"]) or "unknown drive"
    lines = [
        f"system: kernel {facts['kernel']}, {facts['cpu']}, {facts['cores']} cores, "
        f"{format_size(facts['memory_bytes'])}, python {facts['python']}, torch {facts['torch']}",
        f"directory: {facts['offload_filesystem']}, {drives}",
        f"tiers: memory from {facts['allocator']}, {facts['huge_page_share']:.0%} of a sample on "
        "transparent huge pages",
    ]
    if facts["fio"]:
        lines.append("{version}: {engine}, direct=1; memory from {memory}".format(**facts["fio"]))
    return "\n".join(lines)


def format_table(figures: Sequence[dict[str, Any]]) -> str:
    """The table of one tier."""

    def cells(compared: dict[str, float | None], digits: int) -> list[str]:
        places = {"ours": digits, "reference": digits, "ratio": 3}
        return [
            "" if (value := compared[part]) is None else f"{value:.{places[part]}f}"
            for part in places
        ]

    parts = ("ours", figures[0]["reference"] or "none", "ratio")
    return tabulate(
        [
            (
                format_size(figure["block_bytes"]),
                str(figure["depth"]),
                figure["operation"],
                *cells(figure["gbps"], 2),
                *cells(figure["cpu_s_per_gb"], 4),
            )
            for figure in figures
        ],
        headers=[
            *("block", "depth", "operation"),
            *(f"GB/s\n{part}" for part in parts),
            *(f"CPU s/GB\n{part}" for part in parts),
        ],
        disable_numparse=True,
        colalign=("right", "right", "left", *["right"] * 6),
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Two rows of panels for each tier, one panel for each operation."""
    tiers = list(dict.fromkeys(each["tier"] for each in result["figures"]))
    operations = list(dict.fromkeys(each["operation"] for each in result["figures"]))
    groups = len({(each["block_bytes"], each["depth"]) for each in result["figures"]})
    figure, all_axes = plt.subplots(
        2 * len(tiers),
        len(operations),
        figsize=(len(operations) * max(2.8, 0.5 * groups + 0.8), 5 * len(tiers) + 0.8),
        squeeze=False,
        sharey="row",
    )
    for row, (tier, value) in enumerate((tier, value) for tier in tiers for value in LABELS):
        own = [each for each in result["figures"] if each["tier"] == tier]
        for axes, operation in zip(all_axes[row], operations, strict=True):
            chosen = [each for each in own if each["operation"] == operation]
            _draw_bars(axes, chosen, value)
            _mark_blocks(axes, chosen)
            if value == "gbps":
                axes.set_title(f"{tier}: {operation}")
            else:
                axes.set_xlabel("queue depth and block size", labelpad=15, fontsize=8)
        highest = max(each[value][part] or 0 for each in own for part in ("ours", "reference"))
        all_axes[row][0].set_ylim(0, 1.3 * highest)
        all_axes[row][0].set_ylabel(LABELS[value])
        all_axes[row][-1].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    machine = result["machine"]
    figure.suptitle(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['offload_filesystem']}; "
        "numbers are tier / reference",
        fontsize=9,
    )
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.15 / figure.get_figheight()))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_bars(axes: Any, figures: Sequence[dict[str, Any]], value: str) -> None:
    """Ours and the reference side by side for each block size and depth, their ratio above."""
    for offset, part, color in ((-0.2, "ours", OURS), (0.2, "reference", THEIRS)):
        bars = [
            (place + offset, each[value][part], *_range(each["rounds"], part, value))
            for place, each in enumerate(figures)
            if each[value][part] is not None
        ]
        if bars:
            places, heights, lows, highs = zip(*bars, strict=True)
            label = "tier" if part == "ours" else figures[0]["reference"]
            axes.bar(places, heights, 0.4, color=color, label=label)
            axes.vlines(places, lows, highs, color="black", linewidth=0.8)
    for place, each in enumerate(figures):
        compared = each[value]
        if compared["ratio"] is not None:
            height = max(compared["ours"], compared["reference"])
            axes.annotate(
                f"{compared['ratio']:.2f}",
                (place, height),
                xytext=(0, 8),
                textcoords="offset points",
                ha="center",
                fontsize=7.5,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
            )
    axes.set_xticks(range(len(figures)), [str(each["depth"]) for each in figures])
    room = max(2 - len(figures), 0) / 2 + 0.5  # a single pair of bars is not to fill the panel
    axes.set_xlim(-room, len(figures) - 1 + room)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _mark_blocks(axes: Any, figures: Sequence[dict[str, Any]]) -> None:
    """The block size below the depths that belong to it, and a line between two sizes."""
    sizes = [each["block_bytes"] for each in figures]
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


def _range(rounds: Sequence[dict[str, Any]], part: str, value: str) -> tuple[float, float]:
    """Smallest and largest round."""
    values = []
    for sample in (each[part] for each in rounds):
        duration = sample["wall_s"] if value == "gbps" else sample["cpu_s"]
        gigabytes = sample["num_bytes"] / 1e9
        values.append(gigabytes / duration if value == "gbps" else duration / gigabytes)
    return min(values), max(values)


def main(argv: list[str] | None = None) -> int:
    """Shows a result again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, help="a file of bench_storage.py --json")
    parser.add_argument("--output", type=Path, required=True, help="PNG or SVG")
    args = parser.parse_args(argv)
    try:
        result = json.loads(args.result.read_text())
        print(system_lines(result["machine"]) + "\n")
        for tier in dict.fromkeys(figure["tier"] for figure in result["figures"]):
            own = [figure for figure in result["figures"] if figure["tier"] == tier]
            print(f"{tier}\n{format_table(own)}\n")
        draw(result, args.output)
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{args.result} is not a result of bench_storage.py --json: {error!r}")
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
