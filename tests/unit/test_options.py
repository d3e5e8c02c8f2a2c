# SPDX-License-Identifier: Apache-2.0
"""Choices as numbers and as a plan say the same."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from megatron.offload.errors import ConfigurationError
from megatron.offload.placement.plan import Plan, PlannedPart
from megatron.offload.placement.policy import Placement
from megatron.offload.planner.profile.stage_profile import StageProfile
from megatron.offload.planner.simulator.instructions import (
    FIRST_TIER,
    KEEP,
    RECOMPUTE_PART,
    SELECTIVE_OFFSET,
)
from megatron.offload.planner.simulator.options import Choices
from tests.support.stages import layer, part, stage, tier

KEPT, RECOMPUTE, SSD = Placement.KEEP, Placement.RECOMPUTE, Placement.SSD


def profile() -> StageProfile:
    """One layer, with everything that there is to choose."""
    parts = (
        part("attention", 4, recompute_s=0.5, selective_bytes=1, selective_s=0.0),
        part("mlp", 8, recompute_s=0.5, selective_bytes=8, selective_s=0.1),
    )
    return stage(layers=(layer(parts=parts),), tiers=(tier("host"), tier()))


def line(name: str, placement: Placement) -> PlannedPart:
    return PlannedPart(0, "decoder.0", name, placement, 0)


def test_every_choice_survives_as_a_plan() -> None:
    choices = Choices(profile())
    attention = [
        KEEP,
        RECOMPUTE_PART,
        3,
        4,
        KEEP + SELECTIVE_OFFSET,
        3 + SELECTIVE_OFFSET,
        4 + SELECTIVE_OFFSET,
    ]
    mlp = [
        KEEP,
        RECOMPUTE_PART,
        3,
        4,
        KEEP + SELECTIVE_OFFSET,
    ]  # beside the cheap ones nothing would move
    assert choices.options[0][:-1] == list(itertools.product(attention, mlp))
    for option in choices.options[0]:
        plan = choices.plan(np.array(option, np.int64))
        assert choices.of_plan(plan).tolist() == list(option)
        assert choices.of_plan(Plan(plan.parts[::-1])).tolist() == list(option)
        assert sum(one.movable_bytes for one in plan.parts) == 12
        plan.check([(0, "decoder.0")], [Placement.HOST, SSD])


def test_selective_operations_have_a_line_of_their_own() -> None:
    choices = Choices(profile())
    plan = choices.plan(np.array([FIRST_TIER + 1 + SELECTIVE_OFFSET, KEEP]), ["hides", "room"])
    assert [(one.part, one.placement, one.movable_bytes, one.reason) for one in plan.parts] == [
        ("attention", SSD, 3, "hides"),
        ("attention-selective", RECOMPUTE, 1, "runs again in 0 ms"),
        ("mlp", KEPT, 8, "room"),
    ]


def test_one_choice_for_all_is_taken_as_far_as_it_goes() -> None:
    choices = Choices(profile())
    assert choices.all(4 + SELECTIVE_OFFSET).tolist() == [4 + SELECTIVE_OFFSET, 4]
    assert choices.all(KEEP + SELECTIVE_OFFSET).tolist() == [KEEP + SELECTIVE_OFFSET] * 2


@pytest.mark.parametrize(
    "lines",
    [
        [line("mlp-selective", SSD)],
        [line("mlp", SSD), line("mlp-selective", RECOMPUTE)],
        [line("mlp", RECOMPUTE), line("mlp-selective", RECOMPUTE)],
        [line("layer", RECOMPUTE), line("mlp-selective", RECOMPUTE)],
    ],
    ids=["to the SSD", "with nothing left", "recomputed anyway", "recomputed as a whole"],
)
def test_what_cannot_be_is_refused(lines: list[PlannedPart]) -> None:
    with pytest.raises(ConfigurationError, match=r"the plan has mlp-selective of decoder\.0"):
        Choices(profile()).of_plan(Plan(tuple(lines)))
