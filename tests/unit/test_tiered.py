# SPDX-License-Identifier: Apache-2.0
"""Two tiers side by side: shares by bandwidth and limit, a full or failed one is left out."""

from __future__ import annotations

import pytest
import torch

from megatron.offload.tiers.tier import Block, TierStatistics
from megatron.offload.tiers.tiered import TieredTier
from megatron.offload.tiers.transfer import when_all


class CountingTier:
    """Stores nothing; takes bytes up to its limit."""

    def __init__(self, bytes_per_s=None, limit_bytes=None):
        self.statistics = TierStatistics()
        if bytes_per_s is not None:
            self.statistics.writes._recent_bytes = bytes_per_s
            self.statistics.writes._recent_s = 1.0
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.degraded = False
        self.refuses = False

    @property
    def capacity_bytes(self):
        return self.limit_bytes or 0

    def begin_write(self, source, after=None):
        num_bytes = source.nbytes()
        over = self.limit_bytes is not None and self.used_bytes + num_bytes > self.limit_bytes
        if over or self.refuses:
            return None
        self.used_bytes += num_bytes
        return Block(self, num_bytes), when_all([])

    def begin_read(self, block, deadline=0.0, into=None):
        return torch.UntypedStorage(block.num_bytes), when_all([])

    def free(self, block):
        self.used_bytes -= block.num_bytes

    def close(self):
        pass


STORAGE = torch.UntypedStorage(100)


def fill(tiered, count):
    return [tiered.begin_write(STORAGE) for _ in range(count)]


@pytest.mark.parametrize(("fast", "slow"), [(3e9, 1e9), (9e9, 1e9), (1.0, 1.0)])
def test_bytes_are_shared_in_proportion_to_bandwidth(fast, slow):
    tiers = [CountingTier(fast), CountingTier(slow)]
    blocks = fill(TieredTier(tiers), 100)
    assert tiers[0].used_bytes / 10_000 == pytest.approx(fast / (fast + slow), abs=0.02)
    assert len(blocks) == 100


def test_before_anything_is_measured_the_shares_are_equal():
    tiers = [CountingTier(), CountingTier()]
    blocks = fill(TieredTier(tiers), 10)
    assert tiers[0].used_bytes == tiers[1].used_bytes == 500 and blocks


def test_a_small_fast_tier_fills_evenly_over_the_step():
    """Else the slow one would have nothing to do at first and everything at the end."""
    tiers = [CountingTier(9e9, limit_bytes=2000), CountingTier(1e9)]
    tiered = TieredTier(tiers)
    fill(tiered, 100)  # the first step shows how much there is; its blocks are dropped
    assert tiers[0].used_bytes == tiers[1].used_bytes == 0
    blocks = fill(tiered, 50)
    assert tiers[0].used_bytes == pytest.approx(1000, abs=100)  # half of the limit, in mid-step
    blocks += fill(tiered, 50)
    assert tiers[0].used_bytes == 2000 and tiers[1].used_bytes == 8000


def test_a_tier_without_budget_gets_nothing():
    tiers = [CountingTier(9e9, limit_bytes=0), CountingTier(1e9)]
    blocks = fill(TieredTier(tiers), 10)
    assert tiers[0].used_bytes == 0 and tiers[1].used_bytes == 1000 and blocks


def test_a_tier_that_takes_no_more_is_left_out():
    tiers = [CountingTier(9e9), CountingTier(1e9)]
    tiers[0].refuses = True
    tiered = TieredTier(tiers)
    blocks = fill(tiered, 10)
    assert tiers[1].used_bytes == 1000 and None not in blocks
    tiers[1].refuses = True
    assert tiered.begin_write(STORAGE) is None


def test_blocks_are_read_and_freed_by_the_tier_that_has_them():
    tiers = [CountingTier(limit_bytes=100), CountingTier()]
    tiered = TieredTier(tiers)
    blocks = [block for block, _ in fill(tiered, 2)]
    assert {id(block.tier) for block in blocks} == {id(tier) for tier in tiers}
    for block in blocks:
        storage, _ = tiered.begin_read(block)
        assert storage.nbytes() == 100
    assert tiered.used_bytes == 200
    del block, blocks
    assert tiered.used_bytes == 0
