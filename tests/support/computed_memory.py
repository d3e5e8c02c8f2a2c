# SPDX-License-Identifier: Apache-2.0
"""How much memory operations' results take: `ComputedMemory`, also of tensors on "meta"."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ComputedMemory(TorchDispatchMode):
    """Counts the storages that operations make in the context, while they are alive.

    What an operation takes within itself, a kernel's workspace, does not show; nor what was there
    before, such as parameters, of which operations make views. Several threads may enter it, of
    which one at a time runs.

    Attributes:
        peak_bytes: most bytes at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = self._num_bytes = 0
        self._sizes: dict[int, int] = {}  # by the storage's identity

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            one.untyped_storage()._cdata
            for one in tree_leaves((args, kwargs))
            if isinstance(one, torch.Tensor)
        }
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in given:
                self._count(one.untyped_storage())
        return result

    def count_none(self, *tensors: torch.Tensor) -> None:
        """These are there before."""
        for one in tensors:
            self._sizes[one.untyped_storage()._cdata] = 0

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._sizes:
            return
        self._sizes[storage._cdata] = storage.nbytes()
        self._num_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._num_bytes)
        weakref.finalize(storage, self._free, storage._cdata)

    def _free(self, identity: int) -> None:
        self._num_bytes -= self._sizes.pop(identity)
