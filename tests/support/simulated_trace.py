# SPDX-License-Identifier: Apache-2.0
"""A simulated step in detail, as tests ask for it: `trace_of`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron.offload.activations.placement.plan import Plan
from megatron.offload.planner.profile.pipeline_schedule import Pass
from megatron.offload.planner.simulator import rows
from megatron.offload.planner.simulator.timeline import Timeline

_KINDS = {
    rows.FORWARD: "forward",
    rows.BACKWARD: "backward",
    rows.RECOMPUTE: "recompute",
    rows.WAIT_FOR_READ: "wait for a read",
    rows.WAIT_FOR_ROOM: "wait for a write",
    rows.WRITE: "write",
    rows.READ_BACK: "read",
}
_OF_LAYERS = (rows.FORWARD, rows.BACKWARD, rows.RECOMPUTE)


class Interval(NamedTuple):
    """Something that took time in a simulated step.

    Attributes:
        kind: `forward`, `backward`, `recompute`, `wait for a read`, `wait for a write`; of a tier:
            `write`, `read`.
        where: the layer's or the tier's name; empty outside of layers.
        pass_: that was under way.
    """

    kind: str
    begin_s: float
    end_s: float
    where: str
    pass_: Pass


class Trace(NamedTuple):
    """What took time in a simulated step, and (seconds, bytes of device memory) over it."""

    intervals: list[Interval]
    memory: list[tuple[float, int]]


def trace_of(timeline: Timeline, plan: Plan) -> Trace:
    """A plan's step in detail; of the micro-batches that are simulated."""
    arrays = timeline.arrays
    passes = [Pass(bool(one[0]), int(one[1]), int(one[2])) for one in arrays.passes[arrays.own]]
    intervals, memory = [], []
    for kind, begin_s, end, number, where in timeline.log(plan).tolist():
        if kind == rows.LEVEL:
            held = int(np.ceil(end * (1 + arrays.allocator_slack)) + arrays.transient_bytes)
            memory.append((begin_s, held))
        elif kind in _KINDS:
            name = _name(timeline, kind, where)
            intervals.append(Interval(_KINDS[kind], begin_s, end, name, passes[number]))
    return Trace(intervals, memory)


def _name(timeline: Timeline, kind: int, where: int) -> str:
    if kind in _OF_LAYERS:
        return timeline.profile.layers[where].name if where >= 0 else ""
    return timeline.profile.tiers[where].name
