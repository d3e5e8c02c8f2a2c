#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares what `--activation-offload auto` predicts with what then happens.

    tools/check/prediction.py --json result.json
    tools/check/prediction.py --only PP2 --steps 30
    tools/check/prediction.py --json result.json --resume   # what is not in it yet

Each configuration (model size, pipeline stages, a cap on the SSD's write bandwidth) trains once,
with the plan for the least memory within `--slowdown`. Predicted and measured are those of the
first rank, so of the first of two stages. Measured step time is the median of the steps under a
plan, without the first two of them; measured peak is the largest of theirs. `auto` plans from the
first steps, once more when the run has settled, and again where it goes otherwise than was
predicted; judged are the last plan that was followed for at least four such steps, and the first
one, of which the JSON file also has what its peak was predicted to be made of, and was.

Exit code: 0 within the limits (the last plan: 5 % in the median, 15 % at most; the first one: step
time 10 % and peak 15 % in the median), 1 not, 2 a training failed or too few of its steps followed
a plan.
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
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from tabulate import tabulate

from megatron.offload.activations.stats.memory_parts import load_steps
from megatron.offload.commands.memory.command import predicted_peak
from megatron.offload.commands.training_runs.run import RunError, settled_steps
from megatron.offload.commands.training_runs.trainer import TRAINER, Trainer
from megatron.offload.documents import from_json, reading
from megatron.offload.sizes import format_size

ROOT = Path(__file__).resolve().parents[2]
SIZES = {
    "h256 4 layers": "--hidden-size 256 --num-layers 4 --num-attention-heads 8 --seq-length 256",
    "h512 8 layers": "--hidden-size 512 --num-layers 8 --num-attention-heads 8 --seq-length 256",
}
CAPS = ("50MB/s", "150MB/s", "500MB/s", "")
MOST_MEDIAN_ERROR, MOST_ERROR = 0.05, 0.15
MOST_FIRST_STEP_ERROR, MOST_FIRST_PEAK_ERROR = 0.1, 0.15  # of first plans, in the median
_SETTLING_STEPS = 3  # in which memory is sampled as well
_LEAST_STEPS = 4  # that follow a plan, for it to be judged


@dataclass(frozen=True)
class Configuration:
    """One training that is to be predicted.

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
        """The trainer's flags for this configuration."""
        limit = f" --activation-offload-write-limit {self.cap}" if self.cap else ""
        return shlex.split(
            f"{SIZES[self.size]} --micro-batch-size 2 --global-batch-size {2 * self.micro_batches}"
            f" --pipeline-model-parallel-size {self.stages}{limit}"
        )


@dataclass(frozen=True)
class Followed:
    """Steps that followed one plan, and what it said of them. Seconds and bytes."""

    predicted_step_s: float
    measured_step_s: float
    predicted_peak_bytes: int
    measured_peak_bytes: int
    num_steps: int

    @property
    def step_error(self) -> float:
        """Predicted step time over the measured one, less 1."""
        return self.predicted_step_s / self.measured_step_s - 1

    @property
    def peak_error(self) -> float:
        """Predicted peak over the measured one, less 1."""
        return self.predicted_peak_bytes / self.measured_peak_bytes - 1


@dataclass(frozen=True)
class Result:
    """What was predicted for one training, and what was measured.

    Attributes:
        first: its first plan, made from the first steps; None: it was not followed for long enough.
        last: the last plan that was followed for long enough.
        first_parts: of the first one's largest sampled peak, by the names of a memory report:
            bytes predicted and measured.
    """

    configuration: Configuration
    first: Followed | None
    last: Followed
    num_plans: int
    first_parts: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def configurations() -> Iterator[Configuration]:
    """All trainings that are compared."""
    for size, micro_batches in zip(SIZES, (4, 2), strict=True):
        for stages in (1, 2):
            for cap in CAPS:
                yield Configuration(size, stages, micro_batches, cap)


def result_of(
    configuration: Configuration, steps: Sequence[dict[str, Any]], memory: Path | None = None
) -> Result:
    """Reads the lines of a metrics.jsonl, and a memory report if there is one.

    Raises:
        RunError: too few steps followed any plan.
    """
    num_plans = steps[-1]["offload"]["plans"] if steps else 0
    judged = [
        one
        for plan in range(num_plans, 0, -1)
        if (one := _followed(steps, plan)) is not None and one.num_steps >= _LEAST_STEPS
    ]
    if not judged:
        raise RunError(
            f"{configuration}: of {len(steps)} steps no plan was followed for more than "
            f"{_SETTLING_STEPS + _LEAST_STEPS} steps; give more --steps"
        )
    parts = {} if memory is None else _parts_of_peak(memory)
    return Result(configuration, _followed(steps, 1), judged[0], num_plans, parts)


def _parts_of_peak(path: Path) -> dict[str, tuple[int, int]]:
    """Predicted and measured bytes of what the largest peak of a memory report is made of."""
    steps = load_steps(path)
    if not steps:
        return {}
    shown = max(steps, key=lambda one: one.peak_bytes)
    predicted, found = predicted_peak(shown), shown.peak_parts
    wanted = {} if predicted is None else predicted.parts
    return {name: (wanted.get(name, 0), found[name]) for name in found}


def _followed(steps: Sequence[dict[str, Any]], plan: int) -> Followed | None:
    """The steps under the plan with this number, from 1."""
    until = [one for one in steps if one["offload"]["plans"] <= plan]
    own = [one["offload"] for one in settled_steps(until, _SETTLING_STEPS)]
    if not own:
        return None
    return Followed(
        own[-1]["predicted_step_s"],
        statistics.median(one["measured_step_s"] for one in own),
        own[-1]["predicted_peak_bytes"],
        max(one["measured_peak_bytes"] for one in own),
        len(own),
    )


def table(results: Sequence[Result]) -> str:
    """The results as a table in Markdown."""
    rows = [
        (
            str(one.configuration),
            f"{one.last.predicted_step_s:.3f} s",
            f"{one.last.measured_step_s:.3f} s",
            f"{one.last.step_error:+.1%}",
            f"{one.first.step_error:+.1%}" if one.first else "",
            format_size(one.last.predicted_peak_bytes),
            format_size(one.last.measured_peak_bytes),
            f"{one.last.peak_error:+.1%}",
            f"{one.first.peak_error:+.1%}" if one.first else "",
            one.num_plans,
        )
        for one in results
    ]
    headings = (
        *("", "step predicted", "measured", "error", "of first plan"),
        *("peak predicted", "measured", "error", "of first plan", "plans"),
    )
    return str(tabulate(rows, headings, tablefmt="github", disable_numparse=True))


def verdict(results: Sequence[Result]) -> tuple[str, bool]:
    """How far off the predictions are in all, and whether that is within the limits."""
    firsts = [one.first for one in results if one.first]
    lines, is_good = [], bool(firsts)
    for name, errors in (
        ("step time", [abs(one.last.step_error) for one in results]),
        ("peak", [abs(one.last.peak_error) for one in results]),
    ):
        middle, worst = statistics.median(errors), max(errors)
        lines.append(
            f"{name}: off by {middle:.1%} in the median (at most {MOST_MEDIAN_ERROR:.0%}), "
            f"by {worst:.1%} at most ({MOST_ERROR:.0%})"
        )
        is_good &= middle <= MOST_MEDIAN_ERROR and worst <= MOST_ERROR
    for name, errors, limit in (
        ("step time", [abs(one.step_error) for one in firsts], MOST_FIRST_STEP_ERROR),
        ("peak", [abs(one.peak_error) for one in firsts], MOST_FIRST_PEAK_ERROR),
    ):
        if errors:
            middle, worst = statistics.median(errors), max(errors)
            lines.append(
                f"{name} of {len(errors)} first plans: off by {middle:.1%} in the median "
                f"(at most {limit:.0%}), by {worst:.1%} at most"
            )
            is_good &= middle <= limit
    return "\n".join(lines), is_good


def run(configuration: Configuration, args: argparse.Namespace, folder: Path) -> Result:
    """Trains once, and compares.

    Raises:
        RunError: it failed.
    """
    memory = folder / "memory.jsonl"
    flags = [
        *configuration.flags(),
        *shlex.split("--mock-data --vocab-size 1024 --eval-iters 0 --log-interval 1"),
        *("--train-iters", str(args.steps), "--cpu-threads", "1"),
        *("--activation-offload", "auto"),
        *("--activation-offload-min-bytes", "64KiB"),
        *("--activation-offload-max-slowdown", str(args.slowdown)),
        *("--activation-memory-report", str(memory)),
    ]
    trainer = Trainer(TRAINER, flags, args.dir, configuration.stages, args.patience)
    steps = trainer.train(str(configuration), [], "offload", folder)
    return result_of(configuration, steps, memory)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains all configurations, prints the table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--resume", action="store_true", help="keep what --json has, run the rest")
    parser.add_argument("--only", default="", help="configurations with this in their name")
    parser.add_argument("--steps", type=int, default=36, help="of each training (default 36)")
    parser.add_argument("--slowdown", type=float, default=0.1, help="that plans may cost (0.1)")
    parser.add_argument("--dir", type=Path, default=ROOT / "runs" / "offload", help="on the SSD")
    parser.add_argument(
        "--patience", type=float, default=300.0, help="seconds without a step (300)"
    )
    args = parser.parse_args(argv)
    args.dir.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="prediction-"))
    results = _load(args.json) if args.resume else []
    known = {one.configuration for one in results}
    num_failed = 0
    for number, one in enumerate(configurations()):
        if args.only not in str(one) or one in known:
            continue
        try:
            results.append(run(one, args, work / str(number)))
        except RunError as error:
            print(f"prediction.py: error: {error}", file=sys.stderr, flush=True)
            num_failed += 1
            continue
        print(table(results[-1:]).splitlines()[-1], flush=True)
        _save(args.json, results, argv)
    if not results:
        return 2
    text, is_good = verdict(results)
    print(f"\n{table(results)}\n\n{text}")
    if num_failed:
        return 2
    return 0 if is_good else 1


def _load(path: Path | None) -> list[Result]:
    """The results that were saved there; none if there is no such file."""
    if path is None or not path.exists():
        return []
    with reading(f"{path} is not a result of this check", "give one of its --json"):
        saved = from_json(path.read_bytes())["results"]
        return [msgspec.convert(one, Result) for one in saved]


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
            {
                **dataclasses.asdict(one),
                "step_error": one.last.step_error,
                "peak_error": one.last.peak_error,
                "first_step_error": one.first.step_error if one.first else None,
                "first_peak_error": one.first.peak_error if one.first else None,
            }
            for one in results
        ],
        "verdict": verdict(results)[0].splitlines(),
    }
    path.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
