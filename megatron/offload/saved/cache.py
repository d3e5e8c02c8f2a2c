# SPDX-License-Identifier: Apache-2.0
"""Which saved tensors are the same bytes, and which must never move: `TensorCache`.

The hooks ask it for the record of each tensor that autograd saves. It never does I/O.

Note [Identity of a storage]
A storage is known by the address of its `StorageImpl`, together with a weak reference to it. The
weak reference keeps that address from being given to another storage, so as long as an entry is
there, an equal address is the same storage: never a new one that happens to lie where an old one
was. The bytes are also the same only if the version counter stands where it stood.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.offload.saved.record import SavedReference, SavedStorage, storage_if_alive
from megatron.offload.saved.scope import Scope


class TensorCache:
    """Records by storage identity, and the storages that stay where they are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._records: dict[int, tuple[StorageWeakRef, SavedReference]] = {}
        self._excluded: dict[int, StorageWeakRef] = {}

    def exclude(self, tensors: Iterable[torch.Tensor]) -> None:
        """These tensors' storages never move: parameters, buffers, optimizer state, inputs."""
        for tensor in tensors:
            if _has_plain_storage(tensor):
                storage = tensor.untyped_storage()
                self._excluded[storage._cdata] = StorageWeakRef(storage)

    def movable(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        """The tensor's storage, if its bytes can move exactly and are not excluded.

        Subclasses (DTensor, quantised tensors), other layouts, lazily conjugated or negated
        views and tensors on other devices stay as they are.
        """
        if (
            type(tensor) is not torch.Tensor
            or tensor.device.type != self._device.type
            or not _has_plain_storage(tensor)
            or tensor.is_inference()
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or storage._cdata in self._excluded:
            return None
        return storage

    def find(self, storage: torch.UntypedStorage, version: int) -> SavedStorage | None:
        """The live record of exactly these bytes, if they were saved before."""
        entry = self._records.get(storage._cdata)
        record = entry[1]() if entry is not None else None
        return record if record is not None and record.version == version else None

    def add(self, storage: torch.UntypedStorage, scope: Scope, version: int) -> SavedStorage:
        """A new record for a storage that `find` does not know."""
        record = SavedStorage(storage, scope, version)
        self._records[storage._cdata] = (record.origin, weakref.ref(record))
        return record

    def end_step(self) -> int:
        """Forgets the step's records; excludes storages that outlive it. The bytes newly excluded.

        A storage whose records are all gone but that is still alive is held by somebody else
        from step to step (an attention mask, a rotary table): moving it never frees anything.
        """
        learned_bytes = 0
        for cdata, (weak, reference) in list(self._records.items()):
            record = reference()
            if record is not None and not weak.expired():
                continue  # its graph is still alive
            del self._records[cdata]
            if record is None and not weak.expired() and cdata not in self._excluded:
                storage = storage_if_alive(weak)
                if storage is not None:
                    self._excluded[cdata] = weak
                    learned_bytes += storage.nbytes()
        for cdata in [c for c, weak in self._excluded.items() if weak.expired()]:
            del self._excluded[cdata]
        return learned_bytes


def _has_plain_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
