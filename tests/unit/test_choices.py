# SPDX-License-Identifier: Apache-2.0
"""Choices as numbers and as a plan say the same."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from megatron.offload.errors import ConfigurationError
from megatron.offload.placement.choices import Choices
from megatron.offload.placement.plan import Plan, PlannedGroup
from megatron.offload.placement.policy import Placement
from megatron.offload.placement.profile import StageProfile
from megatron.offload.placement.script import CHEAP, FIRST_TIER, KEEP, RECOMPUTE_GROUP
from tests.stages import group, layer, stage, tier

KEPT, RECOMPUTE, SSD = Placement.KEEP, Placement.RECOMPUTE, Placement.SSD


def profile() -> StageProfile:
    """One layer, with everything that there is to choose."""
    groups = (
        group("attention", 4, recompute_s=0.5, cheap_bytes=1, cheap_s=0.0),
        group("mlp", 8, recompute_s=0.5, cheap_bytes=8, cheap_s=0.1),
    )
    return stage(layers=(layer(groups=groups),), tiers=(tier("host"), tier()))


def line(name: str, placement: Placement) -> PlannedGroup:
    return PlannedGroup(0, "decoder.0", name, placement, 0)


def test_every_choice_survives_as_a_plan() -> None:
    choices = Choices(profile())
    attention = [KEEP, RECOMPUTE_GROUP, 3, 4, KEEP + CHEAP, 3 + CHEAP, 4 + CHEAP]
    mlp = [KEEP, RECOMPUTE_GROUP, 3, 4, KEEP + CHEAP]  # beside the cheap ones nothing would move
    assert choices.options[0][:-1] == list(itertools.product(attention, mlp))
    for option in choices.options[0]:
        plan = choices.plan(np.array(option, np.int64))
        assert choices.of_plan(plan).tolist() == list(option)
        assert choices.of_plan(Plan(plan.groups[::-1])).tolist() == list(option)
        assert sum(one.movable_bytes for one in plan.groups) == 12
        plan.check([(0, "decoder.0")], [Placement.HOST, SSD])


def test_cheap_operations_have_a_line_of_their_own() -> None:
    choices = Choices(profile())
    plan = choices.plan(np.array([FIRST_TIER + 1 + CHEAP, KEEP]), ["hides", "room"])
    assert [(one.group, one.placement, one.movable_bytes, one.reason) for one in plan.groups] == [
        ("attention", SSD, 3, "hides"),
        ("attention-cheap", RECOMPUTE, 1, "runs again in 0 ms"),
        ("mlp", KEPT, 8, "room"),
    ]


def test_one_choice_for_all_is_taken_as_far_as_it_goes() -> None:
    choices = Choices(profile())
    assert choices.all(4 + CHEAP).tolist() == [4 + CHEAP, 4]
    assert choices.all(KEEP + CHEAP).tolist() == [KEEP + CHEAP] * 2


@pytest.mark.parametrize(
    "lines",
    [
        [line("mlp-cheap", SSD)],
        [line("mlp", SSD), line("mlp-cheap", RECOMPUTE)],
        [line("mlp", RECOMPUTE), line("mlp-cheap", RECOMPUTE)],
        [line("layer", RECOMPUTE), line("mlp-cheap", RECOMPUTE)],
    ],
    ids=["to the SSD", "with nothing left", "recomputed anyway", "recomputed as a whole"],
)
def test_what_cannot_be_is_refused(lines: list[PlannedGroup]) -> None:
    with pytest.raises(ConfigurationError, match=r"the plan has mlp-cheap of decoder\.0"):
        Choices(profile()).of_plan(Plan(tuple(lines)))
