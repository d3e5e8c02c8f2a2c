# SPDX-License-Identifier: Apache-2.0
"""Brings bytes of which a tier has the only copy, and puts them away: `OnlyCopy`, one a stream.

Optimizer states, parameters and gradients have one each. It handles and reports all that fails.

Note [The only copy]
Unlike an activation, these bytes cannot be computed again. So memory is released only when a write
has ended well; what no tier has room for stays in memory; the tiers keep checksums; a read that
fails is tried once more. If it fails again, `LostStateError` ends the training, which never goes
on with wrong numbers.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from megatron.offload.device.clock import Clock
from megatron.offload.device.device import Device
from megatron.offload.errors import LostStateError, OffloadError
from megatron.offload.machine.condition import Condition
from megatron.offload.moving.storage import MovingStorage, Where
from megatron.offload.sizes import format_size
from megatron.offload.stats.trace import Tracer
from megatron.offload.tiers.tier import Block, Tier
from megatron.offload.tiers.transfer import TRANSFER_ERRORS, Transfer

logger = logging.getLogger(__name__)


class OnlyCopy:
    """The members of one stream, its tiers, and counters of what moving them took.

    Args:
        prefix: the beginning of each of its sentences.
        tiers: a member goes to the first that has room.
        device: in whose memory members are used.
        members: all that moves; the collection may change meanwhile.
        name: of a member, as it stands after "those of" in a sentence.

    Attributes:
        checkpoint: to resume from if bytes are lost; empty: not known.
        peak_bytes: the most bytes in memory whenever `note_peak` was called.
        refused_bytes: for which no tier had room, since the last warning or since it was set to 0.
    """

    def __init__(
        self,
        prefix: str,
        tiers: Sequence[Tier],
        device: Device,
        members: Collection[MovingStorage],
        name: Callable[[Any], str],
    ) -> None:
        self.tiers = list(tiers)
        self.checkpoint = ""
        self.peak_bytes = 0
        self.refused_bytes = 0
        self._prefix = prefix
        self._stream = prefix.removesuffix(": ")
        self._device = device
        self._members = members
        self._name = name
        self._clock = Clock(device)
        self._stall_s = 0.0
        self._refusal = ""  # the reason, if a write failed
        self._has_warned = False
        # An I/O thread notifies it when a transfer has ended. `wait_until` checks its condition
        # under it, which may allocate memory and queue reads (`states/window.py`); meanwhile an I/O
        # thread that ends a transfer waits. A member's own lock is taken under it, not around it.
        self._ended = Condition()
        device.room.add(self)

    def ended(self, one: MovingStorage, direction: str, transfer: Transfer) -> None:
        """A write or a read of a member has ended; usually an I/O thread calls this."""
        with self._ended:
            self._ended.notify_all()
        if (tracer := Tracer.current()) is not None:
            tracer.moved(direction, self._stream, self._name(one), transfer, one.moved_bytes)

    # -- To a tier --------------------------------------------------------------------------------

    def put_away(self, one: MovingStorage) -> bool:
        """Starts to write a member to the first tier that has room.

        Returns:
            False: it stays in memory. True: a write has begun; if it fails, the member is in memory
            again and has a `write_error`.
        """
        after = None if self._device.is_host else self._device.record_event()
        reason, one.write_error = one.write_error and str(one.write_error), None
        for tier in self.tiers:
            try:
                if one.begin_write(tier, after):
                    return True
            except TRANSFER_ERRORS as error:  # e.g. the tier's threads have ended
                reason = str(error)
        self._refusal = reason or self._refusal
        self.refused_bytes += one.num_bytes
        return False

    def warn_of_refused(self, where: str) -> None:
        """Warns once about members for which no tier had room. A drive reports its own errors.

        Args:
            where: where they stay and which flag bounds it, for the sentence.
        """
        if self.refused_bytes and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%sno tier takes %s of %s (%s); they stay in memory %s and nothing is lost, but "
                "more memory is needed; check the disk, make room there, and resume from a "
                "checkpoint if memory runs short",
                self._prefix,
                format_size(self.refused_bytes),
                format_size(self.num_bytes),
                self._refusal or "full or failed",
                where,
            )
        self.refused_bytes = 0

    def wait_for_writes(self) -> None:
        """Blocks until all that was put away is on its tier or back in memory."""
        for one in list(self._members):
            one.wait_for_write()
        for tier in self.tiers:
            tier.wait_for_writes()

    # -- And back ---------------------------------------------------------------------------------

    def bring(self, one: MovingStorage, by: Callable[[], None] | None = None) -> None:
        """Brings a member to memory, so that the calling thread's next operations may use it.

        Args:
            one: the member.
            by: brings it, and may be called again after an error; None: `one.bring`.

        Raises:
            LostStateError: it could not be read back.
            torch.OutOfMemoryError: no memory for it, even after reads ahead were given up.
        """
        work = by or one.bring
        try:
            self._device.room.read(work)
        except (torch.OutOfMemoryError, OffloadError):
            raise
        except TRANSFER_ERRORS as error:
            # Not the error itself, here and elsewhere: a handler that keeps log records would keep
            # the frames that it has passed, and with them what they hold of the tier.
            reason = str(error)
            logger.warning("%sa read failed (%s); trying once more", self._prefix, reason)
            try:
                self._device.room.read(work)
            except (torch.OutOfMemoryError, OffloadError):
                raise
            except TRANSFER_ERRORS as again:
                raise LostStateError(
                    f"{self._prefix}those of {self._name(one)} ({format_size(one.num_bytes)}; "
                    f"{one.block}) could not be read back: {again}; there is no other copy, so "
                    f"training stops; {(one.block or Block).remedy} and resume from "
                    f"{self.checkpoint or 'the last checkpoint'}"
                ) from again

    def give_up_reads(self) -> None:
        """Frees what was read ahead, and waits for writes. See `ReadsAhead`."""
        for one in list(self._members):
            one.give_up_read()
            one.wait_for_write()

    # -- Room -------------------------------------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that its members take now."""
        return sum(one.memory_bytes for one in list(self._members))

    @property
    def num_bytes(self) -> int:
        """Bytes of all its members."""
        return sum(one.num_bytes for one in list(self._members))

    def wait_until(
        self, is_time: Callable[[], bool], of: Collection[MovingStorage] | None = None
    ) -> None:
        """Blocks until a condition holds; checks it whenever a transfer has ended.

        Args:
            is_time: whether it holds.
            of: members on whose transfers it depends; None: all.
        """
        for one in list(self._members) if of is None else of:
            one.watch()
        with self._ended:
            self._ended.wait_for(is_time)

    @property
    def is_writing(self) -> bool:
        """Whether a member is being written."""
        return any(one.where is Where.WRITING for one in list(self._members))

    # -- What it took -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A context around calls that may make compute wait for the tiers."""
        self._clock.read()
        with self._clock.timed(self._add_stall), self._device.annotate(f"wait for {self._stream}"):
            yield

    def _add_stall(self, seconds: float) -> None:
        self._stall_s += seconds

    @property
    def stall_s(self) -> float:
        """Seconds that compute has waited, up to where the device is now."""
        self._clock.read()
        return self._stall_s

    def note_peak(self) -> None:
        """Measures how much is in memory now."""
        self.peak_bytes = max(self.peak_bytes, self.memory_bytes)
