# SPDX-License-Identifier: Apache-2.0
"""Bytes that move as one storage and of which a tier has the only copy: `MovingStorage`.

A bucket of optimizer states or of gradients is one (`bucket.py`), and so is a unit of parameters
(`parameters/unit.py`). Only the thread that trains calls it, but for the end of a write, which an
I/O thread tells.

Note [Whose copy]
Memory is released only once a write has ended well. A bucket's bytes change with each use, so what
comes back is no longer on the tier, and its space there is free. A unit's parameters change in the
optimizer's step alone: what comes back stays on the tier, and leaves again without a write.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.offload.device.device import Device
from megatron.offload.machine.condition import Condition
from megatron.offload.moving.memory import Memory
from megatron.offload.tiers.tier import Tier
from megatron.offload.tiers.transfer import Transfer

# Hears of the end of a `write` or a `read`, in whatever thread.
Ended = Callable[["MovingStorage", str, Transfer], None]


class Where(enum.Enum):
    """Where bytes are that move. Members name the transitions into them."""

    NOWHERE = "nowhere"  # created: there are none yet
    IN_MEMORY = "in memory"  # hold; their read has ended; their write failed or was taken back
    WRITING = "being written"  # begin_write from IN_MEMORY; memory still holds them
    ON_TIER = "on a tier"  # the write has ended well, or let_go; the memory is released
    READING = "being read"  # begin_read from ON_TIER


class MovingStorage:
    """Bytes in one storage, in memory or on a tier.

    Args:
        device: in whose memory they are used.
        ended: is told of each end of a write or a read; None: it is told of none.

    Attributes:
        where: they are.
        num_bytes: of them; 0: there are none yet.
        block: has them on a tier; None: none has, or they have changed since.
        write_error: of the last write that failed, for a report.
    """

    keeps_block = False  # whether the tier keeps what comes back, see Note [Whose copy]

    def __init__(self, device: Device, ended: Ended | None = None) -> None:
        self.where = Where.NOWHERE
        self.num_bytes = 0
        self.block: Any = None
        self.write_error: BaseException | None = None
        self._device = device
        self._ended = ended
        self._memory: Memory | None = None
        self._events: Sequence[Any] = ()  # of the device, after which the memory has the bytes
        self._transfer: Transfer | None = None
        self._is_watched = False  # the end of the transfer under way is told
        # Protects what the end of a write changes. Held for a few assignments.
        self._lock = Condition()

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """That holds them in memory, or will when the read under way has ended."""
        return None if self._memory is None else self._memory.storage

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that they take now."""
        return 0 if self.where in (Where.NOWHERE, Where.ON_TIER) else self.num_bytes

    @property
    def tier(self) -> Tier | None:
        """Which has the bytes, at the end of a write that is under way; None: memory has them."""
        with self._lock:
            is_leaving = self.where in (Where.ON_TIER, Where.WRITING)
            return self.block.tier if is_leaving else None

    def hold(self, memory: Memory | None, num_bytes: int, events: Sequence[Any] = ()) -> None:
        """It has these bytes from now on, whatever it had before; None: it has none any more.

        Args:
            memory: with the bytes.
            num_bytes: of them.
            events: of the device, after which the memory has them.
        """
        self.take_back()
        self._memory, self.num_bytes, self._events = memory, num_bytes, events
        self.where, self.block = Where.NOWHERE if memory is None else Where.IN_MEMORY, None

    def note_change(self) -> None:
        """They are other bytes from now on than the block's; they are in memory."""
        assert self.where is Where.IN_MEMORY, self.where
        self.block = None

    # -- To a tier --------------------------------------------------------------------------------

    def begin_write(self, tier: Tier, after: Any) -> bool:
        """Starts to write them; whether the tier takes them.

        Args:
            tier: where to.
            after: an event of the device, after which the bytes are there.
        """
        assert self.where is Where.IN_MEMORY and self.storage is not None, self.where
        started = tier.begin_write(self.storage, after)
        if started is None:
            return False
        block, transfer = started
        with self._lock:  # all at once: a block counts as written unless it says WRITING
            self._is_watched = False
            self.where, self.block, self._transfer = Where.WRITING, block, transfer
        self.watch()
        return True

    def let_go(self) -> None:
        """Releases the memory of bytes that the tier has; no operation on it is queued."""
        assert self.where is Where.IN_MEMORY and self.block is not None, self.where
        assert self._memory is not None
        self.where = Where.ON_TIER
        self._memory.release()

    def watch(self) -> None:
        """Registers for the end of a transfer. A method that waits for it calls this again: an
        interrupt may have come before the first call was through."""
        transfer = self._transfer
        if self._is_watched or transfer is None:
            return
        if self.where is Where.WRITING:
            transfer.add_done_callback(self._write_ended)
        elif self._ended is not None:
            transfer.add_done_callback(self._read_ended)
        self._is_watched = True

    # Runs in an I/O thread; or in the one that watches, if the write had ended before.
    def _write_ended(self, transfer: Transfer) -> None:
        is_given_up = transfer.cancelled()
        error = None if is_given_up else transfer.exception()
        with self._lock:
            if self._transfer is not transfer:
                return  # taken back meanwhile
            assert self._memory is not None
            released = self._memory.storage  # freed when this frame ends, outside the lock
            # All at once, so that an interrupt leaves it in one of the states.
            if is_given_up or error is not None:
                self._transfer, self.where, self.block = None, Where.IN_MEMORY, None
                self.write_error = error
            else:
                self._transfer, self.where = None, Where.ON_TIER
                self._memory.release()
            self._lock.notify_all()
        del released
        if self._ended is not None:
            self._ended(self, "write", transfer)

    def _read_ended(self, transfer: Transfer) -> None:
        assert self._ended is not None
        self._ended(self, "read", transfer)

    def wait_for_write(self) -> None:
        """Blocks until no write is under way, well or badly."""
        self.watch()
        with self._lock:
            self._lock.wait_for(lambda: self.where is not Where.WRITING)

    def take_back(self) -> None:
        """The bytes are needed: a write under way is given up, and they stay in memory."""
        with self._lock:
            if self.where is not Where.WRITING:
                return
            transfer, self._transfer = self._transfer, None
            self.where, self.block = Where.IN_MEMORY, None
        assert transfer is not None
        transfer.cancel()

    # -- And back ---------------------------------------------------------------------------------

    def begin_read(self) -> None:
        """Starts to bring them back, if they are on a tier."""
        if self.where is not Where.ON_TIER:
            return
        assert self._memory is not None
        into = self._memory.for_read()
        try:
            storage, transfer = self.block.tier.begin_read(self.block, into=into)
        except BaseException:
            self._memory.release()
            raise
        self._is_watched = False
        self._memory.took(storage)
        self._transfer, self.where = transfer, Where.READING
        self.watch()

    @property
    def is_arriving(self) -> bool:
        """Whether a read is under way."""
        return self._transfer is not None and not self._transfer.done()

    def read(self) -> None:
        """Has them in memory; waits for the read if they are not there.

        Raises:
            OSError: it failed; they are still on the tier, if they are anywhere.
        """
        self.take_back()
        self.begin_read()
        if self.where is not Where.READING:
            return
        transfer = self._transfer
        assert transfer is not None
        try:
            transfer.wait()
        except BaseException:
            if transfer.done():  # else the wait was interrupted, and the read goes on
                self._forget_read()
            raise
        self._events = transfer.events or ()
        block = self.block if self.keeps_block else None
        self._transfer, self.where, self.block = None, Where.IN_MEMORY, block

    def bring(self) -> None:
        """As `read`, where operations that the calling thread queues next may use them."""
        if self.where is not Where.IN_MEMORY:
            self.read()
            self.use_here()

    def use_here(self) -> None:
        """The stream of the thread that calls uses them from now on; they are in memory."""
        assert self.storage is not None
        self._device.use_after(self.storage, self._events)

    def give_up_read(self) -> None:
        """They are not needed yet after all: releases the memory of a read, if there is one."""
        if self.where is Where.READING:
            assert self._transfer is not None
            self._transfer.cancel()
            self._transfer.wait_until_done()
            self._forget_read()

    def _forget_read(self) -> None:
        """A read has ended, and what it has read is not wanted, or wrong."""
        assert self._memory is not None
        self.where, self._transfer = Where.ON_TIER, None
        self._memory.release()

    # -- Where they are ---------------------------------------------------------------------------

    def view(self) -> torch.UntypedStorage:
        """The bytes where they are, on the tier or in memory; changed there they stay changed.

        Raises:
            OSError: the tier cannot show them, or has other bytes.
        """
        if self.where is Where.ON_TIER:
            return self.block.tier.view(self.block)
        assert self.storage is not None
        return self.storage

    def renew(self) -> None:
        """What was changed in the place that `view` shows is on the tier from now on.

        Raises:
            OSError: it did not come there.
        """
        if self.where is Where.ON_TIER:
            self.block.tier.renew(self.block)
