# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of what `quantization.py` computes, the same bits: `encode`, `decode`.

A value is read once and written once; operations of torch read and write it some twenty times.
`quantization.py` compares them with these operations on each device before it uses them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from megatron.offload.activations.saved.rounding_noise import (
    FIRST_FACTOR,
    GROUP,
    SECOND_FACTOR,
    STRIDE,
    factors_of_places,
    keys_of_places,
)
from megatron.offload.machine.device_kernels import on_device_of

# Groups and warps of a program; of several that were measured on an H100 the fastest.
_ENCODE_8, _DECODE_8 = (16, 4), (16, 4)
_ENCODE_4, _DECODE_4 = (8, 1), (8, 4)
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# The kernels see these as constants.
_INFINITE = tl.constexpr(0x7F800000)  # the bits of an infinite float32; those of NaN are above
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_FIRST, _SECOND = tl.constexpr(FIRST_FACTOR), tl.constexpr(SECOND_FACTOR)
_STRIDE = tl.constexpr(STRIDE)
BFLOAT16 = tl.constexpr(KINDS[torch.bfloat16])
# Added and taken away again, it leaves the nearest whole number, the even one of two.
_WHOLE = tl.constexpr(12582912.0)


def kernel(function: Any) -> Any:
    """A kernel, or a part of one."""
    return triton.jit(function)


def encode(values: torch.Tensor, out: torch.Tensor, scales: torch.Tensor, bits: int) -> None:
    """Writes the multiples and the scales of values: float32, bfloat16 or float16."""
    tensors = [bits_of(values), out, bits_of(scales)]
    if bits == 8:
        tensors[1] = out.view(torch.int8)
    else:
        tensors += _tables(values.device)
    chosen, size = (_encode_8, _ENCODE_8) if bits == 8 else (_encode_4, _ENCODE_4)
    _run(chosen, size, len(scales), tensors, len(values), KINDS[values.dtype])


def decode(multiples: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, bits: int) -> None:
    """Writes the values: float32, bfloat16 or float16."""
    if bits == 8:
        multiples = multiples.view(torch.int8)
    tensors = [multiples, bits_of(scales), bits_of(out)]
    chosen, size = (_decode_8, _DECODE_8) if bits == 8 else (_decode_4, _DECODE_4)
    _run(chosen, size, len(scales), tensors, len(out), KINDS[out.dtype])


def _run(
    chosen: Any,
    size: tuple[int, int],
    num_groups: int,
    tensors: Sequence[torch.Tensor],
    number: int,
    kind: int,
) -> None:
    groups, warps = size
    if num_groups:
        with on_device_of(tensors[0]):
            chosen[(triton.cdiv(num_groups, groups),)](
                *tensors, number, kind, GROUP, groups, num_warps=warps
            )


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """Values as kernels get them: those of bfloat16 as integers."""
    return values.view(torch.int16) if values.dtype == torch.bfloat16 else values


@functools.cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return factors_of_places(device), keys_of_places(device)


