# SPDX-License-Identifier: Apache-2.0
"""Plots what compare_placements.py measured: memory against speed, one point for each placement.

    tools/plot/placements.py docs/results/placements-*.json --output placements.png

Left is less memory, up is faster: the recompute-offload-keep (ROK) picture of SSDTrain,
arXiv 2408.10013.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from megatron.offload.commands.drawing import begin_near, look_of
from megatron.offload.documents import FAULTS, from_json, reason_of

HOLLOW = "hollow: the C library's malloc; filled: offload's allocator"


def title_of(result: dict[str, Any]) -> str:
    """The model's shape, from the trainer's flags."""
    flags = result["trainer_flags"]
    value = {name: next_ for name, next_ in itertools.pairwise(flags) if name.startswith("--")}
    stages = int(value.get("--pipeline-model-parallel-size", 1))
    return (
        f"{value['--num-layers']} layers, hidden {value['--hidden-size']}, "
        f"sequence {value['--seq-length']}{f', {stages} stages' if stages > 1 else ''}"
    )


def plot(axes: Any, result: dict[str, Any]) -> None:
    """Draws one comparison, a point for each variant."""
    replays = any(row["variant"]["placement"] == "ssd" for row in result["summary"])
    for row in result["summary"]:
        variant = row["variant"]
        placement, allocator = variant["placement"], variant["allocator"]
        x, y = row["peak_bytes"] / (1 << 20), 1 / row["time_ratio"]
        if not replays:  # then there is one ssd, as docs/results/placements.md calls it
            placement = placement.removesuffix("-no-replay")
        color, marker = look_of(placement)
        face = "none" if allocator == "default" else color
        axes.plot(x, y, marker, color=color, markersize=10, markerfacecolor=face, zorder=3)
        place = (0, -18) if allocator == "default" else (0, 9)
        look = {"textcoords": "offset points", "ha": "center", "color": color}
        axes.annotate(placement, (x, y), place, **look)
    if any(row["variant"]["allocator"] == "default" for row in result["summary"]):
        axes.plot([], [], "o", color="gray", markerfacecolor="none", label=HOLLOW)
        axes.legend(fontsize=8, loc="upper center")
    axes.set_title(title_of(result))
    axes.set_xlabel("peak activation memory, MiB")
    axes.set_ylabel("speed relative to the fastest off")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)


def main() -> int:
    """Draws all results side by side; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "results", nargs="+", type=Path, help="files of compare_placements.py --json"
    )
    parser.add_argument("--output", type=Path, required=True, help="PNG or SVG")
    args = parser.parse_args()
    rows = -(-len(args.results) // 2)
    size = (5.5 * min(len(args.results), 2), 4 * rows)
    figure, grid = plt.subplots(
        rows, min(len(args.results), 2), figsize=size, squeeze=False, sharey=True
    )
    all_axes = grid.flat[: len(args.results)]
    for unused in grid.flat[len(args.results) :]:
        unused.set_axis_off()
    speeds: list[float] = []
    for axes, path in zip(all_axes, args.results, strict=True):
        try:
            result = from_json(path.read_bytes())
            plot(axes, result)
            speeds += [1 / row["time_ratio"] for row in result["summary"]]
        except (OSError, *FAULTS) as error:
            reason = reason_of(error)
            parser.error(f"{path} is not a result of compare_placements.py --json: {reason}")
    begin_near(all_axes[0], speeds)  # the others have the same axis
    figure.tight_layout()
    figure.savefig(args.output, dpi=120)
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
