# SPDX-License-Identifier: Apache-2.0
"""Numbers in 8 bits: `encode_int8` and `decode_int8`.

Recipes call them in the thread and on the stream that compute. They never wait for a device.

Note [Eight bits a value]
Symmetric quantization to int8 in groups, by the largest magnitude (absmax), rounded to nearest: 128
values that follow one another in memory are a group. A group has one scale, a bfloat16: its
largest magnitude over 127. Of each value the nearest multiple of the scale is kept, of -127 to 127.
So a decoded value is off by half a scale at most, 1/253 of the largest, and zero stays zero. If a
group has an infinite value or a NaN, its scale is none that counts, and all of it is NaN when it is
decoded: what looks for overflows finds it. Nothing is drawn by chance: the same values give the
same bytes everywhere.

The scales come first, two bytes a group, then the values, a byte each: 8.125 bits a value.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

GROUP = 128  # values
LARGEST = 127
TYPES = (torch.float32, torch.bfloat16, torch.float16)

_CHUNK_ON_HOST, _CHUNK = 1 << 17, 1 << 23  # values at a time: temporaries are small, or in a cache


def encoded_bytes(num_values: int) -> int:
    """Bytes that `encode_int8` returns for so many values."""
    return num_values + 2 * _num_groups(num_values)


def encode_int8(values: torch.Tensor) -> torch.Tensor:
    """Values in 8 bits each: see Note [Eight bits a value].

    Args:
        values: of one dimension, contiguous, of one of `TYPES`.

    Returns:
        Shape [encoded_bytes], uint8, on the same device.
    """
    number = values.numel()
    encoded = torch.empty(encoded_bytes(number), dtype=torch.uint8, device=values.device)
    scales, bytes_ = _parts(encoded, number)
    kernels = _kernels_for(values)
    if kernels is not None:
        kernels.encode(values, bytes_, scales, GROUP, LARGEST)
        return encoded
    for start in range(0, number, chunk := _chunk_of(values)):
        some = values[start : start + chunk]
        groups = slice(start // GROUP, start // GROUP + _num_groups(some.numel()))
        _encode(some, bytes_[start : start + chunk], scales[groups])
    return encoded


def decode_int8(encoded: torch.Tensor, num_values: int, dtype: torch.dtype) -> torch.Tensor:
    """The values that `encode_int8` encoded, each off by half a scale of its group at most.

    Args:
        encoded: its result.
        num_values: of its argument.
        dtype: of its argument.

    Returns:
        Shape [num_values].
    """
    values = torch.empty(num_values, dtype=dtype, device=encoded.device)
    scales, bytes_ = _parts(encoded, num_values)
    kernels = _kernels_for(values)
    if kernels is not None:
        kernels.decode(bytes_, scales, values, GROUP)
        return values
    for start in range(0, num_values, chunk := _chunk_of(values)):
        some = values[start : start + chunk]
        groups = slice(start // GROUP, start // GROUP + _num_groups(some.numel()))
        _decode(bytes_[start : start + chunk], scales[groups], some)
    return values


def _num_groups(num_values: int) -> int:
    return -(-num_values // GROUP)


def _chunk_of(values: torch.Tensor) -> int:
    return _CHUNK_ON_HOST if values.device.type == "cpu" else _CHUNK


def _parts(encoded: torch.Tensor, num_values: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and values."""
    split = 2 * _num_groups(num_values)
    return encoded[:split].view(torch.bfloat16), encoded[split:].view(torch.int8)


def _encode(values: torch.Tensor, out: torch.Tensor, scales: torch.Tensor) -> None:
    wide = _in_groups(values.float())
    scales.copy_(wide.abs().amax(1).div_(LARGEST))
    multiples = wide / scales.float().unsqueeze(1)  # of no scale, or one of 0: no numbers
    multiples = multiples.round_().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    out.copy_(multiples.clamp_(-LARGEST, LARGEST).to(torch.int8).view(-1)[: out.numel()])


def _decode(multiples: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    wide = _in_groups(multiples.float()).mul_(scales.float().unsqueeze(1))
    out.copy_(wide.view(-1)[: out.numel()])


def _in_groups(values: torch.Tensor) -> torch.Tensor:
    missing = -values.numel() % GROUP
    if missing:
        values = torch.nn.functional.pad(values, (0, missing))
    return values.view(-1, GROUP)


@functools.cache
def _kernels() -> Any:
    """Machine code for a CPU, if numba is installed (the extra `auto`); else None."""
    if importlib.util.find_spec("numba") is None:
        return None
    from megatron.offload.activations.saved import int8_on_host

    return int8_on_host


def _kernels_for(values: torch.Tensor) -> Any:
    has_kernel = values.device.type == "cpu" and values.dtype in (torch.float32, torch.bfloat16)
    return _kernels() if has_kernel else None
