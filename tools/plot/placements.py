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

from megatron.offload.documents import FAULTS, from_json, reason_of

COLORS = {
    "off": "tab:gray",
    "recompute": "tab:orange",
    "recompute-ssd": "tab:red",
    "ssd": "tab:blue",
    "ssd-no-replay": "tab:cyan",
}
MARKERS = {"default": "o", "offload": "s"}
ALLOCATORS = {"default": "the C library's malloc", "offload": "offload's allocator"}


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
    for row in result["summary"]:
        variant = row["variant"]
        placement, allocator = variant["placement"], variant["allocator"]
        x, y = row["peak_bytes"] / (1 << 20), 1 / row["time_ratio"]
        label = f"{placement}, {ALLOCATORS[allocator]}"
        style = {"color": COLORS[placement], "marker": MARKERS[allocator]}
        axes.scatter(x, y, s=90, label=label, zorder=3, **style)
    axes.legend(fontsize=8, loc="lower right")
    axes.set_title(title_of(result))
    axes.set_xlabel("peak activation memory, MiB")
    axes.set_ylabel("speed relative to the fastest off")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0, top=1.25)
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
    figure, all_axes = plt.subplots(
        1, len(args.results), figsize=(5.5 * len(args.results), 4), squeeze=False, sharey=True
    )
    for axes, path in zip(all_axes[0], args.results, strict=True):
        try:
            plot(axes, from_json(path.read_bytes()))
        except (OSError, *FAULTS) as error:
            reason = reason_of(error)
            parser.error(f"{path} is not a result of compare_placements.py --json: {reason}")
    figure.tight_layout()
    figure.savefig(args.output, dpi=120)
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
