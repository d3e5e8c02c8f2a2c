# SPDX-License-Identifier: Apache-2.0
"""Numbers in 8 or 4 bits: `INT8` and `INT4`, each with `encode` and `decode`.

Recipes call them in the thread and on the stream that compute. They never wait for a device.

Note [Few bits a value]
Symmetric quantization to integers in groups, by the largest magnitude (absmax): 128 values that
follow one another in memory are a group. A group has one scale, a bfloat16: its largest magnitude
over 127 (int8) or 7 (int4). Of each value a multiple of the scale is kept, and zero stays zero. If
a group has an infinite value or a NaN, its scale is none that counts, and all of it is NaN when it
is decoded: what looks for overflows finds it.

- int8 keeps the nearest multiple: a decoded value is off by half a scale at most, 1/253 of the
  largest.
- int4 keeps one of the two next multiples, the nearer one more often (stochastic rounding), so that
  the mean over many groups is the value: what is off does not add up over steps. A decoded value is
  off by a scale at most, 1/6.9 of the largest. `rounding_noise.py` says where the noise is from.

The scales come first, two bytes a group, then the multiples: 8.125 or 4.125 bits a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron.offload.activations.saved.rounding_noise import GROUP, noise_of
from megatron.offload.errors import PREFIX
from megatron.offload.machine.device_kernels import Kernels, sample_values

TYPES = (torch.float32, torch.bfloat16, torch.float16)

_CHUNK_ON_HOST, _CHUNK = 1 << 17, 1 << 23  # values at a time: temporaries are small, or in a cache


@dataclass(frozen=True, slots=True)
class Quantization:
    """How values become integers and values again.

    Attributes:
        bits: of an integer: 8, or 4 of which a byte has two.
        is_stochastic: values are rounded up or down by their own noise, else to nearest.
    """

    bits: int
    is_stochastic: bool

    @property
    def largest(self) -> int:
        """The largest multiple of the scale."""
        return (1 << (self.bits - 1)) - 1

    def encoded_bytes(self, num_values: int) -> int:
        """Bytes that `encode` returns for so many values."""
        return 2 * _num_groups(num_values) + -(-num_values * self.bits // 8)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Values in few bits each: see Note [Few bits a value].

        Args:
            values: of one dimension, contiguous, of one of `TYPES`.

        Returns:
            Shape [encoded_bytes], uint8, on the same device.
        """
        number = values.numel()
        encoded = torch.empty(self.encoded_bytes(number), dtype=torch.uint8, device=values.device)
        if (kernels := KERNELS.of(values)) is not None:
            scales, multiples = _parts(encoded, number)
            kernels.encode(values, multiples, scales, self.bits)
        else:
            self.encode_by_torch(values, encoded)
        return encoded

    def encode_by_torch(self, values: torch.Tensor, encoded: torch.Tensor) -> None:
        """What `encode` does, by operations of torch; kernels are compared with it."""
        number = values.numel()
        scales, out = _parts(encoded, number)
        for start in range(0, number, chunk := _chunk_of(values)):
            some = values[start : start + chunk]
            multiples = self._encode(some, scales[start // GROUP :], start // GROUP)
            at = start * self.bits // 8
            out[at : at + len(multiples)] = multiples

    def decode(self, encoded: torch.Tensor, num_values: int, dtype: torch.dtype) -> torch.Tensor:
        """The values that `encode` encoded, each off by as much as the note says at most.

        Args:
            encoded: its result.
            num_values: of its argument.
            dtype: of its argument.

        Returns:
            Shape [num_values].
        """
        values = torch.empty(num_values, dtype=dtype, device=encoded.device)
        if (kernels := KERNELS.of(values)) is not None:
            scales, multiples = _parts(encoded, num_values)
            kernels.decode(multiples, scales, values, self.bits)
        else:
            self.decode_by_torch(encoded, values)
        return values

    def decode_by_torch(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        """What `decode` does, by operations of torch; kernels are compared with it."""
        number = out.numel()
        scales, multiples = _parts(encoded, number)
        for start in range(0, number, chunk := _chunk_of(out)):
            at, end = (place * self.bits // 8 for place in (start, start + chunk))
            self._decode(multiples[at:end], scales[start // GROUP :], out[start : start + chunk])

    def _encode(self, values: torch.Tensor, scales: torch.Tensor, place: int) -> torch.Tensor:
        """The multiples of some values, whose first group is at a place; writes their scales."""
        wide = _in_groups(values.float())
        largest = wide.abs().amax(1)
        # By a tensor: CUDA multiplies by the reciprocal of a number, which rounds twice.
        exact = largest / largest.new_full((), self.largest)
        scale = scales[: len(wide)]
        scale.copy_(_rounded_up(exact) if self.is_stochastic else exact)
        multiples = wide / scale.float().unsqueeze(1)  # of no scale, or one of 0: no numbers
        if self.is_stochastic:
            multiples = multiples.add_(noise_of(wide, place)).floor_()
        else:
            multiples = multiples.round_()
        multiples = multiples.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        multiples = multiples.clamp_(-self.largest, self.largest)
        if self.bits == 8:
            return multiples.to(torch.int8).view(torch.uint8).view(-1)[: values.numel()]
        pairs = multiples.add_(8).to(torch.uint8).view(-1, 2)
        return (pairs[:, 0] | pairs[:, 1] << 4)[: -(-values.numel() // 2)]

    def _decode(self, multiples: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        if self.bits == 8:
            wide = multiples.view(torch.int8).float()
        else:
            wide = torch.stack((multiples & 15, multiples >> 4), 1).view(-1).float() - 8
        wide = _in_groups(wide[: out.numel()])
        wide.mul_(scales[: len(wide)].float().unsqueeze(1))
        out.copy_(wide.view(-1)[: out.numel()])


INT8 = Quantization(8, is_stochastic=False)
INT4 = Quantization(4, is_stochastic=True)


def _rounded_up(scales: torch.Tensor) -> torch.Tensor:
    """The next bfloat16 that is not smaller: with it no multiple is beyond the largest."""
    bits = scales.view(torch.int32)
    up = ((bits + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(scales.isfinite(), up, scales.to(torch.bfloat16))


def _num_groups(num_values: int) -> int:
    return -(-num_values // GROUP)


def _chunk_of(values: torch.Tensor) -> int:
    return _CHUNK_ON_HOST if values.device.type == "cpu" else _CHUNK


def _parts(encoded: torch.Tensor, num_values: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales, and the bytes of multiples."""
    split = 2 * _num_groups(num_values)
    return encoded[:split].view(torch.bfloat16), encoded[split:]


def _in_groups(values: torch.Tensor) -> torch.Tensor:
    missing = -values.numel() % GROUP
    if missing:
        values = torch.nn.functional.pad(values, (0, missing))
    return values.view(-1, GROUP)


def kernels_agree(kernels: Any, device: torch.device) -> bool:
    """Whether kernels give the bits of operations of torch, of a few thousand values of each type.

    Args:
        kernels: has `encode` and `decode`, as `quantization_on_gpu.py`.
        device: where they run.
    """
    sample = sample_values(GROUP)
    for one in (INT8, INT4):
        for dtype in TYPES:
            values = sample.to(device=device, dtype=dtype)
            expected, found = (
                torch.zeros(one.encoded_bytes(len(values)), dtype=torch.uint8, device=device)
                for _ in range(2)
            )
            one.encode_by_torch(values, expected)
            scales, multiples = _parts(found, len(values))
            kernels.encode(values, multiples, scales, one.bits)
            decoded, again = torch.empty_like(values), torch.empty_like(values)
            one.decode_by_torch(expected, decoded)
            kernels.decode(multiples, scales, again, one.bits)
            split = 2 * _num_groups(len(values))  # a NaN has many bits
            same_scales = torch.equal(scales.nan_to_num(nan=7), _scales(expected, len(values)))
            if not (same_scales and torch.equal(found[split:], expected[split:])):
                return False
            if not torch.equal(decoded.nan_to_num(nan=7), again.nan_to_num(nan=7)):
                return False
    return True


def _scales(encoded: torch.Tensor, num_values: int) -> torch.Tensor:
    return _parts(encoded, num_values)[0].nan_to_num(nan=7)


KERNELS = Kernels(__name__, PREFIX, kernels_agree)
