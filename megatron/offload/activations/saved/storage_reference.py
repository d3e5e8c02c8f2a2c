# SPDX-License-Identifier: Apache-2.0
"""A weak reference to a storage, `StorageReference`, and functions on storages.

Records and the cache have one for each storage. While it lives, torch gives the address of the
storage's object to no other storage; it keeps nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_functions: Any = torch.UntypedStorage
_free: Callable[[int], None] = _functions._free_weak_ref
_has_expired: Callable[[int], bool] = _functions._expired


class StorageReference:
    """A weak reference to a storage; torch's own takes three times as long to make.

    Attributes:
        cdata: the address that torch's functions for weak references take.
    """

    __slots__ = ("cdata",)

    def __init__(self, storage: Any) -> None:
        self.cdata: int = storage._weak_ref()

    def __del__(self, free: Callable[[int], None] = _free) -> None:  # also as the process ends
        try:
            cdata = self.cdata
        except AttributeError:  # an interrupt has ended `__init__`
            return
        free(cdata)

    def expired(self) -> bool:
        """Whether the storage was freed."""
        return _has_expired(self.cdata)

    def storage(self) -> torch.UntypedStorage | None:
        """The storage; None: it was freed."""
        alive: torch.UntypedStorage | None = _functions._new_with_weak_ptr(self.cdata)
        return alive


def place_of(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Size and address, which change when the owner frees memory that others hold."""
    return storage.nbytes(), storage.data_ptr()


def copy_of(storage: torch.UntypedStorage, start: int, num_bytes: int) -> torch.UntypedStorage:
    """A new storage with some of the bytes of another."""
    source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return source[start:][:num_bytes].clone().untyped_storage()
