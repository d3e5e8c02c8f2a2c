# SPDX-License-Identifier: Apache-2.0
"""Where an activation enters and where it comes back: `SavedTensorHooks.pack` and `unpack`.

Autograd calls them: `pack` when it has saved a tensor, `unpack` when backward needs it. Both run in
the thread of the operation. What happens in between is the engine's: it hands in the two verbs.
"""

from __future__ import annotations

from typing import Protocol

import torch

from megatron.offload.saved.cache import TensorCache
from megatron.offload.saved.record import SavedStorage, SavedView
from megatron.offload.saved.scope import Scope


class Mover(Protocol):
    """What the hooks ask of the engine."""

    @property
    def scope(self) -> Scope:
        """Where in the step we are."""
        ...

    def wants(self, storage: torch.UntypedStorage) -> bool:
        """Whether the policy moves this storage out of device memory."""
        ...

    def saved(self, record: SavedStorage, *, is_new: bool) -> None:
        """A storage was saved, for the first time or by one more operation."""
        ...

    def bring_back(self, record: SavedStorage) -> torch.UntypedStorage:
        """The record's bytes in memory, waiting for them if need be."""
        ...


class SavedTensorHooks:
    """The pair of functions for `register_hooks` and `saved_tensors_hooks`."""

    def __init__(self, cache: TensorCache, mover: Mover) -> None:
        self._cache = cache
        self._mover = mover

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether `pack` would replace this tensor."""
        storage = self._cache.movable(tensor)
        return storage is not None and self._mover.wants(storage)

    def pack(self, tensor: torch.Tensor) -> SavedView | torch.Tensor:
        """What autograd keeps instead of `tensor`: a view record, or the tensor if it stays."""
        storage = self._cache.movable(tensor)
        if storage is None or not self._mover.wants(storage):
            return tensor
        record = self._cache.find(storage, tensor._version)
        is_new = record is None
        if record is None:
            record = self._cache.add(storage, self._mover.scope, tensor._version)
        view = SavedView(record, tensor)
        self._mover.saved(record, is_new=is_new)
        return view

    def unpack(self, packed: SavedView | torch.Tensor) -> torch.Tensor:
        """The saved tensor, bit for bit.

        Raises:
            ChangedInPlaceError: it was modified in place since `pack`.
            StorageError: its bytes could not be read back.
        """
        if isinstance(packed, torch.Tensor):
            return packed
        packed.check_unchanged()
        memory = self._mover.bring_back(packed.saved)
        tensor = packed.rebuild(memory)
        packed.saved.view_used()
        return tensor
