# SPDX-License-Identifier: Apache-2.0
"""What is replayed is neither kept nor moved in a simulated step, and takes its time in backward.

A plan chooses for each part whether it replays.

A part of 8 bytes of `stages.py` that saves 6 more, which backward computes again in 0.25 s, 3 bytes
at a time.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from megatron.offload.activations.placement.plan import Plan, Prediction
from megatron.offload.activations.placement.plan_table import plan_table
from megatron.offload.activations.placement.policy import Placement
from megatron.offload.activations.stats.memory_parts import KEPT, RECOMPUTED, REPLAYED
from megatron.offload.errors import InfeasibleBudgetError
from megatron.offload.planner.profile.pipeline_schedule import PipelinePosition
from megatron.offload.planner.profile.stage_profile import PartProfile, StageProfile
from megatron.offload.planner.projection.hardware import DriveSpec, GpuSpec, Hardware
from megatron.offload.planner.projection.model import Parallelism, Transformer
from megatron.offload.planner.projection.projection import Projection, project
from megatron.offload.planner.simulator.instructions import (
    FIRST_TIER,
    KEEP,
    KEEP_ALL,
    RECOMPUTE_LAYER,
    RECOMPUTE_PART,
    SELECTIVE_OFFSET,
)
from megatron.offload.planner.simulator.timeline import Timeline, prediction_of
from megatron.offload.planner.solver.layer_options import Place, option_of
from megatron.offload.planner.solver.solve import solve
from tests.support.stages import layer, part, predicted, stage, tier

REPLAYS = {"replayed_bytes": 6, "replay_s": 0.25, "replay_extra_bytes": 3}


def replaying(num_layers: int = 2, **more: Any) -> StageProfile:
    layers = tuple(layer(f"decoder.{n}", parts=(part(**REPLAYS),)) for n in range(num_layers))
    return stage(layers=layers, **more)


def kept_or_replayed(num_layers: int) -> StageProfile:
    """Nothing of it can move or be recomputed."""
    parts = (part(**REPLAYS),)
    layers = (layer(f"decoder.{n}", recompute_s=None, parts=parts) for n in range(num_layers))
    return stage(layers=tuple(layers), tiers=())


def test_without_replay_all_of_it_is_kept_and_backward_takes_no_longer() -> None:
    assert predicted(replaying(), KEEP_ALL) == Prediction(6.0, 0.0, 0.0, 2 * (8 + 6))
    several = tuple(part(f"part{n}", **REPLAYS) for n in range(2))
    profile = stage(layers=(layer(parts=several),))
    assert predicted(profile, KEEP_ALL) == Prediction(3.0, 0.0, 0.0, 2 * (8 + 6))


def test_other_stages_do_not_wait_for_replays_that_there_are_not() -> None:
    """All stages take as long as this one; the second of two waits for the first."""
    profile = replaying(1, position=PipelinePosition(2, 1, 1, 2))
    assert predicted(profile, KEEP_ALL).step_s == 1 + 3 + 2
    assert predicted(profile, KEEP).step_s == 1 + 3.25 + 2.25


def test_where_nothing_is_replayed_there_is_no_such_choice() -> None:
    timeline = Timeline(stage(2))
    assert not timeline.choices.all(KEEP_ALL).any()
    assert all(KEEP_ALL not in option for options in timeline.choices.options for option in options)


@pytest.mark.parametrize(
    ("mix", "seconds", "peak"),
    [
        # When forward ends, and as the last layer's backward has begun.
        ((KEEP, KEEP, KEEP_ALL), 9.5, 8 + 8 + 14),
        ((KEEP_ALL, KEEP, KEEP), 9.5, 14 + 8 + 8 + 3),
        ((KEEP, KEEP_ALL, KEEP), 9.5, 8 + 14 + 8 + 3),
        ((KEEP_ALL, KEEP_ALL, KEEP), 9.25, 14 + 14 + 8 + 3),
        # The last layer's memory has gone when the first one runs again: 14 bytes of 2.
        ((RECOMPUTE_LAYER, KEEP, KEEP_ALL), 10.25, 2 + 8 + 14),
        ((FIRST_TIER, KEEP, KEEP_ALL), 9.5, 8 + 14 + 8),  # the first one's are read ahead
    ],
)
def test_some_layers_replay_and_others_do_not(
    mix: tuple[int, ...], seconds: float, peak: int
) -> None:
    fast = tier(write=80.0, read=80.0)
    timeline = Timeline(replaying(3, tiers=(fast,)))
    found = prediction_of(timeline.cost(np.array(mix)))
    assert (found.step_s, found.peak_bytes) == (seconds, peak)


def test_what_is_saved_only_for_replay_is_not_there_without() -> None:
    """Of the 8 bytes 2; whether the layer keeps all of its own, or runs again."""
    parts = (part(only_for_replay_bytes=2, **REPLAYS),)
    profile = stage(layers=(layer(parts=parts),))
    assert predicted(profile, KEEP_ALL).peak_bytes == 8 + 6 - 2
    assert predicted(profile, KEEP).peak_bytes == 8 + 3
    assert predicted(profile, RECOMPUTE_LAYER).peak_bytes == 2 + 8 + 6 - 2


def test_what_is_kept_is_kept_without_it_and_backward_takes_longer() -> None:
    assert predicted(stage(2), KEEP) == Prediction(6.0, 0.0, 0.0, 2 * 8)
    assert predicted(replaying(), KEEP) == Prediction(6.5, 0.0, 0.5, 2 * 8 + 3)


def test_no_byte_of_it_moves() -> None:
    fast = tier(write=80.0, read=80.0)
    moved = predicted(replaying(3, tiers=(fast,)), FIRST_TIER)
    without = predicted(stage(3, tiers=(fast,)), FIRST_TIER)
    assert moved.written_bytes == without.written_bytes == 2 * 8  # the last is used at once
    assert moved.step_s == without.step_s + 3 * 0.25


def test_a_recomputed_layer_replays_nothing_and_holds_all_that_it_saves() -> None:
    assert predicted(replaying(), RECOMPUTE_LAYER) == Prediction(8.0, 0.0, 2.0, 2 * 2 + 8 + 6)


def test_a_recomputed_part_likewise() -> None:
    whole: dict[str, Any] = {"recompute_s": 1.0, "input_bytes": 2, "selective_bytes": 0}
    profile = stage(layers=(layer(recompute_s=None, parts=(part(**whole, **REPLAYS),)),))
    assert predicted(profile, RECOMPUTE_PART) == Prediction(4.0, 0.0, 1.0, 8 + 6)


def test_beside_what_is_recomputed_selectively_the_rest_is_replayed() -> None:
    selective = {"selective_bytes": 2, "selective_s": 0.125}
    profile = stage(layers=(layer(parts=(part(**selective, **REPLAYS),)),))
    found = predicted(profile, KEEP + SELECTIVE_OFFSET)
    assert found == Prediction(3.375, 0.0, 0.375, 6 + 2 + 3)


def test_a_peak_names_it() -> None:
    timeline = Timeline(replaying())
    parts = timeline.explain_peak(timeline.choices.plan(timeline.choices.all(KEEP))).parts
    assert {name: size for name, size in parts.items() if size} == {KEPT: 16, REPLAYED: 3}
    again = timeline.explain_peak(timeline.choices.plan(timeline.choices.all(RECOMPUTE_LAYER)))
    assert {name: size for name, size in again.parts.items() if size} == {KEPT: 4, RECOMPUTED: 14}


@pytest.mark.parametrize(
    ("choice", "live", "seconds"),
    [
        (KEEP, 8 + 3, 0.25),
        (KEEP_ALL, 8 + 6, 0.0),
        (FIRST_TIER, 8 + 3, 0.25),
        (RECOMPUTE_LAYER, 8 + 6 + 2, 1.0),
    ],
)
def test_the_mixed_integer_program_knows_it_as_well(
    choice: int, live: float, seconds: float
) -> None:
    """Seconds are those beyond a step that keeps everything and replays nothing."""
    [one] = replaying(1).layers
    found = option_of(one, Place(-1 if choice == RECOMPUTE_LAYER else 0, choice), 1)
    assert (found.live, found.recompute_s) == (live, seconds)


def test_a_budget_is_for_all_that_a_recomputed_layer_holds() -> None:
    """The first layer runs again: its input, and all of its 14 bytes. 15 would do without replay's.

    Any other plan takes more.
    """
    with pytest.raises(InfeasibleBudgetError) as refused:
        solve(replaying(2, tiers=()), budget_bytes=15)
    assert refused.value.smallest_bytes == 2 + 8 + 6
    plan = solve(replaying(2, tiers=()), budget_bytes=16)
    assert plan.predicted is not None and plan.predicted.recompute_s == 1.0


def test_a_plan_says_what_replay_spares() -> None:
    [_, said] = solve(replaying(), budget_bytes=100).notes
    assert said == "a layer that replays spares 6 B and takes 250 ms more; 8 B are kept or moved"
    assert len(solve(stage(2), budget_bytes=100).notes) == 1


def replayed_in(plan: Plan) -> list[bool]:
    return [one.replays for one in plan.parts]


@pytest.mark.parametrize(
    ("budget", "num_replaying"),
    [
        (100, 0),
        (4 * 14, 0),
        (4 * 14 - 1, 1),
        (3 * 8 + 14, 3),
        (4 * 8 + 3, 4),  # three are replayed at a time
    ],
)
def test_no_more_layers_replay_than_a_budget_takes(budget: int, num_replaying: int) -> None:
    plan = solve(kept_or_replayed(4), budget_bytes=budget)
    assert sum(replayed_in(plan)) == num_replaying
    assert plan.predicted is not None and plan.fastest is not None
    assert plan.predicted.step_s == 12 + num_replaying * 0.25
    assert plan.fastest == Prediction(12.0, 0.0, 0.0, 4 * 14)


def test_where_replay_spares_too_little_layers_leave_too() -> None:
    plan = solve(replaying(4), budget_bytes=4 * 8 + 2)
    assert {one.placement for one in plan.parts} > {Placement.KEEP}
    assert plan.predicted is not None and plan.predicted.peak_bytes <= 4 * 8 + 2


def test_the_least_memory_within_a_slowdown_replays_where_that_is_what_it_takes() -> None:
    """A part in 48 of the step is one layer's replay."""
    for allowed in range(5):
        plan = solve(kept_or_replayed(4), max_slowdown=allowed / 48)
        assert sum(replayed_in(plan)) == allowed


