# SPDX-License-Identifier: Apache-2.0
"""Machine code for a CPU of what `int8.py` computes: `encode` and `decode`, with the same bits.

A group is read once and stays in the nearest cache; torch reads it for each operation. Other
threads go on meanwhile: the interpreter's lock is not held. The first call on a machine compiles.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numba
import numpy
import torch

_INFINITE = 0x7F800000  # the bits of an infinite float32; those of NaN are above
_NAN = 0x7FC0  # of bfloat16


def encode(
    values: torch.Tensor, out: torch.Tensor, scales: torch.Tensor, group: int, largest: int
) -> None:
    """Writes the multiples and the scales of values: float32 or bfloat16, in host memory."""
    bits = values.detach().view(_INTEGERS[values.element_size()]).numpy()
    _encode(bits, out.numpy(), scales.view(torch.uint16).numpy(), group, largest)


def decode(multiples: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, group: int) -> None:
    """Writes the values: float32 or bfloat16, in host memory."""
    bits = out.view(_INTEGERS[out.element_size()]).numpy()
    _decode(multiples.numpy(), scales.view(torch.uint16).numpy(), bits, group)


_INTEGERS = {4: torch.uint32, 2: torch.uint16}


def _compiled(function: Any) -> Any:
    made = numba.njit(nogil=True, error_model="numpy")(function)
    with contextlib.suppress(RuntimeError):  # no directory can be written: each process compiles
        made.enable_caching()
    return made


@_compiled
def _rounded(bits: Any) -> Any:
    """The bits of the nearest bfloat16 of a float32's bits, the even one of two."""
    if bits & numpy.uint32(0x7FFFFFFF) > numpy.uint32(_INFINITE):
        return numpy.uint16(_NAN)
    odd = (bits >> numpy.uint32(16)) & numpy.uint32(1)
    return numpy.uint16((bits + numpy.uint32(0x7FFF) + odd) >> numpy.uint32(16))


@_compiled
def _encode(values: Any, out: Any, scales: Any, size: int, most: int) -> None:
    number = values.size
    most_multiple = numpy.float32(most)
    shift = numpy.uint32(0 if values.itemsize == 4 else 16)
    group_bits = numpy.empty(size, numpy.uint32)
    group = group_bits.view(numpy.float32)
    one_bits = numpy.empty(1, numpy.uint32)
    one = one_bits.view(numpy.float32)
    for place in range(scales.size):
        start = place * size
        length = min(size, number - start)
        largest = numpy.uint32(0)
        for i in range(length):
            bits = numpy.uint32(values[start + i]) << shift
            group_bits[i] = bits
            largest = max(largest, bits & numpy.uint32(0x7FFFFFFF))
        one_bits[0] = largest
        one[0] = one[0] / most_multiple
        scales[place] = _rounded(one_bits[0])
        one_bits[0] = numpy.uint32(scales[place]) << numpy.uint32(16)
        scale = one[0]
        if largest >= numpy.uint32(_INFINITE) or scale == numpy.float32(0):
            out[start : start + length] = 0
            continue
        for i in range(length):
            multiple = numpy.rint(group[i] / scale)
            multiple = min(max(multiple, -most_multiple), most_multiple)
            out[start + i] = numpy.int8(multiple)


@_compiled
def _decode(multiples: Any, scales: Any, out: Any, size: int) -> None:
    number = out.size
    is_wide = out.itemsize == 4
    group = numpy.empty(size, numpy.float32)
    group_bits = group.view(numpy.uint32)
    one_bits = numpy.empty(1, numpy.uint32)
    one = one_bits.view(numpy.float32)
    for place in range(scales.size):
        start = place * size
        length = min(size, number - start)
        one_bits[0] = numpy.uint32(scales[place]) << numpy.uint32(16)
        scale = one[0]
        for i in range(length):
            group[i] = numpy.float32(multiples[start + i]) * scale
        if is_wide:
            for i in range(length):
                out[start + i] = group_bits[i]
        else:
            for i in range(length):
                out[start + i] = _rounded(group_bits[i])
