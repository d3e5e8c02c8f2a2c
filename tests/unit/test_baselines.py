# SPDX-License-Identifier: Apache-2.0
"""The plans that the solver's is compared with."""

from __future__ import annotations

import pytest

from megatron.offload.activations.placement.policy import Placement
from megatron.offload.errors import ConfigurationError
from megatron.offload.planner.profile.pipeline_schedule import PipelinePosition
from megatron.offload.planner.simulator.timeline import Timeline
from megatron.offload.planner.solver.baselines import (
    all_moved,
    suffix_plan,
    suffix_within,
)
from tests.support.stages import stage, tier


@pytest.mark.parametrize(
    ("bytes_per_s", "num_moved"),
    # Four layers of 8 bytes, forward 4 s: (8 n + 16) / (12 - 2 n) is 1.33, 2.4, 4, 6.67.
    [(1.0, 0), (1.5, 1), (3.0, 2), (4.1, 3), (7.0, 4)],
)
def test_the_suffix_rule_keeps_from_the_first_layer_that_would_not_pass(
    bytes_per_s: float, num_moved: int
) -> None:
    plan = suffix_plan(stage(4, tiers=(tier(write=bytes_per_s),)))
    expected = [Placement.SSD] * num_moved + [Placement.KEEP] * (4 - num_moved)
    assert [line.placement for line in plan.parts] == expected


def test_a_suffix_within_a_budget_keeps_as_many_layers_as_fit() -> None:
    # Four layers of 8 bytes that leave in no time; the last one is still there in backward.
    profile = stage(4, tiers=(tier(write=1000.0, read=1000.0),))
    timeline = Timeline(profile)
    moved = []
    for budget in (32, 31, 24, 1):
        plan = suffix_within(profile, budget)
        placements = [line.placement for line in plan.parts]
        moved.append(placements.count(Placement.SSD))
        assert placements == sorted(placements, key=lambda one: one is Placement.KEEP)
        assert timeline.predict(plan).peak_bytes <= budget or moved[-1] == 4
    assert moved[0] == 0 and moved[-1] == 4 and moved == sorted(moved)
    assert moved[1] > 0


def test_a_plan_for_ssds_needs_one() -> None:
    with pytest.raises(ConfigurationError, match=r"tiers \['host'\]; this plan needs ssd"):
        suffix_plan(stage(tiers=(tier("host"),)))


def test_everything_moves_to_the_tiers_in_proportion_and_no_further_than_they_have_room() -> None:
    tiers = (tier("ssd", write=1.0), tier("host", write=3.0, capacity_bytes=20))
    placements = [line.placement for line in all_moved(stage(8, tiers=tiers)).parts]
    assert placements == [Placement.HOST, Placement.HOST, *[Placement.SSD] * 6]
    roomy = (tiers[0], tier("host", write=3.0))
    placements = [line.placement for line in all_moved(stage(8, tiers=roomy)).parts]
    assert placements.count(Placement.SSD) == 2


def test_what_several_micro_batches_hold_at_a_time_counts() -> None:
    first_of_two = PipelinePosition(2, 0, 1, 4)  # holds two
    tiers = (tier("ssd", write=1.0, capacity_bytes=16 * 3),)
    profile = stage(4, position=first_of_two, micro_batches=4, tiers=tiers)
    placements = [line.placement for line in all_moved(profile).parts]
    assert placements == [*[Placement.SSD] * 3, Placement.KEEP]
