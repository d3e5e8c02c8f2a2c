#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What measuring, planning and following a plan cost, apart from what the plan makes of the step.

    tools/bench/planning.py --json planning.json          # about 2 minutes on 2 cores

The benchmark GPT of hooks.py beside this, trained with `--activation-offload auto`. As there, the
time spent in the planner's own code is taken directly, because two runs differ by more than that:
- following_fraction: of a step that follows its plan, the median of such steps. Budget: 1 %.
- measuring_fraction: of a step that is noted in detail for a profile.
- first_plan_s: seconds, once, for the profile, the solver's process and its answer.
- measured_over_following: a step before the first plan (noted in detail, everything offloaded)
  over one that follows the plan.

Exit code: 0 within the budget, 1 not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hooks import ROOT, Stopwatch, train
from tabulate import tabulate

from megatron.offload.activations.placement.plan_policy import PlannedPolicy
from megatron.offload.commands.training_runs.machine import machine_facts
from megatron.offload.planner.online.planner import Phase, Planner
from megatron.offload.planner.profile.profiler import Profiler

MOST_FOLLOWING = 0.01
WARM_STEPS = 2  # under a plan


@dataclass(frozen=True)
class Step:
    """One step: what it was for, and seconds in the planner's own code."""

    phase: Phase
    made_plan: bool
    own_s: float


def timed_context(watch: Stopwatch, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns a context; what it does on the way in and out is timed."""

    @contextlib.contextmanager
    def timed(*args: Any, **kwargs: Any) -> Iterator[Any]:
        context = watch.wrap(function)(*args, **kwargs)
        value = watch.wrap(context.__enter__)()
        try:
            yield value
        except BaseException:
            if not watch.wrap(context.__exit__)(*sys.exc_info()):
                raise
        else:
            watch.wrap(context.__exit__)(None, None, None)

    return timed


def watch_planning(watch: Stopwatch, first_plan: Stopwatch) -> list[Step]:
    """The steps, as they come. Everything of planning that a step calls is timed."""
    for name in ("begin_layer", "reach_middle", "end_layer", "moves", "stayed", "now"):
        setattr(Profiler, name, watch.wrap(getattr(Profiler, name)))
    for name in ("forward", "backward", "recomputation"):
        setattr(Profiler, name, timed_context(watch, getattr(Profiler, name)))
    for name in ("place", "place_layer"):
        setattr(PlannedPolicy, name, watch.wrap(getattr(PlannedPolicy, name)))
    make = first_plan.wrap(Planner._make_first_plan)
    Planner._make_first_plan = make  # type: ignore[method-assign]
    step, steps = timed_context(watch, Planner.step), list[Step]()

    @contextlib.contextmanager
    def noted(self: Planner) -> Iterator[None]:
        phase, num_plans, watch.seconds = self.phase, self.num_plans, 0.0
        with step(self):
            yield
        steps.append(Step(phase, self.num_plans > num_plans, watch.seconds))

    Planner.step = noted  # type: ignore[method-assign]
    return steps


def measure(args: argparse.Namespace, metrics: Path) -> dict[str, Any]:
    """Trains once and sums up the seconds that planning took."""
    watch, first_plan = Stopwatch(), Stopwatch()
    steps = watch_planning(watch, first_plan)
    goal = ["--activation-offload-max-slowdown", str(args.slowdown)]
    flags = [*shlex.split(args.model), "--train-iters", str(args.train_iters)]
    flags += ["--activation-offload", "auto", *goal]
    # `train` leaves the first step out, which warms up.
    records = train([*flags, "--activation-offload-dir", str(args.dir)], metrics)
    both = list(zip(steps[1:], records, strict=True))

    def of(*phases: Phase) -> list[tuple[float, float]]:
        """Own seconds and all seconds; making a plan is not a step's part."""
        return [
            (step.own_s, record["step_time_s"])
            for step, record in both
            if step.phase in phases and not step.made_plan
        ]

    following = of(Phase.FOLLOWING)[WARM_STEPS:]
    measured = of(Phase.MEASURING, Phase.UPDATING)
    return {
        "following_fraction": median(own / all_s for own, all_s in following),
        "following_s": median(own for own, _ in following),
        "num_following": len(following),
        "measuring_fraction": median(own / all_s for own, all_s in measured),
        "measuring_s": median(own for own, _ in measured),
        "first_plan_s": first_plan.seconds,
        "measured_over_following": median(all_s for _, all_s in measured)
        / median(all_s for _, all_s in following),
    }


def table(result: dict[str, Any]) -> str:
    """The results as the table that is printed."""
    fraction = result["following_fraction"]
    rows = [
        (
            "following a plan",
            f"{fraction:.3%} of a step ({1e3 * result['following_s']:.2f} ms)",
            f"{MOST_FOLLOWING:.0%}",
            "yes" if fraction < MOST_FOLLOWING else "NO",
        ),
        (
            "measuring a step in detail",
            f"{result['measuring_fraction']:.3%} of a step ({1e3 * result['measuring_s']:.2f} ms)",
        ),
        ("the first plan", f"{result['first_plan_s']:.2f} s, once"),
        ("a measured step over one that follows", f"{result['measured_over_following']:.3f}"),
    ]
    return str(tabulate(rows, headers=("", "measured", "at most", "kept"), disable_numparse=True))


def main() -> int:
    """Trains, prints and writes the result; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train-iters", type=int, default=10, help="(10)")
    parser.add_argument("--slowdown", type=float, default=0.02, help="that plans may cost (0.02)")
    parser.add_argument("--model", default="", help="flags of the trainer, for another model")
    parser.add_argument("--dir", type=Path, default=ROOT / "runs/offload", help="on an SSD")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args, Path(folder) / "metrics.jsonl")
    print(table(result))
    if args.json:
        values = {
            "command": shlex.join(["tools/bench/planning.py", *sys.argv[1:]]),
            "machine": machine_facts(args.dir),
            **result,
        }
        args.json.write_text(json.dumps(values, indent=1).replace(f"{ROOT}/", "") + "\n")
    return 0 if result["following_fraction"] < MOST_FOLLOWING else 1


if __name__ == "__main__":
    sys.exit(main())
