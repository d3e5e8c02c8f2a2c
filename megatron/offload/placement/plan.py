# SPDX-License-Identifier: Apache-2.0
"""A decision: which placement each part of each layer of a stage gets, and why: `Plan`.

The solver makes it, a policy follows it, a file keeps it, a person reads it as a table.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.offload.placement.policy import Placement


@dataclass(frozen=True)
class Prediction:
    """What a plan should cost and need. Seconds and bytes of one step of one stage.

    Attributes:
        step_s: a step, from its first forward pass to the optimizer's end.
        stall_s: of it, computing waited for reads or for room to write.
        recompute_s: of it, forward passes repeated in backward.
        peak_bytes: most bytes of activations in device memory at a time.
        written_bytes: to all tiers together; read_bytes: from them.
    """

    step_s: float
    stall_s: float
    recompute_s: float
    peak_bytes: int
    written_bytes: int = 0
    read_bytes: int = 0


@dataclass(frozen=True)
class PlannedGroup:
    """One line of a plan.

    Attributes:
        chunk: model chunk of the stage.
        layer: e.g. `decoder.7`.
        group: `attention`, `mlp` or `layer`. A recomputed layer has one line, `layer`.
        placement: `KEEP`, `RECOMPUTE`, `HOST` or `SSD`.
        movable_bytes: of one micro-batch that it decides about.
        reason: for people, a few words.
    """

    chunk: int
    layer: str
    group: str
    placement: Placement
    movable_bytes: int
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """Placements of a stage's activations.

    Attributes:
        groups: by chunk, layer and group, in the order of the forward pass.
        goal: what was asked for, for people: `at most 12 GiB`, `at most 2 % slower`.
        predicted: of this plan. `fastest`: of keeping everything, whatever it needs.
    """

    groups: tuple[PlannedGroup, ...]
    goal: str = ""
    predicted: Prediction | None = None
    fastest: Prediction | None = None
    stage: int = 0
    notes: tuple[str, ...] = field(default_factory=tuple)
