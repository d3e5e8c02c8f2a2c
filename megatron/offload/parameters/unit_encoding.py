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


def is_encoded(param: torch.Tensor) -> bool:
    """Whether a codec makes a frozen parameter smaller: matrices, not biases and norms."""
    return param.dtype in TYPES and param.dim() > 1


def moves_encoded(params: Sequence[torch.Tensor]) -> bool:
    """Whether a unit of these parameters is encoded: none is trained, and some are matrices."""
    return not any(one.requires_grad for one in params) and any(map(is_encoded, params))


def encoded_bytes(params: Sequence[torch.Tensor], codec: WeightCodec) -> int:
    """Bytes of a unit's parameters, encoded if they can be."""
    return sum(
        codec.encoded_bytes(one.numel(), one.dtype)
        if moves_encoded(params) and is_encoded(one)
        else one.nbytes
        for one in params
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
        for slot in layout.slots.values():
            like = torch.empty(slot.shape, dtype=slot.dtype, device="meta")
            encoded = is_encoded(like)
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
