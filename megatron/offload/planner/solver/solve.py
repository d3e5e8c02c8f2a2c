# SPDX-License-Identifier: Apache-2.0
"""The best plan for a stage: `solve`.

A mixed-integer program (`formulation`) gives starting points, the simulation (`timeline`) judges
them, and a search (`local_search`) improves them there. The same profile gives the same plan
everywhere: effort is counted in simulated events, never in seconds.
"""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import replace

from megatron.offload.activations.placement.plan import Plan
from megatron.offload.errors import PREFIX, ConfigurationError, InfeasibleBudgetError
from megatron.offload.planner.profile.produced import replay_in_words
from megatron.offload.planner.profile.stage_profile import StageProfile
from megatron.offload.planner.simulator.arrays import Ints
from megatron.offload.planner.simulator.instructions import (
    FIRST_TIER,
    KEEP,
    KEEP_ALL,
    RECOMPUTE_LAYER,
    SELECTIVE_OFFSET,
)
from megatron.offload.planner.simulator.options import from_tier
from megatron.offload.planner.simulator.timeline import Cost, Timeline, prediction_of
from megatron.offload.planner.solver.encoded_layers import encoded_in_turn
from megatron.offload.planner.solver.explain import Reasons
from megatron.offload.planner.solver.formulation import Program
from megatron.offload.planner.solver.local_search import Goal, Search, Value
from megatron.offload.sizes import format_size

_MOST_EVENTS = 300_000
_MOST_TIMES = 32  # that, for steps of which all micro-batches are simulated
_TIMES_WITH_CODEC = 8  # that, where each part has as many choices again
_SHARE = 0.4  # of what is left of it, for the next starting point
_FEWEST_PROGRAMS, _MOST_PROGRAMS = 3, 8  # the latter until one keeps to the budget
_MOST_KICKS = 8
# Of the layers that a codec could encode. A slowdown leaves time for some of them.
_SHARES_OF_BUDGET, _SHARES_OF_SLOWDOWN = 3, 8
_MOST_CHECKS = 4
_NEAR_LAYERS = 1  # that forward is launched ahead of the device where a plan bounds that
_LEAST_GAIN = 0.005  # of time or memory, for a plan to bound it
_BELOW = (0.97, 0.9, 0.97, 0.8, 0.97, 0.9)  # parts of the best peak so far, to be tried in turn


def solve(
    profile: StageProfile,
    *,
    budget_bytes: int | None = None,
    max_slowdown: float | None = None,
) -> Plan:
    """The fastest plan within a memory budget, or the smallest within a slowdown.

    Args:
        profile: of the stage.
        budget_bytes: most device memory for activations, the profile's working memory included.
        max_slowdown: e.g. 0.02; against keeping everything. With a budget too, the plan is the
            fastest within the budget, and must not be slower than this.

    Raises:
        ConfigurationError: neither is given, or it makes no sense.
        InfeasibleBudgetError: no plan was found that needs so little.
    """
    if budget_bytes is None and max_slowdown is None:
        raise ConfigurationError(
            "a plan was asked for without a goal; give a memory budget, a slowdown or both"
        )
    if (budget_bytes or 0) < 0 or not 0 <= (max_slowdown or 0.0) < math.inf:
        raise ConfigurationError(
            f"a plan was asked for with a budget of {budget_bytes} bytes and a slowdown of "
            f"{max_slowdown}; expected numbers from zero up"
        )
    if profile.lead_layers <= _NEAR_LAYERS:
        return _Solution(profile, budget_bytes, max_slowdown).plan()
    return _with_lead(profile, budget_bytes, max_slowdown)


def _with_lead(profile: StageProfile, budget_bytes: int | None, max_slowdown: float | None) -> Plan:
    """The best plan where the host runs ahead of the device, or where its lead is bounded.

    It is where that makes a better plan: what the bound costs the host cannot be known.
    """
    far: Plan | InfeasibleBudgetError
    try:
        far = _Solution(profile, budget_bytes, max_slowdown).plan()
    except InfeasibleBudgetError as error:
        far = error
    if isinstance(far, Plan) and not _can_gain(far, budget_bytes):
        return far
    near_profile = replace(profile, lead_layers=_NEAR_LAYERS)
    try:
        near = _Solution(near_profile, budget_bytes, max_slowdown).plan()
    except InfeasibleBudgetError as error:
        if isinstance(far, Plan):
            return far
        nearer = replace(error.plan, lead_layers=_NEAR_LAYERS)
        if error.smallest_bytes >= far.smallest_bytes:
            raise far from None
        raise InfeasibleBudgetError(
            str(error).removeprefix(PREFIX), error.smallest_bytes, error.step_s, nearer
        ) from None
    near = replace(near, lead_layers=_NEAR_LAYERS)
    if isinstance(far, InfeasibleBudgetError):
        return near
    assert far.predicted is not None and near.predicted is not None
    if budget_bytes is None:
        gains = far.predicted.peak_bytes > near.predicted.peak_bytes * (1 + _LEAST_GAIN)
    else:
        gains = far.predicted.step_s > near.predicted.step_s * (1 + _LEAST_GAIN)
    return near if gains else far


