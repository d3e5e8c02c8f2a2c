# SPDX-License-Identifier: Apache-2.0
"""What a rank finds in its steps that speaks for another plan, and how patient it is with it."""

from __future__ import annotations

import pytest

from megatron.offload.placement.plan import Prediction
from megatron.offload.planner.online.drift import Drift, MeasuredStep
from megatron.offload.planner.online.watch import Reason, Watch

MIB = 1 << 20
SIZES = {"sequence_length": 8, "micro_batch_size": 2}
USUAL = MeasuredStep(1.0, 0.0, 100 * MIB, SIZES)
STEPS = {
    Reason.OVER: MeasuredStep(1.0, 0.0, 300 * MIB, SIZES),
    Reason.CAUSE: MeasuredStep(1.0, 0.0, 100 * MIB, {**SIZES, "sequence_length": 9}),
    Reason.SMALLER: MeasuredStep(1.0, 0.0, 100 * MIB, {**SIZES, "sequence_length": 7}),
    Reason.EFFECT: MeasuredStep(1.0, 0.5, 100 * MIB, SIZES),
}


def drift() -> Drift:
    """Expects `USUAL`."""
    return Drift(Prediction(1.0, 0.0, 0.0, 100 * MIB), SIZES, (), 200 * MIB)


@pytest.fixture
def watch() -> Watch:
    watch = Watch()
    watch.follow(drift())
    return watch


def steps_until(watch: Watch, reason: Reason, *, most: int = 200) -> int | None:
    """After how many such steps that is found; None: not after `most`."""
    for number in range(1, most + 1):
        watch.see(STEPS[reason], with_effects=True)
        if watch.take()[reason]:
            return number
    return None


def plan_again(watch: Watch, reason: Reason | None, *, changed: bool) -> None:
    watch.planned(reason, changed=changed)
    watch.follow(drift())


def test_too_much_memory_is_found_at_once(watch: Watch) -> None:
    assert steps_until(watch, Reason.OVER) == 1


@pytest.mark.parametrize("reason", [Reason.CAUSE, Reason.EFFECT])
def test_a_new_plan_settles_before_it_is_judged(reason: Reason, watch: Watch) -> None:
    for _ in range(2):
        assert steps_until(watch, reason) == 2 + 2, "two in a row, after two that do not count"
        watch.follow(drift())


def test_a_new_plan_starts_without_reasons(watch: Watch) -> None:
    watch.see(STEPS[Reason.OVER], with_effects=True)
    watch.follow(drift())
    assert not any(watch.take().values())


def test_what_steps_take_is_remembered_once_they_settled(watch: Watch) -> None:
    for step_s in range(12):
        watch.see(MeasuredStep(step_s, 0.0, 0), with_effects=False)
    assert [one.step_s for one in watch.recent] == list(range(4, 12)), "eight at most"
    watch.follow(drift())
    for step_s in range(4):
        watch.see(MeasuredStep(step_s, 0.0, 0), with_effects=False)
    assert [one.step_s for one in watch.recent] == [2, 3]


def test_what_was_found_is_told_once(watch: Watch) -> None:
    for step in (STEPS[Reason.OVER], USUAL):
        watch.see(step, with_effects=True)
    assert "more than the budget" in watch.take()[Reason.OVER]
    assert not any(watch.take().values())


@pytest.mark.parametrize("may", [True, False])
def test_effects_count_where_they_may(may: bool, watch: Watch) -> None:
    for _ in range(10):
        watch.see(STEPS[Reason.EFFECT], with_effects=may)
    found = watch.take()
    assert bool(found[Reason.EFFECT]) is may and not found[Reason.CAUSE]


def test_where_there_is_nothing_to_compare_with_nothing_is_found() -> None:
    watch = Watch()
    assert steps_until(watch, Reason.OVER, most=5) is None and watch.num_followed == 5
    watch.follow(drift())
    watch.see(None, with_effects=True)
    assert watch.num_followed == 1 and not any(watch.take().values())


def test_what_did_not_help_is_a_reason_more_and_more_rarely(watch: Watch) -> None:
    for patience in (0, 4, 8, 16):
        assert steps_until(watch, Reason.OVER) == patience + 1
        plan_again(watch, Reason.OVER, changed=False)


@pytest.mark.parametrize(("reason", "most"), [(Reason.OVER, 64), (Reason.EFFECT, 1024)])
def test_patience_has_an_end(reason: Reason, most: int, watch: Watch) -> None:
    for _ in range(12):
        plan_again(watch, reason, changed=False)
    assert steps_until(watch, reason, most=most) is None
    assert steps_until(watch, reason) == 1


def test_a_change_is_always_a_reason(watch: Watch) -> None:
    plan_again(watch, Reason.CAUSE, changed=False)
    assert steps_until(watch, Reason.CAUSE) == 4


def test_only_what_stays_smaller_is_planned_for(watch: Watch) -> None:
    assert steps_until(watch, Reason.SMALLER, most=2 + 31) is None
    watch.see(USUAL, with_effects=True)
    assert steps_until(watch, Reason.SMALLER) == 32


def test_where_sizes_vary_smaller_ones_are_planned_for_more_and_more_rarely(watch: Watch) -> None:
    for patience in (0, 4, 8, 16, 32, 64, 128):
        assert steps_until(watch, Reason.SMALLER) == max(2 + 32, patience + 1)
        plan_again(watch, Reason.SMALLER, changed=True)
        plan_again(watch, Reason.CAUSE, changed=True)  # as larger ones come again


def test_steps_of_other_sizes_show_nothing_of_what_the_plan_led_to(watch: Watch) -> None:
    slow = MeasuredStep(9.0, 9.0, 150 * MIB, STEPS[Reason.SMALLER].sizes)
    for _ in range(20):
        watch.see(slow, with_effects=True)
    assert not any(watch.take().values()) and not watch.recent


def test_patience_with_one_reason_is_none_with_another(watch: Watch) -> None:
    for _ in range(6):
        plan_again(watch, Reason.EFFECT, changed=False)
    assert steps_until(watch, Reason.EFFECT, most=128) is None
    watch.follow(drift())
    assert steps_until(watch, Reason.OVER) == 1 and steps_until(watch, Reason.CAUSE) == 3


def test_a_plan_that_helps_ends_the_patience(watch: Watch) -> None:
    plan_again(watch, Reason.OVER, changed=False)
    plan_again(watch, Reason.CAUSE, changed=True)
    assert steps_until(watch, Reason.OVER) == 1


def test_a_plan_for_an_effect_may_change_nothing(watch: Watch) -> None:
    plan_again(watch, Reason.EFFECT, changed=True)
    assert steps_until(watch, Reason.EFFECT) == 4 + 1


def test_a_plan_for_no_reason_changes_no_patience(watch: Watch) -> None:
    plan_again(watch, None, changed=False)
    assert steps_until(watch, Reason.OVER) == 1
