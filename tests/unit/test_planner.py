# SPDX-License-Identifier: Apache-2.0
"""The course of a planned run on one rank, with a solver that decides what the test says."""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.offload import ConfigurationError, OffloadConfig, Placement
from megatron.offload.activations.placement.plan import Plan, PlannedPart, Prediction
from megatron.offload.activations.placement.plan_file import load_plans, save_plans
from megatron.offload.device.cpu import CpuDevice
from megatron.offload.errors import OffloadError
from megatron.offload.planner.online import plan_maker, planner
from megatron.offload.planner.online.drift import JUDGED_STEPS
from megatron.offload.planner.online.planner import Phase
from megatron.offload.planner.online.stage import Stage
from megatron.offload.planner.online.step_meter import StepMeter
from megatron.offload.planner.profile.stage_profile import StageProfile, TierProfile
from megatron.offload.stats.memory import PeakMemory
from megatron.offload.tiers.file import UnlinkedFile
from tests.support import planned
from tests.support.models import ssd
from tests.support.planned import GIB, LAYERS, REFINING_STEPS, Run

MIB = 1 << 20


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def build(directory: Path | None = None, **changes: Any) -> Run:
        settings: dict[str, Any] = {
            "mode": "auto",
            "directories": (tmp_path,),
            "min_bytes": 1,
            "memory_budget_bytes": 16 * GIB,
            **changes,
        }
        runs.append(Run(OffloadConfig(**settings), directory))
        return runs[-1]

    yield build
    for run in runs:
        run.engine.close()


