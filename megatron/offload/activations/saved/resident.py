# SPDX-License-Identifier: Apache-2.0
"""What autograd holds in place of a tensor that stays in memory: `ResidentTensor`."""

from __future__ import annotations

import torch

from megatron.offload.activations.saved.scope import Scope
from megatron.offload.errors import ChangedInPlaceError

_alias = torch.Tensor._make_subclass


class ResidentTensor:
    """What autograd holds in place of a saved tensor that stays in memory.

    Autograd does not check versions of saved tensors that have hooks, so this class does. It holds
    the tensor without its graph: the node would hold the tensor in turn. A subclass of Tensor is
    held as it is, because only the subclass knows how to detach itself.

    Attributes:
        copy: of a parameter that others take back before a recipe is found: Note [Parameters that
            are taken back] in `available.py`.
    """

    __slots__ = ("_scope", "_tensor", "_version", "copy")

    def __init__(self, tensor: torch.Tensor, scope: Scope) -> None:
        self._scope = scope
        is_plain = type(tensor) is torch.Tensor
        # As `without_graph`.
        self._tensor = _alias(torch.Tensor, tensor) if is_plain and not tensor.is_leaf else tensor
        self._version = tensor._version
        self.copy: torch.Tensor | None = None

    @property
    def held(self) -> torch.Tensor:
        """The tensor as it is now, whether it was changed or not."""
        return self._tensor

    @property
    def version(self) -> int:
        """Of the tensor that was saved."""
        return self._version

    @property
    def is_changed(self) -> bool:
        """Whether it was modified in place since it was saved."""
        return self._tensor._version != self._version

    def tensor(self) -> torch.Tensor:
        """The saved tensor itself. Raises ChangedInPlaceError if it was modified in place since."""
        tensor = self._tensor
        if self.is_changed:
            shape = "nested" if tensor.is_nested else tuple(tensor.shape)
            raise changed_in_place(tensor, self._version, shape, self._scope)
        return tensor


def changed_in_place(
    tensor: torch.Tensor, version: int, shape: object, scope: Scope
) -> ChangedInPlaceError:
    """The error for a tensor that was saved at another version than it has now."""
    return ChangedInPlaceError(
        f"an activation of {scope} needed for gradient computation has been modified by an "
        f"inplace operation: {tensor.dtype} of shape {shape} is at version {tensor._version}; "
        f"expected version {version}; make the operation out of place or clone its input"
    )
