# SPDX-License-Identifier: Apache-2.0
"""Whether `auto` is as fast as whatever else fits into its budget: `Verdict`, `verdicts_of`.

Times are compared within a turn or a round, see `paired_ratio`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.offload.commands.rok.measurements import MeasuredPoint
from megatron.offload.commands.rok.strategy import Strategy
from megatron.offload.commands.training_runs.run import Run, paired_ratio

# More than this part above the budget is over it: the planner would plan again.
OVER_BUDGET = 1.02


@dataclass(frozen=True)
class Rival:
    """Another strategy beside `auto` at one budget.

    Attributes:
        title: of it. `allocator`: that it ran with.
        fits: its peak is not above the budget, or not above what `auto` took.
        ratio: step time of `auto` / of this one; None: no round has both.
    """

    title: str
    allocator: str
    step_s: float
    peak_bytes: int
    fits: bool
    ratio: float | None


@dataclass(frozen=True)
class Verdict:
    """How `auto` did at one budget beside its rivals.

    Attributes:
        noise: it may take this part longer than a rival.
        step_s, peak_bytes: of it; None: it could not be measured.
        failure: why that is so.
    """

    micro_batch_size: int
    budget_bytes: int
    noise: float
    step_s: float | None
    peak_bytes: int | None
    rivals: tuple[Rival, ...]
    failure: str = ""

    @property
    def lost_to(self) -> list[Rival]:
        """Those that fit and are faster."""
        return [
            one
            for one in self.rivals
            if one.fits and one.ratio is not None and one.ratio > 1 + self.noise
        ]

    @property
    def is_over_budget(self) -> bool:
        """Whether `auto` took more memory than it was given."""
        return self.peak_bytes is not None and self.peak_bytes > self.budget_bytes * OVER_BUDGET

    @property
    def is_won(self) -> bool:
        """Whether `auto` was measured, kept to its budget, and lost to none."""
        return not (self.failure or self.is_over_budget or self.lost_to)


def verdicts_of(
    strategies: Sequence[Strategy],
    runs: Sequence[Run],
    measured: Sequence[MeasuredPoint],
    failures: Mapping[Strategy, str],
    *,
    skip: int,
    noise: float,
) -> list[Verdict]:
    """One for each budget, in the order of `strategies`.

    Args:
        failures: strategies that could not be measured in some round, and why.
        skip: see `settled_steps`.
        noise: see `Verdict`.
    """
    by_strategy = {one.strategy: one for one in measured}
    found = []
    for auto in strategies:
        if auto.budget_bytes is None:
            continue
        own = by_strategy.get(auto)
        limit = max(auto.budget_bytes, own.peak_bytes if own else 0)
        rivals = tuple(
            Rival(
                other.title,
                other.allocator,
                point.step_s,
                point.peak_bytes,
                point.peak_bytes <= limit,
                paired_ratio(_of(runs, auto), _of(runs, other), skip),
            )
            for other, point in by_strategy.items()
            if other.placement != "auto" and other.micro_batch_size == auto.micro_batch_size
        )
        found.append(
            Verdict(
                auto.micro_batch_size,
                auto.budget_bytes,
                noise,
                own.step_s if own else None,
                own.peak_bytes if own else None,
                rivals,
                failures.get(auto, ""),
            )
        )
    return found


def _of(runs: Sequence[Run], strategy: Strategy) -> list[Run]:
    return [run for run in runs if run.variant == strategy]
