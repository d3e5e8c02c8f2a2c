#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares `mode="auto"` with every simple fixed placement where a device runs behind its host.

    tools/check/auto_on_device.py --json auto.json           # an hour, by estimate
    tools/check/auto_on_device.py --quick --json auto.json   # one link, two budgets: six minutes

A model of twelve layers, each of a set time in several parts, trains on the test accelerator
(`tests/support/lag`), whose streams lag behind the host and whose links have set bandwidths: one
hides all that forward makes, one half of it, one a tenth. For each link the fixed placements run
first, as plans from a file: the first layers to the host or recomputed, 0 to 12 of them, the others
kept. Then `auto` runs for 30 steps within each of five budgets, from the peak of keeping everything
to the smallest peak that was measured.

It shows whether `auto` measures, plans and keeps to a budget there; it shows nothing of a GPU's
speed. Its figures are of this machine's clock, so other work on it disturbs them: with --slower
less, as its streams sleep for longer and do no more. By default a layer's forward takes 60 ms.

Limits: the settled step at most 1.03 of the best fixed one that keeps the budget, no step over the
budget after the first plan, two plans at most, predicted step, peak and profile within 5 %.

Exit code: 0 within the limits; 1 not; 2 the accelerator cannot be used here.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tabulate import tabulate
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path[1:1] = [str(ROOT / "tools")]
sys.path.append(str(ROOT))  # the accelerator is the tests'

from check.timed_model import Layer, Model, Shape, Work  # noqa: E402
from megatron.offload import offload_activations  # noqa: E402
from megatron.offload.activations.placement.plan import Plan, PlannedPart  # noqa: E402
from megatron.offload.activations.placement.plan_file import save_plans  # noqa: E402
from megatron.offload.activations.placement.policy import WHOLE_LAYER, Placement  # noqa: E402
from megatron.offload.commands.training_runs.machine import machine_facts  # noqa: E402
from megatron.offload.device.platform import register_platform  # noqa: E402
from megatron.offload.errors import InfeasibleBudgetError  # noqa: E402
from megatron.offload.planner.profile.stage_profile import StageProfile  # noqa: E402
from megatron.offload.sizes import format_size  # noqa: E402
from tests.support.lag import load  # noqa: E402
from tests.support.lag.build import why_not  # noqa: E402
from tests.support.lag.platform import LagPlatform  # noqa: E402

LINKS = {"all": 2.0, "half": 0.5, "tenth": 0.1}  # of what forward makes in a second
NUM_STEPS, NUM_BUDGETS, SETTLED_STEPS = 30, 5, 8
FIXED_STEPS, WARM_STEPS = 5, 2
PROFILED_STEPS = 4  # before a second plan; before the first one two
# Bytes, which are for activations of full size: what is in flight grows to two layers, and what an
# operation saved is handed over when the next one saves.
_BOUNDS = (
    "activations.engine.DEFAULT_INFLIGHT_BYTES",
    "activations.transfer.write_batch._ENOUGH_BYTES",
)
MOST_RATIO, MOST_PLANS, MOST_ERROR = 1.03, 2, 0.05


@dataclass(frozen=True)
class Step:
    """What one step took.

    Attributes:
        step_s: until the device had done all of it.
        computed_s: seconds of the parts on the device, forward and recomputed, then backward.
        peak_bytes: of what was allocated above the state before the first step.
        plans: made so far.
    """

    step_s: float
    forward_s: float
    backward_s: float
    peak_bytes: int
    plans: int
    predicted_step_s: float
    predicted_peak_bytes: int
    recomputed_layers: int
    offloaded_bytes: int


