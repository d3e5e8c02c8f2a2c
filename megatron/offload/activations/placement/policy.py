# SPDX-License-Identifier: Apache-2.0
"""Where an activation goes: the `Placement` words and the policies that choose among them.

The integration asks before each layer, the engine for each saved storage; a policy never does I/O.
"""

from __future__ import annotations

import enum
from typing import Protocol

from megatron.offload.activations.saved.scope import Scope
from megatron.offload.layer_set import LayerSet


class Placement(enum.Enum):
    """What happens to an activation between the forward pass that saves it and its use."""

    KEEP = "keep"  # stays in device memory
    RECOMPUTE = "recompute"  # dropped; its layer's forward runs again in backward
    HOST = "host"  # host DRAM
    SSD = "ssd"  # files on SSDs
    TIERED = "tiered"  # host DRAM or SSD, whichever is behind its share

    __hash__ = object.__hash__  # an enum's own is Python, and each storage looks its tier up


INPUT = "input"  # in scopes, as a part: what a checkpoint of the model's own keeps of its layers
WHOLE_LAYER = "layer"  # in plans and profiles, the part of a layer that is not divided
SELECTIVE = "-selective"  # in plans, after a part's name: what of it takes hardly any time


class Policy(Protocol):
    """Chooses placements. Called by the thread that computes, in the hot path.

    One that gives the attention and the MLP of a layer placements of their own has an attribute
    `divides_layers` that is true; `scope.part` then says which of them is asked about.
    """

    def replays(self, scope: Scope) -> bool:
        """Whether what this scope saves may be computed again or encoded, in a run with that."""
        ...

    def encodes(self, scope: Scope) -> bool:
        """Whether what of it is not computed again may be encoded, in a run with a codec."""
        ...

    def place_layer(self, scope: Scope) -> Placement:
        """What becomes of a layer as a whole, or of `scope.part` of it. Asked before it runs.

        Ranks that compute parts of the same layer (tensor, context and expert parallelism) must
        give the same answer about `RECOMPUTE`: what they send each other in the layer's forward
        they send again in its recomputation, and a rank that stays away stops the others.
        """
        ...

    def place(self, scope: Scope, num_bytes: int) -> Placement:
        """The placement of a storage of `num_bytes` that `scope` saved; never `RECOMPUTE`."""
        ...


class FixedPolicy:
    """Everything of at least `min_bytes` gets one placement, except in the layers named.

    Args:
        min_bytes: smaller storages are kept.
        placement: of the rest.
        offloaded: other layers keep everything; None: none do.
        recomputed: layers that are recomputed.
        recompute_input: where what recomputed layers start from goes; None: that of the layers
            named stays, that of checkpoints of the model's own goes where the rest does.
    """

    def __init__(
        self,
        min_bytes: int,
        placement: Placement = Placement.SSD,
        *,
        offloaded: LayerSet | None = None,
        recomputed: LayerSet | None = None,
        recompute_input: Placement | None = None,
    ) -> None:
        self._min_bytes = min_bytes
        self._placement = placement
        self._offloaded = offloaded
        self._recomputed = recomputed or LayerSet()
        self._recompute_input = recompute_input
        self._of_layer: dict[str, Placement] = {}  # answers given so far

    def place_layer(self, scope: Scope) -> Placement:
        """`RECOMPUTE` for layers that are named so, the one placement for those to offload."""
        found = self._of_layer.get(scope.layer)
        if found is None:
            if scope.layer in self._recomputed:
                found = Placement.RECOMPUTE
            elif self._offloaded is None or scope.layer in self._offloaded:
                found = self._placement
            else:
                found = Placement.KEEP
            self._of_layer[scope.layer] = found
        return found

    def replays(self, scope: Scope) -> bool:
        """Always."""
        return True

    def encodes(self, scope: Scope) -> bool:
        """Always."""
        return True

    def place(self, scope: Scope, num_bytes: int) -> Placement:
        """The placement of its layer for storages of at least `min_bytes`, else `KEEP`."""
        if num_bytes < self._min_bytes:
            return Placement.KEEP
        placement = self._of_layer.get(scope.layer) or self.place_layer(scope)
        if placement is Placement.RECOMPUTE:
            return self._recompute_input or Placement.KEEP
        if scope.part == INPUT and placement is not Placement.KEEP:
            return self._recompute_input or placement
        return placement
