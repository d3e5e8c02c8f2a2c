# SPDX-License-Identifier: Apache-2.0
"""Tensors that wait on a tier though nobody has saved them for backward: `SetAside`.

Whoever runs a step in another order than autograd's has tensors that wait for their turn. They take
the way of activations: records of the same cache, written and read by the same threads, so that
bytes that are saved for backward as well move once. The engine makes it.

Note [A tensor that is empty for a while]
A hidden state of a forward pass that pauses is in the hands of frames that are not ours. So the
tensor stays, and what it is a view of is taken away and given back: it is full of NaN meanwhile, as
a parameter is that waits. Its place in autograd's graph, its hooks and its version counter stay.
Of whoever else has the same storage nothing is taken, but what it changes in place the tensor would
not see any more. So only a tensor that is alone with its storage leaves; any other stays, and for
the memory nothing were gained by it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from megatron.offload.activations.capture.hooks import PLAIN_TORCH, SavedTensorHooks
from megatron.offload.activations.saved.cache import TensorCache
from megatron.offload.activations.saved.record import State
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.activations.saved.view import SavedView
from megatron.offload.activations.transfer.reader import Reader
from megatron.offload.activations.transfer.writer import Writer
from megatron.offload.tiers.tier import Tier


class Emptied:
    """A tensor without its bytes, and where they are."""

    def __init__(self, tensor: torch.Tensor, view: SavedView) -> None:
        self.tensor = tensor
        self.view = view
        self.memory: torch.UntypedStorage | None = None  # is needed again before it was written


class SetAside:
    """Has tensors wait on a tier, and brings them back.

    Args:
        cache: knows which bytes are saved already, and what never moves.
        tier: that they go to.
        min_bytes: smaller ones stay.
        writer: takes them away.
        hooks: bring back what nobody refers to meanwhile.
        reader: brings back what stays a tensor meanwhile.
        moves_foreign: as of `SavedTensorHooks`.
    """

    def __init__(
        self,
        cache: TensorCache,
        tier: Tier,
        min_bytes: int,
        writer: Writer,
        hooks: SavedTensorHooks,
        reader: Reader,
        *,
        moves_foreign: bool,
    ) -> None:
        self._cache = cache
        self._tier = tier
        self._min_bytes = min_bytes
        self._writer = writer
        self._hooks = hooks
        self._reader = reader
        self._moves_foreign = moves_foreign
        alone = torch.empty(1)
        self._num_of_one = _num_users(alone.untyped_storage())
        self._empty: Any = WeakIdKeyDictionary()  # tensors

    # -- Away -----------------------------------------------------------------------------------

    def put(self, tensor: torch.Tensor, scope: Scope) -> SavedView | None:
        """Has a tensor wait on the tier; None: it stays in memory, because it cannot or need not.

        Args:
            tensor: for the caller to drop; its operation is on the stream of the calling thread.
            scope: the place in the step, for errors.
        """
        with PLAIN_TORCH():
            storage = self._cache.movable(tensor)
            if storage is None or storage.nbytes() < self._min_bytes:
                return None
            if tensor.nbytes != storage.nbytes():
                return None
            if not self._moves_foreign and not storage.resizable():
                return None
            record = self._cache.find(storage, None, tensor)
            if record is not None:  # its bytes are on the tier, or on their way
                return SavedView(record, tensor)
            record = self._cache.add(storage, None, tensor, scope)
            view = SavedView(record, tensor)
            self._writer.submit([self._writer.write(record, self._tier)])
            return view

    def empty(self, tensor: torch.Tensor, scope: Scope) -> Emptied | None:
        """The same for a tensor that others refer to: until `fill` it is full of NaN.

        Args:
            tensor: that an operation has made, and that nobody looks at meanwhile.
            scope: as of `put`.
        """
        with PLAIN_TORCH():
            if tensor._base is not None or tensor in self._empty:
                return None
            if _num_users(tensor.untyped_storage()) != self._num_of_one:
                return None
            view = self.put(tensor, scope)
            if view is None:
                return None
            nothing = torch.full((), float("nan"), dtype=tensor.dtype, device=tensor.device)
            tensor.data = nothing.expand(tensor.shape)
            self._empty[tensor] = True
            return Emptied(tensor, view)

    def is_empty(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one that was emptied and not filled again."""
        return tensor in self._empty

    # -- And back -------------------------------------------------------------------------------

    def read_ahead(self, waiting: SavedView | Emptied) -> None:
        """A tensor is needed soon: what has not left memory yet stays, else it is read."""
        if isinstance(waiting, Emptied):
            record = waiting.view.saved
            waiting.memory = waiting.memory or record.memory_not_left_yet
            is_there = waiting.memory is not None
        else:
            record = waiting.saved
            is_there = record.cancel_write() is not None
        if not is_there:
            self._reader.read_ahead(record)

    def take(self, waiting: SavedView) -> torch.Tensor:
        """What was put, bit for bit, for the stream of the calling thread.

        Raises:
            StorageError: its bytes could not be read back.
        """
        return self._hooks.unpack(waiting)

    def fill(self, emptied: Emptied) -> SavedView | None:
        """Gives an emptied tensor its bytes again, for the stream of the calling thread.

        Returns:
            While this is held and somebody saves the tensor, it is on the tier already.

        Raises:
            StorageError: they could not be read back.
        """
        view, tensor, memory = emptied.view, emptied.tensor, emptied.memory
        record = view.saved
        with PLAIN_TORCH():
            view.check_unchanged()
            if memory is None:
                memory = self._reader.wait_for_read(record, for_good=False)
            tensor.data = view.rebuild(memory)
            record.hand_over(memory)
            self._cache.moved(record, tensor)
            del self._empty[tensor]
        self._reader.end_use(view)
        return None if record.state is State.IN_MEMORY else view


def _num_users(storage: torch.UntypedStorage) -> int:
    """How many tensors and others have a storage."""
    return int(torch._C._storage_Use_Count(storage._cdata))
