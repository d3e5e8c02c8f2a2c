# SPDX-License-Identifier: Apache-2.0
"""What a rank finds in its steps that speaks for another plan, and how patient it is with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest

from megatron.offload.activations.placement.plan import Prediction
from megatron.offload.planner.online.drift import Drift, Expectation, MeasuredStep, Reason
from megatron.offload.planner.profile.stage_profile import TierProfile

MIB = 1 << 20
SIZES = {"sequence_length": 8, "micro_batch_size": 2}
SHORTER, LONGER = ({**SIZES, "sequence_length": number} for number in (7, 9))
EXPECTED = Expectation(
    Prediction(1.0, 0.1, 0.0, 100 * MIB), SIZES, (TierProfile("ssd", 100.0, 100.0),), 200 * MIB
)


def step(
    step_s: float = 1.0, stall_s: float | None = 0.1, peak_mib: float = 100, **more: Any
) -> MeasuredStep:
    """As it is expected, but for what is given."""
    return MeasuredStep(step_s, stall_s, int(peak_mib * MIB), **{"sizes": SIZES, **more})


STEPS = {
    Reason.OVER: step(peak_mib=300),
    Reason.SLOWER: step(write_bytes_per_s={"ssd": 49.0}),
    Reason.LARGER: step(sizes=LONGER),
    Reason.UNEXPECTED: step(stall_s=0.5),
}


@pytest.fixture
def drift() -> Drift:
    drift = Drift()
    drift.follow(EXPECTED)
    settle(drift)
    return drift


def settle(drift: Drift) -> None:
    """Two steps that do not count, after a new plan."""
    for _ in range(2):
        drift.see(step(), judges=True)
    drift.take()
    drift.recent.clear()


def found(drift: Drift, reason: Reason, steps: Iterable[MeasuredStep]) -> list[str]:
    """What it says of each step, for this reason."""
    says = []
    for one in steps:
        drift.see(one, judges=True)
        says.append(drift.take()[reason])
    return says


def steps_until(drift: Drift, reason: Reason, *, most: int = 200) -> int | None:
    """After how many such steps that is found; None: not after `most`."""
    says = found(drift, reason, [STEPS[reason]] * most)
    return next((number for number, text in enumerate(says, 1) if text), None)


def plan_again(drift: Drift, reason: Reason | None, *, changed: bool) -> None:
    drift.planned(reason, changed=changed)
    drift.follow(EXPECTED)


@pytest.mark.parametrize(
    ("reason", "num_steps"),
    [(Reason.OVER, 1), (Reason.SLOWER, 2), (Reason.LARGER, 2), (Reason.UNEXPECTED, 2)],
)
def test_a_reason_is_found_once_it_lasts(reason: Reason, num_steps: int, drift: Drift) -> None:
    assert steps_until(drift, reason) == num_steps
    drift.follow(EXPECTED)
    at_first = 0 if reason is Reason.OVER else 2
    assert steps_until(drift, reason) == at_first + num_steps, "a new plan settles"
    drift.follow(EXPECTED)
    settle(drift)
    if num_steps > 1:
        assert steps_until(drift, reason, most=num_steps - 1) is None
        drift.see(step(), judges=True)
        assert steps_until(drift, reason) == num_steps, "one step as expected counts from one again"


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (step(1.11), "steps take 1.110 s, the plan says 1.000 s"),
        (step(0.89), "steps take 0.890 s, the plan says 1.000 s"),
        (step(1.1, stall_s=0.3), "compute waited 0.300 s, the plan says 0.100 s"),
        (step(peak_mib=111), "activations took 111 MiB, the plan says 100 MiB"),
        (step(peak_mib=89), "activations took 89 MiB, the plan says 100 MiB"),
        (step(1.09, stall_s=0.15, peak_mib=109), ""),
        (step(0.91, stall_s=0.0, peak_mib=91), ""),
    ],
)
def test_what_the_plan_leads_to_is_compared_with_its_prediction(
    seen: MeasuredStep, reason: str, drift: Drift
) -> None:
    says = found(drift, Reason.UNEXPECTED, [seen] * 9)
    assert reason in says[-1] if reason else not any(says)
    drift.follow(EXPECTED)
    for one in [seen] * 11:
        drift.see(one, judges=False)
    assert not any(drift.take().values())


def test_the_median_of_some_steps_says_whether_they_take_as_long_as_planned(drift: Drift) -> None:
    seconds = [1.05, 1.3, 0.8] * 4 + [1.2] * 8
    says = found(drift, Reason.UNEXPECTED, map(step, seconds))
    # Of the last eight three take 1.2 s and two 1.3 s: then the middle is above 1.1 s.
    first = next(number for number, reason in enumerate(says) if reason)
    assert "steps take 1.2" in says[first] and first == 12 + 2


def test_a_few_steps_are_not_judged(drift: Drift) -> None:
    says = found(drift, Reason.UNEXPECTED, [step(1.2)] * 9)
    assert [bool(reason) for reason in says] == [False] * 8 + [True]


def test_a_few_pages_are_no_other_peak(drift: Drift) -> None:
    drift.follow(Expectation(Prediction(1.0, 0.1, 0.0, 2 * MIB), SIZES, (), None))
    settle(drift)
    assert not any(found(drift, Reason.UNEXPECTED, [step(peak_mib=5)] * 3))
    says = found(drift, Reason.UNEXPECTED, [step(peak_mib=7)] * 2)
    assert says[0] == "" and "activations took 7 MiB" in says[1]


@pytest.mark.parametrize(
    ("bytes_per_s", "reason"),
    [(49, Reason.SLOWER), (51, None), (199, None), (201, Reason.UNEXPECTED)],
)
def test_a_tier_that_is_slower_is_more_urgent_than_one_that_is_faster(
    bytes_per_s: float, reason: Reason | None, drift: Drift
) -> None:
    for _ in range(2):
        drift.see(step(write_bytes_per_s={"ssd": bytes_per_s}), judges=True)
    says = drift.take()
    assert [one for one in Reason if says[one]] == ([reason] if reason else [])
    assert reason is None or "ssd takes" in says[reason]


def test_a_budget_is_exceeded_by_more_than_what_cannot_be_measured(drift: Drift) -> None:
    assert found(drift, Reason.OVER, [step(peak_mib=203)]) == [""]
    assert "more than the budget" in found(drift, Reason.OVER, [step(peak_mib=205)])[0]
    drift.follow(dataclasses.replace(EXPECTED, on_host=False))  # bytes are counted there
    assert found(drift, Reason.OVER, [step(peak_mib=200.9)]) == [""]
    assert "more than the budget" in found(drift, Reason.OVER, [step(peak_mib=201.1)])[0]


def test_a_new_plan_starts_without_reasons(drift: Drift) -> None:
    drift.see(STEPS[Reason.OVER], judges=True)
    drift.follow(EXPECTED)
    assert not any(drift.take().values())


def test_the_last_steps_under_a_plan_are_remembered(drift: Drift) -> None:
    for step_s in range(12):
        drift.see(step(step_s), judges=False)
    assert [one.step_s for one in drift.recent] == list(range(4, 12)), "eight at most"
    drift.follow(EXPECTED)
    for step_s in range(4):
        drift.see(step(step_s), judges=False)
    assert [one.step_s for one in drift.recent] == [2, 3], "the first two settle"


def test_what_was_found_is_told_once(drift: Drift) -> None:
    for one in (STEPS[Reason.OVER], step()):
        drift.see(one, judges=True)
    assert "more than the budget" in drift.take()[Reason.OVER]
    assert not any(drift.take().values())


@pytest.mark.parametrize("may", [True, False])
def test_what_a_plan_leads_to_is_judged_where_it_may_be(may: bool, drift: Drift) -> None:
    for _ in range(10):
        drift.see(STEPS[Reason.UNEXPECTED], judges=may)
    says = drift.take()
    assert bool(says[Reason.UNEXPECTED]) is may and sum(map(bool, says.values())) == may


def test_where_there_is_nothing_to_compare_with_nothing_is_found() -> None:
    drift = Drift()
    assert steps_until(drift, Reason.OVER, most=5) is None and drift.num_followed == 5
    drift.follow(EXPECTED)
    drift.see(judges=True)
    assert drift.num_followed == 1 and not any(drift.take().values())


def test_steps_of_other_sizes_show_nothing_of_what_the_plan_led_to(drift: Drift) -> None:
    for _ in range(40):
        drift.see(step(9.0, stall_s=9.0, peak_mib=150, sizes=SHORTER), judges=True)
    assert not any(drift.take().values()) and not drift.recent


@pytest.mark.parametrize("reason", [Reason.OVER, Reason.UNEXPECTED])
def test_what_did_not_help_is_a_reason_more_and_more_rarely(reason: Reason, drift: Drift) -> None:
    least = 1 if reason is Reason.OVER else 2 + 2
    drift.follow(EXPECTED)
    for patience in (0, 4, 8, 16):
        assert steps_until(drift, reason) == max(patience + 1, least)
        plan_again(drift, reason, changed=reason is Reason.UNEXPECTED)


@pytest.mark.parametrize(("reason", "most"), [(Reason.OVER, 64), (Reason.UNEXPECTED, 1024)])
def test_patience_has_an_end(reason: Reason, most: int, drift: Drift) -> None:
    for _ in range(12):
        plan_again(drift, reason, changed=False)
    assert steps_until(drift, reason, most=most) is None
    assert steps_until(drift, reason) == 1


@pytest.mark.parametrize("reason", [Reason.SLOWER, Reason.LARGER])
def test_a_change_is_always_a_reason(reason: Reason, drift: Drift) -> None:
    plan_again(drift, reason, changed=False)
    assert steps_until(drift, reason) == 2 + 2


def test_patience_with_one_reason_is_none_with_another(drift: Drift) -> None:
    for _ in range(6):
        plan_again(drift, Reason.UNEXPECTED, changed=False)
    assert steps_until(drift, Reason.UNEXPECTED, most=128) is None
    drift.follow(EXPECTED)
    assert steps_until(drift, Reason.OVER) == 1


def test_a_plan_that_helps_ends_the_patience(drift: Drift) -> None:
    plan_again(drift, Reason.OVER, changed=False)
    plan_again(drift, Reason.SLOWER, changed=True)
    assert steps_until(drift, Reason.OVER) == 1


def test_a_plan_for_no_reason_changes_no_patience(drift: Drift) -> None:
    plan_again(drift, None, changed=False)
    assert steps_until(drift, Reason.OVER) == 1


def test_steps_that_are_known_late_count_when_they_are_known() -> None:
    """A plan's first two steps are those that settle, however late the device comes to them."""
    drift = Drift()
    drift.follow(EXPECTED)
    slow = step(stall_s=0.5)
    for known in ((), (slow,), (slow,)):
        drift.see(*known, judges=True)
    assert drift.num_followed == 3 and not any(drift.take().values())
    drift.see(slow, slow, judges=True)
    assert drift.num_followed == 4 and drift.take()[Reason.UNEXPECTED]


def test_a_step_whose_waits_were_not_timed_says_nothing_of_them() -> None:
    drift = Drift()
    drift.follow(EXPECTED)
    for _ in range(6):
        drift.see(step(stall_s=None), judges=True)
    assert not any(drift.take().values())
