# SPDX-License-Identifier: Apache-2.0
"""When things happened in one pass of a micro-batch: `PassTimings`, `LayerTimings`, `Timestamp`.

The profiler fills them while the pass runs and reads them when the step is over.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron.offload.activations.placement.policy import WHOLE_LAYER


class Timestamp(NamedTuple):
    """A moment of the device, and what had happened until then that no layer's time contains.

    Attributes:
        num_waits: how often compute had waited for the engine.
        num_encodings: how often a codec had encoded what forward saves.
    """

    timestamp: Any
    num_waits: int
    num_encodings: int = 0


TimeSpan = tuple[Timestamp, Timestamp]


@dataclass
class PartTimings:
    """What one part of a layer saved."""

    movable_bytes: int = 0
    resident_bytes: int = 0
    num_storages: int = 0
    selective_bytes: int = 0  # of the movable ones, those of its selective operations
    selective_extra_bytes: int = 0  # in backward, besides those
    selective: list[TimeSpan] = field(default_factory=list)  # when those ran
    replayed_bytes: int = 0  # in storages that backward computes again from others
    replay_extra_bytes: int = 0  # the largest of these
    only_for_replay_bytes: int = 0  # of the movable and the resident ones
    replays: list[TimeSpan] = field(default_factory=list)  # when it did, of what is not encoded
    codec_spared_bytes: int = 0  # of the storages that a codec encodes, beyond what it makes
    exact_extra_bytes: int = 0  # the largest of the replayed ones that it does not
    exact_selective_bytes: int = 0  # `selective_bytes`, and of what it encodes
    encodings: list[TimeSpan] = field(default_factory=list)  # in forward
    decodings: list[TimeSpan] = field(default_factory=list)  # in backward


@dataclass
class LayerTimings:
    """One layer in one pass. Moments are None until they have come."""

    name: str
    began: Timestamp
    input_bytes: int
    movable_input_bytes: int  # of those, in storages that a tier can take
    can_be_recomputed: bool
    in_graph: bool = False  # a compiled one: what that saves and uses is all that is seen of it
    has_parts: bool = False  # which can be recomputed one without the other
    middle: Timestamp | None = None
    middle_bytes: int = 0  # of the tensor between them
    movable_middle_bytes: int = 0  # the same, or 0 if it is too small
    ended: Timestamp | None = None
    backward_began: Timestamp | None = None
    backward_middle: Timestamp | None = None
    backward_ended: Timestamp | None = None
    recomputes: bool = False
    is_frozen: bool = False  # like all before it: no gradient comes to it
    again: dict[str, list[TimeSpan]] = field(
        default_factory=dict
    )  # when what ran again in backward
    parts: dict[str, PartTimings] = field(default_factory=dict)

    def part(self, name: str) -> PartTimings:
        """The part of that name; the empty name is the whole layer."""
        return self.parts.setdefault(name or WHOLE_LAYER, PartTimings())


@dataclass
class PassTimings:
    """A forward pass of a micro-batch through a chunk, and its backward pass."""

    chunk: int
    began: Timestamp
    ended: Timestamp | None = None
    backward_began: Timestamp | None = None
    backward_ended: Timestamp | None = None
    held_bytes: int = 0  # of its input, where the schedule holds that until backward
    layers: list[LayerTimings] = field(default_factory=list)
    between: dict[int, PartTimings] = field(default_factory=dict)

    @property
    def between_layers(self) -> PartTimings:
        """What is saved after the layers so far, and outside of them; by their number."""
        return self.between.setdefault(len(self.layers), PartTimings())

    @property
    def behind_layers(self) -> PartTimings:
        """What was saved after the last layer so far; nothing is noted in it."""
        return self.between.get(len(self.layers)) or PartTimings()

    def end_backward(self, now: Timestamp) -> None:
        """Its backward has run. Frozen layers before all trained ones have none: no time for it."""
        self.divide_backward()
        self.backward_ended = now
        for one in self.layers:
            if one.is_frozen:
                one.backward_began = one.backward_ended = now

    def divide_backward(self) -> None:
        """The backward of each layer in compiled graphs begins where that of the next one ends.

        Not with the first tensor that it uses: what a layer makes for all is used before.
        """
        layers = [one for one in self.layers if one.in_graph and one.backward_began]
        for earlier, later in itertools.pairwise(layers):
            earlier.backward_began = later.backward_ended
        for first in layers[:1]:
            first.backward_ended = None  # with that of the pass

    @property
    def is_complete(self) -> bool:
        """Whether its backward has run, and every layer's."""
        return (
            self.ended is not None
            and self.backward_ended is not None
            and all(one.ended and one.backward_began for one in self.layers)
        )