@dataclass
class Run:
    """Steps of one placement, or of `auto` within a budget."""

    name: str
    link: str
    budget_bytes: int | None
    steps: list[Step] = field(default_factory=list)
    forward_s: float = 0.0  # of a layer in the last profile, the worst of all
    backward_s: float = 0.0
    profile_error: float = 0.0
    failed: str = ""
    plan: str = ""

    @property
    def settled(self) -> list[Step]:
        """The last steps, all under the last plan."""
        return self.steps[-SETTLED_STEPS:] if self.budget_bytes is not None else self.steps[2:]

    @property
    def profiled(self) -> list[Step]:
        """The steps before the last plan was made, which it was made from."""
        before = [one for one in self.steps if one.plans < self.steps[-1].plans]
        return before[-(PROFILED_STEPS if self.steps[-1].plans > 1 else 2) :]

    @property
    def step_s(self) -> float:
        """The median of the settled steps."""
        return statistics.median(one.step_s for one in self.settled)

    @property
    def peak_bytes(self) -> int:
        """The most of the settled steps."""
        return max(one.peak_bytes for one in self.settled)

    @property
    def over_budget_steps(self) -> int:
        """Steps under a plan that took more than the budget."""
        budget_bytes = self.budget_bytes
        assert budget_bytes is not None
        return sum(one.plans > 0 and one.peak_bytes > budget_bytes for one in self.steps)

    @property
    def step_error(self) -> float:
        """Of the predicted step, as a part of the measured one."""
        return abs(self.steps[-1].predicted_step_s / self.step_s - 1)

    @property
    def peak_error(self) -> float:
        """Of the predicted peak, likewise."""
        return abs(self.steps[-1].predicted_peak_bytes / self.peak_bytes - 1)


class Bench:
    """The accelerator with one link, and the model on it.

    Args:
        link: a name in `LINKS`.
        folder: for plans and profiles.
    """

    def __init__(self, link: str, folder: Path, shape: Shape) -> None:
        self.link = link
        self.shape = shape
        self.lag = load()
        self._folder = folder
        self._platform = LagPlatform(self.lag)
        self._peak = self._platform.peak_reader(torch.device("lag", 0))
        register_platform("lag", self._platform)

    @contextlib.contextmanager
    def simulated(self) -> Iterator[None]:
        """The link has its bandwidth. The package's bounds are as small as the model's bytes."""
        rate = LINKS[self.link] * self.shape.produced_bytes_per_s
        self.lag.set_bandwidth(rate, rate)
        self.lag.set_poison(False)  # it takes the time of this machine's memory
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        gc.collect()
        gc.freeze()
        gc.disable()  # as Megatron's --manual-gc: a collection stops all threads for 0.1 s
        try:
            with contextlib.ExitStack() as smaller:
                for name in _BOUNDS:
                    smaller.enter_context(mock.patch(f"megatron.offload.{name}", 4096))
                yield
        finally:
            gc.enable()
            gc.unfreeze()
            torch.set_num_threads(threads)
            self.lag.reset()

    def fixed(self, placement: Placement, number: int) -> Run:
        """The first layers placed so, the others kept."""
        lines = [
            PlannedPart(
                0,
                f"layers.{n}",
                WHOLE_LAYER,
                placement if n < number else Placement.KEEP,
                self.shape.layer_bytes,
            )
            for n in range(self.shape.num_layers)
        ]
        path = self._folder / "plan.json"
        save_plans(path, [Plan(tuple(lines))])
        run = Run(f"{placement.value} {number}", self.link, None)
        self._train(run, WARM_STEPS + FIXED_STEPS, plan_file=path)
        return run

    def auto(self, budget_bytes: int, num_steps: int = NUM_STEPS) -> Run:
        """`auto` within a budget."""
        run = Run("auto", self.link, budget_bytes)
        run_directory = Path(tempfile.mkdtemp(dir=self._folder))
        settings: dict[str, Any] = {
            "memory_budget_bytes": budget_bytes,
            "run_directory": run_directory,
        }
        try:
            self._train(run, num_steps, **settings)
        except InfeasibleBudgetError as error:
            run.failed = str(error)
            return run
        path = run_directory / "activation-profile-stage0.json"
        self._compare(run, StageProfile.load(path))
        return run

    def _train(self, run: Run, num_steps: int, **settings: Any) -> None:
        shape, lag = self.shape, self.lag
        work = Work(lag, shape)
        model = Model(work, shape)
        handle = offload_activations(
            model,
            mode="auto",
            min_bytes=4096,
            layers=[Layer],
            host_budget=4 * shape.num_layers * shape.layer_bytes,
            **settings,
        )
        try:
            lag.synchronize()
            base_bytes = lag.memory_allocated()
            for _ in range(num_steps):
                began_s = time.perf_counter()
                self._peak.reset()
                with lag.recorded() as spans:
                    model(torch.ones(8, device="lag")).sum().backward()
                    lag.synchronize()
                step_s = time.perf_counter() - began_s
                sleeps = [one.ended_s - one.began_s for one in spans if one.kind == "sleep"]
                # Backward's parts are twice as long.
                forward_s = [one for one in sleeps if one < 1.5 * work.forward_s]
                counted = handle.statistics
                run.steps.append(
                    Step(
                        step_s,
                        statistics.fmean(forward_s) * shape.num_parts,
                        (sum(sleeps) - sum(forward_s)) / shape.num_layers,
                        self._peak.peak_bytes() - base_bytes,
                        int(counted.get("plans", 0)),
                        float(counted.get("predicted_step_s", 0.0)),
                        int(counted.get("predicted_peak_bytes", 0)),
                        int(counted.get("recomputed_layers", 0)),
                        int(counted.get("offloaded_bytes", 0)),
                    )
                )
            if int(work.num_wrong):
                raise RuntimeError(f"{int(work.num_wrong)} words came back wrong")
            run.plan = handle.report()
        finally:
            handle.close()

    def _compare(self, run: Run, profile: StageProfile) -> None:
        """The last profile with what the device has computed in the steps that it is of."""
        forward_s = statistics.median(one.forward_s for one in run.profiled)
        backward_s = statistics.median(one.backward_s for one in run.profiled)
        layers = [one for one in profile.layers if one.movable_bytes]

        def worst(seconds: list[float], true_s: float) -> float:
            return max(seconds, key=lambda one: abs(one / true_s - 1))

        run.forward_s = worst([one.forward_s for one in layers], forward_s)
        run.backward_s = worst([one.backward_s for one in layers], backward_s)
        errors = run.forward_s / forward_s - 1, run.backward_s / backward_s - 1
        run.profile_error = max(map(abs, errors))


