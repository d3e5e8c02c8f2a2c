"""Where each tensor lies in the bytes of a bucket: `Layout`, made of `Slot`s.

A bucket's tensors move as one storage, so that a drive gets few and large requests.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from megatron.offload.tiers.mapped import own_pages, storage_at

_ALIGNMENT = 64  # bytes, of each tensor: torch's own allocator aligns so
# A storage that begins and ends at a page can be mapped and goes to a drive without a copy.
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
        tensors: by name; without gaps, with their dimensions in any order.
    """

    def __init__(self, tensors: Mapping[Name, torch.Tensor]) -> None:
        self.slots: dict[Name, Slot] = {}
        end = 0
        for name, tensor in tensors.items():
            self.slots[name] = Slot(end, tensor.shape, dense_stride(tensor), tensor.dtype)
            end = _round_up(end + tensor.nbytes, _ALIGNMENT)
        self.num_bytes = max(_round_up(end, _PAGE), _PAGE)

    def new_storage(self, device: torch.device) -> torch.UntypedStorage:
        """Uninitialised memory for a bucket; on a CPU it begins at a page."""
        if device.type == "cpu":
            return own_pages(self.num_bytes)
        return torch.empty(self.num_bytes, dtype=torch.uint8, device=device).untyped_storage()

    def views(self, storage: torch.UntypedStorage) -> dict[Name, torch.Tensor]:
        """The tensors, in a storage with the bucket's bytes."""
        return {name: _view(storage, slot) for name, slot in self.slots.items()}

    def views_apart(self, storage: torch.UntypedStorage) -> dict[Name, torch.Tensor]:
        """As `views`; on a CPU each tensor has a storage of its own over the same memory.

        `torch.save` saves whole storages, and libraries copy tensors that are a part of theirs.
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
        """Whether these tensors have the names, shapes, strides and types of the layout."""
        return {name: _kind(slot) for name, slot in self.slots.items()} == {
            name: (tensor.shape, dense_stride(tensor), tensor.dtype)
            for name, tensor in tensors.items()
        }

    def store(
        self, tensors: Iterable[tuple[Name, torch.Tensor]], storage: torch.UntypedStorage
    ) -> None:
        """Copies tensors to their places in a storage."""
        with torch.no_grad():
            for name, tensor in tensors:
                _view(storage, self.slots[name]).copy_(tensor)


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a tensor without gaps, with its dimensions in this tensor's order."""
    return torch.empty_like(tensor, device="meta").stride()


def _view(storage: torch.UntypedStorage, slot: Slot) -> torch.Tensor:
    view = torch.empty(0, dtype=slot.dtype, device=storage.device)
    return view.set_(storage, slot.start_bytes // slot.dtype.itemsize, slot.shape, slot.stride)


def _kind(slot: Slot) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return slot.shape, slot.stride, slot.dtype


def _round_up(num_bytes: int, granule: int) -> int:
    return -(-num_bytes // granule) * granule
