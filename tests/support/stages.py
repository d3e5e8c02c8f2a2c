# SPDX-License-Identifier: Apache-2.0
"""Small profiles of stages, with round figures that a reader can add up."""

from __future__ import annotations

from typing import Any

from megatron.offload.activations.placement.plan import Plan, PlannedPart, Prediction
from megatron.offload.activations.placement.policy import Placement
from megatron.offload.planner.profile.pipeline_schedule import PipelinePosition
from megatron.offload.planner.profile.stage_profile import (
    LayerProfile,
    PartProfile,
    StageProfile,
    TierProfile,
)
from megatron.offload.planner.simulator.timeline import Timeline, prediction_of

ONE_STAGE = PipelinePosition(1, 0, 1, 1)


def tier(name: str = "ssd", write: float = 8.0, read: float = 8.0, **more: Any) -> TierProfile:
    """A tier that moves a layer of `stage` in a second."""
    return TierProfile(name, write, read, **more)


def part(name: str = "layer", size: int = 8, **more: Any) -> PartProfile:
    """A storage that is there when the layer ends and needed when its backward begins."""
    values = {"resident_bytes": 0, "num_storages": 1, "produced_s": 1.0, "first_use_s": 0.0}
    return PartProfile(name, size, **{**values, **more})


def layer(name: str = "decoder.0", chunk: int = 0, **more: Any) -> LayerProfile:
    """Forward takes a second, backward two, recomputation one; its input has two bytes."""
    values = {
        "forward_s": 1.0,
        "backward_s": 2.0,
        "recompute_s": 1.0,
        "input_bytes": 2,
        "parts": (part(),),
    }
    return LayerProfile(chunk, name, **{**values, **more})


def stage(
    num_layers: int = 1,
    *,
    position: PipelinePosition = ONE_STAGE,
    micro_batches: int = 1,
    tiers: tuple[TierProfile, ...] = (tier(),),
    layers: tuple[LayerProfile, ...] | None = None,
    **more: Any,
) -> StageProfile:
    """`num_layers` of `layer` in each chunk."""
    chunks = position.num_chunks
    if layers is None:
        layers = tuple(
            layer(f"decoder.{chunk * num_layers + number}", chunk)
            for chunk in range(chunks)
            for number in range(num_layers)
        )
    nothing = (0.0,) * chunks
    values: dict[str, Any] = {
        "before_s": nothing,
        "after_s": nothing,
        "backward_before_s": nothing,
        "backward_after_s": nothing,
        "pass_fixed_bytes": (0,) * chunks,
        "inflight_bytes": 1000,
    }
    return StageProfile(position, micro_batches, layers, tiers, **{**values, **more})


def predicted(profile: StageProfile, choice: int) -> Prediction:
    """What a step costs in which all parts have this choice, if they may."""
    timeline = Timeline(profile)
    return prediction_of(timeline.cost(timeline.choices.all(choice)))


def plan_of(profile: StageProfile, *placements: Placement, lead: int | None = None) -> Plan:
    """One placement for each layer; the last one for those that are left."""
    lines = []
    for number, one in enumerate(profile.layers):
        where = placements[min(number, len(placements) - 1)]
        lines.append(PlannedPart(one.chunk, one.name, "layer", where, one.movable_bytes))
    return Plan(tuple(lines), lead_layers=lead)


def predict(profile: StageProfile, *placements: Placement, lead: int | None = None) -> Prediction:
    """Of `plan_of`."""
    return Timeline(profile).predict(plan_of(profile, *placements, lead=lead))
