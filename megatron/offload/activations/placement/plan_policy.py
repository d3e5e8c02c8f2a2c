# SPDX-License-Identifier: Apache-2.0
"""Places activations as a plan says: `PlannedPolicy`. The planner gives it a plan between steps."""

from __future__ import annotations

from megatron.offload.activations.placement.plan import Plan
from megatron.offload.activations.placement.policy import WHOLE_LAYER, Placement
from megatron.offload.activations.saved.scope import Scope


class PlannedPolicy:
    """Follows a plan; until there is one, and where it says nothing, everything leaves memory.

    Args:
        min_bytes: smaller storages are kept.
        safe: where everything goes without a plan.
    """

    divides_layers = True

    def __init__(self, min_bytes: int, safe: Placement) -> None:
        self._min_bytes = min_bytes
        self._safe = safe
        self._placements: dict[tuple[int, str, str], Placement] = {}
        self._inputs: dict[tuple[int, str, str], Placement] = {}  # of what is recomputed
        self._unreplayed: frozenset[tuple[int, str, str]] = frozenset()
        self._unencoded: frozenset[tuple[int, str, str]] = frozenset()

    def follow(self, plan: Plan) -> None:
        """From now on this one. Between steps only: what is recomputed must not change in one."""
        self._placements, self._inputs = plan.placements, plan.inputs
        self._unreplayed, self._unencoded = plan.unreplayed, plan.unencoded

    def place_layer(self, scope: Scope) -> Placement:
        """What the plan has for a layer or a part. Parts that differ leave the layer none."""
        whole = self._placements.get((scope.chunk, scope.layer, WHOLE_LAYER), self._safe)
        if not scope.part:
            return whole
        return self._placements.get((scope.chunk, scope.layer, scope.part), whole)

    def replays(self, scope: Scope) -> bool:
        """False where the plan keeps all as it is; the line is that of `place`."""
        return not self._unreplayed or self._line(scope) not in self._unreplayed

    def encodes(self, scope: Scope) -> bool:
        """False where the plan has it as it is; the line is that of `place`."""
        return not self._unencoded or self._line(scope) not in self._unencoded

    def _line(self, scope: Scope) -> tuple[int, str, str]:
        """The key of the plan's line for a scope."""
        key = scope.chunk, scope.layer, scope.part or WHOLE_LAYER
        return key if key in self._placements else (scope.chunk, scope.layer, WHOLE_LAYER)

    def place(self, scope: Scope, num_bytes: int) -> Placement:
        """Where the plan sends a storage that a layer or part saved; small ones are kept."""
        if num_bytes < self._min_bytes:
            return Placement.KEEP
        placement = self.place_layer(scope)
        if placement is not Placement.RECOMPUTE:
            return placement
        # What recomputation starts from; what has nothing to start from is run as usual.
        key = scope.chunk, scope.layer, scope.part or WHOLE_LAYER
        return self._inputs.get(key, Placement.KEEP)
