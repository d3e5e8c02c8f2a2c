# SPDX-License-Identifier: Apache-2.0
"""The bytes of a unit of frozen parameters in few bits each: `UnitEncoding`."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from megatron.offload.moving.layout import Layout, Slot
from megatron.offload.parameters.weight_codec import TYPES, WeightCodec
from megatron.offload.tiers.mapped import own_pages

_ALIGNMENT = 64  # bytes, of each parameter
_SMALL = 1000  # times a matrix is smaller than the largest of its unit, and stays exact


def encoded_among(params: Sequence[torch.Tensor]) -> list[bool]:
    """Which of a unit's frozen parameters a codec makes smaller: matrices, not biases and norms.

    Nor a matrix of less than a thousandth of the largest one: that would save nothing, and it may
    be the router of a mixture of experts, whose errors would send tokens elsewhere.
    """
    sizes = [one.numel() if one.dtype in TYPES and one.dim() > 1 else 0 for one in params]
    most = max(sizes, default=0)
    return [size > 0 and size * _SMALL >= most for size in sizes]


def moves_encoded(params: Sequence[torch.Tensor]) -> bool:
    """Whether a unit of these parameters is encoded: none is trained, and some are matrices."""
    return not any(one.requires_grad for one in params) and any(encoded_among(params))


def encoded_bytes(params: Sequence[torch.Tensor], codec: WeightCodec) -> int:
    """Bytes of a unit's parameters, encoded if they can be."""
    moves = moves_encoded(params)
    return sum(
        codec.encoded_bytes(one.numel(), one.dtype) if moves and is_encoded else one.nbytes
        for one, is_encoded in zip(params, encoded_among(params), strict=True)
    )


class _Place(NamedTuple):
    """Where a parameter lies, as it is and encoded. In bytes."""

    slot: Slot
    start: int
    size: int
    is_encoded: bool

    def values(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The parameter's values in memory order, shape [N]; as bytes if it is not encoded."""
        dtype, start = self.slot.dtype, self.slot.start_bytes
        number = self.slot.shape.numel()
        if not self.is_encoded:
            number, dtype = self.size, torch.uint8
        return torch.empty(0, dtype=dtype, device=storage.device).set_(
            storage, start // dtype.itemsize, (number,), (1,)
        )

    def bytes(self, encoded: torch.UntypedStorage) -> torch.Tensor:
        """Its part of the encoded bytes, shape [size], uint8."""
        nothing = torch.empty(0, dtype=torch.uint8, device=encoded.device)
        return nothing.set_(encoded, self.start, (self.size,), (1,))


class UnitEncoding:
    """How a unit's storage is encoded.

    Args:
        layout: of the unit.
        codec: of its matrices; the others keep their bytes.

    Attributes:
        num_bytes: of the encoded unit, in whole pages.
    """

    def __init__(self, layout: Layout, codec: WeightCodec) -> None:
        self._codec = codec
        self._places: list[_Place] = []
        end = 0
        slots = layout.slots.values()
        likes = [torch.empty(slot.shape, dtype=slot.dtype, device="meta") for slot in slots]
        for slot, like, encoded in zip(slots, likes, encoded_among(likes), strict=True):
            size = codec.encoded_bytes(like.numel(), slot.dtype) if encoded else like.nbytes
            self._places.append(_Place(slot, end, size, encoded))
            end = -(-(end + size) // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = max(-(-end // mmap.PAGESIZE), 1) * mmap.PAGESIZE

    def encode(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """A unit's bytes, encoded, in new memory on the same device."""
        encoded = self._new(storage.device)
        for place, values in self._each(storage):
            if place.is_encoded:
                self._codec.encode(values, place.bytes(encoded))
            else:
                place.bytes(encoded).copy_(values)
        return encoded

    def decode(self, encoded: torch.UntypedStorage, storage: torch.UntypedStorage) -> None:
        """Writes a unit's bytes: of encoded ones, on the same device."""
        for place, values in self._each(storage):
            if place.is_encoded:
                self._codec.decode(place.bytes(encoded), values)
            else:
                values.copy_(place.bytes(encoded))

    def agrees(self, encoded: torch.UntypedStorage, storage: torch.UntypedStorage) -> bool:
        """Whether a unit's bytes are those that encoded ones stand for."""
        for place, values in self._each(storage):
            expected = torch.empty_like(values)
            if place.is_encoded:
                self._codec.decode(place.bytes(encoded), expected)
            else:
                expected.copy_(place.bytes(encoded))
            if not torch.equal(expected.view(torch.uint8), values.view(torch.uint8)):
                return False
        return True

    def _new(self, device: torch.device) -> torch.UntypedStorage:
        if device.type == "cpu":
            return own_pages(self.num_bytes)
        return torch.empty(self.num_bytes, dtype=torch.uint8, device=device).untyped_storage()

    def _each(self, storage: torch.UntypedStorage) -> Iterator[tuple[_Place, torch.Tensor]]:
        for place in self._places:
            yield place, place.values(storage)
