# SPDX-License-Identifier: Apache-2.0
"""The simulated step against arithmetic by hand. Seconds and bytes of the profiles are round."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from megatron.offload.activations.placement.plan import Plan, PlannedPart, Prediction
from megatron.offload.activations.placement.policy import Placement
from megatron.offload.activations.stats.memory_parts import (
    AHEAD,
    KEPT,
    OUTSIDE,
    RECOMPUTED,
    REST,
    USED,
    WRITING,
)
from megatron.offload.errors import ConfigurationError
from megatron.offload.planner.profile.pipeline_schedule import PipelinePosition
from megatron.offload.planner.profile.stage_profile import LayerProfile, StageProfile
from megatron.offload.planner.simulator import rows, transfers
from megatron.offload.planner.simulator.arrays import arrays_of
from megatron.offload.planner.simulator.instructions import (
    FIRST_TIER,
    INPUT_OFFSET,
    RECOMPUTE_LAYER,
    RECOMPUTE_PART,
)
from megatron.offload.planner.simulator.step import MISSING_BYTES, STALL_S, _step, new_channels
from megatron.offload.planner.simulator.timeline import Timeline
from tests.support.simulated_trace import trace_of
from tests.support.stages import layer, part, plan_of, predict, stage, tier

Layers = dict[str, int]

KEEP, RECOMPUTE = Placement.KEEP, Placement.RECOMPUTE
HOST, SSD = Placement.HOST, Placement.SSD


def test_what_is_kept_costs_nothing_but_memory() -> None:
    profile = stage(
        3, transient_bytes=100, pass_fixed_bytes=(5,), step_fixed_s=0.5, before_s=(0.25,)
    )
    assert predict(profile, KEEP) == Prediction(9.75, 0.0, 0.0, 3 * 8 + 5 + 100)


def test_fragments_are_a_part_of_what_is_held() -> None:
    profile = stage(3, transient_bytes=100, pass_fixed_bytes=(5,), allocator_slack=0.1)
    timeline = Timeline(profile)
    plan = timeline.choices.plan(timeline.choices.all(0))
    assert timeline.predict(plan).peak_bytes == math.ceil(1.1 * (3 * 8 + 5)) + 100
    assert max(memory for _, memory in trace_of(timeline, plan).memory) == 132


def test_what_is_recomputed_costs_its_forward_again_and_holds_its_input() -> None:
    # Peak: inputs of both layers, and all of the second one's bytes while it is recomputed.
    assert predict(stage(2), RECOMPUTE) == Prediction(8.0, 0.0, 2.0, 2 * 2 + 8)
    # Peak: the second layer's input and bytes above the first one's bytes.
    assert predict(stage(2), KEEP, RECOMPUTE) == Prediction(7.0, 0.0, 1.0, 8 + 2 + 8)


def parts_of_peak(profile: StageProfile, *placements: Placement) -> tuple[dict[str, int], Layers]:
    """What the predicted peak is made of, without what there is none of, and by layer."""
    timeline = Timeline(profile)
    peak = timeline.explain_peak(plan_of(profile, *placements))
    return {name: size for name, size in peak.parts.items() if size}, dict(peak.layers)


def test_a_peak_is_explained_by_what_each_layer_does_then() -> None:
    outside = {"pass_fixed_bytes": (5,), "transient_bytes": 100, "allocator_slack": 0.1}
    kept = parts_of_peak(stage(3, **outside), KEEP)
    assert kept[0] == {KEPT: 24, OUTSIDE: 5, REST: 103}
    assert kept[1] == {**{f"decoder.{n}": 8 for n in range(3)}, "outside of layers": 5}
    # The second layer is computed while the first one is written.
    assert parts_of_peak(stage(2), SSD) == ({WRITING: 8, KEPT: 8}, {"decoder.0": 8, "decoder.1": 8})
    assert parts_of_peak(stage(2), RECOMPUTE)[0] == {KEPT: 2 + 2, RECOMPUTED: 8}
    # A head of 32 bytes is kept, and one of the first layer's four pieces has to do until then.
    four, nothing, head = part(num_storages=4), part(size=0), part(size=32)
    layers = tuple(layer(f"decoder.{n}", parts=(one,)) for n, one in enumerate((four, nothing)))
    profile = stage(layers=(*layers, layer("decoder.1.after", parts=(head,))))
    assert parts_of_peak(profile, SSD, SSD, KEEP)[0] == {OUTSIDE: 32, AHEAD: 2}
    # If it was to move, it is taken back and in use; a piece is read ahead of the next layer.
    assert parts_of_peak(profile, SSD)[0] == {USED: 32, AHEAD: 2}


FROM_SSD = RECOMPUTE_LAYER + INPUT_OFFSET


def recomputed_from_ssd(num_layers: int, **more: Any) -> Prediction:
    """Layers that are recomputed, each from an input of 2 bytes on the SSD."""
    layers = tuple(layer(f"decoder.{n}", movable_input_bytes=2) for n in range(num_layers))
    timeline = Timeline(stage(layers=layers, **more))
    return timeline.predict(timeline.choices.plan(timeline.choices.all(FROM_SSD)))


def test_the_input_of_what_is_recomputed_may_wait_on_a_tier() -> None:
    # 0-4 F0-3, each input written in the quarter of a second after its layer. From 4 on three
    # seconds for each layer backwards: recomputation and backward, behind which the next one's
    # input is read. Peak: a layer's input and bytes, and that one; kept: all four inputs.
    assert recomputed_from_ssd(4) == Prediction(16.0, 0.0, 4.0, 2 + 8 + 2, 6, 6)
    assert predict(stage(4), RECOMPUTE) == Prediction(16.0, 0.0, 4.0, 4 * 2 + 8)


def test_recomputation_waits_for_its_input() -> None:
    # A read takes 4 s. 4-7 B3 (its input was never written), 4-8 the read for B2: one second
    # longer. Then 8-11 and 8-12, 12-15 and 12-16, 16-19.
    tiers = (tier(read=0.5),)
    assert recomputed_from_ssd(4, tiers=tiers) == Prediction(19.0, 3.0, 4.0, 12, 6, 6)


def test_an_input_is_handed_over_at_its_layers_end_or_by_operation_at_its_begin() -> None:
    for hands_over, begins in (("layer", [1.0, 2.0]), ("operation", [0.0, 1.0])):
        layers = tuple(layer(f"decoder.{n}", movable_input_bytes=2) for n in range(3))
        timeline = Timeline(stage(layers=layers, hands_over=hands_over))
        plan = timeline.choices.plan(timeline.choices.all(FROM_SSD))
        intervals = trace_of(timeline, plan).intervals
        writes = [one.begin_s for one in intervals if one.kind == "write"]
        assert writes[:2] == begins


def test_the_input_of_a_part_may_wait_on_a_tier() -> None:
    # Attention recomputed alone from 2 bytes; the MLP's 8 bytes stay.
    parts = (
        part("attention", recompute_s=0.5, input_bytes=2, movable_input_bytes=2, first_use_s=1.0),
        part("mlp"),
    )
    layers = tuple(layer(f"decoder.{n}", parts=parts) for n in range(3))
    timeline = Timeline(stage(layers=layers))
    kept, moved = (
        timeline.cost(np.array([choice, 0] * 3, np.int64))
        for choice in (RECOMPUTE_PART, RECOMPUTE_PART + INPUT_OFFSET)
    )
    assert (kept.step_s, kept.recompute_s, kept.written_bytes) == (10.5, 1.5, 0)
    assert (moved.step_s, moved.recompute_s, moved.stall_s) == (10.5, 1.5, 0)
    assert (moved.written_bytes, moved.read_bytes) == (4, 4)
    # Kept: most in backward of the last MLP, all MLPs' bytes and all inputs. Moved: when the last
    # attention runs again, two MLPs' bytes, the attention's, and an input that was read ahead.
    assert kept.peak_bytes == 3 * 8 + 3 * 2 and moved.peak_bytes == 2 * 8 + 8 + 2


def test_a_layer_that_is_used_at_once_is_not_moved() -> None:
    assert predict(stage(1), SSD) == Prediction(3.0, 0.0, 0.0, 8)


def test_a_write_hides_behind_the_next_layer_and_a_read_behind_backward() -> None:
    # 0-1 F0. 1-2 F1 while 0 is written. 2-4 B1 (never written) while 0 is read: 2-3. 4-6 B0.
    assert predict(stage(2), SSD) == Prediction(6.0, 0.0, 0.0, 16, 8, 8)


def test_backward_waits_for_exactly_what_the_read_lacks() -> None:
    # As above with reads that take 3 s: 2-5, one second longer than B1.
    profile = stage(2, tiers=(tier(read=8 / 3),))
    assert predict(profile, SSD) == Prediction(7.0, 1.0, 0.0, 16, 8, 8)


def test_the_loss_hides_the_first_read_only_when_its_backward_comes_after_the_forward_pass() -> (
    None
):
    # The read begins when the forward pass ends, at 11, and takes 2 s.
    profile = stage(1, after_s=(10.0,), tiers=(tier(read=4.0),))
    assert predict(profile, SSD) == Prediction(15.0, 2.0, 0.0, 8, 8, 8)
    profile = stage(1, after_s=(10.0,), backward_before_s=(3.0,), tiers=(tier(read=4.0),))
    assert predict(profile, SSD) == Prediction(16.0, 0.0, 0.0, 8, 8, 8)


def test_before_the_loss_one_piece_has_to_do() -> None:
    # Two layers written by 3 (a head of 10 s), read in 4 s each: 1 from 12, 0 only when 1 is used,
    # from 17 to 21. Backward of 1 has ended at 19.
    tiers = (tier(read=2.0),)
    profile = stage(2, tiers=tiers, after_s=(10.0,), backward_before_s=(5.0,))
    assert predict(profile, SSD) == Prediction(23.0, 2.0, 0.0, 16, 16, 16)
    # The middle of a pipeline has no loss: of pieces half as large as the first layer's it reads
    # two at once, as the window allows. They wait for the last stage's passes, which take as long:
    # forward 12-24, backward 24-33. 38-40 B1; reads 38-40, and 40-42 while the first one is used.
    small, large = (part(size=size, num_storages=2) for size in (4, 8))
    layers = (layer(parts=(large,)), layer("decoder.1", parts=(small,)))
    position = PipelinePosition(2, 0, 1, 2)
    more = {"tiers": tiers, "after_s": (10.0,), "backward_before_s": (5.0,), "layers": layers}
    assert predict(stage(position=position, **more), SSD) == Prediction(43.0, 1.0, 0.0, 12, 12, 12)
    # With a loss the second one is read from 17 on, and the next one an instant later than it is
    # used: 18-20 and 20-22.
    assert predict(stage(**more), SSD) == Prediction(23.0, 2.0, 0.0, 12, 12, 12)


def test_operations_hand_over_what_they_save_while_their_layer_runs() -> None:
    # Four storages of 2 bytes, one each 0.25 s, each written in the next 0.25 s: the last one when
    # the second layer's 8 bytes come. Nothing is used before B0, for which one storage is there.
    layers = (layer(parts=(part(num_storages=4),)), layer("decoder.1"))
    by_layer = stage(layers=layers)
    by_operation = stage(layers=layers, hands_over="operation")
    assert predict(by_layer, SSD, KEEP) == Prediction(6.0, 0.0, 0.0, 16, 8, 8)
    assert predict(by_operation, SSD, KEEP) == Prediction(6.0, 0.0, 0.0, 10, 8, 8)


def test_what_is_passed_without_a_read_does_not_widen_the_window() -> None:
    # The last layer's 32 bytes are used at once; then one of the first one's pieces is read.
    four, nothing, head = part(num_storages=4), part(size=0), part(size=32)
    layers = (
        layer(parts=(four,)),
        layer("decoder.1", parts=(nothing,)),
        layer("decoder.2", parts=(head,)),
    )
    assert predict(stage(layers=layers), SSD).peak_bytes == 32 + 2


def test_forward_waits_while_too_many_bytes_are_on_their_way() -> None:
    # Writes take 2 s. Layer 1 ends at 2 and is handed over when layer 0 is written, at 3.
    profile = stage(2, tiers=(tier(write=4.0),), inflight_bytes=8)
    assert predict(profile, SSD) == Prediction(7.0, 1.0, 0.0, 16, 8, 8)
    # With room for both nobody waits, and the write that has begun ends for nothing.
    profile = stage(2, tiers=(tier(write=4.0),), inflight_bytes=16)
    assert predict(profile, SSD) == Prediction(6.0, 0.0, 0.0, 16, 8, 0)


def test_a_write_under_way_is_taken_back_without_a_read() -> None:
    # F0 ends at 1, its write would end at 11; B0 begins at 4.
    profile = stage(2, tiers=(tier(write=0.8),))
    assert predict(profile, SSD) == Prediction(6.0, 0.0, 0.0, 16, 8, 0)


def test_memory_goes_when_the_write_for_nothing_ends() -> None:
    # The write of the first layer goes on until 11, after its backward has ended at 6: the second
    # micro-batch's two layers come on top.
    profile = stage(2, tiers=(tier(write=0.8),), micro_batches=2)
    assert predict(profile, SSD, KEEP).peak_bytes == 8 + 16


def test_latency_is_for_each_storage() -> None:
    # Four storages of 2 bytes, each 0.5 s to be read and as long to be found: 2-6. B1 ends at 4.
    # The first is there at 3, and every next one a second later, while each is used for half a one.
    layers = (layer(parts=(part(num_storages=4),)), layer("decoder.1"))
    profile = stage(layers=layers, tiers=(tier(read=4.0, latency_s=0.5),), after_s=(10.0,))
    # F ends at 12, all is read from then on; the head's backward takes no time. B1 would wait.
    found = predict(profile, SSD, KEEP)
    # 12-14 B1. Read before the first use: one, 12-13. Then used 14-14.5, the others' reads begin at
    # 14: there at 15, 16, 17. Waits of 0.5, 0.5 and 0.5.
    assert found.stall_s == pytest.approx(1.5) and found.step_s == pytest.approx(17.5)


@pytest.mark.parametrize(
    ("shared", "written_at"),
    [(None, 3.0), (8.0, 4.0), (12.0, 3.5)],  # what is left for the write: 8, 0, 4 bytes a second
)
def test_while_a_read_is_under_way_a_write_has_what_is_left(
    shared: float | None, written_at: float
) -> None:
    # A second stage and micro-batch make layer 0 of the next forward pass end while layer 0 of the
    # backward pass before is read: figures of `transfers` show it without a schedule around them.
    arrays = arrays_of(stage(tiers=(tier(shared_bytes_per_s=shared),)))
    channels = new_channels(arrays.tiers)
    steps, log = np.zeros(1, rows.STEP), np.zeros(9, rows.LOG)
    launched = np.zeros(0, rows.OPERATION)
    state = steps[0]
    state["urgent"], state["in_flight_limit_bytes"] = -1, 1000
    transfers.stop_reading_ahead(state)
    pieces = np.zeros(2, rows.PIECE)
    pieces["size_bytes"] = 24, 8
    pieces[1]["state"] = rows.ON_TIER
    transfers.hand_over(state, pieces, channels, launched, log, 0)  # takes three seconds by itself
    transfers.compute(state, pieces, channels, launched, log, 1.0)
    transfers.use(state, pieces, channels, launched, log, 1)
    assert state["now_s"] == 2.0
    transfers.compute(state, pieces, channels, launched, log, 8.0)
    writes = log[log["kind"] == rows.WRITE]
    assert writes[0]["end"] == written_at


def test_a_full_tier_keeps_the_rest_in_memory() -> None:
    profile = stage(3, tiers=(tier(capacity_bytes=8),))
    assert predict(profile, SSD).written_bytes == 8
    assert predict(stage(3), SSD).written_bytes == 16


def test_space_of_what_came_back_is_used_again() -> None:
    # Of each micro-batch the first layer: written, read and used before the next one's.
    profile = stage(2, tiers=(tier(capacity_bytes=8),), micro_batches=2)
    assert predict(profile, SSD) == Prediction(12.0, 0.0, 0.0, 16, 16, 16)


def test_space_of_what_was_written_for_nothing_is_used_again() -> None:
    # The write takes from 1 to 3 and the layer is taken back at 2.
    profile = stage(2, tiers=(tier(write=4.0, capacity_bytes=8),), micro_batches=2)
    found = predict(profile, SSD)
    assert found.written_bytes == 16 and found.read_bytes == 0


def test_the_window_grows_by_what_proved_missing() -> None:
    # A layer that is used up faster than its four pieces come, after one that takes long: of the
    # four, two are there in time at first. The second time it is more.
    def layers(times: int) -> tuple[LayerProfile, ...]:
        return tuple(
            one
            for n in range(times)
            for one in (
                layer(f"quick.{n}", backward_s=0.4, parts=(part(num_storages=4),)),
                layer(f"long.{n}", backward_s=10.0, parts=(part(size=2),)),
            )
        )

    def stalls_s(times: int) -> tuple[float, float]:
        """Of a step after none, and of one after others."""
        profile = stage(layers=layers(times), tiers=(tier(read=2.0),), after_s=(100.0,))
        timeline = Timeline(profile)
        chosen = timeline.choices.of_plan(plan_of(profile, SSD))
        first = _step(arrays_of(profile), chosen, np.zeros(0, rows.LOG), 0.0)
        return float(first[STALL_S]), timeline.cost(chosen).stall_s

    (once_s, once_settled_s), (twice_s, twice_settled_s) = stalls_s(1), stalls_s(2)
    assert 0 < twice_s - once_s < once_s - 0.5
    # A step begins with the window that the one before has left.
    assert once_settled_s < once_s and twice_settled_s < twice_s - 0.5


@pytest.mark.parametrize(("long_s", "is_missing"), [(1000.0, False), (10.0, True)])
def test_short_waits_do_not_widen_the_window(long_s: float, is_missing: bool) -> None:
    # Each quick layer waits for a second or two for the last of its four pieces.
    quick = layer("quick", backward_s=0.4, parts=(part(num_storages=4),))
    long = layer("long", backward_s=long_s, parts=(part(size=2),))
    profile = stage(layers=(quick, long), tiers=(tier(read=2.0),), after_s=(100.0,))
    chosen = Timeline(profile).choices.of_plan(plan_of(profile, SSD))
    step = _step(arrays_of(profile), chosen, np.zeros(0, rows.LOG), 0.0)
    assert step[STALL_S] > 0 and bool(step[MISSING_BYTES] > 0) is is_missing


def test_a_trace_is_of_the_step_that_is_predicted() -> None:
    layers = (layer(backward_s=0.4, parts=(part(num_storages=4),)), layer("decoder.1"))
    profile = stage(layers=layers, tiers=(tier(read=2.0),), after_s=(100.0,))
    trace, predicted = trace_of(Timeline(profile), plan_of(profile, SSD)), predict(profile, SSD)
    waits = [one for one in trace.intervals if one.kind == "wait for a read"]
    assert sum(one.end_s - one.begin_s for one in waits) == pytest.approx(predicted.stall_s) != 0
    assert max(size for _, size in trace.memory) == predicted.peak_bytes


def test_groups_move_and_are_recomputed_on_their_own() -> None:
    parts = (
        part("attention", produced_s=0.5, first_use_s=1.0, recompute_s=0.25),
        part("mlp", 6, resident_bytes=1),
    )
    profile = stage(layers=(layer(parts=parts), layer("decoder.1")))
    plan = Plan(
        (
            PlannedPart(0, "decoder.0", "attention", RECOMPUTE, 8),
            PlannedPart(0, "decoder.0", "mlp", SSD, 6),
            PlannedPart(0, "decoder.1", "layer", KEEP, 8),
        )
    )
    # Peak: at 2, when the second layer is done: 1 and 8 bytes, and 6 until they are written at
    # 1.75. Read back at 4, or when layer 1 is not used up yet: 1 + 8 + 6.
    assert Timeline(profile).predict(plan) == Prediction(6.25, 0.0, 0.25, 15, 6, 6)


def test_groups_that_are_recomputed_alone_hold_their_inputs_and_come_back_one_by_one() -> None:
    parts = (
        part("attention", produced_s=0.5, first_use_s=1.0, recompute_s=0.25, input_bytes=2),
        part("mlp", 6, recompute_s=0.5, input_bytes=3),
    )
    profile = stage(layers=(layer(parts=parts),))
    lines = [PlannedPart(0, "decoder.0", one.name, RECOMPUTE, 0) for one in parts]
    # Inputs: 2 and 3. In backward 2 + 6 bytes, then 8; not 8 + 6 as of a recomputed layer.
    assert Timeline(profile).predict(Plan(tuple(lines))) == Prediction(3.75, 0.0, 0.75, 8)
    one = Plan((lines[1],))
    assert Timeline(profile).predict(one) == Prediction(3.5, 0.0, 0.5, 8 + 6)
    assert predict(profile, RECOMPUTE) == Prediction(4.0, 0.0, 1.0, 2 + 8 + 6)


def test_selective_operations_give_their_bytes_back_and_the_rest_stays_or_moves() -> None:
    parts = (
        part("attention", produced_s=0.5, first_use_s=1.0),
        part("mlp", 6, selective_bytes=4, selective_s=0.25, selective_extra_bytes=5),
    )
    profile = stage(layers=(layer(parts=parts), layer("decoder.1")))
    selective = PlannedPart(0, "decoder.0", "mlp-selective", RECOMPUTE, 4)
    assert Timeline(profile).predict(Plan(())).peak_bytes == 8 + 6 + 8
    # Peak: when the MLP has run again, all that it saves and five more.
    assert Timeline(profile).predict(Plan((selective,))) == Prediction(6.25, 0.0, 0.25, 8 + 6 + 5)
    moved = Plan((PlannedPart(0, "decoder.0", "mlp", SSD, 2), selective))
    assert Timeline(profile).predict(moved) == Prediction(6.25, 0.0, 0.25, 8 + 6 + 5, 2, 2)


@pytest.mark.parametrize("own", range(4))
def test_a_stage_holds_as_many_micro_batches_as_come_before_its_first_backward(own: int) -> None:
    profile = stage(position=PipelinePosition(4, own, 1, 4), micro_batches=8)
    assert predict(profile, KEEP) == Prediction(11 * 3.0, 0.0, 0.0, (4 - own) * 8)


def test_recomputation_makes_every_stage_slower() -> None:
    profile = stage(position=PipelinePosition(4, 0, 1, 4), micro_batches=8)
    assert predict(profile, RECOMPUTE).step_s == 11 * 4.0
    assert predict(profile, RECOMPUTE).peak_bytes == 4 * 2 + 8


def test_chunks_of_virtual_stages_shorten_the_bubble() -> None:
    # (M + (p - 1) / v) passes of both chunks.
    profile = stage(position=PipelinePosition(2, 0, 2, 2), micro_batches=4)
    assert predict(profile, KEEP).step_s == 4 * 6.0 + 6.0 / 2


def test_a_long_step_is_extrapolated() -> None:
    for position in (
        PipelinePosition(1, 0, 1, 1),
        PipelinePosition(4, 1, 1, 4),
        PipelinePosition(2, 0, 2, 2),
    ):
        profile = stage(16, position=position, micro_batches=96)
        short, whole = Timeline(profile), Timeline(profile, all_micro_batches=True)
        for choice in (0, 2, FIRST_TIER):
            chosen = short.choices.all(choice)
            fast, slow = short.cost(chosen), whole.cost(chosen)
            assert fast.num_events < slow.num_events / 3
            assert fast[:5] == pytest.approx(slow[:5], rel=0.02)
            # Where writes and reads meet, two storages more or fewer.
            assert abs(fast.peak_bytes - slow.peak_bytes) <= 2 * 8


def test_a_trace_adds_up_to_the_prediction() -> None:
    profile = stage(2, tiers=(tier(read=8 / 3),), transient_bytes=7)
    timeline = Timeline(profile)
    plan = timeline.choices.plan(timeline.choices.all(FIRST_TIER))
    trace, found = trace_of(timeline, plan), timeline.predict(plan)
    took = {kind: 0.0 for kind, *_ in trace.intervals}
    for one in trace.intervals:
        took[one.kind] += one.end_s - one.begin_s
    assert took == pytest.approx(
        {"forward": 2, "backward": 4, "wait for a read": found.stall_s, "write": 1, "read": 3}
    )
    assert max(num_bytes for _, num_bytes in trace.memory) == found.peak_bytes == 16 + 7
    assert trace.memory[-1][1] == 7
    assert [one.where for one in trace.intervals if one.kind == "read"] == ["ssd"]
    assert trace.intervals[0] == ("forward", 0.0, 1.0, "decoder.0", (False, 0, 0))


def test_a_plan_of_another_model_is_refused() -> None:
    plan = Plan((PlannedPart(0, "encoder.0", "layer", KEEP, 8),))
    with pytest.raises(ConfigurationError, match=r"layer of encoder\.0 in chunk 0 as keep"):
        Timeline(stage()).predict(plan)
    with pytest.raises(ConfigurationError, match="as host, which the profile does not allow"):
        predict(stage(), HOST)


def test_a_schedule_that_cannot_run_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="for ever"):
        Timeline(stage(position=PipelinePosition(4, 0, 2, 1), micro_batches=3))


def test_where_nothing_is_left_to_move_any_placement_is_keep() -> None:
    empty = part("attention", 0, selective_bytes=0, selective_s=0.1)
    profile = stage(layers=(layer(parts=(empty, part("mlp"))),))
    lines = [("attention", Placement.SSD, 8), ("attention-selective", Placement.RECOMPUTE, 4)]
    for name, placement, size in lines:
        line = PlannedPart(0, "decoder.0", name, placement, size)
        assert Timeline(profile).predict(Plan((line,))) == Timeline(profile).predict(Plan(()))


def test_a_heads_working_memory_is_there_where_all_that_is_kept_is() -> None:
    profile = stage(3, transient_bytes=100, head_bytes=50)
    assert predict(profile, KEEP).peak_bytes == 3 * 8 + 100 + 50
    # The last layer computes, or is computed again, where nothing is left of the head.
    assert predict(stage(1, head_bytes=5), RECOMPUTE).peak_bytes == 2 + 8
    assert predict(stage(1, head_bytes=9), RECOMPUTE).peak_bytes == 2 + 9
    first = PipelinePosition(2, 0, 1, 0)  # the last stage has the head
    more = stage(3, head_bytes=50, position=first)
    assert predict(more, KEEP).peak_bytes == predict(stage(3, position=first), KEEP).peak_bytes
