# SPDX-License-Identifier: Apache-2.0
"""tools/check/auto_on_device.py: what is judged of its runs. `tests/lag/test_auto.py` runs some."""

from __future__ import annotations

from typing import Any

from check.auto_on_device import Run, Step, best_within, budgets_of, is_within, summary_of


def step(step_s: float, peak_bytes: int, plans: int = 0, **more: Any) -> Step:
    predicted = {"predicted_step_s": 1.0, "predicted_peak_bytes": 100, **more}
    left = {"recomputed_layers": 0, "offloaded_bytes": 0}
    return Step(step_s, 0.06, 0.12, peak_bytes, plans, **predicted, **left)


def fixed(name: str, step_s: float, peak_bytes: int) -> Run:
    warm = [step(9.0, 900), step(9.0, 900)]
    return Run(name, "half", None, [*warm, *[step(step_s, peak_bytes)] * 3])


FIXED = [fixed("keep 0", 1.0, 200), fixed("host 6", 1.1, 100), fixed("recompute 12", 1.4, 40)]


def auto(steps: list[Step], budget_bytes: int = 120) -> Run:
    return Run("auto", "half", budget_bytes, steps)


def test_budgets_go_from_everything_to_the_least() -> None:
    assert budgets_of(FIXED, 5) == [200, 160, 120, 80, 40]


def test_the_best_fixed_placement_keeps_the_budget() -> None:
    assert [best.name for n in (200, 199, 99) if (best := best_within(FIXED, n))] == [
        "keep 0",
        "host 6",
        "recompute 12",
    ]
    assert best_within(FIXED, 39) is None


def test_limits_are_of_steps_under_a_plan_and_of_the_worst_run() -> None:
    # What is measured before the first plan may take more than the budget.
    good = auto([step(2.0, 300), *[step(1.0, 100, plans=1)] * 9])
    assert is_within(summary_of(FIXED, [good]))
    for worse in (
        auto([step(2.0, 300), step(1.0, 121, plans=1), *[step(1.0, 100, plans=1)] * 8]),
        auto([step(1.2, 100, plans=1, predicted_step_s=1.2)] * 9),
        auto([step(1.0, 100, plans=3)] * 9),
        auto([step(1.0, 100, plans=1, predicted_step_s=1.06)] * 9),
        auto([step(1.0, 100, plans=1, predicted_peak_bytes=94)] * 9),
        Run("auto", "half", 120, failed="no plan"),
    ):
        assert not is_within(summary_of(FIXED, [good, worse]))
    profile = auto([step(1.0, 100, plans=1)] * 9)
    profile.profile_error = 0.06
    assert not is_within(summary_of(FIXED, [profile]))
