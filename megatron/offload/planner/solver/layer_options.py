# SPDX-License-Identifier: Apache-2.0
"""What there is to choose for a layer, and what that means: `Place`, `LayerOption`.

`formulation.py` counts how many layers take which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron.offload.planner.profile.stage_profile import LayerProfile
from megatron.offload.planner.simulator.arrays import Floats
from megatron.offload.planner.simulator.instructions import (
    FIRST_TIER,
    INPUT_OFFSET,
    KEEP,
    KEEP_ALL,
    RECOMPUTE_PART,
    base_of,
    is_exact,
    is_selective,
    saved_bytes,
)
from megatron.offload.planner.simulator.options import Choices

ALL = -1  # parts of a layer


class Place(NamedTuple):
    """A choice for a part of a layer, or for all of them."""

    part: int  # among the layer's, or `ALL`
    choice: int


@dataclass(frozen=True)
class LayerOption:
    """What a choice means for a layer, in seconds and bytes of a micro-batch."""

    resident: float
    live: float  # all bytes, while it is computed
    recompute_s: float  # in backward, replays too: beyond a step that keeps everything
    moved: Floats  # by tier


def places_of(choices: Choices, layer: LayerProfile) -> list[Place]:
    """What there is to choose for a layer."""
    places = [
        Place(part, choice)
        for part in range(len(layer.parts))
        for choice in choices.of_part(layer, part)
    ]
    return [*places, *(Place(ALL, choice) for choice in choices.of_layer(layer))]


def parts_of(places: list[Place]) -> list[int]:
    """The parts of a layer that these are choices for."""
    return sorted({place.part for place in places} - {ALL})


def option_of(layer: LayerProfile, place: Place, num_tiers: int) -> LayerOption:
    """What a choice means for a layer that may move to so many tiers."""
    moved = np.zeros(num_tiers)
    choice = place.choice
    of = layer if place.part == ALL else layer.parts[place.part]
    stays = float(of.input_bytes)
    if choice >= INPUT_OFFSET:
        stays -= of.movable_input_bytes
        moved[choice // INPUT_OFFSET - 1] += of.movable_input_bytes
    if place.part == ALL:
        live = float(sum(part.all_bytes for part in layer.parts)) + layer.input_bytes
        return LayerOption(stays, live, layer.recompute_s or 0.0, moved)
    part = layer.parts[place.part]
    if base_of(choice) == RECOMPUTE_PART:
        resident = float(part.resident_bytes + stays)
        # While backward runs through the parts after it, nothing of it is there.
        is_last = place.part == len(layer.parts) - 1
        live = float(part.all_bytes) if is_last else resident
        return LayerOption(resident, live, part.recompute_s or 0.0, moved)
    if choice == KEEP_ALL:
        return LayerOption(part.all_bytes, part.all_bytes, 0.0, moved)
    resident, size = float(part.resident_bytes), float(saved_bytes(part, choice))
    live, replay_s = resident + part.movable_bytes + part.replay_extra_bytes, part.replay_s
    if is_exact(choice):
        live, replay_s = part.exact_bytes + part.exact_extra_bytes, replay_s - part.codec_s
    if base_of(choice) == KEEP:
        resident += size
    else:
        moved[base_of(choice) - FIRST_TIER] += size
    if is_selective(choice):
        live, replay_s = live + part.selective_extra_bytes, replay_s + (part.selective_s or 0.0)
    return LayerOption(resident, live, replay_s, moved)


def average(options: Sequence[LayerOption]) -> LayerOption:
    """Of what the same choice means for several layers."""
    return LayerOption(
        float(np.mean([one.resident for one in options])),
        float(np.mean([one.live for one in options])),
        float(np.mean([one.recompute_s for one in options])),
        np.stack([one.moved for one in options]).mean(axis=0),
    )
