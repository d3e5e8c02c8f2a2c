#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Simulated steps beside the measured ones of tools/bench/layer_major.py, as Markdown.

    tools/check/layer_major_prediction.py docs/results/layer-major.json

Two things the simulation has to be told: what a micro-batch computes, and what a read takes beyond
the drive's rate. Both are taken from two of the measured steps, of one order each: the one with two
micro-batches and the one with the most. All others, and all bytes, are predicted.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.optimize import brentq
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron.offload.documents import load_json  # noqa: E402
from megatron.offload.planner.profile.stage_profile import TierProfile  # noqa: E402
from megatron.offload.planner.simulator.streamed_step import (  # noqa: E402
    StreamedCost,
    StreamedStep,
    UnitWork,
    simulate,
)
from tools.bench.layer_major import WAYS, make_parser  # noqa: E402


@dataclass
class Model:
    """The bench's model on its drive.

    Attributes:
        sizes: flags of the bench.
        compute_s: of a micro-batch.
        read_s: of a read, beyond the drive's rate.
    """

    sizes: argparse.Namespace
    compute_s: float = 1.0
    read_s: float = 0.0

    def cost(self, micro_batches: int, way: str) -> StreamedCost:
        """Backward takes three times forward, as layers are recomputed."""
        layers, rate = self.sizes.layers, self.sizes.rate
        forward_s = self.compute_s / 4 / layers
        drive = TierProfile("ssd", rate, rate, latency_s=self.read_s)
        unit = UnitWork(self.layer_bytes, forward_s, 3 * forward_s)
        step = StreamedStep((unit,) * layers, micro_batches, drive, updates_all=True)
        return simulate(step, layer_major=way == "together")

    @property
    def layer_bytes(self) -> int:
        """Of GPT-2's layers, in fp32."""
        return 4 * int(12 * self.sizes.hidden**2 + 13 * self.sizes.hidden)

    def fit(self, rows: dict[str, dict[str, Any]]) -> None:
        """Finds the seconds. Raises ValueError: none give the measured ones."""

        def missing(seconds: float, name: str, micro_batches: str, way: str) -> float:
            setattr(self, name, seconds)
            found = self.cost(int(micro_batches), way).passes_s
            return float(found - rows[micro_batches][f"{way}_step_s"])

        for _ in range(5):  # each depends little on the other
            self.compute_s = brentq(missing, 0, 60, ("compute_s", max(rows, key=int), "together"))
            self.read_s = brentq(missing, 0, 60, ("read_s", "2", "alone"))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="JSON of tools/bench/layer_major.py")
    result = load_json(
        parser.parse_args(argv).results,
        "a result of tools/bench/layer_major.py",
        "give one of its --json",
    )
    rows = result["summary"]["by_micro_batches"]
    model = Model(make_parser().parse_args(shlex.split(result["command"])[1:]))
    model.fit(rows)
    lines = []
    for number, row in rows.items():
        line = [number]
        for way in WAYS:
            cost, measured_s = model.cost(int(number), way), row[f"{way}_step_s"]
            read = cost.read_bytes / (model.layer_bytes * model.sizes.layers)
            line += [f"{measured_s:.2f}", f"{cost.passes_s:.2f}"]
            line += [f"{cost.passes_s / measured_s - 1:+.0%}", f"{row[f'{way}_read']:.2f}"]
            line += [f"{read:.2f}"]
        lines.append(line)
    heading = ["micro-batches"]
    for name in WAYS.values():
        heading += [f"{name}, s", "simulated", "off by", "parameters read", "simulated"]
    print(tabulate(lines, heading, tablefmt="github", disable_numparse=True))
    print(
        f"\na micro-batch computes {model.compute_s:.3f} s, a read takes "
        f"{1e3 * model.read_s:.1f} ms beyond the drive's rate"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
