# SPDX-License-Identifier: Apache-2.0
"""When things happened in one pass of a micro-batch: `PassMarks`, `LayerMarks`, `Moment`.

The profiler fills them while the pass runs and reads them when the step is over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron.offload.placement.policy import WHOLE_LAYER


class Moment(NamedTuple):
    """A moment of the device, and how long compute had waited for the engine until then."""

    timestamp: Any
    waited_s: float


Span = tuple[Moment, Moment]


@dataclass
class GroupMarks:
    """What one part of a layer saved."""

    movable_bytes: int = 0
    kept_bytes: int = 0
    num_storages: int = 0
    cheap_bytes: int = 0  # of the movable ones, those of its cheap operations
    cheap_extra_bytes: int = 0  # in backward, besides those
    cheap: list[Span] = field(default_factory=list)  # when those ran


@dataclass
class LayerMarks:
    """One layer in one pass. Moments are None until they have come."""

    name: str
    began: Moment
    input_bytes: int
    can_be_recomputed: bool
    has_parts: bool = False  # which can be recomputed one without the other
    middle: Moment | None = None
    middle_bytes: int = 0  # of the tensor between them
    ended: Moment | None = None
    backward_began: Moment | None = None
    backward_middle: Moment | None = None
    backward_ended: Moment | None = None
    recomputes: bool = False
    again: dict[str, list[Span]] = field(default_factory=dict)  # when what ran again in backward
    groups: dict[str, GroupMarks] = field(default_factory=dict)

    def group(self, name: str) -> GroupMarks:
        """The group of that name; the empty name is the whole layer."""
        return self.groups.setdefault(name or WHOLE_LAYER, GroupMarks())


@dataclass
class PassMarks:
    """A forward pass of a micro-batch through a chunk, and its backward pass."""

    chunk: int
    began: Moment
    ended: Moment | None = None
    backward_began: Moment | None = None
    backward_ended: Moment | None = None
    held_bytes: int = 0  # of its input, where the schedule holds that until backward
    layers: list[LayerMarks] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether its backward has run, and every layer's."""
        return (
            self.ended is not None
            and self.backward_ended is not None
            and all(one.ended and one.backward_began for one in self.layers)
        )
