# SPDX-License-Identifier: Apache-2.0
"""What is not computed again, by the operation that made it: `Unreplayed`.

The hooks tell it of each saved storage that has no recipe. It moves nothing and reads no bytes.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.offload.activations.saved.autograd_graph import node_of, origin_of
from megatron.offload.activations.saved.scope import Scope

NO_OPERATION = "no operation with a gradient"  # an input, a mask, noise, a table

# Nodes that make other views or copies of what another has made, by the beginning of their names.
_VIEWS = (
    *("View", "UnsafeView", "ReshapeAlias", "Alias", "Clone", "Expand", "Permute", "Transpose"),
    *("T", "Squeeze", "Unsqueeze", "Select", "Slice", "Split", "UnsafeSplit", "SplitWithSizes"),
    *("Unbind", "AsStrided"),
)
_MOST_VIEWS = 16  # behind one another
_BACKWARD = "Backward"

_is_view: dict[type, bool] = {}


class Unreplayed:
    """Names storages once each, also where they stay and so have no record."""

    def __init__(self) -> None:
        self._scope: Scope | None = None
        self._named: set[tuple[int, Any]] = set()  # in this layer, in which they are alive

    def leave(self) -> None:
        """A forward pass has ended: storages may die, and others get their addresses."""
        self._scope = None

    def name(self, tensor: torch.Tensor, key: tuple[int, Any], scope: Scope) -> str | None:
        """The operation that made a storage; None: this layer has saved it before.

        Args:
            tensor: that is saved.
            key: of its storage, and which part of it.
            scope: that saves it.
        """
        if scope is not self._scope:
            self._named.clear()
            self._scope = scope
        if key in self._named:
            return None
        self._named.add(key)
        return maker_of(tensor)


def maker_of(tensor: torch.Tensor) -> str:
    """The operation that computed the bytes of a tensor, by the name of its node in autograd."""
    made, base = tensor, tensor._base
    if base is not None and node_of(tensor) is None:  # a function has made the view itself
        made = base
    node, _ = origin_of(node_of(made), made.output_nr)
    for _ in range(_MOST_VIEWS):
        if node is None or not _only_views(node):
            break
        node, _ = origin_of(*node.next_functions[0])
    if node is None or getattr(node, "variable", None) is not None:
        return NO_OPERATION
    return type(node).__name__.partition(_BACKWARD)[0]


def _only_views(node: Any) -> bool:
    kind = type(node)
    found = _is_view.get(kind)
    if found is None:
        name, _, rest = kind.__name__.partition(_BACKWARD)
        found = name in _VIEWS and rest.isdigit()
        if not isinstance(node, torch._C._FunctionBase):  # a forward pass may define a type
            _is_view[kind] = found
    return found
