# SPDX-License-Identifier: Apache-2.0
"""Bytes that move as one storage and of which a tier has the only copy: `MovingStorage`.

A bucket of optimizer states or of gradients is one (`bucket.py`), and so is a unit of parameters
(`parameters/unit.py`). The thread that trains calls it. An I/O thread reports the end of a
transfer, and a thread that finds no memory may give up what was read ahead (`give_up_read`).

Note [Whose copy]
Memory is released only when a write has ended well. A bucket's bytes change with each use, so the
tier frees its copy when the bucket is read. A unit's parameters change only in the optimizer's
step, or where other code changes them, which is noticed: the tier keeps its copy when the unit is
read, and the unit leaves again without a write.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.offload.device.device import Device
from megatron.offload.machine.condition import Condition
from megatron.offload.moving.memory import Memory
from megatron.offload.tiers.mapped import own_pages
from megatron.offload.tiers.tier import Tier
from megatron.offload.tiers.transfer import Transfer

# Called at the end of a write or a read, in any thread.
Ended = Callable[["MovingStorage", str, Transfer], None]


class Where(enum.Enum):
    """Where the bytes are. Members name the transitions into them."""

    NOWHERE = "nowhere"  # created: there are no bytes yet
    IN_MEMORY = "in memory"  # hold; the read has ended; the write failed or was taken back
    WRITING = "being written"  # begin_write from IN_MEMORY; memory still holds them
    ON_TIER = "on a tier"  # the write has ended well, or let_go; the read failed or was given up
    READING = "being read"  # begin_read from ON_TIER


class MovingStorage:
    """Bytes in one storage, in memory or on a tier.

    Subclasses may replace `keeps_block`, `moved_bytes`, `memory_bytes`, `_to_write`, `_begin_read`,
    `_arrived`, `_forget_read` and `_shown_block`.

    Args:
        device: in whose memory they are used.
        ended: called at the end of each write and read; None: nothing is called.

    Attributes:
        where: the bytes are.
        num_bytes: of them; 0: there are no bytes yet.
        block: where they are on a tier; None: on no tier, or they have changed since.
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
        self._events: Sequence[Any] = ()  # of the device; after these the memory has the bytes
        self._transfer: Transfer | None = None
        self._is_watched = False  # whether the transfer under way has our callback
        # Protects what the end of a write changes. A thread holds it for a few assignments.
        self._lock = Condition()

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """The storage with the bytes, also while they are being read into it."""
        return None if self._memory is None else self._memory.storage

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that they take now."""
        return 0 if self.where in (Where.NOWHERE, Where.ON_TIER) else self.num_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes that a write or a read of them moves."""
        return self.num_bytes

    @property
    def tier(self) -> Tier | None:
        """The tier with the bytes, or that they are being written to; None: they are in memory."""
        with self._lock:
            is_leaving = self.where in (Where.ON_TIER, Where.WRITING)
            return self.block.tier if is_leaving else None

    def hold(self, memory: Memory | None, num_bytes: int, events: Sequence[Any] = ()) -> None:
        """Replaces the bytes by these.

        Args:
            memory: with the bytes; None: there are no bytes any more.
            num_bytes: of them.
            events: of the device; after these the memory has the bytes.
        """
        self.take_back()
        self.give_up_read()
        self._memory, self.num_bytes, self._events = memory, num_bytes, events
        self.where, self.block = Where.NOWHERE if memory is None else Where.IN_MEMORY, None

    def note_change(self) -> None:
        """The bytes in memory were changed: the block on the tier is not theirs any more."""
        assert self.where is Where.IN_MEMORY, self.where
        self.block = None

    # -- To a tier --------------------------------------------------------------------------------

    def begin_write(self, tier: Tier, after: Any) -> bool:
        """Starts to write the bytes; False: the tier has no room for them.

        Args:
            tier: to write to.
            after: an event of the device; after it the memory has the bytes.
        """
        assert self.where is Where.IN_MEMORY, self.where
        started = tier.begin_write(*self._to_write(after))
        if started is None:
            return False
        block, transfer = started
        with self._lock:  # together: a block counts as written unless the state is WRITING
            self._is_watched = False
            self.where, self.block, self._transfer = Where.WRITING, block, transfer
        self.watch()
        return True

    def _to_write(self, after: Any) -> tuple[torch.UntypedStorage, Any]:
        """What a tier gets, and the event after which it is there."""
        assert self.storage is not None
        return self.storage, after

    def let_go(self) -> None:
        """Releases the memory of bytes that are on the tier."""
        assert self.where is Where.IN_MEMORY and self.block is not None, self.where
        assert self._memory is not None
        self.where = Where.ON_TIER
        self._memory.release()

    def watch(self) -> None:
        """Adds our callback to a transfer. A method that waits for the transfer calls this again:
        Ctrl-C may have ended the first call half way."""
        transfer = self._transfer
        if self._is_watched or transfer is None:
            return
        if self.where is Where.WRITING:
            transfer.add_done_callback(self._write_ended)
        elif self._ended is not None:
            transfer.add_done_callback(self._read_ended)
        self._is_watched = True

    # Runs in an I/O thread, or in the thread that calls `watch` if the write has ended before.
    def _write_ended(self, transfer: Transfer) -> None:
        is_given_up = transfer.cancelled()
        error = None if is_given_up else transfer.exception()
        with self._lock:
            if self._transfer is not transfer:
                return  # `take_back` has taken the bytes back meanwhile
            assert self._memory is not None
            released = self._memory.storage  # freed by the `del` below, outside the lock
            try:
                # In one statement each, so that Ctrl-C leaves one of the states.
                if is_given_up or error is not None:
                    self._transfer, self.where, self.block = None, Where.IN_MEMORY, None
                    self.write_error = error
                else:
                    self._transfer, self.where = None, Where.ON_TIER
                    self._memory.release()
            finally:
                self._lock.notify_all()
        del released
        if self._ended is not None:
            self._ended(self, "write", transfer)

    def _read_ended(self, transfer: Transfer) -> None:
        assert self._ended is not None
        self._ended(self, "read", transfer)

    def wait_for_write(self) -> None:
        """Blocks until no write is under way; raises nothing if the write failed."""
        self.watch()
        with self._lock:
            self._lock.wait_for(lambda: self.where is not Where.WRITING)

    def take_back(self) -> None:
        """The bytes are needed: cancels a write under way, so that they stay in memory."""
        with self._lock:
            if self.where is not Where.WRITING:
                return
            transfer, self._transfer = self._transfer, None
            self.where, self.block = Where.IN_MEMORY, None
            self._lock.notify_all()
        assert transfer is not None
        transfer.cancel()

    # -- And back ---------------------------------------------------------------------------------

    def begin_read(self) -> None:
        """Starts to read the bytes back, if they are on a tier."""
        if self.where is not Where.ON_TIER:
            return
        transfer = self._begin_read()
        self._is_watched = False
        self._transfer, self.where = transfer, Where.READING
        self.watch()

    def _begin_read(self) -> Transfer:
        assert self._memory is not None
        into = self._memory.for_read()
        try:
            storage, transfer = self.block.tier.begin_read(self.block, into=into)
        except BaseException:
            self._memory.release()
            raise
        self._memory.took(storage)
        return transfer

    def _arrived(self, events: Sequence[Any]) -> Sequence[Any]:
        """What was read is there after these events; the bytes after those that it returns.

        Called again after an error.
        """
        return events

    @property
    def is_arriving(self) -> bool:
        """Whether a read is under way."""
        transfer = self._transfer
        return self.where is Where.READING and transfer is not None and not transfer.done()

    def read(self) -> None:
        """Brings the bytes to memory; waits for the read if they are not there.

        Raises:
            OSError: the read failed; the tier still has what it had.
        """
        self.take_back()
        self.begin_read()
        while (transfer := self._read_under_way()) is not None:
            try:
                transfer.wait()
            except BaseException:
                if transfer.done():  # else Ctrl-C has ended the wait, and the read goes on
                    self._forget_read(transfer)
                raise
            events = self._arrived(transfer.events or ())
            with self._lock:
                if self._transfer is transfer:
                    self._events = events
                    block = self.block if self.keeps_block else None
                    self._transfer, self.where, self.block = None, Where.IN_MEMORY, block
            self.begin_read()  # only if another thread has given up the read

    def _read_under_way(self) -> Transfer | None:
        with self._lock:
            return self._transfer if self.where is Where.READING else None

    def bring(self) -> None:
        """`read`, and makes the calling thread's next operations wait for the bytes."""
        self.read()
        self.use_here()

    def use_here(self) -> None:
        """The calling thread's stream uses the bytes from now on; they are in memory."""
        assert self._memory is not None
        self._memory.use_after(self._device, self._events)

    def give_up_read(self) -> None:
        """The bytes are not needed yet: cancels a read under way and releases its memory.

        Another thread than the one that trains may call it where a device's memory runs out.
        """
        if (transfer := self._read_under_way()) is not None:
            transfer.cancel()
            transfer.wait_until_done()
            self._forget_read(transfer)

    def _forget_read(self, transfer: Transfer) -> None:
        """A read has ended, and its bytes are not wanted, or wrong: releases the memory."""
        with self._lock:
            if self._transfer is transfer:  # else another thread has seen its end
                assert self._memory is not None
                self.where, self._transfer = Where.ON_TIER, None
                self._memory.release()

    # -- Where they are ---------------------------------------------------------------------------

    @property
    def _shown_block(self) -> Any:
        """The block on a tier that has the bytes as tensors have them."""
        return self.block

    def view(self) -> torch.UntypedStorage:
        """The bytes where they are, on the tier or in memory; changes of them stay.

        Raises:
            OSError: the tier cannot show them, or has other bytes.
        """
        if self.where is Where.ON_TIER:
            return self._shown_block.tier.view(self._shown_block)
        assert self.storage is not None
        return self.storage

    def copy_of_view(self) -> torch.UntypedStorage:
        """What `view` shows of bytes on a tier, in memory of its own on the host.

        Raises:
            OSError: it could not be read; the view could not be read either, and a read of it
                would end the process.
            torch.OutOfMemoryError: the host has no memory for it.
        """
        assert self.where is Where.ON_TIER, self.where
        copied = own_pages(self.num_bytes)
        self._shown_block.tier.copy_view(self._shown_block, copied)
        return copied

    def renew(self) -> None:
        """Makes changes of the bytes that `view` shows part of the block on the tier.

        Raises:
            OSError: the tier could not take them.
        """
        if self.where is Where.ON_TIER:
            self.block.tier.renew(self.block)