def _can_gain(far: Plan, budget_bytes: int | None) -> bool:
    """Whether a plan may become better by a bound of the host's lead: not where it hides all."""
    assert far.predicted is not None and far.fastest is not None
    slower = far.predicted.step_s > far.fastest.step_s * (1 + _LEAST_GAIN)
    return slower or budget_bytes is None


class _Solution:
    """One call of `solve`."""

    def __init__(
        self, profile: StageProfile, budget_bytes: int | None, max_slowdown: float | None
    ) -> None:
        self._profile = profile
        self._timeline = Timeline(profile)
        self._whole = Timeline(profile, all_micro_batches=True)
        self._choices = self._timeline.choices
        times = profile.num_micro_batches if profile.position.units else 1
        self._most_events = _MOST_EVENTS * min(times, _MOST_TIMES)
        layers = profile.layers
        self._encodes = any(part.codec_spared_bytes for one in layers for part in one.parts)
        if self._encodes:
            self._most_events *= _TIMES_WITH_CODEC
        self._search = Search(self._timeline, self._most_events)
        self._program = Program(profile, self._choices)
        self._budget_bytes = budget_bytes
        self._max_slowdown = max_slowdown
        self._fastest = self._search.cost(self._choices.all(KEEP_ALL))
        self._limit_s = self._fastest.step_s * (1 + (max_slowdown or 0.0)) * (1 + 1e-9)

    def plan(self) -> Plan:
        """What was asked for. Raises InfeasibleBudgetError."""
        return self._in_words(*self._solve())

    def _in_words(self, chosen: Ints, cost: Cost) -> Plan:
        budget = math.inf if self._budget_bytes is None else self._budget_bytes
        reasons = Reasons(self._timeline, chosen, budget).of_parts()
        fastest = self._whole.cost(self._choices.all(KEEP_ALL))
        replay = replay_in_words(self._profile.layers)
        return replace(
            self._choices.plan(chosen, reasons),
            goal=self._goal_in_words(),
            predicted=prediction_of(cost),
            fastest=prediction_of(fastest),
            notes=(f"{self._search.num_tried} plans were simulated", *([replay] if replay else [])),
        )

    def _solve(self) -> tuple[Ints, Cost]:
        """Long steps are judged by a part of them, so the whole has the last word."""
        budget = math.inf if self._budget_bytes is None else float(self._budget_bytes)
        target, limit_s = budget, self._limit_s
        for _ in range(_MOST_CHECKS):
            if self._budget_bytes is None:
                chosen = self._least_memory(limit_s)
            else:
                chosen = self._least_time(target)
            cost = self._whole.cost(chosen)
            if self._budget_bytes is None:
                if cost.step_s <= self._limit_s:
                    return chosen, cost
                limit_s -= cost.step_s - self._limit_s
            else:
                if cost.peak_bytes <= budget:
                    self._check_time(chosen, cost)
                    return chosen, cost
                if self._search.cost(chosen).peak_bytes > target:
                    break
                target -= cost.peak_bytes - budget
        if self._budget_bytes is None:
            everything = self._choices.all(KEEP_ALL)
            return everything, self._whole.cost(everything)
        for chosen in (self._search.best(_smallest), self._smallest_found):
            cost = self._whole.cost(chosen)
            if cost.peak_bytes <= budget:
                self._check_time(chosen, cost)
                return chosen, cost
        raise self._infeasible()

    def _least_time(self, budget: float) -> Ints:
        if self._fastest.peak_bytes <= budget:
            return self._choices.all(KEEP_ALL)
        goal = self._fastest_within(budget)
        starts = self._simple_starts()
        aim, fits = budget, False
        for number in range(_MOST_PROGRAMS):
            if number >= _FEWEST_PROGRAMS and fits:
                break
            found = self._program.solve(budget_bytes=aim)
            if found is None:
                break
            starts.append(found)
            # The program's memory is not exactly the simulation's.
            peak = self._search.cost(found).peak_bytes
            fits |= peak <= budget
            aim = min(aim * budget / max(peak, 1.0), 2 * budget)
        best = self._improve(starts, goal)
        if goal(self._search.cost(best))[0] > 0:
            self._search.left_events = max(self._search.left_events, 0.5 * self._most_events)
            best = self._improve([self._smallest_found, self._search.best(goal)], goal)
        return best

    def _least_memory(self, limit_s: float) -> Ints:
        def goal(cost: Cost) -> Value:
            over = max(cost.step_s - limit_s, 0.0)
            return over, cost.peak_bytes, cost.step_s, cost.written_bytes

        starts = self._simple_starts()
        allowed_s = limit_s - self._fastest.step_s
        for factor in (1.0, 0.5):
            found = self._program.solve(slowdown_s=max(allowed_s * factor, 0.0))
            if found is not None:
                starts.append(found)
        best = self._improve(starts, goal)
        # A change alone seldom lowers a peak: below it, the fastest may become fast enough.
        for part in _BELOW:
            aim = self._fastest_within(part * self._search.cost(best).peak_bytes)
            self._improve([self._search.best(aim)], aim)
            best = self._search.best(goal)
        return best

    def _fastest_within(self, budget: float) -> Goal:
        def goal(cost: Cost) -> Value:
            over = max(cost.peak_bytes - budget, 0.0)
            # What is as fast to a millionth is told apart by what it writes.
            step = round(cost.step_s / self._fastest.step_s, 6)
            return over, step, cost.written_bytes, cost.peak_bytes

        return goal

    @functools.cached_property
    def _smallest_found(self) -> Ints:
        """Needs little memory; found with an effort of its own, so whatever the budget is."""
        search = Search(self._timeline, 2 * self._most_events)
        found = self._program.solve(slowdown_s=math.inf)
        starts = self._simple_starts()
        best = self._improve(starts if found is None else [found, *starts], _smallest, search)
        for _ in range(2):
            best = self._improve([best], _smallest, search)
        return best

    def _simple_starts(self) -> list[Ints]:
        tiers = range(FIRST_TIER, FIRST_TIER + len(self._profile.tiers))
        places = (KEEP, *tiers)
        selective = (choice + SELECTIVE_OFFSET for choice in places)
        again = (from_tier(RECOMPUTE_LAYER, n) for n in range(len(self._profile.tiers)))
        every = (KEEP_ALL, *places, RECOMPUTE_LAYER, *again, *selective)
        return [*(self._choices.all(choice) for choice in every), *self._encoded_starts]

    @functools.cached_property
    def _encoded_starts(self) -> list[Ints]:
        """The best choices where a codec encodes none, some and all layers; without one nothing."""
        found: list[Ints] = []
        if not self._encodes:
            return found
        allowed_s = self._limit_s - self._fastest.step_s
        shares = _SHARES_OF_BUDGET if self._max_slowdown is None else _SHARES_OF_SLOWDOWN
        for some in encoded_in_turn(self._profile, shares):
            codec_s = some.seconds * self._profile.num_micro_batches
            if self._max_slowdown is not None and codec_s > allowed_s:
                continue
            solution = _Solution(some.profile, self._budget_bytes, self._max_slowdown)
            with contextlib.suppress(InfeasibleBudgetError):
                found.append(some.choices(solution._solve()[0], self._choices))
        return found

    def _improve(self, starts: list[Ints], goal: Goal, search: Search | None = None) -> Ints:
        """From all starting points, the most promising one first and with the most effort."""
        search = search or self._search
        different = {start.tobytes(): start for start in starts}
        for start in sorted(different.values(), key=lambda one: goal(search.cost(one))):
            search.improve(start, goal, _SHARE * search.left_events)
        for number in range(_MOST_KICKS):
            kicked = search.kick(search.best(goal), number)
            search.improve(kicked, goal, _SHARE * search.left_events)
        return search.best(goal)

    def _check_time(self, chosen: Ints, cost: Cost) -> None:
        if self._max_slowdown is None or cost.step_s <= self._limit_s:
            return
        slower = cost.step_s / self._fastest.step_s - 1
        raise InfeasibleBudgetError(
            f"the fastest plan within {format_size(self._budget_bytes or 0)} is {slower:.1%} "
            f"slower than keeping everything; expected at most {self._max_slowdown:.1%}; "
            "raise the budget or allow more slowdown",
            self._budget_bytes or 0,
            cost.step_s,
            self._in_words(chosen, cost),
        )

    def _infeasible(self) -> InfeasibleBudgetError:
        """Says what would be possible: a budget that `solve` meets when it is asked for."""
        least_bytes = self._search.cost(self._smallest_found).peak_bytes
        smallest = math.ceil(self._whole.cost(self._smallest_found).peak_bytes)
        tried = [one for cost, one in self._search.tried if cost.peak_bytes <= least_bytes]
        costs = [(self._whole.cost(one), one) for one in tried]
        fitting = [(cost, one) for cost, one in costs if cost.peak_bytes <= smallest]
        within, chosen = min(fitting, key=lambda found: (found[0].step_s, found[0].written_bytes))
        slower = within.step_s / self._fastest.step_s - 1
        return InfeasibleBudgetError(
            f"no plan fits into {format_size(self._budget_bytes or 0)} of device memory; the "
            f"smallest budget that one was found for is {format_size(smallest)} ({smallest} "
            f"bytes), with {within.step_s:.3f} s a step, {slower:.1%} more than keeping "
            "everything; raise the budget, or lower the micro-batch size",
            smallest,
            within.step_s,
            self._in_words(chosen, within),
        )

    def _goal_in_words(self) -> str:
        slowdown = f"at most {100 * (self._max_slowdown or 0.0):g} % slower"
        if self._budget_bytes is None:
            return slowdown
        budget = f"at most {format_size(self._budget_bytes)}"
        return budget if self._max_slowdown is None else f"{budget}, {slowdown}"


def _smallest(cost: Cost) -> Value:
    """The plan with the least memory; what need not move for that stays."""
    return cost.peak_bytes, cost.step_s, cost.written_bytes