@kernel
def widened(values: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """The float32 of what was loaded."""
    if kind == BFLOAT16:
        return (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return values.to(tl.float32)


@kernel
def narrowed(wide: tl.tensor, like: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """What is stored of a float32: the nearest, the even one of two."""
    if kind == BFLOAT16:
        bits = wide.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(_magnitude(wide) > _INFINITE, 0x7FC0, nearest.to(tl.int32)).to(tl.int16)
    return wide.to(like.dtype.element_ty)


@kernel
def pairs_of(places: tl.tensor, size: tl.constexpr) -> tl.tensor:
    """Which bytes have the values of groups, two in each."""
    return places[:, None] * (size // 2) + tl.arange(0, size // 2)[None, :]


@kernel
def _magnitude(values: tl.tensor) -> tl.tensor:
    """The bits of float32 magnitudes, which are ordered as these are; NaN is above all."""
    return values.to(tl.int32, bitcast=True) & _MAGNITUDE


@kernel
def _nearest(values: tl.tensor) -> tl.tensor:
    """Whole numbers; an instruction for it would take the smallest numbers for zero."""
    return (values + _WHOLE) - _WHOLE


@kernel
def _mixed(bits: tl.tensor) -> tl.tensor:
    """As in `rounding_noise.py`."""
    bits = (bits ^ (bits >> 16)) * _FIRST
    bits = (bits ^ (bits >> 13)) * _SECOND
    return bits ^ (bits >> 16)


@kernel
def _encode_8(
    values: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    number: tl.tensor,
    kind: tl.constexpr,
    size: tl.constexpr,
    groups: tl.constexpr,
) -> None:
    places = tl.program_id(0).to(tl.int64) * groups + tl.arange(0, groups)
    at = places[:, None] * size + tl.arange(0, size)[None, :]
    wide = widened(tl.load(values + at, mask=at < number, other=0), kind)
    largest = tl.max(_magnitude(wide), axis=1)
    exact = tl.div_rn(largest.to(tl.float32, bitcast=True), 127.0)
    rounded = narrowed(exact, scales, BFLOAT16)
    tl.store(scales + places, rounded, mask=places * size < number)
    scale = widened(rounded, BFLOAT16)
    is_bad = (largest >= _INFINITE) | (scale == 0.0)
    multiple = tl.div_rn(wide, tl.where(is_bad, 1.0, scale)[:, None])
    multiple = _nearest(multiple)
    multiple = tl.minimum(tl.maximum(multiple, -127.0), 127.0)
    multiple = tl.where(is_bad[:, None], 0.0, multiple)
    tl.store(out + at, multiple.to(tl.int8), mask=at < number)


@kernel
def _decode_8(
    multiples: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    number: tl.tensor,
    kind: tl.constexpr,
    size: tl.constexpr,
    groups: tl.constexpr,
) -> None:
    places = tl.program_id(0).to(tl.int64) * groups + tl.arange(0, groups)
    at = places[:, None] * size + tl.arange(0, size)[None, :]
    scale = widened(tl.load(scales + places, mask=places * size < number, other=0), BFLOAT16)
    multiple = tl.load(multiples + at, mask=at < number, other=0).to(tl.float32)
    tl.store(out + at, narrowed(multiple * scale[:, None], out, kind), mask=at < number)


@kernel
def _folded(wide: tl.tensor, factors: tl.tensor) -> tl.tensor:
    """What values add to their group's hash."""
    bits = wide.to(tl.uint32, bitcast=True)
    return tl.sum((bits ^ (bits >> 16)) * factors.to(tl.uint32)[None, :], axis=1)


@kernel
def _rounded_4(
    wide: tl.tensor, scale: tl.tensor, is_bad: tl.tensor, hashed: tl.tensor, keys: tl.tensor
) -> tl.tensor:
    """Multiples of the scale from 1 to 15, each rounded up or down by its own noise."""
    mixed = _mixed(hashed[:, None] + keys.to(tl.uint32)[None, :])
    noise = (mixed >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
    exact = tl.div_rn(wide, scale[:, None]) + noise
    nearest = _nearest(exact)
    multiple = tl.where(nearest > exact, nearest - 1.0, nearest)
    multiple = tl.minimum(tl.maximum(multiple, -7.0), 7.0)
    return (tl.where(is_bad[:, None], 0.0, multiple) + 8.0).to(tl.uint8)


@kernel
def _encode_4(
    values: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    factors: tl.tensor,
    keys: tl.tensor,
    number: tl.tensor,
    kind: tl.constexpr,
    size: tl.constexpr,
    groups: tl.constexpr,
) -> None:
    places = tl.program_id(0).to(tl.int64) * groups + tl.arange(0, groups)
    column = tl.arange(0, size)
    at = places[:, None] * size + column[None, :]
    wide = widened(tl.load(values + at, mask=at < number, other=0), kind)
    largest = tl.max(_magnitude(wide), axis=1)
    hashed = _folded(wide, tl.load(factors + column))
    hashed = _mixed(hashed.to(tl.uint32) + places.to(tl.uint32) * _STRIDE)
    exact = tl.div_rn(largest.to(tl.float32, bitcast=True), 7.0)
    up = ((exact.to(tl.uint32, bitcast=True) + 0xFFFF) >> 16).to(tl.int16)
    rounded = tl.where(largest >= _INFINITE, narrowed(exact, scales, BFLOAT16), up)
    tl.store(scales + places, rounded, mask=places * size < number)
    scale = widened(rounded, BFLOAT16)
    is_bad = (largest >= _INFINITE) | (scale == 0.0)
    divisor = tl.where(is_bad, 1.0, scale)
    multiple = _rounded_4(wide, divisor, is_bad, hashed, tl.load(keys + column))
    low, high = tl.split(multiple.reshape(groups, size // 2, 2))
    pair = pairs_of(places, size)
    tl.store(out + pair, low | (high << 4), mask=2 * pair < number)


@kernel
def _decode_4(
    multiples: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    number: tl.tensor,
    kind: tl.constexpr,
    size: tl.constexpr,
    groups: tl.constexpr,
) -> None:
    places = tl.program_id(0).to(tl.int64) * groups + tl.arange(0, groups)
    at, pair = places[:, None] * size + tl.arange(0, size)[None, :], pairs_of(places, size)
    scale = widened(tl.load(scales + places, mask=places * size < number, other=0), BFLOAT16)
    byte = tl.load(multiples + pair, mask=2 * pair < number, other=0).to(tl.int32)
    low = ((byte & 15) - 8).to(tl.float32) * scale[:, None]
    high = ((byte >> 4) - 8).to(tl.float32) * scale[:, None]
    both = tl.interleave(narrowed(low, out, kind), narrowed(high, out, kind))
    tl.store(out + at, both, mask=at < number)
