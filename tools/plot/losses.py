# SPDX-License-Identifier: Apache-2.0
"""Plots the losses of two trainings over their steps, and how far they are apart.

    tools/plot/losses.py runs/own/metrics.jsonl runs/chunked/metrics.jsonl \\
        --names "logits in memory,loss over chunks" --title "GPT, 4 layers, fp32" \\
        --output losses.png

The files are those of --metrics-file; the first one's losses are what the second's are compared
with. Without --names a file `metrics.jsonl` goes by the name of its folder.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron.offload.commands.drawing import BLACK, ORANGE, figure
from megatron.offload.documents import each_line, from_json


def losses_of(path: Path) -> list[float]:
    """The loss of each step."""
    advice = "give one that metrics_file= or the trainer has written"
    return each_line(path, "a metrics.jsonl", advice, lambda line: float(from_json(line)["loss"]))


def label_of(path: Path) -> str:
    """A name for a legend."""
    return path.parent.name if path.stem == "metrics" else path.stem


def draw(paths: list[Path], output: Path, names: list[str], title: str = "") -> float:
    """Draws both; returns the largest relative difference."""
    own, other = (losses_of(path) for path in paths)
    differences = [abs(a - b) / abs(a) for a, b in zip(own, other, strict=True)]
    options = {"figsize": (8, 6), "sharex": True, "height_ratios": (2, 1), "layout": "constrained"}
    with figure(output, rows=2, **options) as (_, (above, below)):
        steps = range(1, len(own) + 1)
        above.plot(steps, own, "-", label=names[0], linewidth=3, color=ORANGE)
        above.plot(steps, other, "--", label=names[1], linewidth=1, color=BLACK)
        above.set_ylabel("loss")
        above.set_title(title or f"Losses of {names[0]} and {names[1]}", fontsize=10)
        above.legend()
        apart = [(step, one) for step, one in zip(steps, differences, strict=True) if one]
        below.plot(*zip(*apart, strict=True) if apart else ([], []), "o", color=BLACK, markersize=3)
        if apart:
            below.set_yscale("log")
        num_same = len(differences) - len(apart)
        below.set_title(
            f"{num_same} of {len(differences)} steps have the same loss, bit for bit, and no point",
            fontsize=9,
        )
        below.set_ylabel("relative difference")
        below.set_xlabel("step")
        for axes in (above, below):
            axes.grid(alpha=0.3)
    return max(differences)


def main(argv: list[str] | None = None) -> int:
    """Draws the file and prints the largest difference; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("metrics", type=Path, nargs=2, help="files of --metrics-file")
    parser.add_argument("--names", help="of the two trainings, with a comma between them")
    parser.add_argument("--title", default="", help="of the picture")
    parser.add_argument("--output", type=Path, required=True, help="PNG or SVG")
    args = parser.parse_args(argv)
    names = args.names.split(",") if args.names else [label_of(path) for path in args.metrics]
    if len(names) != len(args.metrics):
        parser.error(f"--names {args.names} are not two names; write them as one,other")
    try:
        difference = draw(args.metrics, args.output, names, args.title)
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"these are no metrics of two trainings of the same length: {error!r}")
    print(f"wrote {args.output}; the losses differ by {difference:.1e} of the first at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
