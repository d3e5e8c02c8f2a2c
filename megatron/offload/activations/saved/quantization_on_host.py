# SPDX-License-Identifier: Apache-2.0
"""Machine code for a CPU of what `quantization.py` computes, the same bits: `encode`, `decode`.

A group is read once and stays in the nearest cache; torch reads it for each operation. Other
threads go on meanwhile: the interpreter's lock is not held. The first call on a machine compiles.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numba
import numpy
import torch

from megatron.offload.activations.saved.rounding_noise import (
    FIRST_FACTOR,
    GROUP,
    SECOND_FACTOR,
    STRIDE,
    factors_of_places,
    keys_of_places,
)

INFINITE = 0x7F800000  # the bits of an infinite float32; those of NaN are above
_NAN = 0x7FC0  # of bfloat16
_LARGEST_8, _LARGEST_4 = numpy.float32(127), numpy.float32(7)
_FIRST_FACTOR, _SECOND_FACTOR = numpy.uint32(FIRST_FACTOR), numpy.uint32(SECOND_FACTOR)
_UNIT = numpy.float32(2.0**-24)
_FACTORS, _KEYS = (
    of_places(torch.device("cpu")).numpy().view(numpy.uint32)
    for of_places in (factors_of_places, keys_of_places)
)


def encode(values: torch.Tensor, out: torch.Tensor, scales: torch.Tensor, bits: int) -> None:
    """Writes the multiples and the scales of values: float32 or bfloat16, in host memory."""
    kernel = _encode_8 if bits == 8 else _encode_4
    as_integers = values.detach().view(INTEGERS[values.element_size()])
    kernel(as_integers.numpy(), out.numpy(), scales.view(torch.uint16).numpy())


def decode(multiples: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, bits: int) -> None:
    """Writes the values: float32 or bfloat16, in host memory."""
    kernel = _decode_8 if bits == 8 else _decode_4
    as_integers = out.view(INTEGERS[out.element_size()])
    kernel(multiples.numpy(), scales.view(torch.uint16).numpy(), as_integers.numpy())


INTEGERS = {4: torch.uint32, 2: torch.uint16}


def compiled(function: Any) -> Any:
    """Machine code of a function, kept for other processes where a directory can be written."""
    made = numba.njit(nogil=True, error_model="numpy")(function)
    with contextlib.suppress(RuntimeError):  # no directory can be written: each process compiles
        made.enable_caching()
    return made


@compiled
def rounded(bits: Any) -> Any:
    """The bits of the nearest bfloat16 of a float32's bits, the even one of two."""
    if bits & numpy.uint32(0x7FFFFFFF) > numpy.uint32(INFINITE):
        return numpy.uint16(_NAN)
    odd = (bits >> numpy.uint32(16)) & numpy.uint32(1)
    return numpy.uint16((bits + numpy.uint32(0x7FFF) + odd) >> numpy.uint32(16))


@compiled
def _mixed(bits: Any) -> Any:
    """As in `rounding_noise.py`, without a sign."""
    bits = numpy.uint32((bits ^ (bits >> numpy.uint32(16))) * _FIRST_FACTOR)
    bits = numpy.uint32((bits ^ (bits >> numpy.uint32(13))) * _SECOND_FACTOR)
    return numpy.uint32(bits ^ (bits >> numpy.uint32(16)))


@compiled
def _encode_8(values: Any, out: Any, scales: Any) -> None:
    most = _LARGEST_8
    shift = numpy.uint32(0 if values.itemsize == 4 else 16)
    group_bits = numpy.empty(GROUP, numpy.uint32)
    group = group_bits.view(numpy.float32)
    one_bits = numpy.empty(1, numpy.uint32)
    one = one_bits.view(numpy.float32)
    for place in range(scales.size):
        start = place * GROUP
        length = min(GROUP, values.size - start)
        largest = numpy.uint32(0)
        for i in range(length):
            bits = numpy.uint32(values[start + i]) << shift
            group_bits[i] = bits
            largest = max(largest, bits & numpy.uint32(0x7FFFFFFF))
        one_bits[0] = largest
        one[0] = one[0] / most
        scales[place] = rounded(one_bits[0])
        one_bits[0] = numpy.uint32(scales[place]) << numpy.uint32(16)
        scale = one[0]
        if largest >= numpy.uint32(INFINITE) or scale == numpy.float32(0):
            out[start : start + length] = 0
            continue
        for i in range(length):
            multiple = min(max(numpy.rint(group[i] / scale), -most), most)
            out[start + i] = numpy.uint8(numpy.int8(multiple))


