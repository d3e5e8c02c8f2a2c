# SPDX-License-Identifier: Apache-2.0
"""Checksums of what is written, for `--activation-offload-verify checksum`.

XXH3 (64 bits) from the package `xxhash`: faster than any SSD, and it releases the interpreter
lock. It finds accidents (a flipped bit, a lost or misplaced write), not attacks.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron.offload.errors import ConfigurationError

Checksum = Callable[[memoryview], int]


def load_checksum() -> Checksum:
    """Returns the function that computes the 64-bit XXH3 checksum of a memoryview.

    Raises:
        ConfigurationError: the package that computes it is not installed.
    """
    try:
        import xxhash
    except ImportError:
        raise ConfigurationError(
            "--activation-offload-verify checksum needs the package xxhash; "
            "pip install 'megatron-offload[verify]'"
        ) from None
    digest: Checksum = xxhash.xxh3_64_intdigest
    return digest
