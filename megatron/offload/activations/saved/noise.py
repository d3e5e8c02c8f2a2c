# SPDX-License-Identifier: Apache-2.0
"""Noise that dropout multiplies with, one bit a value: `may_be_noise`, `pack_noise`.

The finder of recipes asks for each saved tensor that no node made. It never waits for a device.

Note [Noise as bits]
Where torch has no fused dropout, as on a CPU, dropout multiplies with a tensor of its own, whose
values are 0 or 1/(1-p) in the type of the input. Autograd saves that tensor. Its bits and the one
constant say all of it, so the bits are saved instead, and the values are made of them again. It
counts where each value is one of two patterns of bits and one of these is 0: -0.0, a NaN among
numbers or a third constant are not. No seed is drawn again.

The values are read as the tensor is saved. In a context that may be before the operation has
filled it (the noise of `rrelu`), which no version shows. Dropout has changed its noise in place
twice by then, and what is all zeros, or has no zero, is not taken.
"""

from __future__ import annotations

import torch

from megatron.offload.activations.saved.bits import bits_bytes, pack_bits, unpack_bits
from megatron.offload.activations.saved.recipe import bits_of

_NUM_CHANGES = 2  # `bernoulli_`, `div_`: dropout's version of its noise
_GLANCE = 64  # values that nearly always show that a tensor is no noise


def may_be_noise(tensor: torch.Tensor) -> bool:
    """Whether a saved tensor was made as dropout makes its noise. It costs nothing."""
    return (
        tensor._version == _NUM_CHANGES
        and tensor.is_floating_point()
        and not tensor.requires_grad
        and bits_bytes(tensor.numel()) < tensor.nbytes
    )


def pack_noise(tensor: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """The bits of a tensor that has two values, and the bits of the one that is not 0.

    Args:
        tensor: on a CPU, all of its storage and no more.

    Returns:
        None: it has other values.
    """
    values = _flat(tensor)
    if len({0, *values[:_GLANCE].tolist()}) > 2:
        return None
    low, high = (int(one) for one in torch.aminmax(values))
    if low == high:
        return None
    constant = high or low
    mask = values.ne(0)
    if not torch.equal(mask, values.eq(constant)):
        return None
    packed = pack_bits(mask.untyped_storage())
    return torch.empty(0, dtype=torch.uint8).set_(packed), constant


def unpack_noise(
    bits: torch.Tensor, num_values: int, dtype: torch.dtype, constant: int
) -> torch.Tensor:
    """The values that `pack_noise` packed, in the order in which they are in memory."""
    mask = torch.empty(0, dtype=torch.uint8).set_(unpack_bits(bits.untyped_storage(), num_values))
    like = bits_of(torch.empty(0, dtype=dtype))
    return mask.to(like.dtype).mul_(constant).view(dtype)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of all values of a storage, as integers."""
    like = bits_of(torch.empty(0, dtype=tensor.dtype))
    return like.set_(tensor.untyped_storage())
