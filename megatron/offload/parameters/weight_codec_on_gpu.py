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
    pairs_of,
    widened,
)
from megatron.offload.machine.device_kernels import on_device_of

# Values and warps of a program; of several that were measured on an H100 the fastest.
_SIZE_8, _SIZE_4 = (2048, 4), (1024, 2)


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
    values, warps = _SIZE_8 if pairs is None else _SIZE_4
    groups = values // group
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
            num_warps=warps,
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
    at, pair = places[:, None] * size + tl.arange(0, size)[None, :], pairs_of(places, size)
    scale = widened(tl.load(scales + places, mask=places * size < number, other=0), kind)
    byte = tl.load(levels + pair, mask=2 * pair < number, other=0).to(tl.int32)
    low = tl.load(pairs + 2 * byte) * scale[:, None]
    high = tl.load(pairs + 2 * byte + 1) * scale[:, None]
    both = tl.interleave(narrowed(low, out, kind), narrowed(high, out, kind))
    tl.store(out + at, both, mask=at < number)
