# SPDX-License-Identifier: Apache-2.0
"""Several tiers used as one: a block is read by the tier that has it."""

from __future__ import annotations

import torch

from megatron.offload.sizes import MIB
from megatron.offload.tiers.host import HostTier
from megatron.offload.tiers.tiered import TieredTier


def test_a_block_is_read_by_the_tier_that_has_it() -> None:
    tiers = [HostTier(MIB), HostTier(MIB)]
    tiered = TieredTier(tiers)
    blocks = []
    for value in range(4):
        storage = torch.full((4096,), value, dtype=torch.uint8).untyped_storage()
        started = tiered.begin_write(storage)
        assert started is not None
        started[1].wait()
        blocks.append(started[0])
    assert {id(block.tier) for block in blocks} == {id(tier) for tier in tiers}
    for value, block in enumerate(blocks):
        target, transfer = tiered.begin_read(block)
        transfer.wait()
        assert set(torch.empty(0, dtype=torch.uint8).set_(target).tolist()) == {value}
    del started, block, blocks
    tiered.close()