# -- What is shown --------------------------------------------------------------------------------


def best_within(fixed: Sequence[Run], budget_bytes: int) -> Run | None:
    """The fastest of those that keep to a budget."""
    fitting = [one for one in fixed if one.peak_bytes <= budget_bytes]
    return min(fitting, key=lambda one: one.step_s) if fitting else None


def budgets_of(fixed: Sequence[Run], number: int) -> list[int]:
    """From the peak of keeping everything to the smallest one, in equal steps."""
    most = max(one.peak_bytes for one in fixed)
    least = min(one.peak_bytes for one in fixed)
    return [round(most - (most - least) * n / (number - 1)) for n in range(number)]


def summary_of(fixed: Sequence[Run], autos: Sequence[Run]) -> dict[str, float]:
    """The figures that have limits, each the worst of all runs of `auto`."""

    def ratio(one: Run) -> float:
        best = best_within([run for run in fixed if run.link == one.link], one.budget_bytes or 0)
        return one.step_s / best.step_s if best is not None else 1.0

    ended = [one for one in autos if not one.failed]
    return {
        "worst_ratio_to_best": max(map(ratio, ended), default=0.0),
        "over_budget_steps": sum(one.over_budget_steps for one in ended),
        "most_plans": max((one.steps[-1].plans for one in ended), default=0),
        "worst_step_error": max((one.step_error for one in ended), default=0.0),
        "worst_peak_error": max((one.peak_error for one in ended), default=0.0),
        "worst_profile_error": max((one.profile_error for one in ended), default=0.0),
        "failed": len(autos) - len(ended),
    }


def is_within(summary: dict[str, float]) -> bool:
    """Whether all figures keep to their limits."""
    errors = ("worst_step_error", "worst_peak_error", "worst_profile_error")
    return (
        summary["worst_ratio_to_best"] <= MOST_RATIO
        and not summary["over_budget_steps"]
        and summary["most_plans"] <= MOST_PLANS
        and all(summary[name] <= MOST_ERROR for name in errors)
        and not summary["failed"]
    )


def table(fixed: Sequence[Run], autos: Sequence[Run]) -> str:
    """A row for each run of `auto`."""
    rows = []
    for one in autos:
        row = [one.link, format_size(one.budget_bytes or 0)]
        best = best_within([run for run in fixed if run.link == one.link], one.budget_bytes or 0)
        row += [best.name, f"{best.step_s:.3f}"] if best is not None else ["none", ""]
        if one.failed:
            rows.append((*row, one.failed))
            continue
        last = one.steps[-1]
        rows.append(
            (
                *row,
                f"{one.step_s:.3f}",
                f"{one.step_s / best.step_s:.3f}" if best is not None else "",
                f"{last.predicted_step_s:.3f} ({one.step_error:.1%})",
                format_size(one.peak_bytes),
                f"{format_size(last.predicted_peak_bytes)} ({one.peak_error:.1%})",
                str(one.over_budget_steps),
                str(last.plans),
                f"{one.profile_error:.1%}",
                f"{last.recomputed_layers}, {format_size(last.offloaded_bytes)}",
            )
        )
    headings = (
        *("link hides", "budget", "best fixed", "its step", "auto's step", "ratio", "predicted"),
        *("peak", "predicted", "over", "plans", "profile", "recomputed, moved"),
    )
    return str(tabulate(rows, headings, tablefmt="github", disable_numparse=True))


