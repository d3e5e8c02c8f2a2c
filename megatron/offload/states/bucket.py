# SPDX-License-Identifier: Apache-2.0
"""Some parameters whose states move together, and where their bytes are: `Bucket`.

Only the thread that trains calls it, but for the end of a write, which an I/O thread tells.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.offload.machine.condition import Condition
from megatron.offload.states.layout import Layout, Name
from megatron.offload.tiers.tier import Tier
from megatron.offload.tiers.transfer import Transfer


class Where(enum.Enum):
    """Where a bucket's bytes are. Members name the transitions into them."""

    NOWHERE = "nowhere"  # created: the optimizer has made no states yet
    IN_MEMORY = "in memory"  # filled; its read has ended; its write failed or was taken back
    WRITING = "being written"  # begin_write from IN_MEMORY; memory still holds them
    ON_TIER = "on a tier"  # the write has ended well, and memory was let go
    READING = "being read"  # begin_read from ON_TIER


class Bucket:
    """States of a few parameters, in one storage.

    Args:
        params: at least one.
        changed: told, in whatever thread, that a write or a read has ended, well or badly.
    """

    def __init__(self, params: Sequence[torch.Tensor], changed: Callable[[], None]) -> None:
        self.params = list(params)
        self.devices = [param.device for param in self.params]  # where they are between steps
        self.layout: Layout | None = None
        self.where = Where.NOWHERE
        self.storage: torch.UntypedStorage | None = None
        self.block: Any = None
        self.write_error: BaseException | None = None  # of the last write that failed
        self._has_pages = False  # of a CPU, made by its layout
        self._transfer: Transfer | None = None
        self._is_watched = False  # the end of the transfer under way is told
        self._changed = changed
        # Protects what the end of a write changes. Held for a few assignments.
        self._lock = Condition()

    @property
    def num_bytes(self) -> int:
        """Bytes of its states, 0 before the first step."""
        return 0 if self.layout is None else self.layout.num_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that it takes now."""
        return 0 if self.storage is None else self.num_bytes

    @property
    def tier(self) -> Tier | None:
        """Which has its bytes, at the end of a write that is under way; None: memory has them."""
        with self._lock:
            is_leaving = self.where in (Where.ON_TIER, Where.WRITING)
            return self.block.tier if is_leaving else None

    @property
    def views(self) -> dict[Name, torch.Tensor]:
        """Its tensors, by name; it is in memory, or has none."""
        if self.layout is None:
            return {}
        assert self.storage is not None
        return self.layout.views(self.storage)

    def fill(self, layout: Layout, storage: torch.UntypedStorage) -> None:
        """It has these bytes from now on, whatever it had before."""
        self.take_back()
        self.layout, self.storage = layout, storage
        # A gradient may have memory of an allocator's, which begins anywhere in a page.
        self._has_pages = storage.device.type == "cpu" and layout.is_aligned(storage)
        self.where, self.block = Where.IN_MEMORY, None

    def forget(self) -> None:
        """It has no bytes any more."""
        self.take_back()
        self.layout, self.storage, self.block = None, None, None
        self.where = Where.NOWHERE

    def begin_write(self, tier: Tier, after: Any) -> bool:
        """Starts to write it; whether the tier takes it.

        Args:
            tier: where to.
            after: an event of the device, after which the bytes are there.
        """
        assert self.where is Where.IN_MEMORY and self.storage is not None, self.where
        started = tier.begin_write(self.storage, after)
        if started is None:
            return False
        block, transfer = started
        with self._lock:
            self._is_watched = False
            self.where, self.block, self._transfer = Where.WRITING, block, transfer
        self.watch()
        return True

    def watch(self) -> None:
        """Registers for the end of a transfer. A method that waits for it calls this again: an
        interrupt may have come before the first call was through."""
        transfer = self._transfer
        if self._is_watched or transfer is None:
            return
        if self.where is Where.WRITING:
            transfer.add_done_callback(self._write_ended)
        else:
            transfer.add_done_callback(lambda _: self._changed())
        self._is_watched = True

    # Runs in an I/O thread; or in the one that watches, if the write had ended before.
    def _write_ended(self, transfer: Transfer) -> None:
        is_given_up = transfer.cancelled()
        error = None if is_given_up else transfer.exception()
        storage = None  # freed when this frame ends, outside the lock
        with self._lock:
            if self._transfer is not transfer:
                return  # taken back meanwhile
            # All at once, so that an interrupt leaves it in one of the states.
            if is_given_up or error is not None:
                self._transfer, self.where, self.block = None, Where.IN_MEMORY, None
                self.write_error = error
            else:
                storage, self.storage = self.storage, None
                self._transfer, self.where = None, Where.ON_TIER
            self._lock.notify_all()
        del storage
        self._changed()

    def take_back(self) -> None:
        """The bytes are needed: a write under way is given up, and they stay in memory."""
        with self._lock:
            if self.where is not Where.WRITING:
                return
            transfer, self._transfer = self._transfer, None
            self.where, self.block = Where.IN_MEMORY, None
        assert transfer is not None
        transfer.cancel()

    def read(self) -> Sequence[Any] | None:
        """Has it in memory; as `end_read`, after `begin_read` if nobody has begun."""
        if self.where is Where.ON_TIER:
            self.begin_read()
        return self.end_read()

    def begin_read(self) -> None:
        """Starts to bring it back to memory of the kind that it had before."""
        assert self.where is Where.ON_TIER, self.where
        assert self.layout is not None
        # An accelerator's would have to wait for what used it before: the tier knows how.
        into = self.layout.new_storage(torch.device("cpu")) if self._has_pages else None
        storage, transfer = self.block.tier.begin_read(self.block, into=into)
        self._is_watched = False
        self.storage, self._transfer, self.where = storage, transfer, Where.READING
        self.watch()

    def give_up_read(self) -> None:
        """Its bytes are not needed yet after all: lets the memory of a read go, if there is one."""
        if self.where is not Where.READING:
            return
        assert self._transfer is not None
        self._transfer.cancel()
        self._transfer.wait_until_done()
        self.storage, self._transfer, self.where = None, None, Where.ON_TIER

    @property
    def is_coming(self) -> bool:
        """Whether a read of it is under way."""
        return self._transfer is not None and not self._transfer.done()

    def end_read(self) -> Sequence[Any] | None:
        """Waits for the read; events of the device after which the bytes are there.

        Raises:
            OSError: it failed; the bytes are still where they were, if they are anywhere.
        """
        assert self.where is Where.READING, self.where
        transfer = self._transfer
        assert transfer is not None
        try:
            transfer.wait()
        except BaseException:
            self.storage, self._transfer, self.where = None, None, Where.ON_TIER
            raise
        self._transfer, self.where, self.block = None, Where.IN_MEMORY, None
        return transfer.events

    def wait_for_write(self) -> None:
        """Blocks until no write is under way, well or badly."""
        self.watch()
        with self._lock:
            self._lock.wait_for(lambda: self.where is not Where.WRITING)

    def renew(self) -> bool:
        """What was changed in its place there is its bytes from now on; False: only in memory."""
        if self.where is Where.ON_TIER:
            try:
                self.block.tier.renew(self.block)
            except OSError:
                return False
        return True
