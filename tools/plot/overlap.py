# SPDX-License-Identifier: Apache-2.0
"""Draws steps on the test accelerator: what computes, copies, writes and reads, and when.

    tools/plot/overlap.py docs/results/overlap-before.json docs/results/overlap.json --tier ssd \\
        --names before,now --output overlap.png

A panel for each file and tier, with the step whose idle share is the median.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from megatron.offload.commands.drawing import BLUE, GRAY, ORANGE, figure
from megatron.offload.documents import FAULTS, from_json, reason_of

KINDS = {
    "compute": (GRAY, "the device computes"),
    "write": (ORANGE, "activations leave: to the host, and from there to the drives"),
    "read": (BLUE, "activations come back: from the drives, and to the device"),
}
KIND_OF = {"to host": "write", "from host": "read"}
LANES = ("compute", "to host", "from host")


def plot(axes: Any, step: dict[str, Any], title: str) -> None:
    """Draws one step: a lane for each stream and each drive."""
    timeline = step["timeline"]
    drives = sorted({name.rpartition(" ")[0] for name in timeline if name.startswith("drive")})
    lanes = [*(lane for lane in LANES if lane in timeline), *drives]
    for name, spans in timeline.items():
        lane, _, kind = name.rpartition(" ") if name.startswith("drive") else (name, "", name)
        color, _ = KINDS[KIND_OF.get(kind, kind)]
        bars = [(began, ended - began) for began, ended in spans]
        place = (lanes.index(lane) - 0.4, 0.8)
        axes.broken_barh(bars, place, facecolor=color, edgecolor="none")
    turned = 1e3 * step["steps"][step["median_step"]]["forward_s"]
    axes.axvline(turned, color="black", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(lanes)), lanes, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    names = ("idle_share", "forward_idle_share", "backward_idle_share")
    idle, forward, backward = (step[name] for name in names)
    axes.set_title(
        f"{title}: compute is idle {idle:.1%} of the step ({forward:.1%} of forward, "
        f"{backward:.1%} of backward)",
        fontsize=10,
    )


def main(argv: list[str] | None = None) -> int:
    """Draws all steps one below the other; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path, help="files with timelines of steps")
    parser.add_argument("--names", help="of the files, for titles; default: of the files")
    parser.add_argument("--tier", help="this one alone")
    parser.add_argument("--output", type=Path, required=True, help="PNG or SVG")
    args = parser.parse_args(argv)
    names = args.names.split(",") if args.names else [path.stem for path in args.results]
    if len(names) != len(args.results):
        parser.error(f"--names has {len(names)} names for {len(args.results)} files")
    shown: list[tuple[str, dict[str, Any]]] = []
    for name, path in zip(names, args.results, strict=True):
        try:
            for step in from_json(path.read_bytes())["figures"]:
                if args.tier in (None, step["tier"]):
                    shown.append((f"{name}, {step['tier']}", step))
        except (OSError, *FAULTS) as error:
            parser.error(f"{path} has no timelines of steps: {reason_of(error)}")
    if not shown:
        parser.error(f"no result has the tier {args.tier}")
    size = (11, 0.9 + 2.2 * len(shown))
    grid: dict[str, Any] = {"rows": len(shown), "squeeze": False, "sharex": True}
    with figure(args.output, figsize=size, layout="constrained", **grid) as (drawn, all_axes):
        for axes, (title, step) in zip(all_axes[:, 0], shown, strict=True):
            plot(axes, step, title)
        last = all_axes[-1, 0]
        last.set_xlabel("milliseconds of a simulated step")
        for color, label in KINDS.values():
            last.bar(0, 0, color=color, label=label)
        last.plot([], [], "--", color="black", linewidth=1, label="forward ends")
        drawn.legend(fontsize=8, loc="outside lower center", ncols=2)
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
