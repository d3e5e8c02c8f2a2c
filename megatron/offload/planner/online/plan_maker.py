# SPDX-License-Identifier: Apache-2.0
"""Makes plans from profiles, within the budget of a run: `PlanMaker`.

The planner calls it between steps and follows its plans. It measures nothing; the same
arguments give the same plan on all ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron.offload.activations.placement.plan import Plan, Prediction
from megatron.offload.config import OffloadConfig
from megatron.offload.errors import InfeasibleBudgetError
from megatron.offload.planner.profile.calibration import calibrated
from megatron.offload.planner.profile.stage_profile import StageProfile
from megatron.offload.planner.solver.process import SolverProcess

logger = logging.getLogger(__name__)

_WORTHWHILE = 0.03  # of time or memory, for another plan to take the place of the present one
# Part of the budget by which later plans stay below it, for each earlier plan that exceeded it.
_HEADROOM, _MOST_HEADROOM = 0.01, 0.05


class WholeSteps(NamedTuple):
    """What profiles are calibrated to: a step's seconds and the largest of the peaks, in bytes."""

    step_s: float | None  # None: not known
    peak_bytes: int


class PlanMaker:
    """Makes the plans of one run.

    Args:
        config: says which slowdown plans may have, and whether a budget was asked for.
        solver: opened for each plan.
    """

    def __init__(self, config: OffloadConfig, solver: Callable[[], SolverProcess]) -> None:
        self.budget_bytes: int | None = None
        self.num_exceeded = 0  # plans that took more than that
        self._config = config
        self._solver = solver

    def first(self, profile: StageProfile, whole: WholeSteps) -> tuple[StageProfile, Plan]:
        """The first plan, and the profile that it was made from: calibrated to whole steps.

        Args:
            profile: as measured while everything was offloaded.
            whole: of the same steps.

        Raises:
            ConfigurationError: no plan keeps to the budget that was asked for.
            OffloadError: the solver ended.
        """
        with self._solver() as solver:
            profile = _calibrated(solver, profile, None, whole)
            may_exceed = self._config.memory_budget_bytes is None
            return profile, self._solved(solver, profile, may_exceed=may_exceed)

    def seconds(
        self, profile: StageProfile, whole: WholeSteps, budgets: Sequence[int]
    ) -> list[float]:
        """What a step takes with the plan for each budget; infinite: there is none.

        Raises:
            OffloadError: the solver ended.
        """
        found = []
        with self._solver() as solver:
            profile = _calibrated(solver, profile, None, whole)
            for budget in budgets:
                try:
                    plan = solver.solve(profile, budget_bytes=budget, max_slowdown=None)
                except InfeasibleBudgetError:
                    found.append(math.inf)
                else:
                    found.append(plan.predicted.step_s if plan.predicted else math.inf)
        return found

    def next(
        self, profile: StageProfile, present: Plan, whole: WholeSteps
    ) -> tuple[StageProfile, Plan]:
        """A plan for what was measured since, or the present one if no other is worth it.

        Args:
            profile: as measured while the present plan was followed.
            present: predicted anew where it stays.
            whole: of the same steps.

        Raises:
            OffloadError: the solver ended.
        """
        with self._solver() as solver:
            profile = _calibrated(solver, profile, present, whole)
            plan = self._solved(solver, profile, may_exceed=True)
            predicted = solver.predict(profile, plan=present)
        if not self._is_worthwhile(plan, predicted):
            plan = dataclasses.replace(present, predicted=predicted, fastest=plan.fastest)
        return profile, plan

    def _solved(self, solver: SolverProcess, profile: StageProfile, *, may_exceed: bool) -> Plan:
        """The best plan. Where none keeps to the budget, the nearest to it, if that will do."""
        slowdown = self._config.max_slowdown
        try:
            plan = solver.solve(profile, budget_bytes=self._aim_bytes, max_slowdown=slowdown)
        except InfeasibleBudgetError as error:
            if not may_exceed:
                raise
            if self.budget_bytes is None or error.smallest_bytes > self.budget_bytes:
                left = f" ({self._headroom:.0%} of the budget is left free, as steps took more)"
                logger.warning(
                    "%s; going on with as little memory as possible%s",
                    error,
                    left if self._headroom else "",
                )
            plan = error.plan
        return dataclasses.replace(plan, stage=profile.position.stage)

    @property
    def _aim_bytes(self) -> int | None:
        """What plans keep to: the budget, and a little less where that has proved too much."""
        if self.budget_bytes is None:
            return None
        return int(self.budget_bytes * (1 - self._headroom))

    @property
    def _headroom(self) -> float:
        """The part of the budget that plans leave free."""
        return min(_HEADROOM * self.num_exceeded, _MOST_HEADROOM)

    def _is_worthwhile(self, plan: Plan, present: Prediction) -> bool:
        """Whether a plan is so much better than the present one that it takes its place."""
        if plan.predicted is None:
            return True
        least_s = plan.predicted.step_s * (1 + _WORTHWHILE)
        least_bytes = plan.predicted.peak_bytes * (1 + _WORTHWHILE)
        if self.budget_bytes is not None and plan.predicted.peak_bytes <= self.budget_bytes:
            least_bytes = self.budget_bytes  # no use in less, and no more will do
        return present.step_s > least_s or present.peak_bytes > least_bytes


def _calibrated(
    solver: SolverProcess, profile: StageProfile, plan: Plan | None, whole: WholeSteps
) -> StageProfile:
    simulate = functools.partial(solver.predict, plan=plan)
    return calibrated(profile, simulate, step_s=whole.step_s, peak_bytes=whole.peak_bytes)
