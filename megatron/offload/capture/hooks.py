# SPDX-License-Identifier: Apache-2.0
"""Where an activation enters and where it comes back: `SavedTensorHooks.pack` and `unpack`.

Autograd calls them: `pack` when it has saved a tensor, `unpack` when backward needs it. Both run in
the thread of the operation. What happens in between is the engine's: it hands in the two verbs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from megatron.offload.saved.cache import TensorCache, span_of
from megatron.offload.saved.record import ResidentTensor, SavedStorage, SavedView, Span
from megatron.offload.saved.scope import Scope

# A context in which no mode and no subclass intercepts torch's functions: ours are none of their
# business, and they would see some thirty calls for each saved tensor.
PLAIN_TORCH = torch._C.DisableTorchFunction

# What autograd keeps in place of a saved tensor. An inference tensor has no versions: it stands for
# itself.
Packed = SavedView | ResidentTensor | torch.Tensor


class Mover(Protocol):
    """What the hooks ask of the engine."""

    @property
    def scope(self) -> Scope:
        """Where in the step we are."""
        ...

    def tier_for(self, num_bytes: int) -> Any:
        """The tier that the policy sends so many bytes of this scope to; None: they stay."""
        ...

    def saved(self, record: SavedStorage, tier: Any) -> None:
        """A storage was saved, for the first time or, without a tier, by one more operation."""
        ...

    def bring_back(self, record: SavedStorage) -> torch.UntypedStorage:
        """The record's bytes in memory, waiting for them if need be."""
        ...

    def used(self, view: SavedView) -> None:
        """A view is about to be handed to backward."""
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

    def pack(self, tensor: torch.Tensor) -> Packed:
        """What autograd keeps instead of `tensor`: a view record, or the tensor if it stays."""
        with PLAIN_TORCH():
            storage = self._cache.movable(tensor)
            return self._keep(tensor) if storage is None else self._take(tensor, storage)

    def pack_found(self, tensor: torch.Tensor) -> Packed:
        """The same for a tensor that is known to be movable, without torch's modes in the way."""
        return self._take(tensor, tensor.untyped_storage())

    def pack_whole(self, tensor: torch.Tensor) -> Packed:
        """The same if its whole storage is needed, by it and others together."""
        return self._take(tensor, tensor.untyped_storage(), moves_whole=True)

    def emptying(
        self, pack: Callable[[torch.Tensor], Packed], leaf: torch.Tensor
    ) -> Callable[[torch.Tensor], Packed]:
        """`pack` for a leaf that nobody but autograd refers to: it gives its memory up.

        See Note [Leaves] in `graph.py`.
        """

        def pack_and_empty(tensor: torch.Tensor) -> Packed:
            packed = pack(tensor)
            leaf.data = leaf.new_empty(()).expand(leaf.shape)
            return packed

        return pack_and_empty

    def unpack(self, packed: Packed) -> torch.Tensor:
        """The saved tensor, bit for bit.

        Raises:
            ChangedInPlaceError: it was modified in place since `pack`.
            StorageError: its bytes could not be read back.
        """
        if not isinstance(packed, SavedView):
            with PLAIN_TORCH():
                return packed.tensor() if isinstance(packed, ResidentTensor) else packed
        with PLAIN_TORCH():
            tensor = packed.take_ready()
            if tensor is None:
                packed.check_unchanged()
                with self._one_at_a_time:
                    tensor = packed.rebuild(self._mover.bring_back(packed.saved))
        self._mover.used(packed)
        return tensor

    def _take(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, moves_whole: bool = False
    ) -> Packed:
        span: Span | None = None  # all of the storage
        record, tier = self._cache.find(storage, span, tensor), None
        if record is None and not moves_whole and is_small_part(tensor, storage):
            span = span_of(tensor)
            record = self._cache.find(storage, span, tensor)
        if record is None:
            tier = self._mover.tier_for(storage.nbytes() if span is None else span.num_bytes)
            if tier is None:
                return self._keep(tensor)
            record = self._cache.add(storage, span, tensor, self._mover.scope)
        view = SavedView(record, tensor)
        self._mover.saved(record, tier)
        return view

    def _keep(self, tensor: torch.Tensor) -> Packed:
        return tensor if tensor.is_inference() else ResidentTensor(tensor, self._mover.scope)


def is_small_part(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether a view covers so little of its storage that a copy of its span should move."""
    # Cheap first: most saved tensors are all of their storage.
    return (
        tensor.nbytes * 2 <= storage.nbytes() and span_of(tensor).num_bytes * 2 <= storage.nbytes()
    )


def needed_together(found: Sequence[tuple[torch.Tensor, torch.UntypedStorage]]) -> set[int]:
    """The storages of which these tensors together cover so much that all of it should move."""
    spans: dict[int, set[Span]] = {}
    sizes: dict[int, int] = {}
    for tensor, storage in found:
        if is_small_part(tensor, storage):
            spans.setdefault(storage._cdata, set()).add(span_of(tensor))
            sizes[storage._cdata] = storage.nbytes()
    return {c for c, own in spans.items() if sum(s.num_bytes for s in own) * 2 > sizes[c]}
