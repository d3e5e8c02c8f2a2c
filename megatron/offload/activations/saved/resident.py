# SPDX-License-Identifier: Apache-2.0
"""What autograd holds in place of a tensor that stays in memory: `ResidentTensor`."""

from __future__ import annotations

import torch

from megatron.offload.activations.saved.scope import Scope
from megatron.offload.errors import ChangedInPlaceError

_alias = torch.Tensor._make_subclass
_dispatch_keys = torch._C._dispatch_keys
_DISPATCHES = torch._C.DispatchKey.Python


class ResidentTensor:
    """What autograd holds in place of a saved tensor that stays in memory.

    Autograd does not check versions of saved tensors that have hooks, so this class does. It holds
    the tensor without its graph: the node holds what stands for its result, and a result that led
    to its node would never be freed if no backward pass came. A leaf is held as it is. Of
    subclasses, those that dispatch operations detach themselves; others are plain tensors to
    autograd, which hands them out as such.

    Attributes:
        copy: of a parameter that others take back before a recipe is found: Note [Parameters that
            are taken back] in `available.py`.
    """

    __slots__ = ("_scope", "_tensor", "_version", "copy")

    def __init__(self, tensor: torch.Tensor, scope: Scope) -> None:
        self._scope = scope
        self._version = tensor._version
        if tensor.is_leaf:
            self._tensor = tensor
        elif type(tensor) is not torch.Tensor and _dispatch_keys(tensor).has(_DISPATCHES):
            self._tensor = tensor.detach()
        else:
            self._tensor = _alias(torch.Tensor, tensor)  # as `without_graph`
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
    tensor: torch.Tensor, version: int, shape: object, scope: Scope, advice: str = ""
) -> ChangedInPlaceError:
    """The error for a tensor that was saved at another version than it has now."""
    return ChangedInPlaceError(
        f"an activation of {scope} needed for gradient computation has been modified by an "
        f"inplace operation: {tensor.dtype} of shape {shape} is at version {tensor._version}; "
        f"expected version {version}; make the operation out of place or clone its input{advice}"
    )