@compiled
def _encode_4(values: Any, out: Any, scales: Any) -> None:
    most = _LARGEST_4
    shift = numpy.uint32(0 if values.itemsize == 4 else 16)
    group_bits = numpy.empty(GROUP, numpy.uint32)
    group = group_bits.view(numpy.float32)
    one_bits = numpy.empty(1, numpy.uint32)
    one = one_bits.view(numpy.float32)
    levels = numpy.empty(GROUP, numpy.uint8)
    for place in range(scales.size):
        start = place * GROUP
        length = min(GROUP, values.size - start)
        group_bits[length:] = 0
        largest = numpy.uint32(0)
        hashed = numpy.uint32(place * STRIDE)
        for i in range(length):
            bits = numpy.uint32(numpy.uint32(values[start + i]) << shift)
            group_bits[i] = bits
            largest = max(largest, bits & numpy.uint32(0x7FFFFFFF))
        for i in range(length):
            bits = group_bits[i]
            folded = numpy.uint32(bits ^ (bits >> numpy.uint32(16)))
            hashed = numpy.uint32(hashed + numpy.uint32(folded * _FACTORS[i]))
        one_bits[0] = largest
        one[0] = one[0] / most
        bits = one_bits[0]
        if largest >= numpy.uint32(INFINITE):
            scales[place] = rounded(bits)
        else:
            scales[place] = numpy.uint16((bits + numpy.uint32(0xFFFF)) >> numpy.uint32(16))
        one_bits[0] = numpy.uint32(scales[place]) << numpy.uint32(16)
        scale = one[0]
        end = start // 2 + (length + 1) // 2
        if largest >= numpy.uint32(INFINITE) or scale == numpy.float32(0):
            out[start // 2 : end] = 0x88
            continue
        hashed = _mixed(hashed)
        for i in range(GROUP):
            noise = _mixed(numpy.uint32(hashed + _KEYS[i])) >> numpy.uint32(8)
            part = numpy.float32(numpy.int32(noise)) * _UNIT
            multiple = min(max(numpy.floor(group[i] / scale + part), -most), most)
            levels[i] = numpy.uint8(numpy.int8(multiple) + numpy.int8(8))
        for i in range(end - start // 2):
            out[start // 2 + i] = levels[2 * i] | levels[2 * i + 1] << numpy.uint8(4)


@compiled
def _decode_8(multiples: Any, scales: Any, out: Any) -> None:
    is_wide = out.itemsize == 4
    group = numpy.empty(GROUP, numpy.float32)
    group_bits = group.view(numpy.uint32)
    one_bits = numpy.empty(1, numpy.uint32)
    one = one_bits.view(numpy.float32)
    for place in range(scales.size):
        start = place * GROUP
        length = min(GROUP, out.size - start)
        one_bits[0] = numpy.uint32(scales[place]) << numpy.uint32(16)
        scale = one[0]
        for i in range(length):
            group[i] = numpy.float32(numpy.int8(multiples[start + i])) * scale
        if is_wide:
            for i in range(length):
                out[start + i] = group_bits[i]
        else:
            for i in range(length):
                out[start + i] = rounded(group_bits[i])


# Its end is that of `_decode_8`, written out: numba makes slower code of a function for both.
@compiled
def _decode_4(multiples: Any, scales: Any, out: Any) -> None:
    is_wide = out.itemsize == 4
    group = numpy.empty(GROUP, numpy.float32)
    group_bits = group.view(numpy.uint32)
    one_bits = numpy.empty(1, numpy.uint32)
    one = one_bits.view(numpy.float32)
    for place in range(scales.size):
        start = place * GROUP
        length = min(GROUP, out.size - start)
        one_bits[0] = numpy.uint32(scales[place]) << numpy.uint32(16)
        scale = one[0]
        for i in range((length + 1) // 2):
            pair = numpy.int32(multiples[start // 2 + i])
            group[2 * i] = numpy.float32((pair & 15) - 8) * scale
            group[2 * i + 1] = numpy.float32((pair >> 4) - 8) * scale
        if is_wide:
            for i in range(length):
                out[start + i] = group_bits[i]
        else:
            for i in range(length):
                out[start + i] = rounded(group_bits[i])
