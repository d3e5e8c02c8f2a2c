# SPDX-License-Identifier: Apache-2.0
"""Where tensors wait between two units: `Boundary`, and `HiddenStates` for a paused pass.

The schedule decides when they return, before their micro-batch's turn comes; the `Boundary` moves
them. Without a boundary all of them stay in memory.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from megatron.offload.activations.saved.scope import Scope
from megatron.offload.layer_major.config import refusal

# Micro-batches whose turns come next, and which have what they need in memory: one is read while
# the one before computes, and the next one where that takes longer.
AHEAD = 2


class Boundary(Protocol):
    """Keeps tensors outside of memory. What `put` and `empty` give stands for them meanwhile."""

    def put(self, tensor: torch.Tensor, scope: Scope) -> Any:
        """Takes a tensor that the caller drops; None: it stays."""
        ...

    def take(self, waiting: Any) -> torch.Tensor:
        """What was put, for the stream of the calling thread."""
        ...

    def empty(self, tensor: torch.Tensor, scope: Scope) -> Any:
        """Takes the bytes of a tensor that others refer to; None: they stay."""
        ...

    def fill(self, waiting: Any) -> Any:
        """Gives them back, for the stream of the calling thread.

        Returns:
            What the caller holds until the tensor is saved again, which then need not be written.
        """
        ...

    def is_empty(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has no bytes now."""
        ...

    def read_ahead(self, waiting: Any) -> None:
        """What was put or emptied is needed soon."""
        ...


class HiddenStates:
    """What one forward pass hands from unit to unit, while it pauses.

    Only what a graph has made can leave: the model's inputs, masks and tables, which micro-batches
    may share, have none. Without graphs it is what the layer before has not taken: masks and tables
    go to all layers. A tensor that micro-batches share all the same is found by the next one that
    takes it, and refused.

    Args:
        boundary: None: they stay.
        has_graphs: the pass makes a graph.
    """

    def __init__(self, boundary: Boundary | None, *, has_graphs: bool = True) -> None:
        self._boundary = boundary
        self._has_graphs = has_graphs
        self._taken: list[weakref.ref[torch.Tensor]] = []  # by the layer before
        self._waiting: list[Any] = []
        self._held: list[Any] = []  # see `Boundary.fill`

    def leave(self, arguments: Any, scope: Scope) -> None:
        """The pass pauses before a layer with these arguments."""
        if self._boundary is None:
            return
        stays = {id(one()) for one in self._taken}
        tensors = {id(one): one for one in self._moving(arguments) if id(one) not in stays}
        left = [self._boundary.empty(one, scope) for one in tensors.values()]
        self._waiting = [one for one in left if one is not None]
        self._held = []

    def read_ahead(self) -> None:
        """The pass goes on soon."""
        for one in self._waiting:
            assert self._boundary is not None
            self._boundary.read_ahead(one)

    def come_back(self) -> None:
        """The pass goes on, in the calling thread."""
        waiting, self._waiting = self._waiting, []
        while waiting:  # from the end, and no longer held here
            assert self._boundary is not None
            self._held.append(self._boundary.fill(waiting.pop()))

    def check(self, arguments: Any) -> None:
        """Raises ConfigurationError if a layer is about to take what another micro-batch has put
        away."""
        boundary = self._boundary
        if boundary is not None and any(map(boundary.is_empty, self._moving(arguments))):
            what = "a tensor with a gradient" if self._has_graphs else "a tensor"
            raise refusal(
                f"a layer takes {what} that another micro-batch has as well, and that waits "
                "outside of memory; use --activation-boundary keep"
            )

    def note_taken(self, arguments: Any) -> None:
        """A layer takes these; the pass makes no graph."""
        if self._boundary is not None:
            self._taken = [weakref.ref(one) for one in self._moving(arguments)]

    def _moving(self, arguments: Any) -> list[torch.Tensor]:
        """What could leave: with a graph, or any result of an operation where there are none."""
        tensors = [one for one in tree_leaves(arguments) if isinstance(one, torch.Tensor)]
        if self._has_graphs:
            return [one for one in tensors if one.grad_fn is not None]
        results = [one for one in tensors if not one.requires_grad and not one.is_inference()]
        return [one for one in results if one.is_floating_point()]  # others have no NaN
