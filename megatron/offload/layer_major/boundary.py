# SPDX-License-Identifier: Apache-2.0
"""Where tensors wait between two units: `Boundary`, and `HiddenStates` for a paused pass.

The schedule decides when they return, before their micro-batch's turn comes; the `Boundary` moves
them. Without a boundary all of them stay in memory.
"""

from __future__ import annotations

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
    may share, have none. A tensor with a graph that they share all the same is found by the next
    one that takes it, and refused.

    Args:
        boundary: None: they stay.
    """

    def __init__(self, boundary: Boundary | None) -> None:
        self._boundary = boundary
        self._waiting: list[Any] = []
        self._held: list[Any] = []  # see `Boundary.fill`

    def leave(self, arguments: Any, scope: Scope) -> None:
        """The pass pauses before a layer with these arguments."""
        if self._boundary is None:
            return
        tensors = {id(one): one for one in _with_graph(arguments)}
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
        if self._boundary is not None and any(map(self._boundary.is_empty, _with_graph(arguments))):
            raise refusal(
                "a layer takes a tensor with a gradient that another micro-batch has as well, and "
                "that waits outside of memory; use --activation-boundary keep"
            )


def _with_graph(values: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(values)
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.grad_fn is not None]
