# SPDX-License-Identifier: Apache-2.0
"""Measures the first steps of a run, plans, and plans again when the run changes: `Planner`.

An integration puts `step` around every training step. All that is decided is decided between steps,
at the same step on all ranks that share layers; the policy that the engine asks just follows.

Note [The course of a run]
`WARMING_UP` one step, everything offloaded; `MEASURING` two steps, likewise; then the first plan.
The first steps of a run are no good measure of the later ones: memory comes from the system for the
first time, and what a step leaves behind adds to the next one's peak. So once the first plan has
been followed for some steps, `REFINING` measures some more, and a second plan is made.
`FOLLOWING` a plan, every step is compared with what was predicted. When one rank of a group finds
that steps go otherwise, all refine again, more and more rarely if that changes nothing. When what
the plan was made from has changed, there is no time for that: they go on to `UPDATING`, where the
next step, under the present plan, is measured, and another plan follows. Too much memory is more
urgent still: there a plan is made at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import logging
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.offload.config import OffloadConfig, format_size
from megatron.offload.device.device import Device
from megatron.offload.engine import OffloadEngine
from megatron.offload.errors import (
    PREFIX,
    InfeasibleBudgetError,
    OffloadError,
)
from megatron.offload.placement.atomic_file import write_atomically
from megatron.offload.placement.plan import Plan, Prediction
from megatron.offload.placement.plan_policy import PlannedPolicy
from megatron.offload.placement.plan_table import plan_table
from megatron.offload.planner.online.consensus import (
    RankConsensus,
    agreed_profile,
    check_same,
    raise_first,
)
from megatron.offload.planner.online.drift import OVER_BUDGET, Drift, MeasuredStep
from megatron.offload.planner.online.shared_plan_file import SharedPlanFile
from megatron.offload.planner.online.stage import Stage
from megatron.offload.planner.online.step_meter import StepMeter
from megatron.offload.planner.online.watch import Reason, Watch
from megatron.offload.planner.profile.calibration import calibrated
from megatron.offload.planner.profile.interpolation import fitted, tokens_of
from megatron.offload.planner.profile.stage_profile import StageProfile, TierProfile
from megatron.offload.planner.solver.process import SolverProcess

logger = logging.getLogger(__name__)

_MEASURED_STEPS = 2
_STEPS_BEFORE_REFINING = 4
_REFINING_STEPS = 4
_WORTHWHILE = 0.03  # of time or memory, for another plan to take the place of the present one
# Of the budget, that later plans stay below it for each one that was to keep to it and did not.
_HEADROOM, _MOST_HEADROOM = 0.01, 0.05
_REMEMBERED_SIZES = 2
_FREE_SHARE = 0.9  # of a GPU's free memory: fragments and what libraries take later
_FREE_SHARE_OF_HOST = 0.5


class Phase(enum.Enum):
    """Where a run is; see Note [The course of a run]."""

    WARMING_UP = "warming up"
    MEASURING = "measuring"
    FOLLOWING = "following"
    REFINING = "refining"
    UPDATING = "updating"


_NUM_MEASURED = {  # steps that are measured in detail
    Phase.MEASURING: _MEASURED_STEPS,
    Phase.REFINING: _REFINING_STEPS,
    Phase.UPDATING: 1,
}


class Planner:
    """Decides the placements of one stage.

    Args:
        config: with mode `auto`.
        engine: asks `policy`.
        device: where activations live.
        policy: follows the plans.
        agreement: with the ranks that share the stage's layers, and with all.
        stage: what is planned for.
        directory: for the profile, the last one made; None: it is written nowhere.
        solver: opened for each plan.

    Raises:
        ConfigurationError: the plan file is there, but is none or does not fit.
    """

    def __init__(
        self,
        config: OffloadConfig,
        engine: OffloadEngine,
        device: Device,
        policy: PlannedPolicy,
        consensus: RankConsensus,
        stage: Stage,
        *,
        directory: Path | None = None,
        solver: Callable[[], SolverProcess] = SolverProcess,
    ) -> None:
        self.phase = Phase.WARMING_UP
        self.plan: Plan | None = None
        self.profile: StageProfile | None = None
        self.num_plans = 0
        self.meter = StepMeter(config, engine, device)
        self._config = config
        self._engine = engine
        self._device = device
        self._policy = policy
        self._consensus = consensus
        self._stage = stage
        self._directory = directory
        self._solver = solver
        self._own_tiers: tuple[TierProfile, ...] = ()  # this rank's, in the present profile
        self._by_tokens: dict[int, StageProfile] = {}  # measured, by size of micro-batches
        self._watch = Watch()
        self._reason: Reason | None = None  # for the next plan
        self._budget_bytes: int | None = None
        self._num_exceeded = 0  # plans that took more than it
        self._adapts = True
        self._has_warned = False
        self._is_refined = False
        self._measured: list[MeasuredStep] = []  # in detail, for the next plan
        self._file: SharedPlanFile | None = None
        if config.plan_file is not None:
            self._file = SharedPlanFile(config.plan_file, stage, consensus)
            self._follow_file(self._file)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around the passes of a training step.

        Raises:
            ConfigurationError: after the last measured step: no plan keeps to the budget.
        """
        num_wanted = _NUM_MEASURED.get(self.phase, 0)
        with self.meter.step(detailed=num_wanted > 0):
            yield
        if num_wanted and self.meter.last is not None:
            self._measured.append(self.meter.last)
        if self.plan is None:
            self._device.return_freed_memory()  # or what this step leaves adds to the next one's
        if self.phase is Phase.WARMING_UP:
            self.phase = Phase.MEASURING
        elif self.phase is Phase.FOLLOWING:
            self._return_what_is_over_budget()
            if self._adapts:
                self._compare()
            else:
                self._warn_if_over_budget()
        elif self.meter.num_detailed >= num_wanted:
            if self.phase is Phase.MEASURING:
                self._make_first_plan()
            else:
                self._is_refined |= self.phase is Phase.REFINING
                self._plan_again(self._measured_profile(self.profile))
                assert self.profile is not None
                self._remember(self.profile)
        self.meter.resume()

    @property
    def metrics(self) -> dict[str, int | float]:
        """Predicted and measured, for metrics; always the same names."""
        predicted = self.plan.predicted if self.plan is not None else None
        last = self.meter.last
        return {
            "predicted_step_s": predicted.step_s if predicted else 0.0,
            "measured_step_s": last.step_s if last else 0.0,
            "predicted_peak_bytes": predicted.peak_bytes if predicted else 0,
            "measured_peak_bytes": last.peak_bytes if last else 0,
            "plans": self.num_plans,
        }

    # -- The first plan -------------------------------------------------------------------------

    def _follow_file(self, file: SharedPlanFile) -> None:
        """Follows the plan that it has for this stage, if it is there."""
        plan = file.load(self._engine.tiers)
        if plan is None:
            return
        self._follow(plan)
        self._adapts = False
        if self._stage.speaks:
            logger.info("activation offload: %s\n(from %s)", plan_table(plan), file.path)

    def _make_first_plan(self) -> None:
        """Plans, with all ranks of the run: where one finds no plan, none goes on."""
        plan, message = None, None
        self._budget_bytes = self._asked_budget()
        whole_steps = self._whole_steps()
        if self._stage.speaks and self._stage.position.stage == 0:
            logger.info(
                "activation offload: planning, which takes seconds; the first time after an "
                "installation up to half a minute, as the simulation is compiled"
            )
        try:
            profile = self._measured_profile(None)
            with self._solver() as solver:
                simulate = functools.partial(solver.predict, plan=None)
                self.profile = calibrated(profile, simulate, **whole_steps)
                may_exceed = self._config.memory_budget_bytes is None
                plan = self._solved(solver, self.profile, may_exceed=may_exceed)
        except OffloadError as error:
            message = str(error).removeprefix(PREFIX)
        told = self._consensus.of_all((plan if self._stage.speaks else None, message))
        raise_first(one for _, one in told)
        assert plan is not None and self.profile is not None
        check_same(plan, self._consensus)
        self._remember(self.profile)
        self._save_profile(self.profile)
        self._follow(plan)
        if self._stage.speaks and self._stage.position.stage == 0:
            plans = (one for one, _ in told if one is not None)
            self._show_and_save(sorted(plans, key=lambda one: one.stage))

    def _show_and_save(self, plans: list[Plan]) -> None:
        for plan in plans:
            logger.info("activation offload: %s", plan_table(plan))
        if self._file is not None:
            self._file.save(plans)

    def _asked_budget(self) -> int | None:
        """The budget that the ranks of the group share; None: there is none to keep to."""
        config = self._config
        if config.memory_budget_bytes is not None or config.max_slowdown is not None:
            return config.memory_budget_bytes
        free = self._device.free_bytes()
        ranks = self._stage.num_local_ranks if self._device.is_host else 1
        share = _FREE_SHARE_OF_HOST if self._device.is_host else _FREE_SHARE
        least = -self._consensus.largest([-float(int(free * share) // ranks)])[0]
        logger.info(
            "activation offload: no --activation-memory-budget is given; activations may take %s, "
            "%.0f %% of the %s that are free%s",
            format_size(least),
            100 * share,
            format_size(free),
            f", shared by {ranks} ranks" if ranks > 1 else "",
        )
        return int(least)

    def _solved(self, solver: SolverProcess, profile: StageProfile, *, may_exceed: bool) -> Plan:
        """The plan. Where no plan keeps to the budget, the one nearest to it, if that will do."""
        slowdown = self._config.max_slowdown
        try:
            plan = solver.solve(profile, budget_bytes=self._aim_bytes, max_slowdown=slowdown)
        except InfeasibleBudgetError as error:
            if not may_exceed:
                raise
            if self._budget_bytes is None or error.smallest_bytes > self._budget_bytes:
                logger.warning("%s; going on with as little memory as possible", error)
            plan = error.plan
        return dataclasses.replace(plan, stage=profile.position.stage)

    @property
    def _aim_bytes(self) -> int | None:
        """What plans keep to: the budget, and a little less where that has proved too much."""
        if self._budget_bytes is None:
            return None
        headroom = min(_HEADROOM * self._num_exceeded, _MOST_HEADROOM)
        return int(self._budget_bytes * (1 - headroom))

    def _follow(self, plan: Plan, usual: float = 1.0) -> None:
        self.plan = plan
        self.num_plans += 1
        self._policy.follow(plan)
        self.phase = Phase.FOLLOWING
        self._reason = None
        self._device.return_freed_memory()  # it fitted what was kept until now
        drift = None
        if self.profile is not None and plan.predicted is not None:
            drift = Drift(
                plan.predicted, self.profile.sizes, self._own_tiers, self._budget_bytes, usual
            )
        self._watch.follow(drift)

    # -- Profiles -------------------------------------------------------------------------------

    def _measured_profile(self, previous: StageProfile | None) -> StageProfile:
        """The profile of the steps that were measured, the same on all ranks of the group."""
        profile = self.meter.profile(
            self._stage.position, recomputes=not self._stage.why_not_recomputed, previous=previous
        )
        self._own_tiers = profile.tiers
        return agreed_profile(profile, self._consensus)

    def _as_now(self, profile: StageProfile | None) -> StageProfile:
        """The profile, with the tiers and for the sizes of the last step.

        A tier that has become slow holds memory longer: no plan for the fast one would help.
        """
        assert profile is not None and self.meter.last is not None
        self._own_tiers, sizes = self.meter.tiers(), dict(self.meter.last.sizes)
        profile = dataclasses.replace(profile, tiers=self._own_tiers, sizes=sizes)
        return agreed_profile(profile, self._consensus)

    def _remember(self, profile: StageProfile) -> None:
        tokens = tokens_of(profile.sizes)
        self._by_tokens.pop(tokens, None)
        self._by_tokens[tokens] = profile
        while len(self._by_tokens) > _REMEMBERED_SIZES:
            del self._by_tokens[next(iter(self._by_tokens))]

    def _agreed_fitted(self) -> StageProfile | None:
        """`_fitted`, the same on all ranks of the group; None: one of them has none, or another's
        micro-batches have other sizes, as those of data-parallel ranks may."""
        fitted_profile = self._fitted()
        tokens = float(tokens_of(fitted_profile.sizes)) if fitted_profile is not None else 0.0
        high, negative_low = self._consensus.largest([tokens, -tokens])
        if fitted_profile is None or high != -negative_low:
            return None
        return agreed_profile(fitted_profile, self._consensus)

    def _fitted(self) -> StageProfile | None:
        """The profile of sizes that are new, where two others were measured."""
        assert self.profile is not None and self.meter.last is not None
        sizes = dict(self.meter.last.sizes)
        if len(self._by_tokens) < 2 or tokens_of(sizes) in (*self._by_tokens, 0):
            return None
        one, other = self._by_tokens.values()
        profile = fitted(one, other, sizes)
        return profile and dataclasses.replace(profile, tiers=self.profile.tiers)

    def _save_profile(self, profile: StageProfile) -> None:
        if self._directory is None or not self._stage.speaks:
            return
        path = self._directory / f"activation-profile-stage{profile.position.stage}.json"
        try:
            write_atomically(path, profile.to_json())
        except OSError as error:
            logger.warning("activation offload: the profile could not be written: %s", error)

    # -- Adapting -------------------------------------------------------------------------------

    def _compare(self) -> None:
        """All ranks of a group ask each other at the same steps, whatever they have found."""
        self._watch.see(self.meter.last, with_effects=self._is_refined)
        num_followed = self._watch.num_followed
        if num_followed % self._consensus.period_steps:
            return
        found = self._watch.take()
        told = self._consensus.largest([float(bool(found[reason])) for reason in Reason])
        reasons = [reason for reason, anybody in zip(Reason, told, strict=True) if anybody]
        self._reason = reasons[0] if reasons else None
        is_to_be_refined = not self._is_refined and num_followed >= _STEPS_BEFORE_REFINING
        if self._reason is not None:
            self._say(found[self._reason] or self._reason.value)
        if self._reason is Reason.OVER:
            self._num_exceeded += 1
            self._plan_again(self._as_now(self._agreed_fitted() or self.profile))
        elif self._reason in (Reason.CAUSE, Reason.SMALLER):
            fitted_profile = self._agreed_fitted()
            if fitted_profile is not None:
                self._plan_again(fitted_profile)
            else:
                self.phase = Phase.UPDATING
        elif self._reason is Reason.EFFECT or is_to_be_refined:
            self._device.return_freed_memory()
            self.phase = Phase.REFINING

    def _return_what_is_over_budget(self) -> None:
        """A resident set also has what the allocator keeps for reuse, more of it step by step."""
        budget_bytes, last = self._budget_bytes, self.meter.last
        if budget_bytes is not None and last is not None and last.peak_bytes > budget_bytes:
            self._device.return_freed_memory()

    def _warn_if_over_budget(self) -> None:
        """Once: a plan from a file is followed as it is."""
        budget_bytes, last = self._config.memory_budget_bytes, self.meter.last
        if budget_bytes is None or last is None or self._has_warned:
            return
        if last.peak_bytes > budget_bytes * OVER_BUDGET:
            self._has_warned = True
            logger.warning(
                "activation offload: activations took %s, more than the budget of %s; the plan %s "
                "is followed as it is: remove the file to have another one made",
                format_size(last.peak_bytes),
                format_size(budget_bytes),
                self._config.plan_file,
            )

    def _whole_steps(self) -> dict[str, Any]:
        """What to calibrate with, the same on all ranks of a group: of the steps measured for this
        plan, or else of the last one. See `calibrated`."""
        steps, self._measured = self._measured, []
        if self.phase is Phase.REFINING:  # nothing has changed since those before
            steps = [*steps, *self._watch.recent]
        if not steps and self.meter.last is not None:
            steps = [self.meter.last]
        own_s = statistics.median(one.step_s for one in steps) if steps else 0.0
        own_bytes = max((one.peak_bytes for one in steps), default=0)
        step_s, peak_bytes = self._consensus.largest([own_s, float(own_bytes)])
        return {"step_s": step_s or None, "peak_bytes": int(peak_bytes)}

    def _plan_again(self, profile: StageProfile | None) -> None:
        """Where that fails on a rank of the group, all of them go on as they are."""
        assert profile is not None and self.plan is not None
        before, after = self.plan, None
        whole_steps = self._whole_steps()
        try:
            with self._solver() as solver:
                simulate = functools.partial(solver.predict, plan=before)
                profile = calibrated(profile, simulate, **whole_steps)
                after = self._solved(solver, profile, may_exceed=True)
                present = simulate(profile)
                if not self._is_worthwhile(after, present):
                    after = dataclasses.replace(before, predicted=present, fastest=after.fastest)
        except OffloadError as error:
            logger.warning("%s; going on with the present plan", error)
        (any_failed,) = self._consensus.largest([float(after is None)])
        plan = before if any_failed or after is None else after
        check_same(plan, self._consensus)
        self.profile = profile
        self._save_profile(profile)
        changed, usual, step = plan.digest() != before.digest(), 1.0, self.meter.last
        predicted = plan.predicted
        self._watch.planned(self._reason, changed=changed)
        if not changed and predicted is not None and predicted.step_s and step is not None:
            usual = (whole_steps["step_s"] or step.step_s) / predicted.step_s
        self._follow(plan, usual)
        if self._file is not None:
            self._file.update(plan)
        if self._stage.speaks:
            text = plan_table(plan) if changed else "the plan stays as it is"
            logger.info("activation offload: planned again: %s", text)

    def _is_worthwhile(self, plan: Plan, present: Prediction) -> bool:
        """Whether a plan is so much better than the present one that it takes its place."""
        if plan.predicted is None:
            return True
        least_s = plan.predicted.step_s * (1 + _WORTHWHILE)
        least_bytes = plan.predicted.peak_bytes * (1 + _WORTHWHILE)
        if self._budget_bytes is not None and plan.predicted.peak_bytes <= self._budget_bytes:
            least_bytes = self._budget_bytes  # no use in less, and no more will do
        return present.step_s > least_s or present.peak_bytes > least_bytes

    def _say(self, reason: str) -> None:
        if self._stage.speaks:
            stage = self._stage.position.stage
            logger.info("activation offload: stage %d is to be planned again: %s", stage, reason)
