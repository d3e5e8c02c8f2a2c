# SPDX-License-Identifier: Apache-2.0
"""Plots the losses of two trainings over their steps, and how far they are apart.

    tools/plot/losses.py runs/own/metrics.jsonl runs/chunked/metrics.jsonl --output losses.png

The files are those of --metrics-file; the first one's losses are what the second's are compared
with. In the legend a file `metrics.jsonl` goes by the name of its folder.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from megatron.offload.documents import each_line, from_json


def losses_of(path: Path) -> list[float]:
    """The loss of each step."""
    advice = "give one that metrics_file= or the trainer has written"
    return each_line(path, "a metrics.jsonl", advice, lambda line: float(from_json(line)["loss"]))


def label_of(path: Path) -> str:
    """A name for a legend."""
    return path.parent.name if path.stem == "metrics" else path.stem


def draw(paths: list[Path], output: Path) -> float:
    """Draws both; returns the largest relative difference."""
    own, other = (losses_of(path) for path in paths)
    differences = [abs(a - b) / abs(a) for a, b in zip(own, other, strict=True)]
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    steps = range(1, len(own) + 1)
    above.plot(steps, own, label=label_of(paths[0]), linewidth=3, color="tab:gray")
    above.plot(steps, other, label=label_of(paths[1]), linewidth=1, color="tab:blue")
    above.set_ylabel("loss")
    above.legend()
    below.semilogy(steps, [max(one, 1e-9) for one in differences], color="tab:blue", linewidth=1)
    below.set_ylabel("relative difference")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(output, dpi=120)
    plt.close(figure)
    return max(differences)


def main(argv: list[str] | None = None) -> int:
    """Draws the file and prints the largest difference; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("metrics", type=Path, nargs=2, help="files of --metrics-file")
    parser.add_argument("--output", type=Path, required=True, help="PNG or SVG")
    args = parser.parse_args(argv)
    try:
        difference = draw(args.metrics, args.output)
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"these are no metrics of two trainings of the same length: {error!r}")
    print(f"wrote {args.output}; the losses differ by {difference:.1e} of the first at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
