# SPDX-License-Identifier: Apache-2.0
"""A plan chooses for each part whether a codec encodes it: what that spares, and what it takes.

A part of `stages.py` whose 8 bytes a codec has made of 20, which takes 0.5 s; it saves 6 more, that
backward computes again in 0.25 s, 3 bytes at a time.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from megatron.offload.activations.placement.plan import Plan, PlannedPart, Prediction
from megatron.offload.activations.placement.plan_file import plans_from_json, plans_to_json
from megatron.offload.activations.placement.plan_policy import PlannedPolicy
from megatron.offload.activations.placement.plan_table import plan_table
from megatron.offload.activations.placement.policy import Placement
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.errors import ConfigurationError
from megatron.offload.planner.profile.stage_profile import StageProfile
from megatron.offload.planner.projection.hardware import DriveSpec, GpuSpec, Hardware
from megatron.offload.planner.projection.model import Parallelism, Transformer
from megatron.offload.planner.projection.projection import Projection, project
from megatron.offload.planner.simulator.instructions import (
    EXACT_OFFSET,
    FIRST_TIER,
    KEEP,
    KEEP_ALL,
    SELECTIVE_OFFSET,
)
from megatron.offload.planner.simulator.timeline import Timeline, prediction_of
from megatron.offload.planner.solver.encoded_layers import encoded_in_turn
from megatron.offload.planner.solver.layer_options import Place, option_of
from megatron.offload.planner.solver.solve import solve
from tests.support.stages import layer, part, predicted, stage, tier

ENCODES = {
    "replayed_bytes": 6 + 20,
    "only_for_replay_bytes": 8,
    "replay_s": 0.25 + 0.5,
    "replay_extra_bytes": 20,
    "codec_spared_bytes": 12,
    "codec_s": 0.5,
    "exact_extra_bytes": 3,
}
KEEP_EXACT, TIER_EXACT = KEEP + EXACT_OFFSET, FIRST_TIER + EXACT_OFFSET


def encoding(num_layers: int = 2, **more: Any) -> StageProfile:
    layers = tuple(layer(f"decoder.{n}", parts=(part(**ENCODES),)) for n in range(num_layers))
    return stage(layers=layers, **more)


def kept(num_layers: int) -> StageProfile:
    """Nothing of it can move or be recomputed."""
    parts = (part(**ENCODES),)
    layers = (layer(f"decoder.{n}", recompute_s=None, parts=parts) for n in range(num_layers))
    return stage(layers=tuple(layers), tiers=())


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        (KEEP_ALL, Prediction(6.0, 0.0, 0.0, 2 * 26)),
        (KEEP_EXACT, Prediction(6.5, 0.0, 0.5, 2 * 20 + 3)),
        (KEEP, Prediction(7.5, 0.0, 1.5, 2 * 8 + 20)),
    ],
)
def test_what_is_not_encoded_takes_its_own_bytes_and_replays_without_a_codec(
    choice: int, found: Prediction
) -> None:
    assert predicted(encoding(), choice) == found


def test_it_moves_as_it_is() -> None:
    fast = tier(write=80.0, read=80.0)
    encoded, exact = (
        predicted(encoding(3, tiers=(fast,)), choice) for choice in (FIRST_TIER, TIER_EXACT)
    )
    assert (encoded.written_bytes, exact.written_bytes) == (2 * 8, 2 * 20)
    assert encoded.step_s == exact.step_s + 3 * 0.5


def test_without_a_codec_there_is_no_such_choice() -> None:
    timeline = Timeline(stage(2))
    assert all(c < EXACT_OFFSET for options in timeline.choices.options for o in options for c in o)


def test_beside_selective_recomputation_too() -> None:
    """Of the 20 bytes 5 are produced again, of the 8 two; the result is there once more."""
    selective = {"selective_bytes": 2, "exact_selective_bytes": 5, "selective_s": 0.125}
    own = part(selective_extra_bytes=5, **selective, **ENCODES)
    layers = tuple(layer(f"decoder.{n}", parts=(own,)) for n in range(2))
    profile = stage(layers=layers, tiers=(tier(write=80.0, read=80.0),))
    found = predicted(profile, KEEP + SELECTIVE_OFFSET)
    assert (found.step_s, found.peak_bytes) == (2 * 3.875, 2 * 6 + 2 + 5 + 20)
    found = predicted(profile, KEEP_EXACT + SELECTIVE_OFFSET)
    assert (found.step_s, found.peak_bytes) == (2 * 3.375, 2 * 15 + 5 + 5 + 3)
    [one, _] = profile.layers
    option = option_of(one, Place(0, TIER_EXACT + SELECTIVE_OFFSET), 1)
    assert (option.live, option.recompute_s) == (20 + 3 + 5, 0.375)
    assert option.moved.tolist() == [15]
    choices = Timeline(profile).choices
    chosen = [TIER_EXACT + SELECTIVE_OFFSET, KEEP]
    plan = choices.plan(np.array(chosen))
    assert [line.movable_bytes for line in plan.parts] == [15, 5, 8]
    assert choices.of_plan(plan).tolist() == chosen


def test_where_a_codec_encodes_all_that_selective_operations_produce() -> None:
    """They spare nothing of what is encoded, and much of what is left as it is."""
    slow = {**ENCODES, "codec_s": 2.0, "replay_s": 2.25}
    own = part("mlp", selective_bytes=0, exact_selective_bytes=15, selective_s=0.01, **slow)
    layers = (layer(f"decoder.{n}", recompute_s=None, parts=(own,)) for n in range(4))
    profile = stage(layers=tuple(layers), tiers=())
    timeline, selective = Timeline(profile), KEEP_EXACT + SELECTIVE_OFFSET
    assert timeline.choices.options[0] == [(KEEP,), (KEEP_ALL,), (KEEP_EXACT,), (selective,)]
    plan = solve(profile, budget_bytes=60)
    chosen = timeline.choices.of_plan(plan)
    assert selective in chosen
    assert prediction_of(timeline.cost(chosen)) == plan.predicted
    reasons = {one.reason for one in plan.parts if one.part == "mlp" and not one.encodes}
    assert reasons == {"encoding it would cost 2e+03 ms"}
    # Nothing of 8 encoded bytes is left to move where 8 are produced again, and much of all 20.
    own = dataclasses.replace(own, selective_bytes=8)
    profile = stage(layers=(layer(parts=(own,)),), tiers=(tier(),))
    own_choices = Timeline(profile).choices.of_part(profile.layers[0], 0)
    assert TIER_EXACT + SELECTIVE_OFFSET in own_choices
    assert FIRST_TIER + SELECTIVE_OFFSET not in own_choices


@pytest.mark.parametrize(
    ("choice", "resident", "live", "moved", "seconds"),
    [
        (KEEP, 8, 8 + 20, 0, 0.75),
        (KEEP_EXACT, 20, 20 + 3, 0, 0.25),
        (FIRST_TIER, 0, 8 + 20, 8, 0.75),
        (TIER_EXACT, 0, 20 + 3, 20, 0.25),
    ],
)
def test_the_mixed_integer_program_knows_it_as_well(
    choice: int, resident: float, live: float, moved: float, seconds: float
) -> None:
    [one] = encoding(1).layers
    found = option_of(one, Place(0, choice), 1)
    assert (found.resident, found.live, found.recompute_s) == (resident, live, seconds)
    assert found.moved.tolist() == [moved]


def test_a_plan_is_the_fastest_of_all_that_a_budget_takes() -> None:
    """Nothing moves or runs again; each of four layers is kept in one of three ways."""
    profile = kept(4)
    timeline, ways = Timeline(profile), (KEEP, KEEP_EXACT, KEEP_ALL)
    costs = [timeline.cost(np.array(mix)) for mix in itertools.product(ways, repeat=4)]
    numbers = set()
    for budget in (104, 96, 88, 80, 72, 64, 56, 52):
        plan = solve(profile, budget_bytes=budget)
        assert plan.predicted is not None
        assert plan.predicted.peak_bytes <= budget
        fastest = min(cost.step_s for cost in costs if cost.peak_bytes <= budget)
        assert plan.predicted.step_s == fastest
        numbers.add(sum(not one.encodes for one in plan.parts))
    assert len(numbers) > 2


def test_a_plan_says_which_parts_are_not_encoded_and_why() -> None:
    plan = solve(kept(2), budget_bytes=2 * 20 + 3)
    [first, second] = plan.parts
    assert (first.encodes, first.replays, first.movable_bytes) == (False, True, 20)
    assert second.reason == "encoding it would cost 5e+02 ms"
    assert "decoder.0-1  layer  20 B  keep, not encoded  encoding it would cost" in plan_table(plan)
    assert plans_from_json(plans_to_json([plan])) == {0: plan}
    assert '"encodes": false' in plans_to_json([plan])
    encoded = dataclasses.replace(
        plan, parts=tuple(dataclasses.replace(one, encodes=True) for one in plan.parts)
    )
    assert '"encodes"' not in plans_to_json([encoded])
    assert encoded.digest() != plan.digest()


def test_choices_come_back_from_a_plan() -> None:
    choices = Timeline(encoding(2, tiers=(tier(),))).choices
    for mix in ([KEEP_EXACT, KEEP], [KEEP, TIER_EXACT], [TIER_EXACT, KEEP_ALL]):
        plan = choices.plan(np.array(mix))
        assert choices.of_plan(plan).tolist() == mix
    moved = choices.moved_bytes(np.array([TIER_EXACT, FIRST_TIER]))
    assert moved == {Placement.SSD: 20 + 8}
    # Of a run without a codec, what is not encoded goes where the rest goes.
    plan = choices.plan(np.array([KEEP_EXACT, TIER_EXACT]))
    without = Timeline(stage(2, tiers=(tier(),))).choices
    assert without.of_plan(plan).tolist() == [KEEP, FIRST_TIER]


def test_what_is_recomputed_cannot_be_left_out_by_a_codec() -> None:
    line = PlannedPart(0, "decoder.0", "layer", Placement.RECOMPUTE, 8, encodes=False)
    with pytest.raises(ConfigurationError, match="without a codec; expected keep, host or ssd"):
        Plan((line,)).check([(0, "decoder.0")], [Placement.SSD])


def test_a_policy_follows_the_line_of_a_part_or_of_its_layer() -> None:
    policy = PlannedPolicy(1, Placement.HOST)
    attention = Scope(layer="decoder.0", part="attention")
    assert policy.encodes(attention)
    lines = (
        PlannedPart(0, "decoder.0", "attention", Placement.HOST, 8, encodes=False),
        PlannedPart(0, "decoder.0", "mlp", Placement.HOST, 8),
        PlannedPart(0, "decoder.1", "layer", Placement.KEEP, 8, encodes=False),
    )
    policy.follow(Plan(lines))
    assert not policy.encodes(attention) and policy.replays(attention)
    assert policy.encodes(dataclasses.replace(attention, part="mlp"))
    assert not policy.encodes(Scope(layer="decoder.1", part="mlp"))
    assert policy.encodes(Scope(layer="decoder.2"))


def projected(codec: str) -> StageProfile:
    model = Transformer(num_layers=6, hidden_size=4096, num_attention_heads=32, seq_length=4096)
    hardware = Hardware(GpuSpec.load("h100"), DriveSpec.load("990-pro"))
    return project(
        Projection(model, Parallelism(), hardware, replay=True, codec=codec, inflight_bytes=1 << 30)
    )


@pytest.mark.parametrize("choice", [KEEP, FIRST_TIER])
def test_a_projection_with_a_codec_is_without_it_that_of_a_run_without_it(choice: int) -> None:
    exact = predicted(projected("int8"), choice + EXACT_OFFSET)
    without = predicted(projected("off"), choice)
    assert exact == dataclasses.replace(
        without,
        step_s=pytest.approx(without.step_s),
        recompute_s=pytest.approx(without.recompute_s),
    )
    assert predicted(projected("int8"), choice).peak_bytes < without.peak_bytes


def test_a_plan_with_some_layers_encoded_costs_what_it_says() -> None:
    """Of the profile that has nothing to choose, and of the one that it was made of."""
    profile, numbers = encoding(4, tiers=(tier(write=80.0, read=80.0),)), []
    whole = Timeline(profile)
    for some in encoded_in_turn(profile, 8):
        own = Timeline(some.profile)
        for choice in (KEEP, KEEP_ALL, FIRST_TIER):
            chosen = own.choices.all(choice)
            found = some.choices(chosen, whole.choices)
            assert prediction_of(whole.cost(found)) == prediction_of(own.cost(chosen))
        numbers.append(some.seconds / 0.5)
    assert numbers == [0, 1, 2, 3, 4]


def test_with_a_codec_allowed_no_plan_is_worse_than_without() -> None:
    """The goal leaves too little time to encode all: what is not encoded may move all the same."""
    for slowdown in (0.0, 0.01, 0.02, 0.05):
        found = [solve(projected(codec), max_slowdown=slowdown) for codec in ("int8", "off")]
        with_codec, without = (one.predicted for one in found)
        assert with_codec is not None and without is not None
        assert with_codec.peak_bytes <= without.peak_bytes
