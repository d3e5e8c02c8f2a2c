# SPDX-License-Identifier: Apache-2.0
"""A place outside device memory: the `Tier` protocol, and the `Block` that it hands out.

Async first: `begin_*` return at once. The engine calls; a tier never knows what it stores. What it
keeps of a storage is a block; `str(block)` says where the bytes are. A block that nobody refers to
any more frees its space by itself, and a transfer under way refers to its block, so no space is
reused while a transfer still touches it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megatron.offload.tiers.bandwidth import BandwidthMeter
from megatron.offload.tiers.transfer import Transfer


class Block:
    """Where a tier keeps the bytes of one storage; each tier derives its own kind."""

    def __init__(self, tier: Tier, num_bytes: int) -> None:
        self.tier = tier
        self.num_bytes = num_bytes

    def __del__(self) -> None:
        self.tier.free(self)


@dataclass
class TierStatistics:
    """What a tier moved since it was opened: bytes that reached it or came from it."""

    writes: BandwidthMeter = field(default_factory=BandwidthMeter)
    reads: BandwidthMeter = field(default_factory=BandwidthMeter)
    failed_writes: int = 0


class Tier(Protocol):
    """Stores the bytes of saved storages. `str(tier)` says where, for people."""

    @property
    def statistics(self) -> TierStatistics:
        """Bytes, bandwidth and failures so far."""
        ...

    @property
    def degraded(self) -> bool:
        """Whether a write failed or the disk is full; what is there can be read all the same."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes taken by live blocks."""
        ...

    @property
    def capacity_bytes(self) -> int:
        """Bytes that it has room for at present, taken or free; it may grow up to its budget."""
        ...

    @property
    def limit_bytes(self) -> int | None:
        """Bytes that it may ever hold; None: until the disk is full."""
        ...

    def begin_write(
        self, source: torch.UntypedStorage, after: Any = None
    ) -> tuple[Any, Transfer] | None:
        """Starts to write a whole storage. None: the tier is full or failed, keep the bytes.

        How many bytes may be in flight is the caller's business.

        Args:
            source: must not change or be freed until the transfer is done, which keeps it alive.
            after: an event of the device, after which it holds its bytes; None: it holds them.
        """
        ...

    def begin_read(
        self, block: Any, deadline: float = 0.0, into: torch.UntypedStorage | None = None
    ) -> tuple[torch.UntypedStorage, Transfer]:
        """Starts to read a block into a fresh storage, or into one that is there.

        Its bytes are there when the transfer is done, on the device after the transfer's events.

        Args:
            block: from this tier's `begin_write`, whose transfer has ended well.
            deadline: of several queued reads the one with the smallest goes first; any scale that
                all callers share.
            into: of the block's size. In host memory aligned as what was written; on a device of
                `Device.alloc_storage`, which nobody has used since.
        """
        ...

    def view(self, block: Any) -> torch.UntypedStorage:
        """The bytes of a block where they are, on the CPU; what is changed in them stays changed.

        The block lives as long as this, and a process that is forked meanwhile sees it too. What
        has checksums is compared with them now. Whoever changes it calls `renew` before it is read
        again.

        Args:
            block: from this tier's `begin_write`; nothing of it is under way, nor begins.

        Raises:
            OSError: they cannot be shown in their place, or are not those that were written.
        """
        ...

    def renew(self, block: Any) -> None:
        """Takes what was changed through a block's view for its bytes.

        Raises:
            OSError: they did not come to their place; the view has them.
        """
        ...

    def wait_for_writes(self, timeout_s: float | None = None) -> bool:
        """Blocks until what it has taken is where it is to stay; whether it came to that.

        A write's transfer may end before, once the bytes are safe in a place on their way.
        """
        ...

    def free(self, block: Any) -> None:
        """Gives a block's space back; its bytes are lost. Takes no lock: finalizers call it."""
        ...

    def close(self) -> None:
        """Cancels what is queued, waits for what is under way, gives everything back."""
        ...


def close_when_dropped(owner: object, tiers: Sequence[Tier]) -> weakref.finalize[..., object]:
    """Has tiers closed when their owner is gone, if no caller has called its `close`.

    In a thread of its own: an owner may go in any thread at any moment, one of a tier's and one
    under a lock included, and closing waits for threads.

    Args:
        owner: alone uses the tiers; they do not refer to it.
        tiers: to be closed.

    Returns:
        What its `close` is to detach. At the end of the process nothing is done.
    """
    finalizer = weakref.finalize(owner, _close_soon, list(tiers))
    finalizer.atexit = False
    return finalizer


def _close_soon(tiers: Sequence[Tier]) -> None:
    def close() -> None:
        for tier in tiers:
            tier.close()

    threading.Thread(target=close, name="offload closing", daemon=True).start()
