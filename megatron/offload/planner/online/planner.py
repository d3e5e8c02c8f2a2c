# SPDX-License-Identifier: Apache-2.0
"""Measures the first steps of a run, plans, and plans again when the run changes: `Planner`.

An integration puts `step` around every training step. It decides between steps only, at the same
step on all ranks that share layers; the policy that the engine asks just follows.

Note [The course of a run]
`WARMING_UP` one step, everything offloaded; `MEASURING` two steps, likewise; then the first plan.
The first steps of a run are no good measure of the later ones. In the first one the optimizer makes
its state: that counts for nothing. Memory comes from the system for the first time: of the two that
are measured the faster one counts. And everything offloaded is not what a plan does: so once the
first plan has been followed for some steps, `REFINING` measures more, and a second plan is made.
`FOLLOWING` a plan, every step is compared with what was predicted. When one rank of a group finds
that steps go otherwise, all refine again, more and more rarely if that changes nothing. When a tier
has become slow or micro-batches larger, there is no time for that: they go on to `UPDATING`, where
the next step, under the present plan, is measured, and another plan follows. Too much memory is
more urgent still: there a plan is made at once. Smaller micro-batches are no reason to plan: where
lengths vary, a plan for the shorter ones would take too much memory when longer ones come again.
Of a layer-major step all micro-batches are in memory at a time, so more of them count as larger
ones. One that runs micro-batch by micro-batch, to count random numbers, does not count as a step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import logging
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.offload.activations.engine import OffloadEngine
from megatron.offload.activations.placement.atomic_file import write_atomically
from megatron.offload.activations.placement.plan import Plan
from megatron.offload.activations.placement.plan_file import plans_to_json
from megatron.offload.activations.placement.plan_policy import PlannedPolicy
from megatron.offload.config import OffloadConfig
from megatron.offload.device.device import Device
from megatron.offload.errors import PREFIX, OffloadError
from megatron.offload.machine.allocator import (
    START_WITH_ENVIRONMENT,
    allocator_name,
    keeps_freed_memory,
)
from megatron.offload.planner.libraries import is_compiled
from megatron.offload.planner.online.consensus import (
    RankConsensus,
    agreed_profile,
    check_same,
    raise_first,
)
from megatron.offload.planner.online.drift import Drift, Expectation, MeasuredStep, Reason
from megatron.offload.planner.online.memory_budget import MemoryBudget
from megatron.offload.planner.online.plan_maker import PlanMaker, WholeSteps
from megatron.offload.planner.online.shared_memory import SharesMemory
from megatron.offload.planner.online.shared_plan_file import SharedPlanFile
from megatron.offload.planner.online.stage import Stage
from megatron.offload.planner.online.step_meter import StepMeter
from megatron.offload.planner.online.step_order import StepOrder
from megatron.offload.planner.profile.pipeline_schedule import Pass
from megatron.offload.planner.profile.stage_profile import StageProfile, TierProfile, tokens_of
from megatron.offload.planner.solver.process import SolverProcess

logger = logging.getLogger(__name__)

_MEASURED_STEPS = 2
_STEPS_BEFORE_REFINING = 4
_REFINING_STEPS = 4


class Phase(enum.Enum):
    """Where a run with `auto` stands; see Note [The course of a run]."""

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
    """Decides, between steps, which placements the policy of one stage follows.

    Args:
        config: with mode `auto`.
        engine: asks `policy`.
        device: where activations live.
        policy: follows the plans.
        consensus: of the ranks that share the stage's layers, and of all.
        stage: what is planned for.
        directory: for the profile, the last one made; None: it is written nowhere.
        solver: opened for each plan.
        beside: what else takes memory that the planner divides; None: nothing does.

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
        beside: SharesMemory | None = None,
    ) -> None:
        self.phase = Phase.WARMING_UP
        self.plan: Plan | None = None
        self.profile: StageProfile | None = None
        self.num_plans = 0
        self.meter = StepMeter(
            config,
            engine,
            device,
            is_layer_major=bool(stage.position.units),
            in_order=self._in_order if stage.position.units else None,
        )
        self._engine = engine
        self._device = device
        self._policy = policy
        self._consensus = consensus
        self._stage = stage
        self._order = StepOrder(stage.position, consensus)
        self._directory = directory
        self._maker = PlanMaker(config, solver)
        self._budget = MemoryBudget(config, engine, device, stage, consensus, beside)
        self._own_tiers: tuple[TierProfile, ...] = ()  # this rank's, in the present profile
        self._drift = Drift()
        self._reason: Reason | None = None  # for the next plan
        self._adapts = True
        self._is_refined = False
        self._measured: list[MeasuredStep] = []  # in detail, for the next plan
        self._file: SharedPlanFile | None = None
        if config.plan_file is not None:
            self._file = SharedPlanFile(config.plan_file, stage, consensus)
            self._follow_file(self._file)

    def measure(self) -> contextlib.AbstractContextManager[None]:
        """Around the passes of a training step; call `decide` before the next one."""
        return self.meter.step(detailed=self.phase in _NUM_MEASURED)

    def decide(self) -> None:
        """After a step: goes on to the next phase, and makes a plan where it is time for one.

        Raises:
            ConfigurationError: after the last measured step: no plan keeps to the budget.
            OffloadError: ranks that share layers have come to different plans.
        """
        with self.meter.left_out():
            self._decide()

    def _decide(self) -> None:
        steps = self.meter.read()
        num_wanted = _NUM_MEASURED.get(self.phase, 0)
        is_complete = bool(num_wanted) and self.meter.num_detailed >= num_wanted
        if is_complete:
            steps += self.meter.read(waits=True)
        self._measured += [one for one in steps if one.in_detail]
        if self.phase is Phase.WARMING_UP:
            self.phase = Phase.MEASURING
        elif self.phase is Phase.FOLLOWING:
            self._budget.return_excess(self.meter.last)
            if self._adapts:
                self._compare(steps)
            else:
                self._budget.warn_of_excess(self.meter.last)
        elif is_complete:
            if self.phase is Phase.MEASURING:
                self._make_first_plan()
            else:
                self._is_refined |= self.phase is Phase.REFINING
                self._plan_for_measured()

    def _in_order(self, order: Sequence[Pass]) -> bool:
        """Whether a layer-major step has run unit by unit."""
        by_all = self.phase in (Phase.WARMING_UP, Phase.MEASURING)
        return self._order.was_kept(order, by_all=by_all)

    @property
    def table(self) -> str:
        """The plan that is followed, as people read it; empty before the first."""
        return self._stage.table(self.plan) if self.plan is not None else ""

    def explained(self) -> tuple[str, str] | None:
        """The plan that is followed and the profile that it was made for, as JSON.

        Returns:
            None before the first plan; an empty profile where the plan was read from a file.
        """
        if self.plan is None:
            return None
        profile = self.profile.to_json() if self.profile is not None else ""
        return plans_to_json([self.plan]), profile

    @property
    def metrics(self) -> dict[str, int | float]:
        """What was predicted of the last step, and what was measured; always the same names."""
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
        """Follows the plan that the file has for this stage, if there is a file."""
        plan = file.load(self._engine.tiers)
        if plan is None:
            return
        self._follow(plan)
        self._adapts = False
        if self._stage.speaks:
            logger.info("activation offload: %s\n(from %s)", self._stage.table(plan), file.path)

    def _make_first_plan(self) -> None:
        """Plans, with all ranks of the run: where one finds no plan, none goes on."""
        profile, plan, message = None, None, None
        speaks_first = self._stage.speaks and self._stage.position.stage == 0
        whole = self._whole_steps()
        if speaks_first and is_compiled():
            logger.info("activation offload: planning, which takes seconds")
        elif speaks_first:  # also to those who see warnings only: the step takes long
            logger.warning(
                "activation offload: planning; the first time after an installation this takes up "
                "to half a minute, as the simulation is compiled"
            )
        try:
            profile = self._measured_profile(None)
            seconds_of = functools.partial(self._maker.seconds, profile, whole)
            self._budget.decide(whole.peak_bytes, seconds_of)
            self._maker.budget_bytes = self._budget.num_bytes
            self.profile, plan = self._maker.first(profile, whole)
        except OffloadError as error:
            message = str(error).removeprefix(PREFIX)
            if profile is not None and self._device.is_host and keeps_freed_memory():
                message += (
                    f"; what was measured has memory in it that {allocator_name()} keeps: "
                    f"{START_WITH_ENVIRONMENT}"
                )
        told = self._consensus.of_all((plan if self._stage.speaks else None, message))
        raise_first(one for _, one in told)
        assert plan is not None and self.profile is not None
        check_same(plan, self._consensus)
        self._save_profile(self.profile)
        self._follow(plan)
        if speaks_first:
            plans = sorted((one for one, _ in told if one is not None), key=lambda one: one.stage)
            for one in plans:
                logger.info("activation offload: %s", self._stage.table(one))
            if self._file is not None:
                self._file.save(plans)

    def _follow(self, plan: Plan) -> None:
        self.plan = plan
        self.num_plans += 1
        self._policy.follow(plan)
        self._engine.bound_lead(plan.lead_layers)
        self.phase = Phase.FOLLOWING
        self._reason = None
        self.meter.read(waits=True)  # steps under another plan show nothing of this one
        self._device.return_freed_memory()  # it fitted what was kept until now
        expected = None
        if self.profile is not None and plan.predicted is not None:
            sizes, budget_bytes = self.profile.sizes, self._budget.num_bytes
            on_host = self._device.is_host
            expected = Expectation(plan.predicted, sizes, self._own_tiers, budget_bytes, on_host)
        self._drift.follow(expected)

    # -- Profiles -------------------------------------------------------------------------------

    def _measured_profile(self, previous: StageProfile | None) -> StageProfile:
        """The profile of the steps that were measured, the same on all ranks of the group."""
        profile = self.meter.profile(
            self._stage.position,
            recomputes=not self._stage.why_not_recomputed,
            previous=previous,
            plan=self.plan,
            hands_over=self._stage.hands_over,
        )
        self._own_tiers = profile.tiers
        return agreed_profile(profile, self._consensus)

    def _as_now(self, profile: StageProfile) -> StageProfile:
        """The profile, with the tiers and for the sizes of the last step.

        A tier that has become slow holds memory longer: no plan for the fast one would help.
        """
        assert self.meter.last is not None
        self._own_tiers, sizes = self.meter.tiers(), dict(self.meter.last.sizes)
        profile = dataclasses.replace(
            profile,
            tiers=self._own_tiers,
            sizes=sizes,
            num_micro_batches=sizes.get("micro_batches", profile.num_micro_batches),
        )
        return agreed_profile(profile, self._consensus)

    def _whole_steps(self) -> WholeSteps:
        """What to calibrate with, the same on all ranks of a group: of the steps measured for this
        plan, or else of the last one."""
        self.meter.read(waits=True)  # its last one is known then
        steps, self._measured = self._measured, []
        if self.phase is Phase.REFINING:  # nothing has changed since those before
            steps = [*steps, *self._drift.recent]
        if not steps and self.meter.last is not None:
            steps = [self.meter.last]
        passes_s, own_s = self._passes_s(steps), 0.0
        if passes_s:
            # The first steps are few, and what disturbs one, such as new memory, only makes it
            # longer.
            own_s = min(passes_s) if self.plan is None else statistics.median(passes_s)
            own_s += steps[-1].gap_s
        own_bytes = max((one.peak_bytes for one in steps), default=0)
        step_s, peak_bytes = self._consensus.largest([own_s, float(own_bytes)])
        return WholeSteps(step_s or None, int(peak_bytes))

    def _passes_s(self, steps: Sequence[MeasuredStep]) -> list[float]:
        """What passes took, as `calibrated` wants it."""
        if self._device.is_host:
            return [one.step_s - one.gap_s for one in steps]
        return [one.step_s - one.gap_s - one.stall_s for one in steps if one.stall_s is not None]

    def _save_profile(self, profile: StageProfile) -> None:
        if self._directory is None or not self._stage.speaks:
            return
        path = self._directory / f"activation-profile-stage{profile.position.stage}.json"
        try:
            write_atomically(path, profile.to_json())
        except OSError as error:
            logger.warning("activation offload: the profile could not be written: %s", error)

    # -- Adapting -------------------------------------------------------------------------------

    def _compare(self, steps: Sequence[MeasuredStep]) -> None:
        """All ranks of a group ask each other at the same steps, whatever they have found."""
        self._drift.see(*steps, judges=self._is_refined)
        num_followed = self._drift.num_followed
        if num_followed % self._consensus.period_steps:
            return
        found = self._drift.take()
        told = self._consensus.largest([float(bool(found[reason])) for reason in Reason])
        self._reason = next((one for one, any_ in zip(Reason, told, strict=True) if any_), None)
        if self._reason is not None and self._stage.speaks:
            logger.info(
                "activation offload: stage %d is to be planned again: %s",
                self._stage.position.stage,
                found[self._reason] or self._reason.value,
            )
        if self._reason is Reason.OVER:
            assert self.profile is not None
            self._maker.num_exceeded += 1
            self._plan_again(self._as_now(self.profile))
        elif self._reason in (Reason.SLOWER, Reason.LARGER):
            self.phase = Phase.UPDATING
        elif self._reason is Reason.UNEXPECTED or (
            not self._is_refined and num_followed >= _STEPS_BEFORE_REFINING
        ):
            self._device.return_freed_memory()
            self.phase = Phase.REFINING

    def _plan_for_measured(self) -> None:
        """Plans for the steps measured, unless they were shorter than those it plans for: where
        lengths vary, these come again. A tier that has become slow does not wait for them. Nor does
        it plan for steps in which a forward pass had no backward pass."""
        assert self.profile is not None
        (any_has_none,) = self._consensus.largest([float(not self.meter.has_whole_steps)])
        if any_has_none:
            self.meter.forget()
            self._go_on_with_plan()
            return
        profile = self._measured_profile(self.profile)
        least_tokens = tokens_of(self.profile.sizes) + (self._reason is Reason.LARGER)
        if tokens_of(profile.sizes) < least_tokens and self._reason is not Reason.SLOWER:
            self._go_on_with_plan()
        else:
            self._plan_again(profile)

    def _go_on_with_plan(self) -> None:
        """What was measured is nothing to plan for."""
        self._measured = []
        self._drift.planned(self._reason, changed=False)
        self.phase = Phase.FOLLOWING

    def _plan_again(self, profile: StageProfile) -> None:
        """Where that fails on a rank of the group, all of them go on as they are."""
        assert self.plan is not None
        before, after = self.plan, None
        whole = self._whole_steps()
        try:
            profile, after = self._maker.next(profile, before, whole)
        except OffloadError as error:
            logger.warning("%s; going on with the present plan", error)
        (any_failed,) = self._consensus.largest([float(after is None)])
        plan = before if any_failed or after is None else after
        check_same(plan, self._consensus)
        self.profile = profile
        self._save_profile(profile)
        changed = plan.digest() != before.digest()
        self._drift.planned(self._reason, changed=changed)
        self._follow(plan)
        if self._file is not None:
            self._file.update(plan)
        if self._stage.speaks:
            text = self._stage.table(plan) if changed else "the plan stays as it is"
            logger.info("activation offload: planned again: %s", text)
