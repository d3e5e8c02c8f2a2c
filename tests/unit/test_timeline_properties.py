# SPDX-License-Identifier: Apache-2.0
"""What holds for the simulated step of any stage and plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.offload.activations.stats.memory_parts import REST
from megatron.offload.planner.profile.pipeline_schedule import PipelinePosition
from megatron.offload.planner.profile.stage_profile import StageProfile
from megatron.offload.planner.simulator.arrays import Ints
from megatron.offload.planner.simulator.instructions import (
    FIRST_TIER,
    INPUT_OFFSET,
    KEEP,
    KEEP_ALL,
    RECOMPUTE_LAYER,
)
from megatron.offload.planner.simulator.timeline import Cost, Timeline
from tests.support.simulated_trace import trace_of
from tests.support.stages import layer, part, stage, tier

FROM_TIER = RECOMPUTE_LAYER + INPUT_OFFSET
REPLAYS = {"replayed_bytes": 6, "replay_s": 0.25, "replay_extra_bytes": 3}
layouts = st.sampled_from(
    [PipelinePosition(1, 0, 1, 1), PipelinePosition(2, 0, 1, 2), PipelinePosition(4, 1, 1, 4)]
)


@st.composite
def stages(draw: st.DrawFn) -> tuple[StageProfile, Ints]:
    """A stage with one tier, and choices."""
    layers = tuple(
        layer(
            f"decoder.{n}",
            forward_s=draw(st.floats(0.1, 2.0)),
            movable_input_bytes=2,
            parts=(
                part(
                    size=draw(st.integers(1, 40)),
                    num_storages=draw(st.integers(1, 3)),
                    **draw(st.sampled_from([{}, REPLAYS])),
                ),
            ),
        )
        for n in range(draw(st.integers(1, 5)))
    )
    profile = stage(
        layers=layers,
        position=draw(layouts),
        micro_batches=draw(st.integers(1, 5)),
        tiers=(tier(write=draw(st.floats(1.0, 50.0)), read=draw(st.floats(1.0, 50.0))),),
        inflight_bytes=draw(st.integers(1, 100)),
        after_s=(draw(st.floats(0.0, 3.0)),),
    )
    choices = draw(
        st.lists(
            st.sampled_from([KEEP, KEEP_ALL, RECOMPUTE_LAYER, FIRST_TIER, FROM_TIER]),
            min_size=len(layers),
            max_size=len(layers),
        )
    )
    return profile, np.array(choices, np.int64)


def cost(profile: StageProfile, choices: Ints, **changes: Any) -> Cost:
    tiers = tuple(replace(one, **changes) for one in profile.tiers)
    return Timeline(replace(profile, tiers=tiers)).cost(choices)


@settings(max_examples=150, deadline=None)
@given(stages())
def test_a_step_is_what_is_computed_and_what_is_waited_for(case: tuple[StageProfile, Ints]) -> None:
    profile, choices = case
    found = cost(profile, choices)
    kept = cost(profile, np.full_like(choices, KEEP_ALL))
    recomputed = cost(profile, np.where(choices == FIRST_TIER, KEEP, choices % INPUT_OFFSET))
    assert kept.step_s <= recomputed.step_s <= found.step_s + 1e-9
    assert found.step_s <= recomputed.step_s + found.stall_s + 1e-9  # the rest a bubble may hide
    assert found.recompute_s == pytest.approx(recomputed.recompute_s)  # in pieces, of replays
    assert found.read_bytes <= found.written_bytes


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(stages())
def test_memory_lies_between_what_one_layer_needs_and_everything(
    case: tuple[StageProfile, Ints],
) -> None:
    profile, choices = case
    found, kept = cost(profile, choices), cost(profile, np.full_like(choices, KEEP_ALL))
    inputs = 2 * len(choices) * 5 * profile.position.num_stages
    assert max(one.movable_bytes for one in profile.layers) <= found.peak_bytes
    # A write for nothing, and pieces that were read ahead, may lie beside what is computed.
    assert found.peak_bytes <= kept.peak_bytes + inputs + 3 * 40


@settings(max_examples=150, deadline=None)
@given(stages(), st.floats(0.0, 0.3), st.integers(0, 50))
def test_the_parts_of_a_peak_are_all_of_it(
    case: tuple[StageProfile, Ints], slack: float, transient_bytes: int
) -> None:
    profile, choices = case
    profile = replace(
        profile,
        allocator_slack=slack,
        transient_bytes=transient_bytes,
        pass_fixed_bytes=(7,) * profile.position.num_chunks,
    )
    timeline = Timeline(profile)
    plan = timeline.choices.plan(choices)
    peak = timeline.explain_peak(plan)
    assert min(peak.parts.values()) >= 0
    assert sum(peak.parts.values()) == timeline.predict(plan).peak_bytes
    assert sum(peak.layers.values()) == sum(peak.parts.values()) - peak.parts[REST]


@settings(max_examples=150, deadline=None)
@given(stages(), st.integers(2, 6))
def test_the_part_of_a_long_step_that_is_simulated_has_the_peak_of_the_whole(
    case: tuple[StageProfile, Ints], rounds: int
) -> None:
    profile, choices = case
    profile = replace(profile, num_micro_batches=4 * rounds)
    whole = Timeline(profile, all_micro_batches=True)
    assert Timeline(profile).cost(choices).peak_bytes == whole.cost(choices).peak_bytes


@settings(max_examples=150, deadline=None)
@given(stages(), st.floats(1.0, 20.0))
def test_a_drive_that_reads_and_writes_at_once_is_never_slower_by_more_than_a_piece(
    case: tuple[StageProfile, Ints], times: float
) -> None:
    # A faster write may take away what would have been forwarded, which then must be read: for
    # each micro-batch, what was on its way may be read again.
    profile, choices = case
    one = profile.tiers[0]
    fast = cost(
        profile,
        choices,
        write_bytes_per_s=one.write_bytes_per_s * times,
        read_bytes_per_s=one.read_bytes_per_s * times,
    )
    slow = cost(profile, choices)
    largest = max(layer.movable_bytes for layer in profile.layers)
    on_its_way = (profile.inflight_bytes + 2 * largest) / (one.read_bytes_per_s * times)
    assert fast.step_s <= slow.step_s + profile.num_micro_batches * on_its_way + 1e-9


@settings(max_examples=150, deadline=None)
@given(stages(), st.floats(1.0, 20.0))
def test_faster_writes_never_make_the_forward_passes_wait_longer(
    case: tuple[StageProfile, Ints], times: float
) -> None:
    # One micro-batch: its forward pass has nothing to do with reads.
    profile, choices = case
    profile = replace(profile, num_micro_batches=1, position=PipelinePosition(1, 0, 1, 1))
    faster = profile.tiers[0].write_bytes_per_s * times

    def forward_wait_s(**changes: Any) -> float:
        tiers = tuple(replace(one, **changes) for one in profile.tiers)
        timeline = Timeline(replace(profile, tiers=tiers))
        trace = trace_of(timeline, timeline.choices.plan(choices))
        waits = [one for one in trace.intervals if one.kind == "wait for a write"]
        return sum(one.end_s - one.begin_s for one in waits)

    assert forward_wait_s(write_bytes_per_s=faster) <= forward_wait_s() + 1e-9
