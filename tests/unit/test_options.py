# SPDX-License-Identifier: Apache-2.0
"""Choices as numbers and as a plan say the same."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from megatron.offload.activations.placement.plan import Plan, PlannedPart
from megatron.offload.activations.placement.policy import Placement
from megatron.offload.errors import ConfigurationError
from megatron.offload.planner.profile.stage_profile import StageProfile
from megatron.offload.planner.simulator.instructions import (
    FIRST_TIER,
    KEEP,
    RECOMPUTE_LAYER,
    RECOMPUTE_PART,
    SELECTIVE_OFFSET,
)
from megatron.offload.planner.simulator.options import Choices, from_tier
from tests.support.stages import layer, part, stage, tier

TO_HOST, TO_SSD = FIRST_TIER, FIRST_TIER + 1
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
        TO_HOST,
        TO_SSD,
        KEEP + SELECTIVE_OFFSET,
        TO_HOST + SELECTIVE_OFFSET,
        TO_SSD + SELECTIVE_OFFSET,
    ]
    mlp = [
        KEEP,
        RECOMPUTE_PART,
        TO_HOST,
        TO_SSD,
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
    assert choices.all(TO_SSD + SELECTIVE_OFFSET).tolist() == [TO_SSD + SELECTIVE_OFFSET, TO_SSD]
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


def test_a_recomputation_may_start_from_any_tier_whose_input_can_move() -> None:
    parts = (
        part("attention", 4, recompute_s=0.5, input_bytes=3, movable_input_bytes=3),
        part("mlp", 8, recompute_s=0.5, input_bytes=3),  # too small to move
    )
    one = layer(parts=parts, input_bytes=5, movable_input_bytes=5)
    choices = Choices(stage(layers=(one,), tiers=(tier("host"), tier())))
    from_host, from_ssd = (from_tier(RECOMPUTE_PART, number) for number in range(2))
    assert choices.of_part(one, 0) == [KEEP, RECOMPUTE_PART, from_host, from_ssd, TO_HOST, TO_SSD]
    assert choices.of_part(one, 1) == [KEEP, RECOMPUTE_PART, TO_HOST, TO_SSD]
    whole = [RECOMPUTE_LAYER, *(from_tier(RECOMPUTE_LAYER, number) for number in range(2))]
    assert choices.of_layer(one) == whole
    assert choices.options[0][-3:] == [(choice, choice) for choice in whole]
    inputs = []
    for option in choices.options[0]:
        chosen = np.array(option, np.int64)
        plan = choices.plan(chosen)
        assert choices.of_plan(plan).tolist() == list(option)
        plan.check([(0, "decoder.0")], [Placement.HOST, SSD])
        if option[0] in (from_ssd, whole[2]) and option[1] in (KEEP, whole[2]):
            inputs.append((list(plan.inputs.items()), choices.moved_bytes(chosen)))
    moved = [{Placement.HOST: 0, SSD: 3}, {Placement.HOST: 0, SSD: 5}]
    assert inputs == [
        ([((0, "decoder.0", "attention"), SSD)], moved[0]),
        ([((0, "decoder.0", "layer"), SSD)], moved[1]),
    ]


def test_where_no_input_can_move_a_plan_that_moves_one_says_the_same() -> None:
    start = PlannedPart(0, "decoder.0", "layer", RECOMPUTE, 8, "", SSD)
    assert Choices(stage(1)).of_plan(Plan((start,))).tolist() == [RECOMPUTE_LAYER]
    other = stage(layers=(layer(movable_input_bytes=2),), tiers=(tier("host"),))
    with pytest.raises(ConfigurationError, match="which the profile does not allow"):
        Choices(other).of_plan(Plan((start,)))


def test_one_recomputation_for_all_keeps_the_inputs_that_cannot_move() -> None:
    layers = (layer(), layer("decoder.1", movable_input_bytes=2))
    choices = Choices(stage(layers=layers))
    wanted = from_tier(RECOMPUTE_LAYER, 0)
    assert choices.all(wanted).tolist() == [RECOMPUTE_LAYER, wanted]
