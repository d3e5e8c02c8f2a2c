# SPDX-License-Identifier: Apache-2.0
"""Bytes in host memory: `HostTier`, opened for the modes `host` and `tiered`.

It copies storages to an arena that reuses freed ranges, and back; `copies.py` makes the copies. On
a CPU both are host memory, so it frees none: for trying things out.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from megatron.offload.device.cpu import CpuDevice
from megatron.offload.device.device import Device
from megatron.offload.sizes import format_size
from megatron.offload.tiers.arena import HostArena
from megatron.offload.tiers.copies import ByDevice, ByThreads, HostCopies
from megatron.offload.tiers.host_budget import PROMISED
from megatron.offload.tiers.mapped import storage_at
from megatron.offload.tiers.purpose import ACTIVATIONS, Purpose
from megatron.offload.tiers.tier import Block, TierStatistics
from megatron.offload.tiers.transfer import Transfer

logger = logging.getLogger(__name__)


class HostBlock(Block):
    """Where the host tier keeps the bytes of one storage: a range of the arena."""

    def __init__(self, tier: HostTier, offset: int, num_bytes: int) -> None:
        self.offset: int | None  # None: freed
        # First, and in one statement: from here on `__del__` frees the range.
        self.tier, self.offset = tier, offset
        super().__init__(tier, num_bytes)

    def __str__(self) -> str:
        return f"host memory, offset {self.offset}, length {self.num_bytes}"


class HostTier:
    """A tier in host memory, within a budget.

    Args:
        budget_bytes: most bytes that it may hold; 0: it takes nothing.
        num_threads: copies that run at the same time on a CPU; a device has a queue of its own.
        device: where the storages are; None: in host memory.
        purpose: whose bytes it holds, in sentences.
        flag: the end of the name of the flag that sets the budget.
        overflows: no warning when it is full, because another tier takes what does not fit.

    Raises:
        ConfigurationError: the system has no memory of that kind or size; the message says why.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        num_threads: int = 2,
        device: Device | None = None,
        purpose: Purpose = ACTIVATIONS,
        flag: str = "host-budget",
        overflows: bool = False,
    ) -> None:
        self.purpose = purpose
        self._flag = purpose.flag(flag)
        self.statistics = TierStatistics()
        self.limit_bytes: int | None = budget_bytes
        device = device or CpuDevice()
        self._arena = HostArena(budget_bytes, device, purpose, flag)
        self._is_used_up = overflows
        self._copies: HostCopies = (
            ByThreads(device, num_threads, self.statistics, purpose)
            if device.is_host
            else ByDevice(device, self.statistics, purpose)
        )
        PROMISED.add(self)

    def __str__(self) -> str:
        pinned = ", pinned" if self._arena.pinned else ""
        state = ", cannot grow" if self.degraded else ""
        return f"host memory ({format_size(self._arena.budget_bytes)} budget{pinned}{state})"

    @property
    def degraded(self) -> bool:
        """Whether the system refused memory although budget was left."""
        return self._arena.growth_failed

    @property
    def used_bytes(self) -> int:
        """Bytes taken by live blocks, in whole pages."""
        return self._arena.used_bytes

    @property
    def capacity_bytes(self) -> int:
        """Bytes that the arena has grown to, taken or free; it grows up to the budget."""
        return self._arena.size_bytes

    def begin_write(
        self, source: torch.UntypedStorage, after: Any = None
    ) -> tuple[HostBlock, Transfer] | None:
        """Starts to copy a whole storage to host memory; None if the budget is used up."""
        offset = self._arena.allocate(source.nbytes())
        if offset is None:
            self._warn_used_up()
            return None
        # The copy holds the block, and with it the range.
        block = HostBlock(self, offset, source.nbytes())
        address = self._arena.address(offset)
        return block, self._copies.begin_write(source, address, after, block)

    def begin_read(
        self, block: HostBlock, deadline: float = 0.0, into: torch.UntypedStorage | None = None
    ) -> tuple[torch.UntypedStorage, Transfer]:
        """Starts to copy a block into a new storage on the device, or into `into`."""
        assert block.offset is not None, "the block was freed"
        address = self._arena.address(block.offset)
        return self._copies.begin_read(address, block.num_bytes, deadline, block, into)

    def view(self, block: HostBlock) -> torch.UntypedStorage:
        """A block's range of the arena; child processes that are forked meanwhile inherit it."""
        assert block.offset is not None, "the block was freed"
        shown = self._arena.forkable(block.offset, block.num_bytes)
        owner = (block, shown, self._arena.keep_mapped())
        return storage_at(self._arena.address(block.offset), block.num_bytes, owner)

    def copy_view(self, block: HostBlock, into: torch.UntypedStorage) -> None:
        """Copies a block's range of the arena."""
        into.copy_(self.view(block))

    def renew(self, block: HostBlock) -> None:
        """Does nothing: the view is the block's memory."""

    def wait_for_writes(self, timeout_s: float | None = None) -> bool:
        """Returns at once: a write whose transfer has ended is complete."""
        return True

    def trim(self) -> None:
        """Does nothing: the device allocates what a read fills."""

    def free(self, block: HostBlock) -> None:
        """Gives a block's range back to the arena. Takes no lock: finalizers call it."""
        offset, block.offset = block.offset, None
        if offset is not None:
            self._arena.free(offset)

    def close(self) -> None:
        """Cancels what is queued, waits for what is under way, frees the memory."""
        PROMISED.discard(self)
        self._copies.close()
        self._arena.close()

    def _warn_used_up(self) -> None:
        """Warns once, unless the arena has already said why it does not grow."""
        if self._is_used_up or self._arena.growth_failed or not self._arena.budget_bytes:
            return
        self._is_used_up = True
        logger.warning(
            "%s%s is used up; host memory holds %s, and what does not fit goes to another tier or "
            "stays in device memory",
            self.purpose.prefix,
            self._flag,
            format_size(self._arena.size_bytes),
        )
