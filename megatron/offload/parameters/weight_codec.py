# SPDX-License-Identifier: Apache-2.0
"""Weights in 8 or 4 bits: `CODECS`, each with `encode` and `decode`.

Note [Rounded once]
A group of values that follow one another in memory has one scale: its largest magnitude (absmax),
in the type of the values. Of each value the nearest of a few levels is kept, which are parts of the
scale from -1 to 1; zero is one of them.

- int8: 255 levels, evenly spaced, groups of 128: 8.125 bits a value of a 16-bit type.
- nf4: 16 levels, as many values of a normal distribution around each of them, groups of 64: 4.25
  bits. It is NormalFloat4 of QLoRA (arXiv 2305.14314, appendix E).

The largest value of a group is kept exactly, because 1 is a level, and no value moves to another
level when it is rounded to its own type. So what was decoded is encoded and decoded without any
further change: weights are rounded once, and after that they move in few bits and stay the same.
A group with an infinite value or a NaN is NaN when it is decoded.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch

from megatron.offload.errors import PARAMETERS_PREFIX
from megatron.offload.machine.device_kernels import Kernels, sample_values

TYPES = (torch.float32, torch.bfloat16, torch.float16)

_CHUNK = 1 << 17  # values at a time on a CPU: temporaries stay in a cache
_CHUNK_ON_DEVICE = 1 << 24


@dataclass(frozen=True, slots=True)
class WeightCodec:
    """How weights become levels, and weights again.

    Attributes:
        name: as settings name it.
        bits: of a level's number: 8, or 4 of which a byte has two.
        group: values that share a scale.
    """

    name: str
    bits: int
    group: int

    def encoded_bytes(self, num_values: int, dtype: torch.dtype) -> int:
        """Bytes of so many values of a type, once they are encoded."""
        return self._scale_bytes(num_values, dtype) + -(-num_values * self.bits // 8)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Writes values in few bits each.

        Args:
            values: shape [N], contiguous, of one of `TYPES`.
            out: shape [encoded_bytes], uint8, on the same device.
        """
        scales, levels = self._parts(out, len(values), values.dtype)
        if values.device.type == "cpu" and (kernels := KERNELS.of(values)) is not None:
            between = _between(values.device) if self.bits == 4 else None
            kernels.encode(values, levels, scales, between, self.group)
            return
        for start in range(0, len(values), chunk := _chunk_of(values)):
            some = values[start : start + chunk].float()
            missing = -len(some) % self.group
            wide = torch.nn.functional.pad(some, (0, missing)).view(-1, self.group)
            scale = wide.abs().amax(1, keepdim=True)
            scales[start // self.group :][: len(scale)] = scale.view(-1).to(values.dtype)
            numbers = self._numbers((wide / scale).nan_to_num_(0.0, 0.0, 0.0)).view(-1)
            if self.bits == 4:
                pairs = numbers.view(-1, 2)
                numbers = pairs[:, 0] | pairs[:, 1] << 4
            at, size = start * self.bits // 8, -(-len(some) * self.bits // 8)
            levels[at : at + size] = numbers[:size]

    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the values that `encode` was given, each rounded: see Note [Rounded once].

        Args:
            encoded: its result, uint8.
            out: of the shape and type of its argument, on the same device.
        """
        if (kernels := KERNELS.of(out)) is not None:
            scales, levels = self._parts(encoded, len(out), out.dtype)
            pairs = _table(4, out.device) if self.bits == 4 else None
            kernels.decode(levels, scales, out, pairs, self.group)
        else:
            self.decode_by_torch(encoded, out)

    def decode_by_torch(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        """What `decode` does, by operations of torch; kernels are compared with it."""
        scales, levels = self._parts(encoded, len(out), out.dtype)
        table = _table(self.bits, out.device)
        for start in range(0, len(out), chunk := _chunk_of(out)):
            some = out[start : start + chunk]
            at = start * self.bits // 8
            numbers = levels[at : at + -(-len(some) * self.bits // 8)]
            parts = table[numbers.int()].view(-1)[: len(some)]
            missing = -len(some) % self.group
            wide = torch.nn.functional.pad(parts, (0, missing)).view(-1, self.group)
            scale = scales[start // self.group :][: len(wide)].float().unsqueeze(1)
            some.copy_((wide * scale).view(-1)[: len(some)])

    def _scale_bytes(self, num_values: int, dtype: torch.dtype) -> int:
        return -(-num_values // self.group) * dtype.itemsize

    def _parts(
        self, encoded: torch.Tensor, num_values: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales, and numbers of levels."""
        split = self._scale_bytes(num_values, dtype)
        return encoded[:split].view(dtype), encoded[split:]

    def _numbers(self, parts: torch.Tensor) -> torch.Tensor:
        """The numbers of the levels nearest to parts of the scale, as uint8."""
        if self.bits == 8:
            return (parts * 127).round_().to(torch.int8).view(torch.uint8)
        return torch.bucketize(parts, _between(parts.device), out_int32=True).to(torch.uint8)


CODECS = {one.name: one for one in (WeightCodec("int8", 8, 128), WeightCodec("nf4", 4, 64))}


@functools.cache
def normal_levels() -> tuple[float, ...]:
    """The 16 levels of NF4, from -1 to 1: see Note [Rounded once]."""
    tail = (1 - 1 / 32 + 1 - 1 / 30) / 2  # of the distribution beyond the last level
    quantile = NormalDist().inv_cdf
    above = [quantile(tail + (0.5 - tail) * n / 8) for n in range(8)]
    below = [-quantile(tail + (0.5 - tail) * n / 7) for n in range(7)]
    levels = sorted([*above, 0.0, *below])
    return tuple(level / above[0] for level in levels)


def _levels() -> torch.Tensor:
    """The levels of NF4: shape [16], whatever type and device are the default."""
    return torch.tensor(normal_levels(), dtype=torch.float32, device="cpu")


@functools.cache
def _between(device: torch.device) -> torch.Tensor:
    """Halfway between the levels of NF4: shape [15], float32."""
    levels = _levels()
    return ((levels[1:] + levels[:-1]) / 2).to(device)


@functools.cache
def _table(bits: int, device: torch.device) -> torch.Tensor:
    """The levels that a byte stands for: shape [256, 1 or 2], float32."""
    if bits == 8:
        numbers = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.int8)
        return (numbers.float() / 127).view(-1, 1).to(device)
    levels, byte = _levels(), torch.arange(256, device="cpu")
    return torch.stack((levels[byte & 15], levels[byte >> 4]), 1).to(device)


def _chunk_of(values: torch.Tensor) -> int:
    return _CHUNK if values.device.type == "cpu" else _CHUNK_ON_DEVICE


def kernels_agree(kernels: Any, device: torch.device) -> bool:
    """Whether kernels give the bits of operations of torch, of a few thousand values of each type.

    Args:
        kernels: has `decode`, as `weight_codec_on_gpu.py`.
        device: where they run.
    """
    sample = sample_values(128)
    for codec in CODECS.values():
        for dtype in TYPES:
            values = sample.to(device=device, dtype=dtype)
            size = codec.encoded_bytes(len(values), dtype)
            encoded = torch.empty(size, dtype=torch.uint8, device=device)
            codec.encode(values, encoded)
            expected, found = torch.empty_like(values), torch.empty_like(values)
            codec.decode_by_torch(encoded, expected)
            scales, levels = codec._parts(encoded, len(values), dtype)
            pairs = _table(4, device) if codec.bits == 4 else None
            kernels.decode(levels, scales, found, pairs, codec.group)
            if not torch.equal(expected.nan_to_num(nan=7), found.nan_to_num(nan=7)):
                return False
    return True


KERNELS = Kernels(__name__, PARAMETERS_PREFIX, kernels_agree)