def test_a_plan_says_which_parts_do_not_replay_and_why() -> None:
    with_room = solve(replaying(2), budget_bytes=100)
    line = "decoder.0-1  layer  14 B  keep, not replayed  there is room"
    assert line in plan_table(with_room)
    [first, second] = solve(kept_or_replayed(2), budget_bytes=2 * 14 - 1).parts
    assert (first.replays, first.movable_bytes) == (True, 8)
    assert first.reason == "no room without replay"
    assert (second.replays, second.movable_bytes) == (False, 14)
    assert second.reason == "replaying it would cost 2.5e+02 ms"


def test_choices_come_back_from_a_plan() -> None:
    choices = Timeline(replaying(2)).choices
    for mix in ([KEEP_ALL, KEEP], [KEEP, KEEP_ALL], [FIRST_TIER, KEEP_ALL]):
        assert choices.of_plan(choices.plan(np.array(mix))).tolist() == mix
    # Of a profile without replay, what does not replay is kept as the rest is.
    plan = choices.plan(np.array([KEEP_ALL, KEEP]))
    assert Timeline(stage(2)).choices.of_plan(plan).tolist() == [KEEP, KEEP]


def test_what_alone_can_be_replayed_may_be_kept() -> None:
    nothing_moves = part(size=0, resident_bytes=4, **REPLAYS)
    profile = stage(layers=(layer(recompute_s=None, parts=(nothing_moves,)),))
    choices = Timeline(profile).choices
    assert choices.options == [[(KEEP,), (KEEP_ALL,)]]
    plan = choices.plan(choices.all(KEEP_ALL))
    assert choices.of_plan(plan).tolist() == [KEEP_ALL]
    assert predicted(profile, KEEP_ALL) == Prediction(3.0, 0.0, 0.0, 4 + 6)
    assert solve(profile, budget_bytes=10).parts[0].reason == "there is room"


