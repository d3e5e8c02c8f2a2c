# SPDX-License-Identifier: Apache-2.0
"""Tensors that wait on a tier although autograd has not saved them: `TensorSwapper`.

A layer-major step runs operations in another order than autograd's, so some tensors wait for their
turn. They move as activations do: records of the same cache, which the same threads write and read,
so that bytes that are also saved for backward move once. The engine makes it.

Note [A tensor that is empty for a while]
When a forward pass pauses, its frames, which are the model's, hold the hidden state. So the tensor
object stays and its storage is replaced: until it is filled again it views a single NaN, as an
offloaded parameter does. It keeps its place in autograd's graph, its hooks and its version counter.
A tensor that shares its storage stays: its other owners keep the memory anyway, and in-place
changes through them would be lost.
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
from megatron.offload.device.device import Device
from megatron.offload.tiers.tier import Tier


class SwappedTensor:
    """A tensor whose bytes were taken, and where they are."""

    def __init__(self, tensor: torch.Tensor, view: SavedView) -> None:
        self.tensor = tensor
        self.view = view
        self.memory: torch.UntypedStorage | None = None  # the bytes, if the write had not ended


class TensorSwapper:
    """Moves waiting tensors to a tier, and back.

    Args:
        cache: knows which bytes are saved already, and which never move.
        tier: that they go to.
        min_bytes: smaller ones stay.
        writer: writes them.
        hooks: bring a tensor back that its caller dropped (`put`, `take`).
        reader: brings the bytes of a tensor back that its owners still hold (`empty`, `fill`).
        device: see `SavedTensorHooks`.
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
        device: Device,
    ) -> None:
        self._cache = cache
        self._tier = tier
        self._min_bytes = min_bytes
        self._writer = writer
        self._hooks = hooks
        self._reader = reader
        self._device = device
        alone = torch.empty(1)
        self._num_of_one = _num_users(alone.untyped_storage())
        self._empty: Any = WeakIdKeyDictionary()  # tensors

    # -- Away -----------------------------------------------------------------------------------

    def put(self, tensor: torch.Tensor, scope: Scope) -> SavedView | None:
        """Moves a tensor to the tier; None: it stays in memory, because it cannot or need not move.

        Args:
            tensor: the caller drops it; its operation is on the stream of the calling thread.
            scope: the place in the step, for errors.
        """
        with PLAIN_TORCH():
            storage = self._cache.movable(tensor)
            if storage is None or storage.nbytes() < self._min_bytes:
                return None
            if tensor.nbytes != storage.nbytes():
                return None
            if not self._device.gets_back(storage):
                return None
            record = self._cache.find(storage, None, tensor)
            if record is not None and record.recipe is None:  # on the tier, or on its way
                return SavedView(record, tensor)
            record = self._cache.add(storage, None, tensor, scope)
            view = SavedView(record, tensor)
            self._writer.submit([self._writer.write(record, self._tier)])
            return view

    def empty(self, tensor: torch.Tensor, scope: Scope) -> SwappedTensor | None:
        """`put` for a tensor that others hold: until `fill` it is full of NaN.

        Args:
            tensor: result of an operation; its owners do not read it until `fill`.
            scope: see `put`.
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
            return SwappedTensor(tensor, view)

    def is_empty(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one that was emptied and not filled again."""
        return tensor in self._empty

    # -- And back -------------------------------------------------------------------------------

    def read_ahead(self, waiting: SavedView | SwappedTensor) -> None:
        """A tensor is needed soon: reads it, unless its bytes have not left memory yet."""
        if isinstance(waiting, SwappedTensor):
            record = waiting.view.saved
            waiting.memory = waiting.memory or record.memory_not_left_yet
            is_there = waiting.memory is not None
        else:
            record = waiting.saved
            is_there = record.cancel_write() is not None
        if not is_there:
            self._reader.read_ahead(record)

    def take(self, waiting: SavedView) -> torch.Tensor:
        """The tensor that was put, bit for bit, for the stream of the calling thread.

        Raises:
            StorageError: its bytes could not be read back.
        """
        return self._hooks.unpack(waiting)

    def fill(self, emptied: SwappedTensor) -> SavedView | None:
        """Gives an emptied tensor its bytes back, for the stream of the calling thread.

        Returns:
            Its bytes on the tier: as long as the caller holds this, autograd can save the tensor
            without another write. None: they were not written.

        Raises:
            StorageError: the reader could not read them back.
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
    """How many tensors and other objects hold a storage."""
    return int(torch._C._storage_Use_Count(storage._cdata))
