# SPDX-License-Identifier: Apache-2.0
"""Which tensor lies where in the bytes of a bucket: `Layout`, made of `Slot`s.

A bucket's tensors move as one storage, so that a drive sees few and long requests.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from megatron.offload.tiers.mapped import own_pages, storage_at

_ALIGNMENT = 64  # bytes, of each tensor: what torch's own allocator gives
# A storage that begins and ends at a page goes to a drive as a whole and can be mapped.
_PAGE = mmap.PAGESIZE

Name = tuple[int, str]  # of a tensor: its parameter's place in the bucket, its key in the state


class Slot(NamedTuple):
    """A tensor's place in a bucket's bytes."""

    start_bytes: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Layout:
    """Where each tensor of a bucket lies.

    Args:
        tensors: by name; dense, in whatever order their dimensions have.
    """

    def __init__(self, tensors: Mapping[Name, torch.Tensor]) -> None:
        self.slots: dict[Name, Slot] = {}
        end = 0
        for name, tensor in tensors.items():
            self.slots[name] = Slot(end, tensor.shape, dense_stride(tensor), tensor.dtype)
            end = _round_up(end + tensor.nbytes, _ALIGNMENT)
        self.num_bytes = max(_round_up(end, _PAGE), _PAGE)

    def new_storage(self, device: torch.device) -> torch.UntypedStorage:
        """Fresh memory for a bucket, contents undefined; on a CPU it begins at a page."""
        if device.type == "cpu":
            return own_pages(self.num_bytes)
        return torch.empty(self.num_bytes, dtype=torch.uint8, device=device).untyped_storage()

    def views(self, storage: torch.UntypedStorage) -> dict[Name, torch.Tensor]:
        """The tensors, in a storage that holds the bucket."""
        return {name: _view(storage, slot) for name, slot in self.slots.items()}

    def views_apart(self, storage: torch.UntypedStorage) -> dict[Name, torch.Tensor]:
        """As `views`, on a CPU each in a storage of its own over the same memory.

        Who saves tensors saves whole storages, and copies those of which it wants a part.
        """
        views = self.views(storage)
        if storage.device.type != "cpu":
            return views
        for name, view in views.items():
            if view.nbytes:
                own = storage_at(view.data_ptr(), view.nbytes, storage)
                views[name] = _view(own, self.slots[name]._replace(start_bytes=0))
        return views

    def fits(self, tensors: Mapping[Name, torch.Tensor]) -> bool:
        """Whether these are the tensors that it was made for, or others of their kind."""
        return {name: _kind(slot) for name, slot in self.slots.items()} == {
            name: (tensor.shape, dense_stride(tensor), tensor.dtype)
            for name, tensor in tensors.items()
        }

    def store(
        self, tensors: Iterable[tuple[Name, torch.Tensor]], storage: torch.UntypedStorage
    ) -> None:
        """Copies tensors to where they belong in a storage."""
        with torch.no_grad():
            for name, tensor in tensors:
                _view(storage, self.slots[name]).copy_(tensor)


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a tensor without gaps, with its dimensions in this one's order."""
    return torch.empty_like(tensor, device="meta").stride()


def _view(storage: torch.UntypedStorage, slot: Slot) -> torch.Tensor:
    view = torch.empty(0, dtype=slot.dtype, device=storage.device)
    return view.set_(storage, slot.start_bytes // slot.dtype.itemsize, slot.shape, slot.stride)


def _kind(slot: Slot) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return slot.shape, slot.stride, slot.dtype


def _round_up(num_bytes: int, granule: int) -> int:
    return -(-num_bytes // granule) * granule
