# SPDX-License-Identifier: Apache-2.0
"""What autograd holds in place of a saved tensor whose bytes move: `SavedView`.

The bytes are those of a `SavedStorage` (`record.py`), which several views may share.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from megatron.offload.activations.saved.record import SavedStorage
from megatron.offload.activations.saved.resident import changed_in_place
from megatron.offload.activations.saved.tensor_kind import without_graph

_alias = torch.Tensor._make_subclass
# AccumulateGrad takes a gradient that only autograd holds as it is: then `.grad` is what we have
# built, and shares its version counter. An original would be held by autograd, and copied.
_OF_GRADIENTS = (
    "; an earlier backward pass has used it: where a Function returns what it has saved as a "
    "gradient, have it return a clone, for .grad may be that tensor, which later passes and the "
    "script change"
)


class SavedView:
    """What autograd holds in place of a saved tensor: how to view its storage again.

    Args:
        saved: the bytes.
        tensor: the saved tensor.
    """

    __slots__ = (
        *("_offset", "_shape", "_stride", "_version", "_witness", "__weakref__"),
        *("is_used", "built", "ready", "saved"),
    )

    def __init__(self, saved: SavedStorage, tensor: torch.Tensor) -> None:
        self.saved = saved
        self.is_used = False
        # The tensor, if the dispatcher has built it: one use takes it out, also where several
        # threads ask.
        self.built: list[torch.Tensor] | None = None
        self.ready: Sequence[Any] | None = None  # of the built tensor, see the record
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._offset = tensor.storage_offset()
        self._version = tensor._version
        witness = saved.witness  # the cache made sure that all views share its version counter
        if witness is None or witness.dtype is not tensor.dtype:
            witness = saved.witness = _alias(torch.Tensor, tensor)  # as `witness_of`
            nothing = _nothing.get((tensor.dtype, tensor.device))
            if nothing is None:
                nothing = _nothing_like(tensor.dtype, tensor.device)
            witness.data = nothing
        self._witness = witness
        with saved._lock:
            saved.num_unused_views += 1
        saved._views.append(weakref.ref(self))

    @classmethod
    def again(cls, view: SavedView) -> SavedView:
        """The same view once more, for another use."""
        one = cls.__new__(cls)
        one.saved, one.is_used, one.built, one.ready = view.saved, False, None, None
        one._shape, one._stride, one._offset = view._shape, view._stride, view._offset
        one._version, one._witness = view._version, view._witness
        with one.saved._lock:
            one.saved.num_unused_views += 1
        one.saved._views.append(weakref.ref(one))
        return one

    @property
    def version(self) -> int:
        """Of the tensor that was saved."""
        return self._version

    @property
    def is_changed(self) -> bool:
        """Whether the tensor was modified in place since it was saved."""
        return self._witness._version != self._version

    def take_built(self) -> torch.Tensor | None:
        """The tensor, if it is built and was not modified; no other call gets the same one."""
        built = self.built
        if built is None or self._witness._version != self._version:
            return None
        try:
            return built.pop()
        except IndexError:
            return None

    def check_unchanged(self) -> None:
        """Checks that the tensor was not modified in place since it was saved.

        Raises:
            ChangedInPlaceError: it was.
        """
        if self.is_changed:
            shape, advice = tuple(self._shape), _OF_GRADIENTS if self.is_used else ""
            raise changed_in_place(self._witness, self._version, shape, self.saved.scope, advice)

    def rebuild(self, memory: torch.UntypedStorage) -> torch.Tensor:
        """The tensor with its own shape, stride, offset, dtype and version counter, on `memory`.

        A change in place in backward shows in every view of it, and `check_unchanged` notices it.
        """
        witness, offset = self._witness, self._offset
        start_bytes = self.saved.start_bytes
        # `memory` is the copy of a span, or all of the storage that the span is a part of.
        if start_bytes and memory.nbytes() == self.saved.saved_bytes:
            offset -= start_bytes // witness.element_size()
        # `set_` alone lets go of the GIL: see `tensor_kind.py`.
        content = without_graph(_nothing_like(witness.dtype, witness.device))
        content.set_(memory, offset, self._shape, self._stride)
        tensor = without_graph(witness)
        tensor.data = content
        return tensor


def witness_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that shares the version counter of `tensor` and none of its memory.

    `detach` shares the counter; assigning `data` keeps the counter and replaces the storage.
    """
    witness = without_graph(tensor)
    witness.data = _nothing_like(tensor.dtype, tensor.device)
    return witness


def _nothing_like(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An empty tensor, shared by all witnesses of its kind."""
    nothing = _nothing.get((dtype, device))
    if nothing is None:
        nothing = torch.empty(0, dtype=dtype, device=device)
        if type(nothing) is torch.Tensor:  # not the tensor of a mode, such as a fake tensor
            _nothing[dtype, device] = nothing
    return nothing


_nothing: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
