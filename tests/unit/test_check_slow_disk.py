# SPDX-License-Identifier: Apache-2.0
"""tools/check/slow_disk.py: what is read from the runs, and what does not hold."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
from check.slow_disk import MOST_STEPS, Run, in_words, order_of_round, table, verdict_of
from check.train_on_slow_disk import Lane

AFTER, TAIL = 6, 3


def training(
    variant: str, *, planned_after: tuple[int, ...] = (), step_s: float = 2.0, round_: int = 0
) -> Run:
    """Twelve steps; slow ones until the last plan has settled."""
    steps: list[dict[str, Any]] = []
    for number in range(1, 13):
        plans = sum(after <= number for after in planned_after)
        seconds = step_s if number > 9 else 9.0
        offload = {"plans": plans, "written_bytes": 1 << 20} if planned_after else {}
        step = {"step": number, "loss": 1 / number, "grad_norm": 2 / number, "model": None}
        steps.append({**step, "step_time_s": seconds, "offload": offload})
    return Run(variant, round_, steps)


def runs(**changes: Any) -> list[Run]:
    values = {"planned_after": (2, 5, 9), **changes}
    return [
        training("off"),
        training("slow", planned_after=(3,)),
        training("slowed", **values),
    ]


def test_a_run_that_planned_in_time_and_got_as_fast_passes() -> None:
    verdict = verdict_of(runs(step_s=2.08), AFTER, TAIL)
    assert verdict.steps_until_plan == [3] and verdict.step_ratio == pytest.approx(1.04)
    assert verdict.holds and "DOES NOT HOLD" not in in_words(verdict, AFTER)
    assert "2, 5, 9" in table(runs(), TAIL) and "| NO" not in table(runs(), TAIL)


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"planned_after": (2, 5, AFTER + MOST_STEPS)}, MOST_STEPS),
        ({"planned_after": (2, 5, AFTER + MOST_STEPS + 1)}, MOST_STEPS + 1),
        ({"planned_after": (2, 5, AFTER)}, None),  # for the fast disk
        ({"planned_after": (2, 5)}, None),
    ],
)
def test_a_plan_that_came_late_or_never_fails(changes: dict[str, Any], steps: int | None) -> None:
    verdict = verdict_of(runs(**changes), AFTER, TAIL)
    assert verdict.steps_until_plan == [steps]
    assert verdict.holds is (steps == MOST_STEPS)
    assert ("never" in in_words(verdict, AFTER)) is (steps is None)


def test_a_plan_that_was_due_in_any_case_does_not_count() -> None:
    verdict = verdict_of(runs(planned_after=(3, AFTER + 3)), AFTER, TAIL)
    assert verdict.plans_before == [1] and verdict.steps_until_plan == [3]
    assert not verdict.holds and "so many plans made: 1" in in_words(verdict, AFTER)


def test_steps_that_stay_slower_fail() -> None:
    verdict = verdict_of(runs(step_s=2.12), AFTER, TAIL)
    assert not verdict.holds and "DOES NOT HOLD" in in_words(verdict, AFTER)


@pytest.mark.parametrize("name", ["loss", "grad_norm", "model"])
def test_other_bits_fail(name: str) -> None:
    three = runs()
    three[2].steps[-1][name] = 7.0
    verdict = verdict_of(three, AFTER, TAIL)
    assert not verdict.identical and not verdict.holds and "| NO" in table(three, TAIL)
    short = [*three[:2], dataclasses.replace(three[2], steps=three[2].steps[:-1])]
    assert not verdict_of(short, AFTER, TAIL).identical


def test_each_round_counts_against_its_own_slow_run() -> None:
    first, second = runs(step_s=2.0), runs(step_s=6.0)
    second = [dataclasses.replace(one, round=1) for one in second[1:]]
    for step in second[0].steps:
        step["step_time_s"] *= 3
    verdict = verdict_of([*first, *second], AFTER, TAIL)
    assert verdict.step_ratio == pytest.approx(1.0) and len(verdict.steps_until_plan) == 2
    assert order_of_round(0) == ["off", "slow", "slowed"] and order_of_round(1)[0] == "slowed"


def test_a_slow_lane_takes_as_long_as_its_bytes_at_its_rate() -> None:
    lane = Lane()
    lane.wait(1 << 40)  # nothing at first
    lane.bytes_per_s = 1e6
    began = time.monotonic()
    for _ in range(3):
        lane.wait(10_000)
    assert time.monotonic() - began >= 0.03
