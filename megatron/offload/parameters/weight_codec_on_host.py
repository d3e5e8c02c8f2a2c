# SPDX-License-Identifier: Apache-2.0
"""Machine code for a CPU of what `weight_codec.py` computes, the same bits: `encode`, `decode`.

Other threads go on meanwhile: the interpreter's lock is not held. The first call on a machine
compiles.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch

from megatron.offload.activations.saved.quantization_on_host import (
    INFINITE,
    INTEGERS,
    compiled,
    rounded,
)


def encode(
    values: torch.Tensor,
    levels: torch.Tensor,
    scales: torch.Tensor,
    between: torch.Tensor | None,
    group: int,
) -> None:
    """Writes the numbers of levels, and scales, of values: float32 or bfloat16, in host memory.

    Args:
        values: shape [N].
        levels: their numbers, uint8.
        scales: of the type of the values.
        between: halfway between 16 levels, shape [15]; None: there are 255, evenly spaced.
        group: values that share a scale.
    """
    kind = INTEGERS[values.element_size()]
    integers = values.view(kind).numpy(), levels.numpy(), scales.view(kind).numpy()
    if between is None:
        _encode_1(*integers, group)
    else:
        _encode_2(*integers, between.numpy(), group)


def decode(
    levels: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    pairs: torch.Tensor | None,
    group: int,
) -> None:
    """Writes values, float32 or bfloat16, in host memory.

    Args:
        levels: their numbers, uint8.
        scales: of the type of the values.
        out: shape [N].
        pairs: the two levels of each byte, shape [256, 2]; None: a byte has one of 255 levels,
            which are evenly spaced.
        group: values that share a scale.
    """
    kind = INTEGERS[out.element_size()]
    integers = levels.numpy(), scales.view(kind).numpy(), out.view(kind).numpy()
    if pairs is None:
        _decode_1(*integers, group)
    else:
        _decode_2(*integers, pairs.numpy(), group)


@compiled
def _encode_1(values: Any, levels: Any, scales: Any, size: Any) -> None:
    shift = numpy.uint32(0 if values.itemsize == 4 else 16)
    group_bits = numpy.empty(size, numpy.uint32)
    group = group_bits.view(numpy.float32)
    one_bits = numpy.empty(1, numpy.uint32)
    one = one_bits.view(numpy.float32)
    for place in range(scales.size):
        start = place * size
        length = min(size, values.size - start)
        largest = numpy.uint32(0)
        for i in range(length):
            bits = numpy.uint32(values[start + i]) << shift
            group_bits[i] = bits
            largest = max(largest, bits & numpy.uint32(0x7FFFFFFF))
        scales[place] = largest >> shift
        one_bits[0] = largest
        scale = one[0]
        if largest >= INFINITE or scale == numpy.float32(0):
            levels[start : start + length] = 0
            continue
        for i in range(length):
            number = numpy.rint(group[i] / scale * numpy.float32(127))
            levels[start + i] = numpy.uint8(numpy.int8(number))


@compiled
def _encode_2(values: Any, levels: Any, scales: Any, between: Any, size: Any) -> None:
    shift = numpy.uint32(0 if values.itemsize == 4 else 16)
    group_bits = numpy.empty(size, numpy.uint32)
    group = group_bits.view(numpy.float32)
    one_bits = numpy.empty(1, numpy.uint32)
    one = one_bits.view(numpy.float32)
    numbers = numpy.empty(size, numpy.uint8)
    for place in range(scales.size):
        start = place * size
        length = min(size, values.size - start)
        group_bits[length:] = 0
        largest = numpy.uint32(0)
        for i in range(length):
            bits = numpy.uint32(values[start + i]) << shift
            group_bits[i] = bits
            largest = max(largest, bits & numpy.uint32(0x7FFFFFFF))
        scales[place] = largest >> shift
        one_bits[0] = largest
        scale = one[0]
        if largest >= INFINITE or scale == numpy.float32(0):
            group_bits[:] = 0
            scale = numpy.float32(1)
        for i in range(size):
            part = group[i] / scale
            number = 8 if part > between[7] else 0
            number += 4 if part > between[number + 3] else 0
            number += 2 if part > between[number + 1] else 0
            number += 1 if part > between[number] else 0
            numbers[i] = number
        for i in range((length + 1) // 2):
            pair = numbers[2 * i] | numbers[2 * i + 1] << numpy.uint8(4)
            levels[start // 2 + i] = pair


@compiled
def _decode_1(levels: Any, scales: Any, out: Any, size: Any) -> None:
    is_wide = out.itemsize == 4
    shift = numpy.uint32(0 if is_wide else 16)
    group = numpy.empty(size, numpy.float32)
    group_bits = group.view(numpy.uint32)
    one_bits = numpy.empty(1, numpy.uint32)
    one = one_bits.view(numpy.float32)
    for place in range(scales.size):
        start = place * size
        length = min(size, out.size - start)
        one_bits[0] = numpy.uint32(scales[place]) << shift
        scale = one[0]
        for i in range(length):
            part = numpy.float32(numpy.int8(levels[start + i])) / numpy.float32(127)
            group[i] = part * scale
        if is_wide:
            for i in range(length):
                out[start + i] = group_bits[i]
        else:
            for i in range(length):
                out[start + i] = rounded(group_bits[i])


# The rest is that of `_decode_1`, written out: numba makes slower code of a function for both.
@compiled
def _decode_2(levels: Any, scales: Any, out: Any, pairs: Any, size: Any) -> None:
    is_wide = out.itemsize == 4
    shift = numpy.uint32(0 if is_wide else 16)
    group = numpy.empty(size, numpy.float32)
    group_bits = group.view(numpy.uint32)
    one_bits = numpy.empty(1, numpy.uint32)
    one = one_bits.view(numpy.float32)
    for place in range(scales.size):
        start = place * size
        length = min(size, out.size - start)
        one_bits[0] = numpy.uint32(scales[place]) << shift
        scale = one[0]
        for i in range((length + 1) // 2):
            byte = levels[start // 2 + i]
            group[2 * i] = pairs[byte, 0] * scale
            group[2 * i + 1] = pairs[byte, 1] * scale
        if is_wide:
            for i in range(length):
                out[start + i] = group_bits[i]
        else:
            for i in range(length):
                out[start + i] = rounded(group_bits[i])
