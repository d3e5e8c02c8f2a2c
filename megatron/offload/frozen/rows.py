# SPDX-License-Identifier: Apache-2.0
"""The tensors of a result as the bytes of its rows, and back: `Rows`.

Note [Rounded wherever they come from]
With a codec, floating-point numbers are kept in 8 bits, in groups that begin anew with each row. A
pass that computes them gets what their bytes stand for as well. Else a training would depend on
which rows were there already, and the next run on the same files would be another one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.offload.activations.saved.quantization import TYPES, Quantization
from megatron.offload.frozen.digests import bytes_of


@dataclass(frozen=True)
class Rows:
    """How a result is divided.

    Attributes:
        layouts: of its tensors, as `layout_of` gives them.
        num_rows: so many indices of the first dimension; 1: it is stored as a whole.
        codec: of numbers in floating point; None: they keep their bits.
    """

    layouts: Sequence[Sequence[Any]]
    num_rows: int
    codec: Quantization | None

    @property
    def num_bytes(self) -> int:
        """Of a row."""
        return sum(map(self._size, self.layouts))

    def encode(self, leaves: Sequence[torch.Tensor]) -> list[list[bytes]]:
        """The bytes of each row. It waits for a device."""
        each = [self._bytes_of(*one) for one in zip(leaves, self.layouts, strict=True)]
        return [[of_leaf[row] for of_leaf in each] for row in range(self.num_rows)]

    def decode(
        self, payloads: Sequence[memoryview | bytearray], device: torch.device
    ) -> list[torch.Tensor]:
        """The tensors.

        Args:
            payloads: the bytes of each row.
            device: for those that were on one of its kind.
        """
        leaves, begin = [], 0
        for layout in self.layouts:
            shape, stride, dtype, place = parsed(layout, device)
            made = torch.empty_strided(shape, stride, dtype=dtype, device=place)
            size = self._size(layout)
            for row, payload in enumerate(payloads if size else ()):
                values = self._values(payload[begin : begin + size], layout)
                into = made[row] if self.num_rows > 1 else made
                into.copy_(values.view(into.shape))
            leaves.append(made)
            begin += size
        return leaves

    def _bytes_of(self, leaf: torch.Tensor, layout: Sequence[Any]) -> list[bytes]:
        codec, size = self._codec_of(layout), self._size(layout)
        if codec is None:
            values = bytes_of(leaf)
            return [bytes(values[row * size : (row + 1) * size]) for row in range(self.num_rows)]
        rows = leaf.detach().to("cpu").reshape(self.num_rows, -1)
        return [bytes(bytes_of(codec.encode(row.contiguous()))) for row in rows]

    def _values(self, body: memoryview | bytearray, layout: Sequence[Any]) -> torch.Tensor:
        codec, dtype = self._codec_of(layout), parsed(layout)[2]
        if codec is None:
            return torch.frombuffer(body, dtype=dtype)
        encoded = torch.frombuffer(body, dtype=torch.uint8).clone()  # which is aligned
        return codec.decode(encoded, self._number(layout), dtype)

    def _codec_of(self, layout: Sequence[Any]) -> Quantization | None:
        """Of a tensor; None: it keeps its bits."""
        number, dtype = self._number(layout), parsed(layout)[2]
        if self.codec is None or dtype not in TYPES:
            return None
        is_smaller = self.codec.encoded_bytes(number) < number * dtype.itemsize
        return self.codec if is_smaller else None

    def _number(self, layout: Sequence[Any]) -> int:
        """Of the values in a row."""
        return math.prod(parsed(layout)[0]) // self.num_rows

    def _size(self, layout: Sequence[Any]) -> int:
        """Bytes of a row."""
        codec, number = self._codec_of(layout), self._number(layout)
        return codec.encoded_bytes(number) if codec else number * parsed(layout)[2].itemsize


def parsed(
    layout: Sequence[Any], device: torch.device | None = None
) -> tuple[list[int], list[int], torch.dtype, torch.device]:
    """Shape, stride, type and device of what `layout_of` was given.

    Args:
        layout: its result.
        device: if it is of the same kind, that of the layout.
    """
    dtype, kind, shape, stride = layout
    found: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
    is_of_kind = device is not None and kind == device.type
    return shape, stride, found, device if device is not None and is_of_kind else torch.device(kind)
