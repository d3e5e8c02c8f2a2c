# SPDX-License-Identifier: Apache-2.0
"""What the tiers moved in a step: `Traffic`. The engine asks it at a step's begin and end."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.offload.activations.placement.policy import Placement
from megatron.offload.stats.statistics import StepStatistics
from megatron.offload.tiers.tier import Tier


class Traffic:
    """Counts the bytes that went to and came from each tier in one step.

    Args:
        tiers: those that hold bytes, without the one that only chooses among the others.
    """

    def __init__(self, tiers: Mapping[Placement, Tier]) -> None:
        self._tiers = tiers
        self._before: dict[Placement, tuple[int, int]] = {}

    def begin_step(self) -> None:
        """Starts counting: what was moved before does not belong to the step."""
        self._before = self._moved_bytes()

    def end_step(self, step: StepStatistics) -> None:
        """Fills in the step's counters of bytes and bandwidths of the tiers."""
        moved = {
            placement: (written - self._before[placement][0], read - self._before[placement][1])
            for placement, (written, read) in self._moved_bytes().items()
        }
        step.host_written_bytes, step.host_read_bytes = moved.get(Placement.HOST, (0, 0))
        step.written_bytes, step.read_bytes = moved.get(Placement.SSD, (0, 0))
        step.tier_used_bytes = sum(tier.used_bytes for tier in self._tiers.values())
        ssd = self._tiers.get(Placement.SSD)
        if ssd is not None:
            statistics = ssd.statistics
            step.write_bytes_per_s = statistics.writes.bytes_per_s or 0.0
            step.read_bytes_per_s = statistics.reads.bytes_per_s or 0.0

    def _moved_bytes(self) -> dict[Placement, tuple[int, int]]:
        """Bytes written and read since the tiers were opened."""
        return {
            placement: (tier.statistics.writes.total_bytes, tier.statistics.reads.total_bytes)
            for placement, tier in self._tiers.items()
        }
