# SPDX-License-Identifier: Apache-2.0
"""Checksums of what is written: of activations if the user asks for it, of optimizer states always.

XXH3 (64 bits) from the package `xxhash`: faster than any SSD, and it releases the interpreter lock.
It detects accidents (a flipped bit, a lost or misplaced write), not attacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megatron.offload.packages import check_packages
from megatron.offload.tiers.purpose import ACTIVATIONS, Purpose

Checksum = Callable[[memoryview], int]


def load_checksum(purpose: Purpose = ACTIVATIONS) -> Checksum:
    """Returns the function that computes the 64-bit XXH3 checksum of a memoryview.

    Raises:
        ConfigurationError: the package `xxhash` is not installed.
    """
    check_packages(purpose.checksum_flag, "xxhash", prefix=purpose.prefix)
    import xxhash

    digest: Checksum = xxhash.xxh3_64_intdigest
    return digest


def checksum_in_parts(parts: Iterable[memoryview]) -> int:
    """The checksum of consecutive parts, each of which is read before the next is asked for.

    Equal to that of all their bytes at once; `load_checksum` has found the package.
    """
    import xxhash

    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return int(state.intdigest())
