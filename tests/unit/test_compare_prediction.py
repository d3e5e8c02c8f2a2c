# SPDX-License-Identifier: Apache-2.0
"""tools/compare_prediction.py: what is compared, and how the figures of a run are read."""

from __future__ import annotations

from typing import Any

import pytest
from compare_prediction import ComparisonError, Configuration, configurations, result_of, table

ONE = Configuration("h256 4 layers", 2, 4, "50MB/s")


def step(plans: int, measured_s: float, peak_bytes: int) -> dict[str, Any]:
    return {
        "offload": {
            "plans": plans,
            "predicted_step_s": 2.0 * plans,
            "predicted_peak_bytes": 1000 * plans,
            "measured_step_s": measured_s,
            "measured_peak_bytes": peak_bytes,
        }
    }


def test_there_are_caps_stages_and_sizes() -> None:
    all_of_them = list(configurations())
    assert len(all_of_them) == len(set(map(str, all_of_them))) >= 12
    assert {one.stages for one in all_of_them} == {1, 2}
    assert {one.cap for one in all_of_them} == {"50MB/s", "150MB/s", "500MB/s", ""}
    assert "--activation-offload-write-limit 50MB/s" in " ".join(ONE.flags())


def test_only_steps_that_followed_the_last_plan_count() -> None:
    before = [step(0, 9.0, 9000)] * 2 + [step(1, 9.0, 9000)] * 5
    # The step after which the plan was made, and two that settle.
    after = [step(2, 9.0, 9000)] * 3 + [step(2, 5.0, 1600), step(2, 3.0, 1500), step(2, 5.0, 1400)]
    result = result_of(ONE, before + after)
    assert (result.predicted_step_s, result.measured_step_s) == (4.0, 5.0)
    assert (result.predicted_peak_bytes, result.measured_peak_bytes) == (2000, 1600)
    assert result.num_steps == 3 and result.num_plans == 2
    assert result.step_error == pytest.approx(-0.2) and result.peak_error == pytest.approx(0.25)
    assert "-20%" in table([result]) and "+25%" in table([result])


@pytest.mark.parametrize("steps", [[], [step(0, 1.0, 1)] * 9, [step(1, 1.0, 1)] * 3])
def test_too_few_steps_are_an_error(steps: list[dict[str, Any]]) -> None:
    with pytest.raises(ComparisonError, match="give more --steps"):
        result_of(ONE, steps)
