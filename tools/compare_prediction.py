#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares what `--activation-offload auto` predicts with what then happens.

    compare_prediction.py --json result.json
    compare_prediction.py --only PP2 --steps 20

Each configuration (model size, pipeline stages, a cap on the SSD's write bandwidth) trains once,
with the plan for the least memory within `--slowdown`. Predicted and measured are those of the
first rank, so of the first of two stages. Measured step time is the median of the steps under the
last plan, without the first two of them; measured peak is the largest of theirs.

Exit code: 0 all were compared, 2 a training failed or too few of its steps followed a plan.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from megatron.offload.config import format_size
from megatron.offload.storage.allocator import allocator_environment

ROOT = Path(__file__).resolve().parent.parent
TRAINER = ROOT / "examples" / "pretrain_gpt.py"
SIZES = {
    "h256 4 layers": "--hidden-size 256 --num-layers 4 --num-attention-heads 8 --seq-length 256",
    "h512 8 layers": "--hidden-size 512 --num-layers 8 --num-attention-heads 8 --seq-length 256",
}
CAPS = ("50MB/s", "150MB/s", "500MB/s", "")
_SETTLING_STEPS = 2


class ComparisonError(Exception):
    """A training failed; the message says where its output is."""


@dataclass(frozen=True)
class Configuration:
    """One training.

    Attributes:
        size: key of `SIZES`.
        stages: pipeline stages, a process each.
        micro_batches: of a step.
        cap: of the SSD's write bandwidth; empty: none.
    """

    size: str
    stages: int
    micro_batches: int
    cap: str

    def __str__(self) -> str:
        cap = self.cap or "no cap"
        return f"{self.size}, PP{self.stages}, {self.micro_batches} micro-batches, {cap}"

    def flags(self) -> list[str]:
        """Of the trainer."""
        limit = f" --activation-offload-write-limit {self.cap}" if self.cap else ""
        return shlex.split(
            f"{SIZES[self.size]} --micro-batch-size 2 --global-batch-size {2 * self.micro_batches}"
            f" --pipeline-model-parallel-size {self.stages}{limit}"
        )


@dataclass(frozen=True)
class Result:
    """Predicted and measured. Seconds and bytes."""

    configuration: Configuration
    predicted_step_s: float
    measured_step_s: float
    predicted_peak_bytes: int
    measured_peak_bytes: int
    num_plans: int
    num_steps: int  # measured under the last plan

    @property
    def step_error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_step_s / self.measured_step_s - 1

    @property
    def peak_error(self) -> float:
        """Likewise of the peak."""
        return self.predicted_peak_bytes / self.measured_peak_bytes - 1


def configurations() -> Iterator[Configuration]:
    """All that are compared."""
    for size in SIZES:
        for stages in (1, 2):
            for cap in CAPS:
                yield Configuration(size, stages, 4, cap)


def result_of(configuration: Configuration, steps: Sequence[dict[str, Any]]) -> Result:
    """Reads the lines of a metrics.jsonl.

    Raises:
        ComparisonError: too few steps followed a plan.
    """
    figures = [step["offload"] for step in steps]
    num_plans = figures[-1]["plans"] if figures else 0
    # The step that a plan is made after shows its prediction already, but did not follow it.
    followed = [one for one in figures if num_plans and one["plans"] == num_plans][1:]
    steady = followed[_SETTLING_STEPS:]
    if not steady:
        raise ComparisonError(
            f"{configuration}: {len(followed)} of {len(figures)} steps followed the last plan; "
            f"at least {_SETTLING_STEPS + 1} are needed; give more --steps"
        )
    return Result(
        configuration,
        steady[-1]["predicted_step_s"],
        statistics.median(one["measured_step_s"] for one in steady),
        steady[-1]["predicted_peak_bytes"],
        max(one["measured_peak_bytes"] for one in steady),
        num_plans,
        len(steady),
    )


def table(results: Sequence[Result]) -> str:
    """For people; Markdown."""
    rows = [
        (
            str(one.configuration),
            f"{one.predicted_step_s:.3f} s",
            f"{one.measured_step_s:.3f} s",
            f"{one.step_error:+.0%}",
            format_size(one.predicted_peak_bytes),
            format_size(one.measured_peak_bytes),
            f"{one.peak_error:+.0%}",
            one.num_plans,
        )
        for one in results
    ]
    headings = ("", "step predicted", "measured", "", "peak predicted", "measured", "", "plans")
    return str(tabulate(rows, headings, tablefmt="github", disable_numparse=True))


def run(configuration: Configuration, args: argparse.Namespace, folder: Path) -> Result:
    """Trains once.

    Raises:
        ComparisonError: it failed.
    """
    folder.mkdir(parents=True)
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={configuration.stages}",
    ]
    command = [
        *(sys.executable, *(launch if configuration.stages > 1 else []), str(TRAINER)),
        *configuration.flags(),
        *shlex.split("--mock-data --vocab-size 1024 --eval-iters 0 --log-interval 1"),
        *("--train-iters", str(args.steps), "--cpu-threads", "1"),
        *("--activation-offload", "auto", "--activation-offload-dir", str(args.dir)),
        *("--activation-offload-min-bytes", "64KiB"),
        *("--activation-offload-max-slowdown", str(args.slowdown)),
        *("--metrics-file", str(folder / "metrics.jsonl")),
    ]
    log = folder / "output.log"
    with log.open("w") as output:
        ended = subprocess.run(
            command,
            env={**os.environ, **allocator_environment()},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=args.timeout,
        )
    if ended.returncode:
        raise ComparisonError(f"{configuration}: exit code {ended.returncode}; see {log}")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return result_of(configuration, [json.loads(line) for line in lines])


def main(argv: Sequence[str] | None = None) -> int:
    """See the file's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--only", default="", help="configurations with this in their name")
    parser.add_argument("--steps", type=int, default=24, help="of each training (default 24)")
    parser.add_argument("--slowdown", type=float, default=0.1, help="that plans may cost (0.1)")
    parser.add_argument("--dir", type=Path, default=ROOT / "runs" / "offload", help="on the SSD")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of each training")
    args = parser.parse_args(argv)
    args.dir.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="prediction-"))
    results: list[Result] = []
    num_failed = 0
    for number, one in enumerate(configurations()):
        if args.only not in str(one):
            continue
        try:
            results.append(run(one, args, work / str(number)))
        except (ComparisonError, subprocess.TimeoutExpired) as error:
            print(f"compare_prediction: error: {error}", file=sys.stderr, flush=True)
            num_failed += 1
            continue
        print(table(results[-1:]).splitlines()[-1], flush=True)
        _save(args.json, results, argv)
    print(f"\n{table(results)}")
    return 2 if num_failed else 0


def _save(path: Path | None, results: Sequence[Result], argv: Sequence[str] | None) -> None:
    if path is None:
        return
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),  # of others as well: a loaded machine is slower than predicted
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.cuda.is_available(),
    }
    values = {
        "date": datetime.date.today().isoformat(),
        "arguments": list(sys.argv[1:] if argv is None else argv),
        "machine": machine,
        "results": [
            {**dataclasses.asdict(one), "step_error": one.step_error, "peak_error": one.peak_error}
            for one in results
        ],
    }
    path.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