def test_a_profile_keeps_it_in_its_file() -> None:
    profile = replaying()
    assert StageProfile.from_json(profile.to_json()) == profile
    [one] = {field.name for field in dataclasses.fields(PartProfile)} & {"replay_s"}
    older = profile.to_json().replace(f'"{one}": 0.25', '"of_an_older_release": 1')
    assert StageProfile.from_json(older).layers[0].replay_s == 0.0


LLAMA_8B = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
    "seq_length": 4096,
    "vocab_size": 128256,
    "gated": True,
    "rope": True,
    "rms_norm": True,
    "tied_embeddings": False,
}


def projected(*, replay: bool, **model: Any) -> StageProfile:
    hardware = Hardware(GpuSpec.load("h100"), DriveSpec.load("990-pro"), host_bytes=1 << 40)
    transformer = Transformer(**{**LLAMA_8B, **model})
    return project(Projection(transformer, Parallelism(), hardware, replay=replay))


@pytest.mark.parametrize(
    ("eager", "saved", "kept", "replayed"),
    [
        # In hidden sizes a token: two norms, queries, keys and values (rotated ones are 1.25), what
        # attention gives, and inside the MLP 3.5 for each of its tensors.
        (False, 2 * 2 + 1.5 + 1.25 + 1 + 3 * 3.5, 2 + 1.5 + 1.25 + 1 + 2 * 3.5, 2 + 3.5),
        # A norm: its input in fp32 (2), what is normalized, what it gives. Four tensors in the MLP.
        (True, 2 * 4 + 1.5 + 1 + 4 * 3.5, 2 + 1.5 + 1 + 2 * 3.5, 2 * 4 + 2 * 3.5),
    ],
    ids=["fused", "eager"],
)
def test_a_projected_layer_saves_what_is_replayed_no_more(
    eager: bool, saved: float, kept: float, replayed: float
) -> None:
    states = 2 * 4096 * 4096
    without = projected(replay=False, eager=eager).layers[0]
    with_replay = projected(replay=True, eager=eager).layers[0]
    small = 4 * 32 * 4096  # log-sum-exps, smaller than what moves
    assert sum(part.all_bytes for part in without.parts) == saved * states + small
    assert without.replayed_bytes == without.replay_s == 0
    assert with_replay.movable_bytes == kept * states
    assert with_replay.replayed_bytes == replayed * states


