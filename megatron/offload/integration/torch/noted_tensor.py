# SPDX-License-Identifier: Apache-2.0
"""A tensor that a layer finds before it runs, for when it runs again: `NotedTensor`.

`argument_snapshot.py` notes those of arguments, `attribute_snapshot.py` those of modules. See Note
[Tensors among arguments] there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch


class NotedTensor:
    """A tensor that a layer finds, and the bytes that it had then.

    Attributes:
        path: where it is.
        has_graph: whether it has a gradient.
        is_inside: whether a container or an object has it, which may change.
        is_held: whether it is held here, until the layer runs again.
        copy: its bytes, where the layer may change them.
        is_gone: whether a second run has found it no longer as it was.
    """

    def __init__(self, tensor: torch.Tensor, path: Any) -> None:
        self.path = path
        self.has_graph = tensor.requires_grad
        self.is_inside = False
        self.is_held = False
        self.copy: torch.Tensor | None = None
        self.is_gone = False
        self._version = version_of(tensor)
        self._strong: torch.Tensor | None = tensor
        self._weak = weakref.ref(tensor)
        self._shape: torch.Tensor | None = None

    @property
    def was_changed(self) -> bool:
        """Whether it is there and no longer as it was."""
        tensor = self._weak()
        return tensor is not None and version_of(tensor) != self._version

    def settle(self, used: set[Any]) -> None:
        """The layer has run: holds what a second run needs.

        Args:
            used: nodes of others that lead to what it has computed.
        """
        tensor, self._strong = self._strong, None
        assert tensor is not None
        if self.was_changed:
            return
        self.copy = None
        if not self.is_held:
            return
        if tensor.grad_fn is None or tensor.grad_fn in used or not is_strided(tensor):
            self._strong = tensor
        if is_strided(tensor):
            self._shape = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
            ).requires_grad_(self.has_graph)

    def present(self) -> torch.Tensor:
        """It, or one without bytes."""
        tensor = self._weak()
        if tensor is not None and (self._shape is None or not self.was_changed):
            return tensor
        self.is_gone = True
        assert self._shape is not None
        return self._shape


def is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor has been changed in place, as far as autograd counts it."""
    return 0 if tensor.is_inference() else tensor._version


def nodes_before(begin: int, results: Iterable[torch.Tensor]) -> set[Any]:
    """The nodes that those made since `begin` lead to, by autograd's numbers."""
    left: list[Any] = [one.grad_fn for one in results]
    seen: set[Any] = {None}
    before: set[Any] = set()
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if node._sequence_nr() < begin:
            before.add(node)
        else:
            left += [following for following, _ in node.next_functions]
    return before
