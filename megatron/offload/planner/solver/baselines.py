# SPDX-License-Identifier: Apache-2.0
"""Plans that others would make, to compare the solver's with: `all_moved`, `suffix_plan`.

Each takes a profile and gives a plan without looking at a budget; `suffix_within` does look at one.
"""

from __future__ import annotations

import math

from megatron.offload.activations.placement.plan import Plan, PlannedPart
from megatron.offload.activations.placement.policy import Placement
from megatron.offload.errors import ConfigurationError
from megatron.offload.planner.profile.pipeline_schedule import pipeline_schedule
from megatron.offload.planner.profile.stage_profile import StageProfile
from megatron.offload.planner.simulator.instructions import FIRST_TIER, KEEP
from megatron.offload.planner.simulator.options import Choices
from megatron.offload.planner.simulator.timeline import Timeline


def all_moved(profile: StageProfile) -> Plan:
    """Everything that can move goes to the tiers side by side, so far as they have room.

    As with `--activation-offload tiered`: each gets what it writes in the same time.
    """
    most = _most_in_flight(profile)
    seconds = [0.0] * len(profile.tiers)  # of writing, so far
    limits = [tier.capacity_bytes for tier in profile.tiers]
    room = [math.inf if limit is None else limit for limit in limits]
    lines = []
    for layer in profile.layers:
        for part in layer.parts:
            size, placement = part.movable_bytes, Placement.KEEP
            taken = size * most[layer.chunk]
            takes_s = [size / tier.write_bytes_per_s for tier in profile.tiers]
            fitting = [n for n, left in enumerate(room) if size and taken <= left]
            if fitting:
                n = min(fitting, key=lambda n: seconds[n] + takes_s[n])
                placement = Placement(profile.tiers[n].name)
                seconds[n] += takes_s[n]
                room[n] -= taken
            lines.append(PlannedPart(layer.chunk, layer.name, part.name, placement, size))
    return Plan(tuple(lines), stage=profile.position.stage)


def _most_in_flight(profile: StageProfile) -> list[int]:
    """Of each chunk: forward passes that wait for their backward at a time."""
    now, most = [0] * profile.position.num_chunks, [0] * profile.position.num_chunks
    for one in pipeline_schedule(profile.position, profile.num_micro_batches):
        now[one.chunk] += -1 if one.is_backward else 1
        most[one.chunk] = max(most[one.chunk], now[one.chunk])
    return most


def suffix_plan(profile: StageProfile) -> Plan:
    """The adaptive rule of SSDTrain: layers before a certain one go to SSDs, it and the rest stay.

    From Wu et al., "SSDTrain: An Activation Offloading Framework to SSDs for Faster Large Language
    Model Training", arXiv 2408.10013, where the system is also called TBA.

    That is the first layer n, of those of a micro-batch, where
    (V_before + 2 V_n) / (3 T_forward - 2 t_before) > write bandwidth, with backward taken to be
    twice forward: what lies before it, and it back and forth, would not pass in the time from its
    own forward to its backward.
    """
    bytes_per_s = profile.tiers[_ssd(profile)].write_bytes_per_s
    forward_s = sum(layer.forward_s for layer in profile.layers)
    forward_s += sum(profile.before_s) + sum(profile.after_s)
    before_bytes, before_s = 0, 0.0
    for number, layer in enumerate(profile.layers):
        size = before_bytes + 2 * layer.movable_bytes
        if size > bytes_per_s * (3 * forward_s - 2 * before_s):
            return first_moved(profile, number)
        before_bytes += layer.movable_bytes
        before_s += layer.forward_s
    return first_moved(profile, len(profile.layers))


def suffix_within(profile: StageProfile, budget_bytes: int) -> Plan:
    """The plan of this form that keeps most and is predicted to fit into a budget.

    Where none is, the one that keeps nothing.
    """
    timeline = Timeline(profile)
    for number in range(len(profile.layers)):
        plan = first_moved(profile, number)
        if timeline.predict(plan).peak_bytes <= budget_bytes:
            return plan
    return first_moved(profile, len(profile.layers))


def first_moved(profile: StageProfile, num_layers: int) -> Plan:
    """The first layers go to SSDs, the others stay."""
    choices = Choices(profile)
    chosen = choices.all(FIRST_TIER + _ssd(profile))
    if num_layers < len(profile.layers):
        chosen[choices.spans[num_layers][0] :] = KEEP
    return choices.plan(chosen)


def _ssd(profile: StageProfile) -> int:
    names = [tier.name for tier in profile.tiers]
    if Placement.SSD.value not in names:
        raise ConfigurationError(
            f"the profile has tiers {names}; this plan needs ssd; measure with one or leave it out"
        )
    return names.index(Placement.SSD.value)
