# SPDX-License-Identifier: Apache-2.0
"""Ranks that share layers plan with the same figures and notice if they decide differently."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from megatron.offload import OffloadError, Placement
from megatron.offload.activations.placement.plan import Plan, PlannedPart
from megatron.offload.planner.online.consensus import SingleRank, agreed_profile, check_same
from megatron.offload.planner.profile.pipeline_schedule import PipelinePosition
from megatron.offload.planner.profile.stage_profile import (
    LayerProfile,
    PartProfile,
    StageProfile,
    TierProfile,
)


class Two:
    """One of two ranks, which are threads of this process."""

    period_steps = 1

    def __init__(self, rank: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self._rank, self._shared, self._barrier = rank, shared, barrier

    def _exchange(self, values: Any) -> list[Any]:
        self._shared[self._rank] = values
        self._barrier.wait(10)
        both = list(self._shared)
        self._barrier.wait(10)
        return both

    def means(self, values: Sequence[float]) -> list[float]:
        return [(a + b) / 2 for a, b in zip(*self._exchange(list(values)), strict=True)]

    def largest(self, values: Sequence[float]) -> list[float]:
        return [max(pair) for pair in zip(*self._exchange(list(values)), strict=True)]

    def of_all(self, value: Any) -> list[Any]:
        return self._exchange(value)


def on_two(work: Callable[[Two, int], Any]) -> list[Any]:
    """Runs it on both ranks; what each returned or raised."""
    barrier, shared, results = threading.Barrier(2), [None, None], [None, None]

    def run(rank: int) -> None:
        try:
            results[rank] = work(Two(rank, shared, barrier), rank)
        except BaseException as error:
            results[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def profile(seconds: float, num_bytes: int, speed: float) -> StageProfile:
    group = PartProfile("layer", num_bytes, 1, 2, seconds, 0.0, None)
    layer = LayerProfile(0, "decoder.1", seconds, 2 * seconds, None, 8, (group,))
    return StageProfile(
        PipelinePosition(2, 1, 1, 2),
        4,
        (layer,),
        (TierProfile("ssd", speed, speed, None, 0.0, None),),
        (seconds,),
        (0.0,),
        (0.0,),
        (0.0,),
        sizes={"sequence_length": 32},
        source="measured",
    )


def test_both_get_mean_seconds_and_rates_and_the_larger_sizes() -> None:
    own = [profile(1.0, 100, 1e9), profile(2.0, 90, 3e9)]
    one, other = on_two(lambda two, rank: agreed_profile(own[rank], two))
    assert one == other == profile(1.5, 100, 2e9)


def test_alone_nothing_changes() -> None:
    assert agreed_profile(profile(1.0, 100, 1e9), SingleRank()) == profile(1.0, 100, 1e9)
    check_same(Plan(()), SingleRank())
    assert SingleRank().of_all(7) == [7]


def test_different_plans_are_an_error_on_both() -> None:
    group = PlannedPart(0, "decoder.1", "layer", Placement.KEEP, 8)
    plans = [
        Plan((group,)),
        Plan((dataclasses.replace(group, placement=Placement.RECOMPUTE),)),
    ]
    for result in on_two(lambda two, rank: check_same(plans[rank], two)):
        assert isinstance(result, OffloadError) and "different plans" in str(result)
    assert on_two(lambda two, rank: check_same(plans[0], two)) == [None, None]


@pytest.mark.parametrize("digest_of", [Plan(()), Plan((), stage=3)])
def test_a_plan_equals_itself(digest_of: Plan) -> None:
    assert on_two(lambda two, rank: check_same(digest_of, two)) == [None, None]
