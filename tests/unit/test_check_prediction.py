# SPDX-License-Identifier: Apache-2.0
"""tools/check/prediction.py: what is compared, and how the figures of a run are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from check.prediction import (
    Configuration,
    Followed,
    Result,
    _load,
    _save,
    configurations,
    result_of,
    table,
    verdict,
)

from megatron.offload.activations.stats.memory_parts import BETWEEN, WRITING, Moment, StepMemory
from megatron.offload.commands.training_runs.run import RunError

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


def steps_of_two_plans() -> list[dict[str, Any]]:
    before = [step(0, 9.0, 9000)] * 2 + [step(1, 9.0, 9000)] * 4 + [step(1, 4.0, 800)] * 2
    # The step after which the plan was made, and three that settle.
    after = [step(2, 9.0, 9000)] * 4 + [step(2, 5.0, 1600), step(2, 3.0, 1500), step(2, 5.0, 1400)]
    return before + after + [step(2, 5.0, 1500)]


@pytest.mark.parametrize("num_late", [0, 6])
def test_only_steps_that_followed_the_last_plan_count(num_late: int) -> None:
    """And one that was followed too briefly is as none."""
    result = result_of(ONE, steps_of_two_plans() + [step(3, 1.0, 100)] * num_late)
    assert result.num_plans == (3 if num_late else 2)
    last = result.last
    assert (last.predicted_step_s, last.measured_step_s) == (4.0, 5.0)
    assert (last.predicted_peak_bytes, last.measured_peak_bytes) == (2000, 1600)
    assert last.num_steps == 4
    assert last.step_error == pytest.approx(-0.2) and last.peak_error == pytest.approx(0.25)
    assert "-20.0%" in table([result]) and "+25.0%" in table([result])


def test_the_first_plan_stands_beside_it() -> None:
    result = result_of(ONE, steps_of_two_plans())
    assert result.first is not None and result.first.num_steps == 2
    assert result.first.step_error == pytest.approx(-0.5)
    assert "-50.0%" in table([result])
    result = result_of(ONE, steps_of_two_plans()[6:])
    assert result.first is None and "-50.0%" not in table([result])


def followed(step_error: float, peak_error: float) -> Result:
    one = Followed(1.0 + step_error, 1.0, round(1000 * (1 + peak_error)), 1000, 3)
    return Result(ONE, one, one, 2)


@pytest.mark.parametrize(
    ("errors", "is_good"),
    [
        ([(0.04, -0.049), (-0.149, 0.149), (0.0, 0.0)], True),
        ([(0.06, 0.0), (-0.06, 0.0), (0.0, 0.0)], False),
        ([(0.0, -0.06), (0.0, 0.06), (0.0, 0.0)], False),
        ([(0.0, 0.0), (-0.16, 0.0), (0.0, 0.0)], False),
        ([(0.0, 0.0), (0.0, 0.16), (0.0, 0.0)], False),
    ],
)
def test_the_median_and_the_worst_error_have_limits(
    errors: list[tuple[float, float]], is_good: bool
) -> None:
    assert verdict([followed(*one) for one in errors])[1] is is_good


@pytest.mark.parametrize(
    ("errors", "is_good"),
    [
        ([(0.099, 0.149), (-0.9, -0.9), (0.0, 0.0)], True),
        ([(0.11, 0.0), (-0.11, 0.0), (0.0, 0.0)], False),
        ([(0.0, 0.16), (0.0, -0.16), (0.0, 0.0)], False),
        ([], False),
    ],
)
def test_the_first_plans_have_limits_of_their_own(
    errors: list[tuple[float, float]], is_good: bool
) -> None:
    good = followed(0.0, 0.0)
    results = [Result(ONE, followed(*one).first, good.last, 2) for one in errors]
    text, found = verdict(results or [Result(ONE, None, good.last, 2)])
    assert found is is_good and ("first plans" in text) is bool(errors)


def test_results_can_be_added_to(tmp_path: Path) -> None:
    saved = [followed(0.1, 0.2), Result(ONE, None, followed(0.3, 0.4).last, 3, {WRITING: (1, 2)})]
    _save(tmp_path / "found.json", saved, [])
    assert _load(tmp_path / "found.json") == saved
    assert _load(tmp_path / "none.json") == _load(None) == []


def test_the_largest_sampled_peak_is_explained(tmp_path: Path) -> None:
    steps = [
        StepMemory(0, number, 10 + size, None, Moment(0.0, "", "", {WRITING: size}), ())
        for number, size in ((4, 5), (5, 7), (6, 3))
    ]
    report = tmp_path / "memory.jsonl"
    report.write_text("\n".join(one.to_json() for one in steps))
    parts = result_of(ONE, steps_of_two_plans(), report).first_parts
    assert parts == {WRITING: (0, 7), BETWEEN: (0, 10)}  # they followed no plan


@pytest.mark.parametrize("steps", [[], [step(0, 1.0, 1)] * 9, [step(1, 1.0, 1)] * 3])
def test_too_few_steps_are_an_error(steps: list[dict[str, Any]]) -> None:
    with pytest.raises(RunError, match="give more --steps"):
        result_of(ONE, steps)
