# SPDX-License-Identifier: Apache-2.0
"""A place outside device memory: the `Tier` protocol.

Async first: `begin_*` return at once. The engine calls; a tier never knows what it stores. What it
keeps of a storage is a block, an object of its own: `str(block)` says where the bytes are, and its
space is given back when the last reference to it is gone. A transfer holds one, so no space is
reused while a transfer still touches it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron.offload.storage.transfer import Transfer


@dataclass
class TierStatistics:
    """Counters since the tier was opened. Bytes are those that reached or left the drive."""

    written_bytes: int = 0
    read_bytes: int = 0
    failed_writes: int = 0


class Tier(Protocol):
    """Stores the bytes of saved storages. `str(tier)` says where, for people."""

    statistics: TierStatistics
    degraded: bool  # a write failed: takes no more writes, still serves reads

    @property
    def used_bytes(self) -> int:
        """Bytes taken by live blocks."""
        ...

    @property
    def capacity_bytes(self) -> int:
        """Bytes that it has room for at present."""
        ...

    def begin_write(self, source: torch.UntypedStorage) -> tuple[Any, Transfer] | None:
        """Starts to write a whole storage. None: the tier is full or degraded, keep the bytes.

        `source` must not change or be freed until the transfer is done; the transfer keeps it
        alive. Waits while the bytes in flight are over budget.
        """
        ...

    def begin_read(self, block: Any) -> tuple[torch.UntypedStorage, Transfer]:
        """Starts to read a block into a fresh storage, which is valid when the transfer is done."""
        ...

    def close(self) -> None:
        """Waits for transfers under way and gives everything back."""
        ...
