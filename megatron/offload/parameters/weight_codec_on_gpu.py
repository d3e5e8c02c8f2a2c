# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of what `weight_codec.py` computes, the same bits: `decode`.

Weights are encoded once, by operations of torch, and decoded with each use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron.offload.activations.saved.quantization_on_gpu import (
    KINDS,
    bits_of,
    kernel,
    narrowed,
    widened,
)
from megatron.offload.machine.device_kernels import on_device_of

_VALUES_8, _VALUES_4 = 2048, 512  # of a program
_WARPS = 4


def decode(
    levels: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    pairs: torch.Tensor | None,
    group: int,
) -> None:
    """Writes values; see `weight_codec_on_host.decode`."""
    if not len(scales):
        return
    chosen, tables = (_decode_8, ()) if pairs is None else (_decode_4, (pairs,))
    if pairs is None:
        levels = levels.view(torch.int8)
    groups = (_VALUES_8 if pairs is None else _VALUES_4) // group
    with on_device_of(out):
        chosen[(triton.cdiv(len(scales), groups),)](
            levels,
            bits_of(scales),
            bits_of(out),
            *tables,
            len(out),
            KINDS[out.dtype],
            group,
            groups,
            num_warps=_WARPS,
        )


@kernel
def _decode_8(
    levels: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    number: tl.tensor,
    kind: tl.constexpr,
    size: tl.constexpr,
    groups: tl.constexpr,
) -> None:
    places = tl.program_id(0).to(tl.int64) * groups + tl.arange(0, groups)
    at = places[:, None] * size + tl.arange(0, size)[None, :]
    scale = widened(tl.load(scales + places, mask=places * size < number, other=0), kind)
    level = tl.load(levels + at, mask=at < number, other=0).to(tl.float32)
    value = tl.div_rn(level, 127.0) * scale[:, None]
    tl.store(out + at, narrowed(value, out, kind), mask=at < number)


@kernel
def _decode_4(
    levels: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    pairs: tl.tensor,
    number: tl.tensor,
    kind: tl.constexpr,
    size: tl.constexpr,
    groups: tl.constexpr,
) -> None:
    places = tl.program_id(0).to(tl.int64) * groups + tl.arange(0, groups)
    at = places[:, None] * size + 2 * tl.arange(0, size // 2)[None, :]
    scale = widened(tl.load(scales + places, mask=places * size < number, other=0), kind)
    byte = tl.load(levels + at // 2, mask=at < number, other=0).to(tl.int32)
    low = tl.load(pairs + 2 * byte) * scale[:, None]
    high = tl.load(pairs + 2 * byte + 1) * scale[:, None]
    tl.store(out + at, narrowed(low, out, kind), mask=at < number)
    tl.store(out + at + 1, narrowed(high, out, kind), mask=at + 1 < number)
