# SPDX-License-Identifier: Apache-2.0
"""Where an activation enters and where it comes back: `SavedTensorHooks.pack` and `unpack`.

Autograd calls them: `pack` when it has saved a tensor, `unpack` when backward needs it. Both run in
the thread of the operation. What happens in between is the engine's: it hands in the two verbs.
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch

from megatron.offload.saved.cache import TensorCache, span_of, whole
from megatron.offload.saved.record import SavedStorage, SavedView
from megatron.offload.saved.scope import Scope

# A context in which no mode and no subclass intercepts torch's functions: ours are none of their
# business, and they would see some thirty calls for each saved tensor.
PLAIN_TORCH = torch._C.DisableTorchFunction


class Mover(Protocol):
    """What the hooks ask of the engine."""

    @property
    def scope(self) -> Scope:
        """Where in the step we are."""
        ...

    def wants(self, num_bytes: int) -> bool:
        """Whether the policy moves so many bytes of this scope out of device memory."""
        ...

    def saved(self, record: SavedStorage, *, is_new: bool) -> None:
        """A storage was saved, for the first time or by one more operation."""
        ...

    def bring_back(self, record: SavedStorage) -> torch.UntypedStorage:
        """The record's bytes in memory, waiting for them if need be."""
        ...

    def used(self, record: SavedStorage) -> None:
        """A view of the record's bytes was handed to backward."""
        ...


class SavedTensorHooks:
    """The pair of functions for `register_hooks` and `saved_tensors_hooks`."""

    def __init__(self, cache: TensorCache, mover: Mover) -> None:
        self._cache = cache
        self._mover = mover
        # Held while a record is brought back, of which its state and the read-ahead expect one at
        # a time: several threads may run backward through one graph. Its holder may wait for a
        # read, which no thread that waits for the lock has to end. Taken before a record's lock.
        self._one_at_a_time = threading.Lock()

    def pack(self, tensor: torch.Tensor) -> SavedView | torch.Tensor:
        """What autograd keeps instead of `tensor`: a view record, or the tensor if it stays."""
        with PLAIN_TORCH():
            storage = self._cache.movable(tensor)
            return tensor if storage is None else self._take(tensor, storage, moves_whole=False)

    def pack_whole(self, tensor: torch.Tensor) -> SavedView | torch.Tensor:
        """The same for a tensor whose whole storage is needed, by it and others together."""
        with PLAIN_TORCH():
            storage = self._cache.movable(tensor)
            return tensor if storage is None else self._take(tensor, storage, moves_whole=True)

    def unpack(self, packed: SavedView | torch.Tensor) -> torch.Tensor:
        """The saved tensor, bit for bit.

        Raises:
            ChangedInPlaceError: it was modified in place since `pack`.
            StorageError: its bytes could not be read back.
        """
        if isinstance(packed, torch.Tensor):
            return packed
        with PLAIN_TORCH():
            packed.check_unchanged()
            with self._one_at_a_time:
                memory = self._mover.bring_back(packed.saved)
                tensor = packed.rebuild(memory)
                packed.saved.view_used()
                self._mover.used(packed.saved)
        return tensor

    def _take(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, *, moves_whole: bool
    ) -> SavedView | torch.Tensor:
        span = whole(storage)
        record = self._cache.find(storage, span, tensor)
        if record is None and not moves_whole and is_small_part(tensor, storage):
            span = span_of(tensor)
            record = self._cache.find(storage, span, tensor)
        is_new = record is None
        if record is None:
            if not self._mover.wants(span.num_bytes):
                return tensor
            record = self._cache.add(storage, span, tensor, self._mover.scope)
        view = SavedView(record, tensor, span.start_bytes)
        self._mover.saved(record, is_new=is_new)
        return view


def is_small_part(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether a view covers so little of its storage that a copy of its span should move."""
    # Cheap first: most saved tensors are all of their storage.
    return (
        tensor.nbytes * 2 <= storage.nbytes() and span_of(tensor).num_bytes * 2 <= storage.nbytes()
    )
