# SPDX-License-Identifier: Apache-2.0
"""A place outside device memory: the `Tier` protocol, and the `Block` that it hands out.

`begin_*` methods return at once. `Writer`, `Reader` and `MovingStorage` call them; a tier does not
know what it stores. A block is where a tier keeps the bytes of a storage; `str(block)` says where
that is. A block that nothing refers to any more frees its space by itself, and a transfer under way
refers to its block, so no space is reused while a transfer still uses it.
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
    """Where a tier keeps the bytes of one storage; each tier derives its own kind.

    Attributes:
        remedy: what to do where they cannot be read, in sentences.
    """

    remedy = "check the disk"

    def __init__(self, tier: Tier, num_bytes: int) -> None:
        self.tier = tier
        self.num_bytes = num_bytes

    def __del__(self) -> None:
        try:
            free = self.tier.free
        except AttributeError:  # an interrupt has ended `__init__`
            return
        free(self)


@dataclass
class TierStatistics:
    """What a tier has moved since it was opened: bytes written to it and read from it."""

    writes: BandwidthMeter = field(default_factory=BandwidthMeter)
    reads: BandwidthMeter = field(default_factory=BandwidthMeter)
    failed_writes: int = 0


class Tier(Protocol):
    """Stores the bytes of storages. `str(tier)` says where, for sentences."""

    @property
    def statistics(self) -> TierStatistics:
        """Bytes, bandwidth and failures so far."""
        ...

    @property
    def degraded(self) -> bool:
        """Whether a write failed or the disk is full; what it holds can still be read."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes taken by live blocks."""
        ...

    @property
    def capacity_bytes(self) -> int:
        """Bytes that it has room for now, taken or free; it may grow up to its budget."""
        ...

    @property
    def limit_bytes(self) -> int | None:
        """The most bytes that it may hold; None: until the disk is full."""
        ...

    def begin_write(
        self, source: torch.UntypedStorage, after: Any = None
    ) -> tuple[Any, Transfer] | None:
        """Starts to write a whole storage. None: the tier is full or failed, keep the bytes.

        The caller bounds how many bytes are in flight.

        Args:
            source: must not change or be freed until the transfer is done, which keeps it alive.
            after: an event of the device, after which the storage has its bytes; None: it has them.
        """
        ...

    def begin_read(
        self, block: Any, deadline: float = 0.0, into: torch.UntypedStorage | None = None
    ) -> tuple[torch.UntypedStorage, Transfer]:
        """Starts to read a block into a new storage, or into `into`.

        The bytes are in place when the transfer is done; on a device after the transfer's events.

        Args:
            block: from this tier's `begin_write`; its transfer has ended without an error.
            deadline: among queued reads the smallest goes first; on any scale that all callers
                share.
            into: of the block's size. In host memory aligned as what was written; on a device from
                `Device.alloc_storage`, and not used since.
        """
        ...

    def view(self, block: Any) -> torch.UntypedStorage:
        """The bytes of a block in place, on the CPU; writes to them change the block.

        The result keeps the block alive, and child processes that are forked meanwhile see it too.
        Bytes with checksums are compared with them now. A caller that changes them must call
        `renew` before the next read. Where a drive fails while they are used, the system ends the
        process: code of this package reads them with `copy_view`.

        Args:
            block: from this tier's `begin_write`; no transfer of it is under way, nor begins.

        Raises:
            OSError: the bytes cannot be shown in place, or are not those that were written.
        """
        ...

    def copy_view(self, block: Any, into: torch.UntypedStorage) -> None:
        """Fills a storage on the CPU, of the block's size, with what the block's view shows.

        Changes through the view are part of it, and are compared with no checksum.

        Raises:
            OSError: a drive failed.
        """
        ...

    def renew(self, block: Any) -> None:
        """Accepts changes through a block's view as its bytes.

        Raises:
            OSError: the changes did not reach the tier; the view has them.
        """
        ...

    def wait_for_writes(self, timeout_s: float | None = None) -> bool:
        """Blocks until all bytes are in their final place; False after `timeout_s`.

        The transfer of a write may end earlier, once the bytes are safe on their way.
        """
        ...

    def trim(self) -> None:
        """Gives memory back to the system that reads had and that nothing uses any more.

        Without it the tier gives it back with its next write, or not at all.
        """
        ...

    def free(self, block: Any) -> None:
        """Frees a block's space; its bytes are lost. Takes no lock: finalizers call it."""
        ...

    def close(self) -> None:
        """Cancels what is queued, waits for what is under way, frees all memory and space."""
        ...


def close_when_dropped(owner: object, tiers: Sequence[Tier]) -> weakref.finalize[..., object]:
    """Closes tiers when their owner is freed, if no caller has called its `close`.

    In a thread of its own: an owner may be freed in any thread at any moment, also in a thread of a
    tier or under a lock, and closing waits for threads.

    Args:
        owner: alone uses the tiers; they do not refer to it.
        tiers: to be closed.

    Returns:
        The finalizer, which the owner's `close` must detach. It does nothing when the process ends.
    """
    finalizer = weakref.finalize(owner, _close_soon, list(tiers))
    finalizer.atexit = False
    return finalizer


def _close_soon(tiers: Sequence[Tier]) -> None:
    def close() -> None:
        for tier in tiers:
            tier.close()

    threading.Thread(target=close, name="offload closing", daemon=True).start()
