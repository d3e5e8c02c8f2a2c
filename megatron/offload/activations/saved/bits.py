# SPDX-License-Identifier: Apache-2.0
"""Masks, one bit a value: `pack_bits` and `unpack_bits`.

Records call them in the thread and on the stream that compute. They never wait for a device.

Note [Masks as bits]
A storage saved as `torch.bool` holds a byte for each value, 0 or 1, so we move an eighth of it.
Torch does not check that a bool tensor holds no other bytes (reinterpreted or uninitialised memory
may), and a check before packing would wait for the device. So the device computes the largest byte
along with the bits, we write it behind them, and queue a copy of it to the host. The record frees
what was saved when the bits were written: the device has done all of this by then, and the byte has
arrived. If it is larger than 1, the record drops what was written and the storage stays in memory.

We leave storages saved as `torch.uint8` alone: most hold more than masks, and only the bytes
themselves would show which do.

Bytes are packed in eight contiguous ranges, the first into the lowest bits: each step is one
operation over neighbouring bytes.
"""

from __future__ import annotations

import torch


def bits_bytes(num_values: int) -> int:
    """Bytes that `pack_bits` returns for a storage of so many values."""
    return -(-num_values // 8) + 1


def pack_bits(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """The lowest bit of each byte, and behind them the largest byte: see Note [Masks as bits].

    Args:
        storage: of at least one byte, each 0 or 1; with other bytes only the last byte is valid.
    """
    values = _bytes_of(storage)
    packed = values.new_zeros(bits_bytes(values.numel()))
    torch.amax(values, 0, keepdim=True, out=packed[-1:])
    for values_of_bit in reversed(values.split(packed.numel() - 1)):
        bits = packed[: values_of_bit.numel()]
        torch.add(values_of_bit, bits, alpha=2, out=bits)
    return packed.untyped_storage()


def fetch_largest(packed: torch.UntypedStorage) -> torch.Tensor:
    """A copy of the byte behind the bits, in host memory once the device has reached this point."""
    return _bytes_of(packed)[-1:].to("cpu", non_blocking=True)


def unpack_bits(packed: torch.UntypedStorage, num_values: int) -> torch.UntypedStorage:
    """The storage of `num_values` bytes, 0 or 1, that `pack_bits` packed."""
    bits = _bytes_of(packed)[:-1]
    values = bits.new_empty(num_values)
    for number, values_of_bit in enumerate(values.split(bits.numel())):
        of_these = bits[: values_of_bit.numel()]
        torch.bitwise_right_shift(of_these, number, out=values_of_bit)
    return values.bitwise_and_(1).untyped_storage()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