def _as_json(one: Run) -> dict[str, Any]:
    values = asdict(one)
    if one.steps:
        values |= {"step_s": one.step_s, "peak_bytes": one.peak_bytes}
    return values


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    result.add_argument("--quick", action="store_true", help="one link and two budgets")
    result.add_argument("--links", default=",".join(LINKS), help="(all,half,tenth)")
    result.add_argument("--budgets", type=int, default=NUM_BUDGETS, help="of each link (5)")
    result.add_argument(
        "--slower", type=float, default=3.0, help="all takes so many times as long (3)"
    )
    result.add_argument(
        "--every", type=int, default=1, help="fixed placements of so many layers more each (1)"
    )
    result.add_argument("--steps", type=int, default=NUM_STEPS, help="of auto (30)")
    return result


def measured(
    shape: Shape, links: Sequence[str], num_budgets: int, num_steps: int, every: int
) -> tuple[list[Run], list[Run]]:
    """Fixed runs and those of `auto`.

    Args:
        shape: of the model.
        links: names in `LINKS`.
        num_budgets: of each link; two are the second and the fourth of five.
        num_steps: of each run of `auto`.
        every: fixed placements of so many layers more than the one before.
    """
    fixed: list[Run] = []
    autos: list[Run] = []
    wanted = [(Placement.KEEP, 0)]
    for placement in (Placement.HOST, Placement.RECOMPUTE):
        wanted += [(placement, number) for number in range(shape.num_layers, 0, -every)]
    total = len(links) * (len(wanted) + num_budgets)
    with (
        tempfile.TemporaryDirectory() as folder,
        tqdm(total=total, unit="run", dynamic_ncols=True, disable=None) as bar,
    ):
        for link in links:
            bench = Bench(link, Path(folder), shape)
            with bench.simulated():
                for placement, number in wanted:
                    bar.set_description(f"link {link}, {placement.value} {number}")
                    fixed.append(bench.fixed(placement, number))
                    bar.update()
                of_link = [one for one in fixed if one.link == link]
                budgets = budgets_of(of_link, num_budgets if num_budgets > 2 else 5)
                for budget_bytes in budgets if num_budgets > 2 else budgets[1:4:2]:
                    bar.set_description(f"link {link}, auto within {format_size(budget_bytes)}")
                    autos.append(bench.auto(budget_bytes, num_steps))
                    bar.update()
    return fixed, autos


def main(argv: Sequence[str] | None = None) -> int:
    """Measures everything and prints the table; the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    args = parser().parse_args(arguments)
    links = ["half"] if args.quick else args.links.split(",")
    for link in links:
        if link not in LINKS:
            parser().error(f"there is no link {link}; choose of {', '.join(LINKS)}")
    if reason := why_not():
        print(f"auto_on_device.py: the test accelerator cannot be used: {reason}", file=sys.stderr)
        return 2
    num_budgets = 2 if args.quick else args.budgets
    shape = Shape(layer_s=Shape().layer_s * args.slower)
    every = 3 if args.quick else args.every
    fixed, autos = measured(shape, links, num_budgets, args.steps, every)
    summary = summary_of(fixed, autos)
    print(f"{table(fixed, autos)}\n\n{json.dumps(summary, indent=1)}")
    if args.json is not None:
        values = {
            "command": shlex.join(["tools/check/auto_on_device.py", *arguments]),
            "machine": machine_facts(ROOT),
            "simulated": {**asdict(shape), "links": LINKS},
            "summary": summary,
            "fixed": [_as_json(one) for one in fixed],
            "auto": [_as_json(one) for one in autos],
        }
        args.json.write_text(json.dumps(values).replace(f"{ROOT}/", "") + "\n")
    return 0 if is_within(summary) else 1


if __name__ == "__main__":
    sys.exit(main())
