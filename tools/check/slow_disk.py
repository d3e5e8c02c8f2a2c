#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether `--activation-offload auto` gets over a disk that becomes slow in the middle of a run.

    tools/check/slow_disk.py --json result.json          # about 7 minutes a round on 2 cores

The same training three ways, in rounds whose order turns: `off`; `slow`, planned for a disk that
has the low rate from the start; `slowed`, on a disk that gets it after step `--after`, when the two
plans have been made that are made in any case (after steps 3 and 11). train_on_slow_disk.py, beside
this, says what makes the disk slow. Step times are medians of the last `--tail` steps.

Exit code: 0 `slowed` planned a third time within 5 steps, ended at most 5 % slower than `slow` (the
median over the rounds), and losses, gradient norms and weights of all runs are the same bits; 1 one
of these does not hold; 2 a training failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tabulate import tabulate

from megatron.offload.commands.training_runs.machine import machine_facts
from megatron.offload.commands.training_runs.run import COMPARED_FIELDS
from megatron.offload.machine.allocator import allocator_environment
from megatron.offload.sizes import format_size

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = ("off", "slow", "slowed")
MOST_STEPS, MOST_RATIO = 5, 1.05
PLANS_IN_ANY_CASE = 2
MODEL = (
    "--hidden-size 512 --num-layers 8 --num-attention-heads 8 --seq-length 256"
    " --micro-batch-size 2 --global-batch-size 4 --vocab-size 1024"
)


class ComparisonError(Exception):
    """A training failed; the message says where its output is."""


@dataclass(frozen=True)
class Run:
    """One training: the lines of its metrics.jsonl."""

    variant: str
    round: int
    steps: list[dict[str, Any]]

    def step_s(self, tail: int) -> float:
        """Median seconds of the last `tail` steps."""
        return median(step["step_time_s"] for step in self.steps[-tail:])

    def written_bytes(self, tail: int) -> float:
        """Median bytes that the last `tail` steps wrote."""
        return median(step["offload"].get("written_bytes", 0) for step in self.steps[-tail:])

    def plans_after(self) -> list[int]:
        """The steps after which a plan was made."""
        plans = [step["offload"].get("plans", 0) for step in self.steps]
        before = [0, *plans]
        return [n for n, (old, new) in enumerate(zip(before, plans, strict=False), 1) if new > old]

    def planned_again_after(self, step: int) -> int | None:
        """How many steps later, at the soonest; None: never."""
        return next((n - step for n in self.plans_after() if n > step), None)

    def same_bits(self, other: Run) -> bool:
        """Losses, gradient norms and the final weights."""
        return len(self.steps) == len(other.steps) and all(
            one.get(name) == two.get(name)
            for one, two in zip(self.steps, other.steps, strict=True)
            for name in COMPARED_FIELDS
        )


@dataclass(frozen=True)
class Verdict:
    """Whether the runs show what they were to show."""

    plans_before: list[int]  # of each round
    steps_until_plan: list[int | None]
    step_ratio: float  # slowed over slow, the median of the rounds
    identical: bool

    @property
    def holds(self) -> bool:
        """Whether all of it was shown."""
        soon = all(n is not None and n <= MOST_STEPS for n in self.steps_until_plan)
        settled = all(n >= PLANS_IN_ANY_CASE for n in self.plans_before)
        return soon and settled and self.step_ratio <= MOST_RATIO and self.identical


def verdict_of(runs: Sequence[Run], after: int, tail: int) -> Verdict:
    """What the runs of all rounds show."""
    by_round = {(run.variant, run.round): run for run in runs}
    slowed = [run for run in runs if run.variant == "slowed"]
    return Verdict(
        [sum(n <= after for n in run.plans_after()) for run in slowed],
        [run.planned_again_after(after) for run in slowed],
        median(run.step_s(tail) / by_round["slow", run.round].step_s(tail) for run in slowed),
        all(run.same_bits(runs[0]) for run in runs[1:]),
    )


def table(runs: Sequence[Run], tail: int) -> str:
    """The runs as a table in Markdown."""
    rows = [
        (
            run.variant,
            run.round + 1,
            ", ".join(map(str, run.plans_after())) or "-",
            f"{run.step_s(tail):.3f} s",
            format_size(run.written_bytes(tail)),
            "yes" if run.same_bits(runs[0]) else "NO",
        )
        for run in sorted(runs, key=lambda run: VARIANTS.index(run.variant))
    ]
    headings = ("", "round", "planned after step", "step", "written a step", "same bits")
    return str(tabulate(rows, headings, tablefmt="github", disable_numparse=True))