def test_projected_recipes_take_the_time_of_their_bytes() -> None:
    """Norms: one pass each over input and output. The gated unit: both halves and the product."""
    layer = projected(replay=True).layers[0]
    states, rate = 2 * 4096 * 4096, 3350e9 * 0.8
    moved = 2 * 2 * states + 3 * 3.5 * states
    assert layer.replay_s == pytest.approx(moved / rate)
    assert layer.backward_s == projected(replay=False).layers[0].backward_s


def test_smaller_storages_are_not_replayed() -> None:
    hardware = Hardware(GpuSpec.load("h100"), DriveSpec.load("990-pro"))
    model = Transformer(**{**LLAMA_8B, "eager": True, "seq_length": 8})
    of = Projection(model, Parallelism(), hardware, min_bytes=1 << 30)
    with_replay = project(dataclasses.replace(of, replay=True))
    assert with_replay == project(of)


def test_programs_are_solved_until_one_keeps_to_the_budget() -> None:
    """The first three need a part in a thousand more, and no small change of them needs less."""
    hardware = Hardware(GpuSpec.load("h100"), DriveSpec.load("990-pro"), 0, 500 << 30)
    model = Transformer(**LLAMA_8B, eager=True)
    parallel = Parallelism(data=8, global_batch_size=64)
    profile = project(
        Projection(model, parallel, hardware, distributed_optimizer=True, replay=True)
    )
    budget = 11_374_952_448
    plan = solve(profile, budget_bytes=budget)
    assert plan.predicted is not None and plan.fastest is not None
    assert plan.predicted.peak_bytes <= budget
    assert plan.predicted.step_s < 1.05 * plan.fastest.step_s
