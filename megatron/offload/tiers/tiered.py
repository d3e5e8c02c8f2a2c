# SPDX-License-Identifier: Apache-2.0
"""Several tiers used at the same time: `TieredTier`. The engine opens one for mode `tiered`.

Every storage goes to one of the tiers, as a whole; its block is that tier's own. The shares follow
the measured bandwidths, bounded by what each tier can hold, so that all tiers fill at the same
pace. A tier that is full or has failed gets nothing, and the others go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron.offload.tiers.bandwidth import BandwidthMeter
from megatron.offload.tiers.tier import Block, Tier, TierStatistics
from megatron.offload.tiers.transfer import Transfer


class TieredTier:
    """A tier made of others, usually host memory and SSDs, which it uses side by side.

    Args:
        tiers: at least one; closed with this one.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers = list(tiers)
        self._peak_bytes = 0  # most bytes that were ever stored at the same time

    def __str__(self) -> str:
        return " and ".join(str(tier) for tier in self.tiers)

    @property
    def statistics(self) -> TierStatistics:
        """What all tiers moved, added up; bandwidths too: the tiers work side by side."""
        each = [tier.statistics for tier in self.tiers]
        return TierStatistics(
            writes=BandwidthMeter.side_by_side([one.writes for one in each]),
            reads=BandwidthMeter.side_by_side([one.reads for one in each]),
            failed_writes=sum(one.failed_writes for one in each),
        )

    @property
    def degraded(self) -> bool:
        """Whether one of the tiers is degraded."""
        return any(tier.degraded for tier in self.tiers)

    @property
    def used_bytes(self) -> int:
        """Bytes taken by live blocks, over all tiers."""
        return sum(tier.used_bytes for tier in self.tiers)

    @property
    def capacity_bytes(self) -> int:
        """Bytes that all tiers have room for at present, taken or free."""
        return sum(tier.capacity_bytes for tier in self.tiers)

    @property
    def limit_bytes(self) -> int | None:
        """Bytes that all tiers may ever hold; None: one of them has no known bound."""
        limits = [tier.limit_bytes for tier in self.tiers]
        known = [limit for limit in limits if limit is not None]
        return sum(known) if len(known) == len(limits) else None

    def begin_write(
        self, source: torch.UntypedStorage, after: Any = None
    ) -> tuple[Block, Transfer] | None:
        """Starts to write a storage to the tier that is furthest behind its share, or to the next.

        None if every tier is full or failed.
        """
        num_bytes = source.nbytes()
        used = [tier.used_bytes for tier in self.tiers]
        self._peak_bytes = max(self._peak_bytes, sum(used) + num_bytes)
        shares = self._shares()
        order = sorted(
            (index for index in range(len(used)) if shares[index] > 0),
            key=lambda index: (used[index] + num_bytes) / shares[index],
        )
        for index in order:
            started = self.tiers[index].begin_write(source, after)
            if started is not None:
                return started
        return None

    def begin_read(
        self, block: Block, deadline: float = 0.0, into: torch.UntypedStorage | None = None
    ) -> tuple[torch.UntypedStorage, Transfer]:
        """Starts to read a block from the tier that it was written to."""
        return block.tier.begin_read(block, deadline, into)

    def view(self, block: Block) -> torch.UntypedStorage:
        """The bytes of a block, in the tier that it was written to."""
        return block.tier.view(block)

    def copy_view(self, block: Block, into: torch.UntypedStorage) -> None:
        """Calls `copy_view` of the tier that the block was written to."""
        block.tier.copy_view(block, into)

    def renew(self, block: Block) -> None:
        """Calls `renew` of the tier that the block was written to."""
        block.tier.renew(block)

    def wait_for_writes(self, timeout_s: float | None = None) -> bool:
        """Blocks until all tiers have all bytes in their final place; False after `timeout_s`."""
        return all(tier.wait_for_writes(timeout_s) for tier in self.tiers)

    def trim(self) -> None:
        """Calls `trim` of each tier."""
        for tier in self.tiers:
            tier.trim()

    def free(self, block: Block) -> None:
        """Frees a block's space in its tier. Takes no lock: finalizers call it."""
        block.tier.free(block)

    def close(self) -> None:
        """Closes each tier: it cancels queued transfers and waits for those under way."""
        for tier in self.tiers:
            tier.close()

    def _shares(self) -> list[float]:
        """The part of all stored bytes that each tier should hold; they add up to at most 1.

        In proportion to write bandwidth. A part beyond a tier's limit (relative to the most bytes
        that were ever stored at once) goes to the other tiers.
        """
        speeds = [tier.statistics.writes.bytes_per_s for tier in self.tiers]
        known = [speed for speed in speeds if speed]
        usual = sum(known) / len(known) if known else 1.0
        weights = [speed or usual for speed in speeds]
        caps = [
            1.0 if tier.limit_bytes is None else tier.limit_bytes / self._peak_bytes
            for tier in self.tiers
        ]
        shares = [0.0] * len(weights)
        open_tiers = set(range(len(weights)))
        left = 1.0
        while open_tiers:
            total = sum(weights[index] for index in open_tiers)
            capped = {i for i in open_tiers if left * weights[i] / total > caps[i]}
            if not capped:
                for index in open_tiers:
                    shares[index] = left * weights[index] / total
                break
            for index in capped:
                shares[index] = caps[index]
            left -= sum(caps[index] for index in capped)
            open_tiers -= capped
        return shares
