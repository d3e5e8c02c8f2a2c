# SPDX-License-Identifier: Apache-2.0
"""A plan beside what else could be done with the same activations: `PlanComparison`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron.offload.activations.placement.plan import Plan, Prediction
from megatron.offload.activations.placement.policy import Placement
from megatron.offload.activations.stats.memory_parts import PredictedPeak
from megatron.offload.commands.plan.request import Request
from megatron.offload.errors import InfeasibleBudgetError
from megatron.offload.planner.profile.stage_profile import StageProfile
from megatron.offload.planner.projection.projection import Projection, project, saved_bytes
from megatron.offload.planner.simulator.instructions import (
    FIRST_TIER,
    KEEP,
    KEEP_ALL,
    RECOMPUTE_LAYER,
)
from megatron.offload.planner.simulator.options import Choices, from_tier
from megatron.offload.planner.simulator.timeline import Timeline, prediction_of
from megatron.offload.planner.solver.baselines import suffix_plan
from megatron.offload.planner.solver.solve import solve
from megatron.offload.stats.endurance import YEAR_S

_NUM_BUDGETS = 9  # of the curve
REPLAY_ALL, ENCODE_ALL, BOTH_ALL = "replay all", "encode all", "replay and encode all"
WITHOUT_CODEC = "no codec, same goal"


@dataclass(frozen=True)
class CodecFigures:
    """What a codec does to the layers of a micro-batch, where it encodes all that it may.

    Attributes:
        name: `int8` or `int4`.
        exact_bytes: that the layers save without it, as far as these can move.
        stored_bytes: of the same with it.
        seconds: to encode and to decode that.
        layers_s: of the layers, forward and backward.
    """

    name: str
    exact_bytes: int
    stored_bytes: int
    seconds: float
    layers_s: float


@dataclass(frozen=True)
class PlanComparison:
    """A plan beside what else could be done, as `megatron-offload plan` shows it.

    Attributes:
        strategies: predictions by name, `this plan` and `keep all` among them; None: impossible.
        peak: what this plan's predicted peak is made of.
        curve: budgets and what the plan for each is predicted to take, from the largest down.
        curve_without_replay: the same of a run without replay, where the projected one has it.
        without_replay: what the plan for the same goal is predicted to take there.
        codec: of a projected run that has one.
    """

    request: Request
    plan: Plan
    strategies: dict[str, Prediction | None]
    peak: PredictedPeak
    curve: tuple[tuple[int, Prediction], ...] = ()
    curve_without_replay: tuple[tuple[int, Prediction], ...] = ()
    without_replay: Prediction | None = None
    codec: CodecFigures | None = None

    @property
    def profile(self) -> StageProfile:
        """Profile of the stage that is planned."""
        return self.request.profile

    @property
    def projection(self) -> Projection | None:
        """Where the profile comes from, if it was projected."""
        return self.request.projection

    @property
    def predicted(self) -> Prediction:
        """What a step with the plan should cost."""
        return self._certain("this plan")

    @property
    def keep(self) -> Prediction:
        """What a step that keeps everything should cost."""
        return self._certain("keep all")

    @property
    def required_bytes_per_s(self) -> float:
        """Write bandwidth that hides all activations: S / (t / 2), as SSDTrain counts."""
        return 2 * saved_bytes(self.profile) / self.keep.step_s

    @property
    def ssd_written_bytes(self) -> int:
        """In a step with this plan, to drives."""
        choices = Choices(self.profile)
        moved = choices.moved_bytes(choices.of_plan(self.plan))
        return self.profile.num_micro_batches * moved.get(Placement.SSD, 0)

    @property
    def states_written_bytes(self) -> int:
        """Of optimizer states in a step, to drives."""
        states = self.request.states
        if states is None or states.tier.name != Placement.SSD.value:
            return 0
        return int(states.predicted.moved_bytes)

    @property
    def life_years(self) -> float | None:
        """Until the drives have taken their rated bytes; None: nothing written, or not known."""
        rated = self.request.rated_bytes
        written = self.ssd_written_bytes + self.states_written_bytes
        if rated is None or not written:
            return None
        return rated * self.predicted.step_s / written / YEAR_S

    def _certain(self, name: str) -> Prediction:
        found = self.strategies[name]
        assert found is not None
        return found


def compare_plans(request: Request, *, with_curve: bool) -> PlanComparison:
    """Plans, and predicts what else could be done. Raises ConfigurationError."""
    profile = request.profile
    plan = solve(profile, budget_bytes=request.budget_bytes, max_slowdown=request.max_slowdown)
    timeline = Timeline(profile)
    strategies: dict[str, Prediction | None] = {"this plan": plan.predicted}
    of = request.projection
    for name, choice in _references(profile, of):
        chosen = timeline.choices.all(choice)
        possible = choice in (KEEP, KEEP_ALL) or chosen.any()
        strategies[name] = prediction_of(timeline.cost(chosen)) if possible else None
    if any(tier.name == "ssd" for tier in profile.tiers):
        strategies["TBA's suffix"] = timeline.predict(suffix_plan(profile))
    curve: list[tuple[int, Prediction]] = []
    if with_curve:
        keep = strategies["keep all"]
        assert keep is not None
        curve = frontier(profile, keep.peak_bytes)
    peak, found, codec = timeline.explain_peak(plan), tuple(curve), None
    if of is not None and of.codec != "off":
        exact = project(dataclasses.replace(of, codec="off"))
        codec = _codec_figures(of.codec, profile, exact)
        strategies[WITHOUT_CODEC] = _solved(exact, request.budget_bytes, request.max_slowdown)
    if of is None or not of.replay:
        return PlanComparison(request, plan, strategies, peak, found, codec=codec)
    plain = project(dataclasses.replace(of, replay=False))
    without = _solved(plain, request.budget_bytes, request.max_slowdown)
    most = Timeline(plain).keep_all()
    strategies["no replay, same goal"] = without
    if plan.predicted is not None:
        slowdown = max(plan.predicted.step_s / most.step_s - 1, 0.0)
        strategies["no replay, as fast"] = _solved(plain, None, slowdown)
    other = frontier(plain, most.peak_bytes) if with_curve else ()
    return PlanComparison(request, plan, strategies, peak, found, tuple(other), without, codec)


def _codec_figures(name: str, profile: StageProfile, exact: StageProfile) -> CodecFigures:
    of_exact, layers = exact.layers, profile.layers
    return CodecFigures(
        name,
        sum(layer.movable_bytes for layer in of_exact),
        sum(layer.movable_bytes for layer in layers),
        sum(layer.replay_s for layer in layers) - sum(layer.replay_s for layer in of_exact),
        sum(layer.forward_s + layer.backward_s for layer in of_exact),
    )


def _references(profile: StageProfile, of: Projection | None) -> list[tuple[str, int]]:
    """What may become of everything, where it can.

    Args:
        of: what the profile was projected from, if it was.
    """
    names = [tier.name for tier in profile.tiers]
    replays = any(layer.replayed_bytes for layer in profile.layers)
    again = REPLAY_ALL
    if of is not None and of.codec != "off":
        again = BOTH_ALL if of.replay else ENCODE_ALL
    return [
        ("keep all", KEEP_ALL),
        *([(again, KEEP)] if replays else []),
        ("recompute all", RECOMPUTE_LAYER),
        *(
            (f"recompute, inputs on {one}", from_tier(RECOMPUTE_LAYER, n))
            for n, one in enumerate(names)
        ),
        *((f"{name} all", FIRST_TIER + n) for n, name in enumerate(names)),
    ]


def frontier(profile: StageProfile, most_bytes: int) -> list[tuple[int, Prediction]]:
    """Budgets and predictions, from `most_bytes` down to the least that any plan needs."""
    least = _solved(profile, 1)
    least_bytes = max(least.peak_bytes, 1)
    budgets = [
        most_bytes - (most_bytes - least_bytes) * number // (_NUM_BUDGETS - 1)
        for number in range(_NUM_BUDGETS)
    ]
    return [(budget, _solved(profile, budget)) for budget in budgets]


def _solved(
    profile: StageProfile, budget_bytes: int | None, max_slowdown: float | None = None
) -> Prediction:
    """Of the plan for a goal, or, where there is none, of the smallest that there is."""
    try:
        plan = solve(profile, budget_bytes=budget_bytes, max_slowdown=max_slowdown)
    except InfeasibleBudgetError as error:
        plan = error.plan
    assert plan.predicted is not None
    return plan.predicted


def all_stages(comparison: PlanComparison) -> list[Plan]:
    """The plans of all stages of a projected run, each for the same goal as that at hand."""
    of = comparison.request
    budget_bytes, max_slowdown = of.budget_bytes, of.max_slowdown
    plans = (
        comparison.plan
        if one is of.projection
        else solve(project(one), budget_bytes=budget_bytes, max_slowdown=max_slowdown)
        for one in of.projections
    )
    return [
        dataclasses.replace(plan, stage=one.stage)
        for plan, one in zip(plans, of.projections, strict=True)
    ]