def in_words(verdict: Verdict, after: int) -> str:
    """The verdict in a few lines, with its limits."""
    steps = ", ".join("never" if n is None else str(n) for n in verdict.steps_until_plan)
    return (
        f"the disk became slow after step {after}, with so many plans made: "
        f"{', '.join(map(str, verdict.plans_before))} (at least {PLANS_IN_ANY_CASE})\n"
        f"planned again after so many steps: {steps} (at most {MOST_STEPS})\n"
        f"a step at the end over that of a run planned for the slow disk: "
        f"{verdict.step_ratio:.3f} (at most {MOST_RATIO})\n"
        f"losses, gradient norms and weights are {'' if verdict.identical else 'NOT '}the same "
        f"bits\n{'holds' if verdict.holds else 'DOES NOT HOLD'}"
    )


def run(variant: str, round_: int, args: argparse.Namespace, work: Path) -> Run:
    """Trains once, in a process of its own.

    Raises:
        ComparisonError: it failed.
    """
    folder = work / f"{round_ + 1}-{variant}"
    folder.mkdir(parents=True)
    goal = ["--activation-offload-max-slowdown", str(args.slowdown)]
    if args.budget:
        goal = ["--activation-memory-budget", args.budget]
    auto = [
        *("--activation-offload", "auto", "--activation-offload-dir", str(args.dir), *goal),
        *("--activation-offload-min-bytes", "64KiB"),
    ]
    command = [
        *(sys.executable, str(ROOT / "tools/check/train_on_slow_disk.py"), "--rate", args.rate),
        *("--after", str(args.after if variant == "slowed" else 0)),
        *(["--only-writes"] if args.only_writes and variant != "off" else []),
        *("--", *shlex.split(args.model), "--mock-data", "--eval-iters", "0"),
        *("--log-interval", "1", "--cpu-threads", "1", "--train-iters", str(args.steps)),
        *("--metrics-file", str(folder / "metrics.jsonl"), *(auto if variant != "off" else [])),
    ]
    log = folder / "output.log"
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with log.open("w") as output:
        print(shlex.join(command), file=output, flush=True)
        ended = subprocess.run(
            command,
            env={**os.environ, **allocator_environment(), "PYTHONPATH": search},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=args.timeout,
        )
    if ended.returncode:
        raise ComparisonError(f"{variant}: exit code {ended.returncode}; see {log}")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return Run(variant, round_, [json.loads(line) for line in lines])


def order_of_round(round_: int) -> list[str]:
    """`off` once: it is there for its bits. The others change places."""
    both = ["slow", "slowed"] if round_ % 2 == 0 else ["slowed", "slow"]
    return ["off", *both] if round_ == 0 else both


def main(argv: Sequence[str] | None = None) -> int:
    """Trains in all rounds, prints the table and the verdict; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--rate", default="50MB/s", help="of the slow disk (50MB/s)")
    parser.add_argument("--only-writes", action="store_true", help="see train_on_slow_disk.py")
    parser.add_argument(
        "--after", type=int, default=14, help="the step that it gets slow after (14)"
    )
    parser.add_argument("--steps", type=int, default=32, help="of each training (32)")
    parser.add_argument("--tail", type=int, default=6, help="steps that are timed at the end (6)")
    parser.add_argument("--rounds", type=int, default=2, help="(2)")
    parser.add_argument("--slowdown", type=float, default=0.1, help="that plans may cost (0.1)")
    parser.add_argument("--budget", help="of memory, instead of a slowdown; for example 300MiB")
    parser.add_argument("--model", default=MODEL, help="flags of the trainer")
    parser.add_argument("--dir", type=Path, default=ROOT / "runs" / "offload", help="on the SSD")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of each training")
    args = parser.parse_args(argv)
    args.dir.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="slow-disk-"))
    runs: list[Run] = []
    try:
        for round_ in range(args.rounds):
            for variant in order_of_round(round_):
                runs.append(run(variant, round_, args, work))
                print(table(runs[-1:], args.tail).splitlines()[-1], flush=True)
    except (ComparisonError, subprocess.TimeoutExpired) as error:
        print(f"slow_disk.py: error: {error}", file=sys.stderr)
        return 2
    verdict = verdict_of(runs, args.after, args.tail)
    arguments = sys.argv[1:] if argv is None else argv
    print(f"\n{table(runs, args.tail)}\n\n{in_words(verdict, args.after)}")
    if args.json is not None:
        values = {
            "date": datetime.date.today().isoformat(),
            "command": shlex.join(["tools/check/slow_disk.py", *arguments]),
            "machine": {**machine_facts(args.dir), "load": os.getloadavg()},
            "holds": verdict.holds,
            **asdict(verdict),
            "runs": [
                {
                    "variant": one.variant,
                    "round": one.round,
                    "planned_after_steps": one.plans_after(),
                    "step_s": one.step_s(args.tail),
                    "written_bytes": one.written_bytes(args.tail),
                    "same_bits": one.same_bits(runs[0]),
                    "step_times_s": [step["step_time_s"] for step in one.steps],
                }
                for one in runs
            ],
        }
        args.json.write_text(json.dumps(values, indent=1).replace(f"{ROOT}/", "") + "\n")
    return 0 if verdict.holds else 1


if __name__ == "__main__":
    sys.exit(main())