def test_three_steps_are_offloaded_and_then_the_plan_is_followed(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start(tmp_path / "run", max_slowdown=0.5)
    run.solver.placement = Placement.KEEP
    for phase in (Phase.WARMING_UP, Phase.MEASURING, Phase.MEASURING):
        assert run.planner.phase is phase and run.planner.plan is None
        run.step()
        assert run.engine.statistics.offloaded_bytes > 0
    ((profile, budget_bytes, slowdown),) = run.solver.asked
    assert (budget_bytes, slowdown) == (16 * GIB, 0.5)
    assert profile.num_micro_batches == 2 and [one.name for one in profile.layers] == list(LAYERS)
    assert profile.transient_bytes > 0 and profile.layers[0].forward_s > 0
    saved = StageProfile.load(tmp_path / "run" / "activation-profile-stage0.json")
    assert saved == profile
    assert run.planner.phase is Phase.FOLLOWING
    run.steps(3)
    assert run.engine.statistics.offloaded_bytes == 0
    assert len(run.solver.asked) == 1 and run.engine._step.observer is None


def test_a_plan_that_was_followed_for_some_steps_is_refined_once(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start(tmp_path / "run")
    run.solver.placement = Placement.KEEP
    run.steps(3 + 2)
    peaks = []
    for number in range(2 + REFINING_STEPS):  # all that it follows the plan once it has settled
        assert (run.planner.phase is Phase.REFINING) is (number >= 2)
        assert run.planner.num_plans == 1
        run.step()
        peaks.append(run.planner.metrics["measured_peak_bytes"])
    assert run.planner.phase is Phase.FOLLOWING and run.planner.num_plans == 2
    (_, _, _), (profile, budget_bytes, _) = run.solver.asked
    assert budget_bytes == 16 * GIB
    # The simulation has a step of a second, and no peak of its own.
    assert profile.transient_bytes == max(peaks)
    saved = StageProfile.load(tmp_path / "run" / "activation-profile-stage0.json")
    assert saved == profile != run.solver.asked[0][0]
    run.steps(20)
    assert run.planner.phase is Phase.FOLLOWING and run.planner.num_plans == 2


def test_what_earlier_steps_have_freed_is_returned_before_later_ones_are_judged(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    returned = collections.Counter[int]()
    run, begun = start(), list[int]()
    monkeypatch.setattr(CpuDevice, "return_freed_memory", lambda _: returned.update([len(begun)]))
    run.solver.placement = Placement.KEEP
    for number in range(3 + 4 + REFINING_STEPS + 4):
        begun.append(number)
        run.step()
    # Before the two that set the base, by the plan after the third, before refining and by the plan
    # that follows from it.
    assert returned == {1: 1, 2: 1, 3: 1, 3 + 4: 1, 3 + 4 + REFINING_STEPS: 1}


@pytest.mark.parametrize(("peak_bytes", "num_returned"), [(1000, 0), (1001, 2)])
def test_what_the_allocator_keeps_is_returned_after_steps_over_the_budget(
    peak_bytes: int,
    num_returned: int,
    start: Callable[..., Run],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = start(memory_budget_bytes=1000)
    run.steps(3)
    monkeypatch.setattr(PeakMemory, "end_step", lambda _: peak_bytes)
    returned: list[int] = []
    monkeypatch.setattr(CpuDevice, "return_freed_memory", lambda _: returned.append(1))
    run.steps(2)
    assert run.planner.num_plans == 1  # so little above the budget is no reason for another plan
    assert len(returned) == num_returned


def test_the_largest_peak_of_the_measured_steps_counts(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = iter([500, 4000, 1000])
    monkeypatch.setattr(PeakMemory, "end_step", lambda _: next(peaks))
    run = start()
    run.steps(3)
    assert run.solver.asked[0][0].transient_bytes == 4000  # the first step does not count


def test_the_profile_is_made_as_slow_as_whole_steps_are(start: Callable[..., Run]) -> None:
    run = start()
    run.step_s = 31.0
    run.steps(3)
    # The simulation has a step of a second, whatever the profile: the rest is outside of passes.
    assert run.solver.asked[0][0].step_fixed_s >= 30.0


def test_predicted_and_measured_stand_side_by_side(start: Callable[..., Run]) -> None:
    run = start()
    run.step()
    before = run.planner.metrics
    assert before["predicted_step_s"] == 0 and before["measured_step_s"] > 0
    run.steps(3)
    after = run.planner.metrics
    assert list(after) == list(before)
    assert after["predicted_step_s"] == 1.0 and after["predicted_peak_bytes"] == 1 << 20
    assert after["plans"] == 1 and after["measured_peak_bytes"] >= 0


def test_a_step_that_ends_badly_is_measured_again(start: Callable[..., Run]) -> None:
    run = start()
    run.step()
    with pytest.raises(ArithmeticError):
        run.step(fails=True)
    assert run.planner.phase is Phase.MEASURING and not run.solver.asked
    run.steps(2)
    assert run.planner.phase is Phase.FOLLOWING


def test_the_plan_is_written_and_another_run_follows_it_at_once(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    first = start(plan_file=path)
    first.solver.placement = Placement.KEEP
    first.steps(3)
    assert load_plans(path)[0] == first.planner.plan
    second = start(plan_file=path)
    assert second.planner.plan == first.planner.plan
    second.solver.predicted = Prediction(0.0, 0.0, 0.0, 0)
    second.steps(8)
    assert second.engine.statistics.offloaded_bytes == 0
    assert second.solver.asked == []  # it neither measures nor adapts


def test_a_plan_that_takes_the_place_of_the_first_does_so_in_the_file(
    start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    run = start(plan_file=path, memory_budget_bytes=1000 * MIB)
    run.steps(3)
    save_plans(path, [*load_plans(path).values(), Plan((), stage=7)])
    monkeypatch.setattr(PeakMemory, "end_step", lambda _: 1100 * MIB)
    run.solver.placement = Placement.KEEP
    run.step()
    assert run.planner.num_plans == 2
    written = load_plans(path)
    assert {line.placement for line in written[0].parts} == {Placement.KEEP}
    assert written[7] == Plan((), stage=7)


def test_a_plan_from_a_file_that_takes_more_than_the_budget_is_followed_with_a_warning(
    start: Callable[..., Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "plan.json"
    start(plan_file=path).steps(3)
    run = start(plan_file=path, memory_budget_bytes=1000 * MIB)
    monkeypatch.setattr(PeakMemory, "end_step", lambda _: 1020 * MIB)
    run.steps(2)
    assert "is followed as it is" not in caplog.text
    monkeypatch.setattr(PeakMemory, "end_step", lambda _: 1021 * MIB)
    run.steps(2)
    assert caplog.text.count("is followed as it is") == 1


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (Plan((), stage=1), "has stages 1, and none numbered 0"),
        (Plan(()), r"the model has layer decoder\.1"),
    ],
)
def test_a_plan_of_another_model_is_refused_at_the_start(
    plan: Plan, sentence: str, start: Callable[..., Run], tmp_path: Path
) -> None:
    save_plans(tmp_path / "plan.json", [plan])
    with pytest.raises(ConfigurationError, match=sentence):
        start(plan_file=tmp_path / "plan.json")


def test_a_plan_that_recomputes_what_may_not_be_is_refused(
    start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [PlannedPart(0, name, "layer", Placement.RECOMPUTE, 1) for name in LAYERS]
    save_plans(tmp_path / "plan.json", [Plan(tuple(parts))])
    start(plan_file=tmp_path / "plan.json")
    why_not = functools.partial(Stage, why_not_recomputed="layers that compute in fp8")
    monkeypatch.setattr(planned, "Stage", why_not)
    with pytest.raises(ConfigurationError, match="cannot recompute layers that compute in fp8"):
        start(plan_file=tmp_path / "plan.json")


def test_a_plan_that_recomputes_alone_what_cannot_be_is_refused(
    start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [PlannedPart(0, name, "mlp", Placement.RECOMPUTE, 1) for name in LAYERS]
    save_plans(tmp_path / "plan.json", [Plan(tuple(parts))])
    start(plan_file=tmp_path / "plan.json")
    without = functools.partial(Stage, not_alone={(LAYERS[1], "mlp")})
    monkeypatch.setattr(planned, "Stage", without)
    with pytest.raises(ConfigurationError, match=r"recomputes mlp of decoder\.2 alone, which that"):
        start(plan_file=tmp_path / "plan.json")


@pytest.mark.parametrize("keeps", [True, False])
def test_a_budget_that_cannot_be_met_ends_the_run(
    keeps: bool, start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says so if an allocator that keeps freed memory may be why."""
    planner = "megatron.offload.planner.online.planner"
    monkeypatch.setattr(f"{planner}.keeps_freed_memory", lambda: keeps)
    run = start(memory_budget_bytes=1000)
    run.solver.smallest_bytes = 2000
    run.steps(2)
    with pytest.raises(ConfigurationError, match="no plan is so small") as error:
        run.step()
    assert ("megatron-offload doctor" in str(error.value)) is keeps


def test_a_budget_that_nobody_gave_is_what_is_free_or_as_little_as_possible(
    start: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    run = start(memory_budget_bytes=None)
    run.solver.smallest_bytes = 1 << 60
    with caplog.at_level(logging.INFO, "megatron.offload"):
        run.steps(3)
    assert "50 % of the" in caplog.text and "as little memory as possible" in caplog.text
    ((_, inferred, _),) = run.solver.asked  # the error brings the plan with it
    assert inferred is not None and 0 < inferred < 1 << 50
    assert run.planner.plan is not None and run.planner.phase is Phase.FOLLOWING


def test_a_slowdown_alone_sets_no_budget(start: Callable[..., Run]) -> None:
    run = start(memory_budget_bytes=None, max_slowdown=0.02)
    run.steps(3)
    assert run.solver.asked[0][1:] == (None, 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["the disk", "the limit"])
def test_a_disk_that_becomes_slow_is_planned_for_within_five_steps(
    how: str, start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, takes_s = UnlinkedFile.write, 0.005

    def paced(self: UnlinkedFile, body: memoryview, offset: int) -> None:
        time.sleep(takes_s)
        write(self, body, offset)

    monkeypatch.setattr(UnlinkedFile, "write", paced)
    run = start(write_bytes_per_s=1e10, threads=1)
    run.writes_end = True
    run.steps(3 + 4 + REFINING_STEPS + 3)  # by now it would not plan again of itself
    assert run.planner.phase is Phase.FOLLOWING
    num_plans = run.planner.num_plans
    assert num_plans == 2
    if how == "the disk":
        takes_s = 0.15
    else:
        limit = ssd(run.engine).write_limit
        assert limit is not None
        limit.bytes_per_s = 2e5
    for _ in range(5):
        run.step()
        if run.planner.num_plans > num_plans:
            break
    assert run.planner.num_plans == num_plans + 1
    first, second = (one[0].tiers[0].write_bytes_per_s for one in run.solver.asked[-2:])
    assert second < first / 2


def test_larger_micro_batches_are_measured_and_smaller_ones_keep_the_plan(
    start: Callable[..., Run],
) -> None:
    run = start()
    run.solver.placement = Placement.KEEP
    run.steps(5)
    run.tokens = 64
    run.steps(3)
    assert run.planner.num_plans == 2
    sizes = [profile.sizes["sequence_length"] for profile, _, _ in run.solver.asked]
    assert sizes == [32, 64]
    run.steps(4 + REFINING_STEPS)
    assert run.planner.num_plans == 3
    run.tokens = 48
    run.steps(50)
    assert run.planner.num_plans == 3


def test_a_plan_is_not_refined_for_smaller_micro_batches(start: Callable[..., Run]) -> None:
    run = start()
    run.solver.placement = Placement.KEEP
    run.steps(3)
    run.tokens = 16
    run.steps(4 + REFINING_STEPS)
    assert run.planner.num_plans == 1 and run.planner.phase is Phase.FOLLOWING


def test_where_the_step_measured_for_larger_micro_batches_has_small_ones_the_plan_stays(
    start: Callable[..., Run],
) -> None:
    run = start()
    run.solver.placement = Placement.KEEP
    run.steps(3 + 4 + REFINING_STEPS)
    run.steps(2)
    for run.tokens in (64, 64, 32):
        run.step()
    assert run.planner.num_plans == 2 and run.planner.phase is Phase.FOLLOWING
    run.tokens = 64
    run.steps(3)
    assert run.planner.num_plans == 3


@pytest.mark.slow
def test_where_sizes_vary_the_plan_becomes_that_of_the_larger_ones(
    start: Callable[..., Run],
) -> None:
    run = start()
    run.solver.placement = Placement.KEEP
    run.steps(3 + 4 + REFINING_STEPS)
    order = random.Random(1)
    num_plans = []
    for _ in range(10):
        for _ in range(40):
            run.tokens = order.choice((16, 24, 32, 40, 48, 56, 64))
            run.step()
        num_plans.append(run.planner.num_plans)
    assert num_plans[0] <= 2 + 5 and num_plans[-1] - num_plans[1] <= 3
    assert run.solver.asked[-1][0].sizes["sequence_length"] >= 56


def test_steps_over_the_budget_are_planned_for_at_once_with_their_own_sizes(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(memory_budget_bytes=1000 * MIB)
    run.solver.placement = Placement.KEEP
    run.steps(3 + 4 + REFINING_STEPS)
    run.tokens = 96
    num_asked = len(run.solver.asked)
    monkeypatch.setattr(PeakMemory, "end_step", lambda _: 1100 * MIB)
    run.step()
    (profile, _, _) = run.solver.asked[num_asked]
    assert profile.sizes["sequence_length"] == 96


def test_more_memory_than_the_budget_is_planned_for_at_once(start: Callable[..., Run]) -> None:
    run = start(memory_budget_bytes=100)
    run.solver.placement = Placement.KEEP
    run.steps(3)
    # The model's activations are small; so the plan's are said to be smaller than nothing.
    run.solver.simulated_bytes = -1 << 30
    run.step()
    (before, _, _), (after, budget_bytes, _) = run.solver.asked
    assert budget_bytes == 99 and run.planner.num_plans == 2
    assert after.transient_bytes > before.transient_bytes + (1 << 29)
    run.steps(4)  # the plan has not changed: it is not asked for again at once
    assert run.planner.num_plans == 2
    run.steps(REFINING_STEPS)
    assert run.planner.num_plans == 3
    for num_plans, patient_steps in ((3, 4), (4, 8)):
        run.steps(patient_steps)
        assert run.planner.num_plans == num_plans
        run.steps(1)
        assert run.planner.num_plans == num_plans + 1


def test_plans_stay_below_a_budget_that_was_exceeded(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(memory_budget_bytes=1000)
    run.steps(3)
    monkeypatch.setattr(PeakMemory, "end_step", lambda _: 1100)
    for placement in [Placement.KEEP, Placement.SSD] * 4:
        run.solver.placement = placement
        run.step()
    budgets = [budget for _, budget, _ in run.solver.asked]
    assert budgets == [1000, 990, 980, 970, 960, 950, 950, 950, 950]


@pytest.mark.parametrize(("smallest_bytes", "warns"), [(995, False), (1005, True)])
def test_a_plan_between_what_is_aimed_at_and_the_budget_will_do(
    smallest_bytes: int,
    warns: bool,
    start: Callable[..., Run],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = start(memory_budget_bytes=1000)
    run.steps(3)
    monkeypatch.setattr(PeakMemory, "end_step", lambda _: 1100)
    run.solver.smallest_bytes = smallest_bytes
    run.step()
    assert [budget for _, budget, _ in run.solver.asked] == [1000, 990]
    assert ("as little memory as possible" in caplog.text) is warns


def test_a_step_over_its_budget_says_how_long_it_took(start: Callable[..., Run]) -> None:
    """What was on its way out when memory was scarcest depends on that."""
    run = start(memory_budget_bytes=1)
    run.solver.placement = Placement.KEEP
    run.steps(3)
    run.step_s = 1.5
    run.step()
    (before, _, _), (after, _, _) = run.solver.asked
    assert after.layers[0].forward_s == pytest.approx(1.5 * before.layers[0].forward_s)


def test_a_plan_that_is_to_save_memory_counts_on_the_tiers_as_they_are(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(memory_budget_bytes=1)
    run.solver.placement = Placement.KEEP
    run.steps(3)
    now = (TierProfile("ssd", 5.0, 6.0),)
    monkeypatch.setattr(StepMeter, "tiers", lambda _: now)
    run.step()
    assert run.planner.num_plans == 2 and run.solver.asked[-1][0].tiers == now


def test_what_is_noticed_between_the_steps_at_which_ranks_ask_is_not_lost(
    start: Callable[..., Run],
) -> None:
    run = start()
    run.solver.placement = Placement.KEEP
    run.planner._consensus.period_steps = 4
    run.steps(3 + 4 + REFINING_STEPS)
    run.steps(4)
    run.tokens = 64
    run.steps(2)
    run.tokens = 32  # the change is noticed already
    run.steps(1)
    assert run.planner.phase is Phase.FOLLOWING
    run.steps(1)
    assert run.planner.phase is Phase.UPDATING


def test_a_solver_that_fails_later_leaves_the_plan_as_it_is(
    start: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    run = start()
    run.solver.placement = Placement.KEEP
    run.steps(5)
    plan, run.tokens = run.planner.plan, 64
    run.solver.error = OffloadError("the process that plans ended")
    run.steps(3)
    assert "the process that plans ended; going on with the present plan" in caplog.text
    assert run.planner.plan == plan and run.planner.phase is Phase.FOLLOWING
    run.steps(1)


@pytest.mark.parametrize("tokens", [32, 64])  # it is refined; micro-batches have become larger
def test_steps_whose_passes_were_given_up_leave_the_plan_as_it_is(
    start: Callable[..., Run], tokens: int
) -> None:
    run = start()
    run.solver.placement = Placement.KEEP
    run.steps(3 + 4 + (REFINING_STEPS + 1 if tokens == 64 else 0))
    plans, run.tokens, run.drops_last = run.planner.num_plans, tokens, True
    run.steps(2 + REFINING_STEPS)
    assert run.planner.num_plans == plans
    run.drops_last, run.tokens = False, 96
    run.steps(20)
    assert run.planner.num_plans > plans, "those that are whole are planned for"


def test_steps_whose_passes_were_given_up_are_no_first_measurement(
    start: Callable[..., Run],
) -> None:
    run = start()
    run.drops_last = True
    run.steps(2)
    with pytest.raises(ConfigurationError, match="no step had a backward pass for each"):
        run.step()


def test_a_solver_that_fails_at_first_ends_the_run(start: Callable[..., Run]) -> None:
    run = start()
    run.solver.error = OffloadError("the process that plans ended")
    run.steps(2)
    with pytest.raises(ConfigurationError, match="the process that plans ended"):
        run.step()


def test_until_the_plan_is_refined_only_causes_count(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PeakMemory, "end_step", lambda _: 1 << 30)
    monkeypatch.setattr(planner, "_STEPS_BEFORE_REFINING", 30)
    run = start()
    run.solver.placement = Placement.KEEP
    run.steps(3 + 10)
    assert run.planner.num_plans == 1 and run.planner.phase is Phase.FOLLOWING


@pytest.mark.parametrize("changes", [False, True])
def test_another_peak_than_was_predicted_is_planned_for_more_and_more_rarely(
    changes: bool, start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start()
    run.solver.placement = Placement.KEEP
    run.steps(3 + 4 + REFINING_STEPS)
    assert run.planner.num_plans == 2
    monkeypatch.setattr(PeakMemory, "end_step", lambda _: 1 << 30)
    # No other reason, on a machine that is busy.
    monkeypatch.setattr(StepMeter, "_write_speeds", lambda _: {})
    monkeypatch.setattr(StepMeter, "_waited_s", lambda *_: 0.0)
    planned_after, num_plans = [], 2
    for number in range(40):
        if changes:  # from one plan to another, and back again
            run.solver.placement = (Placement.SSD, Placement.KEEP)[len(planned_after) % 2]
        run.step()
        if run.planner.num_plans > num_plans:
            planned_after.append(number)
            num_plans = run.planner.num_plans
    profile, _, _ = run.solver.asked[2]
    assert profile.transient_bytes == 1 << 30  # the simulation has no peak of its own
    # Two steps to settle, two that differ in a row, and four to measure; then one after four steps
    # of patience, and then after twice as many, unless the same plan now says what happens.
    between = [after - before for before, after in itertools.pairwise(planned_after)]
    assert planned_after[0] == 7 and between == ([9, 13] if changes else [])


@pytest.mark.parametrize("step_s", [0.5, 2.0])
def test_steps_that_take_longer_or_less_long_than_planned_are_measured_like_a_new_run(
    step_s: float, start: Callable[..., Run]
) -> None:
    run = start()
    run.solver.placement = Placement.KEEP
    run.steps(3 + 4 + REFINING_STEPS)
    assert run.planner.num_plans == 2
    # No other reason, on a machine that is busy.
    run.stall_s, run.peak_bytes = 0.0, run.solver.predicted.peak_bytes
    run.step_s = step_s
    run.solver.simulates(step_s)  # what it is calibrated to
    run.steps(2 + JUDGED_STEPS)
    assert run.planner.phase is Phase.FOLLOWING
    run.steps(1)  # two in a row
    assert run.planner.phase is Phase.REFINING
    run.steps(REFINING_STEPS)
    assert run.planner.num_plans == 3
    run.steps(30)  # what steps take now is what it expects
    assert run.planner.num_plans == 3


@pytest.mark.parametrize("number", [2, 3])
def test_all_steps_since_a_plan_settled_say_how_long_a_step_takes(
    number: int, start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those before something has changed do not."""
    calibrated_to = []

    def calibrated(profile: StageProfile, simulate: Any, **whole: Any) -> StageProfile:
        calibrated_to.append(whole["step_s"])
        return profile

    monkeypatch.setattr(plan_maker, "calibrated", calibrated)
    run = start()
    run.solver.placement = Placement.KEEP
    run.steps(3)
    run.solver.simulates(2.0)
    seconds = [9.0, 9.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]  # two that settle, two more, four measured
    if number == 3:
        seconds += [9.0, 9.0, *[2.0] * 10, 5.0, 5.0, 5.0]
    for number_of_step, run.step_s in enumerate(seconds):
        if number_of_step == 20:
            run.tokens = 64
        run.step()
    assert run.planner.num_plans == number
    assert calibrated_to[1:] == pytest.approx([2.0, 5.0][: number - 1], abs=0.01)


def test_the_faster_of_the_first_steps_counts_without_the_optimizers_first_one(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated_to = []

    def calibrated(profile: StageProfile, simulate: Any, **whole: Any) -> StageProfile:
        calibrated_to.append(whole["step_s"])
        return profile

    monkeypatch.setattr(plan_maker, "calibrated", calibrated)
    run, gaps_s = start(), [0.0, 7.0, 1.0]  # before each step; the first of them is not known
    for run.step_s, gap_s in zip((9.0, 12.0, 6.5), gaps_s, strict=True):
        run.gap_s = gap_s
        run.step()
    # Passes of 5 and 5.5 seconds, and the optimizer's later steps of one.
    assert calibrated_to == [6.0]


@pytest.mark.parametrize(
    ("budget", "step_s", "peak_bytes", "changes"),
    [
        (None, 1.0, 100 * MIB, False),
        (None, 0.98, 98 * MIB, False),
        (None, 0.96, 100 * MIB, True),
        (None, 1.0, 96 * MIB, True),
        (101 * MIB, 1.0, 50 * MIB, False),  # there is room for it
        (99 * MIB, 1.0, 50 * MIB, True),
        (99 * MIB, 1.0, 99 * MIB, True),  # the other does not keep to it, however little it lacks
        (97 * MIB, 1.0, 98 * MIB, False),  # neither does
    ],
)
def test_a_plan_takes_the_place_of_another_if_that_is_worth_it(
    budget: int | None,
    step_s: float,
    peak_bytes: int,
    changes: bool,
    start: Callable[..., Run],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PeakMemory, "end_step", lambda _: 90 * MIB)
    run = start(memory_budget_bytes=budget, max_slowdown=0.5)
    run.steps(3)
    before = run.planner.plan
    assert before is not None
    simulated = Prediction(1.0, 0.0, 0.0, 100 * MIB)
    monkeypatch.setattr(run.solver, "predict", lambda *_, **__: simulated)
    run.solver.placement = Placement.KEEP
    run.solver.predicted = Prediction(step_s, 0.0, 0.0, peak_bytes)
    run.steps(4 + REFINING_STEPS)
    after = run.planner.plan
    assert after is not None and run.planner.num_plans == 2
    assert (after.placements != before.placements) == changes
    assert after.predicted == (run.solver.predicted if changes else simulated)
