# SPDX-License-Identifier: Apache-2.0
"""A tier at work: `TierLoad`, and `open_load`, which opens the tiers that a kind stands for.

They are called as the engine calls them: begin_write, begin_read and wait, on storages of the
device. `command.py` times pieces of it. Nothing here prints.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.offload.commands.bench.arguments import NUM_WAITING
from megatron.offload.commands.bench.sample import Sample, Stopwatch, random_storage
from megatron.offload.commands.training_runs.run import RunError
from megatron.offload.device.device import Device
from megatron.offload.tiers.gds import GdsTier
from megatron.offload.tiers.host import HostTier
from megatron.offload.tiers.ssd import SsdTier
from megatron.offload.tiers.tier import Tier
from megatron.offload.tiers.tiered import TieredTier
from megatron.offload.tiers.transfer import Transfer

WARM_UP_S = 0.05


class TierLoad:
    """A tier full of live blocks. Every write takes the place of the block that it replaces.

    At most `depth + NUM_WAITING` transfers are submitted. Sources are used again when their
    transfer is done, as fio's buffers are; what is read is dropped as soon as it arrives.

    Args:
        tier: empty, with room for all blocks.
        block_bytes: of each storage.
        num_blocks: that it holds.
        depth: its I/O threads.
        device: where the storages are.

    Raises:
        RunError: the tier takes no more.
    """

    def __init__(
        self, tier: Tier, block_bytes: int, num_blocks: int, depth: int, device: Device
    ) -> None:
        self._tier = tier
        self._block_bytes = block_bytes
        self._window = depth + NUM_WAITING
        self._sources = [random_storage(block_bytes, device.device) for _ in range(self._window)]
        self._device = device
        self._made = device.record_event()  # after it they hold their bytes
        self._blocks: list[Any] = [None] * num_blocks
        self.run("write", None)
        self.run("read", WARM_UP_S)  # memory for reads comes from the allocator's free blocks then

    def run(self, operation: str, seconds: float | None) -> Sample:
        """One timed piece: all blocks once, or over and over for `seconds`."""
        watch = Stopwatch()
        end = None if seconds is None else time.perf_counter() + seconds
        under_way: collections.deque[tuple[object, Transfer]] = collections.deque()
        num_moved = 0
        while num_moved < len(self._blocks) if end is None else time.perf_counter() < end:
            if len(under_way) == self._window:
                self._wait(under_way.popleft()[1])
            under_way.append(self._begin(operation, num_moved))
            num_moved += 1
        while under_way:
            self._wait(under_way.popleft()[1])
        return watch.stop(num_moved * self._block_bytes)

    def _wait(self, transfer: Transfer) -> None:
        transfer.wait()
        for event in transfer.events or ():
            self._device.wait_for_event(event)

    def _begin(self, operation: str, index: int) -> tuple[object, Transfer]:
        """Starts transfer `index` of a piece. Mixed reads stay half the tier away from writes."""
        place, is_write = index, operation == "write"
        if operation == "mixed":
            is_write = index % 2 == 0
            place = index // 2 + (0 if is_write else len(self._blocks) // 2)
        place %= len(self._blocks)
        if not is_write:
            return self._tier.begin_read(self._blocks[place])
        self._blocks[place] = None  # its space is free for the new one
        started = self._tier.begin_write(self._sources[index % self._window], self._made)
        if started is None:
            raise RunError(f"{self._tier} takes no more")
        self._blocks[place], transfer = started
        return None, transfer


@contextlib.contextmanager
def open_load(
    kind: str, directory: Path, device: Device, size_bytes: int, block_bytes: int, depth: int
) -> Iterator[TierLoad]:
    """A tier of a kind, full of blocks; everything is closed and freed afterwards.

    Args:
        kind: ssd, ssd-buffered, ssd-gds, host, or tiered: half in host memory.
        directory: on the SSD.
        device: where the storages are that move.
        size_bytes: of all blocks together.
        block_bytes: of each.
        depth: I/O threads.

    Raises:
        ConfigurationError: the tier cannot work here.
        RunError: it takes no more.
    """
    room = size_bytes + size_bytes // 16  # a block's space may be larger than the block
    io = {"ssd-buffered": "buffered", "ssd-gds": "gds"}.get(kind, "auto")
    tiers: list[Tier] = []
    try:
        if kind in ("host", "tiered"):
            budget_bytes = room if kind == "host" else size_bytes // 2
            tiers.append(HostTier(budget_bytes, num_threads=depth, device=device))
        if kind != "host":
            ssd = GdsTier if io == "gds" else SsdTier
            tiers.append(
                ssd([directory], reserve_bytes=room, num_threads=depth, io=io, device=device)
            )
        tier = tiers[0] if len(tiers) == 1 else TieredTier(tiers)
        yield TierLoad(tier, block_bytes, size_bytes // block_bytes, depth, device)
    finally:
        for tier in tiers:
            tier.close()
