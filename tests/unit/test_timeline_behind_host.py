# SPDX-License-Identifier: Apache-2.0
"""A simulated device that runs behind its host, against arithmetic by hand.

Layers compute a second forward and two backward and save 8 bytes. A copy takes a second, unless a
test says otherwise.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megatron.offload.activations.placement.plan import Prediction
from megatron.offload.activations.placement.policy import Placement
from megatron.offload.planner.profile.stage_profile import UNBOUNDED, StageProfile
from megatron.offload.planner.simulator.timeline import Timeline
from tests.support.simulated_trace import trace_of
from tests.support.stages import layer, part, plan_of, predict, stage, tier

KEEP, RECOMPUTE = Placement.KEEP, Placement.RECOMPUTE
HOST, SSD = Placement.HOST, Placement.SSD


def behind(num_layers: int, *, rate: float = 8.0, name: str = "host", **more: Any) -> StageProfile:
    """Layers on an accelerator; two of them may be on their way."""
    tiers = (tier(name, rate, rate),)
    values = {"inflight_bytes": 16, "lead_layers": UNBOUNDED, "tiers": tiers, **more}
    return stage(num_layers, **values)


@pytest.mark.parametrize("placement", [KEEP, RECOMPUTE])
def test_what_does_not_move_takes_the_time_and_memory_that_it_takes_where_the_host_computes(
    placement: Placement,
) -> None:
    profile = behind(3, step_fixed_s=0.5, transient_bytes=100)
    as_host = dataclasses.replace(profile, lead_layers=0)
    assert predict(profile, placement) == predict(as_host, placement)


def test_what_moves_stays_until_the_device_has_computed_and_copied_it() -> None:
    # At once the host launches layers 0 to 2: 24 bytes, of which the third ones find no room among
    # those on their way before 2, when the device has computed (0-1) and copied (1-2) layer 0.
    # 2 layer 3 is launched, 3 (layer 1 has left) handed over, and backward begins on the host: the
    # copies of layers 2 and 3 go on for nothing and hold their memory, though both were used,
    # while layers 1 and 0 are read: 32 bytes. The device computes without a wait until 4 + 8.
    assert predict(behind(4), HOST) == Prediction(12.0, 0.0, 0.0, 32, 32, 16)
    # Where the host computes, layers 2 and 1 are all that is there at a time, for an instant.
    as_host = dataclasses.replace(behind(4), lead_layers=0)
    assert predict(as_host, HOST).peak_bytes == 16


def test_what_is_kept_after_what_moves_is_there_at_the_same_time() -> None:
    # The host launches all four at once. With its lead bounded it launches layer 2 at 1 and layer 3
    # at 2, when layer 0 has left: 0.5 s a copy.
    profile = behind(4, rate=16.0)
    assert predict(profile, HOST, HOST, KEEP).peak_bytes == 32
    assert predict(profile, HOST, HOST, KEEP, lead=1).peak_bytes == 24
    assert predict(profile, HOST, HOST, KEEP, lead=1).step_s == 12.0


def test_a_slow_link_holds_up_the_device_and_the_host() -> None:
    # A copy takes 4 s. Forward: layer 0 leaves from 1 to 5, and only then layer 2 is handed over
    # and layer 3 launched. The device has computed layer 2 at 3 and stands still until 5.
    profile = behind(4, rate=2.0)
    trace = trace_of(Timeline(profile), plan_of(profile, HOST))
    began = {one.where: one.begin_s for one in trace.intervals if one.kind == "forward"}
    assert began == {"decoder.0": 0.0, "decoder.1": 1.0, "decoder.2": 2.0, "decoder.3": 5.0}
    # 9 layer 1 has left, layer 3 is handed over and taken back at once, and so is layer 2. Layer 0
    # is read 9-13 with layer 1 before it... the device waits for them, not the host.
    cost = predict(profile, HOST)
    assert cost.stall_s == cost.step_s - 12.0 > 0


def test_a_drive_that_is_read_holds_up_the_host() -> None:
    fast, slow = predict(behind(6, name="ssd"), SSD), predict(behind(6, name="ssd", rate=1.0), SSD)
    assert fast.stall_s == 0.0 < slow.stall_s
    assert slow.step_s == pytest.approx(18.0 + slow.stall_s)


def test_by_operation_a_piece_leaves_once_the_next_one_is_launched() -> None:
    two = part(num_storages=2)
    layers = tuple(layer(f"decoder.{n}", parts=(two,)) for n in range(3))
    profile = behind(3, layers=layers, hands_over="operation", inflight_bytes=1000)
    intervals = trace_of(Timeline(profile), plan_of(profile, HOST)).intervals
    writes = [one.begin_s for one in intervals if one.kind == "write"]
    assert writes[:3] == [1.0, 1.5, 2.0]


def test_by_operation_what_is_kept_comes_once_the_piece_before_has_left() -> None:
    # Pieces of 4 bytes, copied in 0.5 s, three on their way at most. The host launches all of
    # layers 0 and 1 and the first operation of layer 2: 20 bytes. The last piece of layer 1 finds
    # room at 1, when the first of layer 0 has left; then comes the other half of layer 2.
    two = part(num_storages=2)
    layers = tuple(layer(f"decoder.{n}", parts=(two,)) for n in range(3))
    profile = behind(3, layers=layers, hands_over="operation", inflight_bytes=12)
    assert predict(profile, HOST, HOST, KEEP).peak_bytes == 20


def test_many_micro_batches_are_like_those_that_are_simulated() -> None:
    layers = tuple(layer(f"decoder.{n}") for n in range(4))
    for count in (1, 3):
        profile = behind(4, layers=layers, micro_batches=count)
        assert predict(profile, KEEP).step_s == 12.0 * count
    # More than a simulation has: the middle ones are taken to be like the others.
    profile = behind(4, layers=layers, micro_batches=400)
    assert predict(profile, KEEP).step_s == pytest.approx(4800.0)
    few, whole = Timeline(profile), Timeline(profile, all_micro_batches=True)
    plan = plan_of(profile, HOST, KEEP)
    assert few.predict(plan).step_s == pytest.approx(whole.predict(plan).step_s, rel=0.02)
