# SPDX-License-Identifier: Apache-2.0
"""Draws a step that `tools/bench/overlap.py` measured: what computes, copies and writes, and when.

    tools/plot/overlap.py overlap.json --output overlap.png
    tools/plot/overlap.py before.json after.json --tier ssd --output overlap.png

A row for each file and tier; the one whose idle share is the median of the steps.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from megatron.offload.documents import FAULTS, from_json, reason_of

COLORS = {
    "compute": "tab:gray",
    "to host": "tab:orange",
    "from host": "tab:blue",
    "write": "tab:orange",
    "read": "tab:blue",
}
LANES = ("compute", "to host", "from host")


def plot(axes: Any, figure: dict[str, Any], title: str) -> None:
    """Draws one step: a lane for each stream and each drive."""
    timeline = figure["timeline"]
    drives = sorted({name.rpartition(" ")[0] for name in timeline if name.startswith("drive")})
    lanes = [*(lane for lane in LANES if lane in timeline), *drives]
    for name, spans in timeline.items():
        lane, _, kind = name.rpartition(" ") if name.startswith("drive") else (name, "", name)
        bars = [(began, ended - began) for began, ended in spans]
        axes.broken_barh(bars, (lanes.index(lane) - 0.4, 0.8), color=COLORS[kind], linewidth=0)
    turned = 1e3 * figure["steps"][figure["median_step"]]["forward_s"]
    axes.axvline(turned, color="black", linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(lanes)), lanes, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    idle, forward, backward = (
        figure[name] for name in ("idle_share", "forward_idle_share", "backward_idle_share")
    )
    axes.set_title(
        f"{title}: idle {idle:.1%} of the step (forward {forward:.1%}, backward {backward:.1%})",
        fontsize=10,
    )


def main(argv: list[str] | None = None) -> int:
    """Draws all steps one below the other; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path, help="files of overlap.py --json")
    parser.add_argument("--tier", help="this one alone")
    parser.add_argument("--output", type=Path, required=True, help="PNG or SVG")
    args = parser.parse_args(argv)
    shown: list[tuple[str, dict[str, Any]]] = []
    for path in args.results:
        try:
            for figure in from_json(path.read_bytes())["figures"]:
                if args.tier in (None, figure["tier"]):
                    shown.append((f"{path.stem}, {figure['tier']}", figure))
        except (OSError, *FAULTS) as error:
            parser.error(f"{path} is not a result of overlap.py --json: {reason_of(error)}")
    if not shown:
        parser.error(f"no result has the tier {args.tier}")
    figure, all_axes = plt.subplots(
        len(shown), 1, figsize=(11, 2.2 * len(shown)), squeeze=False, sharex=True
    )
    for axes, (title, one) in zip(all_axes[:, 0], shown, strict=True):
        plot(axes, one, title)
    all_axes[-1, 0].set_xlabel("milliseconds of a simulated step; dashed: the end of forward")
    figure.tight_layout()
    figure.savefig(args.output, dpi=110)
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
