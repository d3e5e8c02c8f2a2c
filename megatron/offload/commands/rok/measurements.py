# SPDX-License-Identifier: Apache-2.0
"""What the trainings showed: a `MeasuredPoint` for each strategy, and `Point`s predicted.

Medians over the rounds. Nothing here starts a process or writes a file.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from megatron.offload.commands.plan.comparison import frontier
from megatron.offload.commands.rok.strategy import Strategy
from megatron.offload.commands.training_runs.run import Run, paired_ratio
from megatron.offload.planner.profile.stage_profile import StageProfile
from megatron.offload.planner.simulator.timeline import Timeline


@dataclass(frozen=True)
class MeasuredPoint:
    """A strategy over all rounds. Of a step: seconds, bytes.

    Attributes:
        placement, allocator, micro_batch_size, budget_bytes, num_moved, is_rule: see `Strategy`.
        keep_ratio: step time / the faster `off` of the same round; None: `off` was not measured.
        peak_bytes: of activations, the largest of a round's steps.
        predicted_step_s, predicted_peak_bytes: by the last plan; None: none was made in the run.
        num_plans: that `auto` made before it settled.
        num_rounds: that it was measured in.
        replayed_bytes: neither kept nor written, but computed again.
        fast_step_s, slow_step_s: a quarter of the steps that count took less than the first, a
            quarter more than the second; None: there were too few, or it is of an older release.
    """

    placement: str
    allocator: str
    micro_batch_size: int
    budget_bytes: int | None
    num_moved: int | None
    is_rule: bool
    step_s: float
    tokens_per_s: float
    keep_ratio: float | None
    peak_bytes: int
    predicted_step_s: float | None
    predicted_peak_bytes: int | None
    num_plans: int
    written_bytes: float
    read_bytes: float
    stall_s: float
    num_rounds: int
    replayed_bytes: float = 0.0
    fast_step_s: float | None = None
    slow_step_s: float | None = None

    @property
    def strategy(self) -> Strategy:
        """The strategy that was measured."""
        names = (one.name for one in dataclasses.fields(Strategy))
        return Strategy(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class Point:
    """What the planner predicts for a budget."""

    micro_batch_size: int
    budget_bytes: int
    step_s: float
    tokens_per_s: float
    peak_bytes: int


def measured_points(
    strategies: Sequence[Strategy], runs: Sequence[Run], skip: int
) -> list[MeasuredPoint]:
    """A row for each strategy that was measured."""
    found = []
    for strategy in strategies:
        own = [run for run in runs if run.variant == strategy]
        if own:
            base = [run for run in runs if _is_keep(run, strategy.micro_batch_size)]
            found.append(_figure(strategy, own, base, skip))
    return found


def _is_keep(run: Run, size: int) -> bool:
    of = run.variant
    return isinstance(of, Strategy) and of.placement == "off" and of.micro_batch_size == size


def _figure(
    strategy: Strategy, own: Sequence[Run], base: Sequence[Run], skip: int
) -> MeasuredPoint:
    def of_offload(name: str) -> float:
        return median(run.offload_median(name, skip) for run in own)

    predicted = of_offload("predicted_step_s") if strategy.placement == "auto" else 0.0
    step_s = median(run.step_time_s(skip) for run in own)
    times_s = [seconds for run in own for seconds in run.step_times_s(skip)]
    fast_s, _, slow_s = quantiles(times_s, method="inclusive") if len(times_s) > 1 else [None] * 3
    tokens = median(run.tokens_per_s(skip) * run.step_time_s(skip) for run in own)
    return MeasuredPoint(
        **dataclasses.asdict(strategy),
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        keep_ratio=paired_ratio(own, base, skip),
        peak_bytes=round(median(run.peak_bytes(skip) for run in own)),
        predicted_step_s=predicted or None,
        predicted_peak_bytes=round(of_offload("predicted_peak_bytes")) if predicted else None,
        num_plans=round(of_offload("plans")),
        written_bytes=of_offload("written_bytes"),
        read_bytes=of_offload("read_bytes"),
        stall_s=of_offload("stall_s"),
        num_rounds=len(own),
        replayed_bytes=of_offload("replayed_bytes"),
        fast_step_s=fast_s,
        slow_step_s=slow_s,
    )


def predicted_frontier(
    profiles: Mapping[int, StageProfile], measured: Sequence[MeasuredPoint]
) -> list[Point]:
    """What each profile says about all budgets, from keeping everything down.

    Args:
        profiles: by micro-batch size.
        figures: for the tokens of a step.
    """
    points = []
    for size, profile in profiles.items():
        tokens = next(
            round(one.tokens_per_s * one.step_s) for one in measured if one.micro_batch_size == size
        )
        most_bytes = Timeline(profile).keep_all().peak_bytes
        points += [
            Point(size, budget, one.step_s, tokens / one.step_s, one.peak_bytes)
            for budget, one in frontier(profile, most_bytes)
        ]
    return points


def as_csv(measured: Sequence[MeasuredPoint]) -> str:
    """A heading, and a line for each; bytes and seconds; empty where there is nothing."""
    text = io.StringIO()
    names = [one.name for one in dataclasses.fields(MeasuredPoint)]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for point in measured:
        writer.writerow(dataclasses.asdict(point))
    return text.getvalue()
