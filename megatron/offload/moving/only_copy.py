# SPDX-License-Identifier: Apache-2.0
"""Brings bytes that a tier has the only copy of, and puts them away: `OnlyCopy`, one a stream.

Optimizer states, parameters and gradients each have one. What fails is handled here, and said here.

Note [The only copy]
Unlike an activation, these bytes cannot be made again. Memory is released only once a write has
ended well; what no tier takes stays in memory; the tiers keep checksums; a read that fails is tried
once more, and then ends the training with `LostStateError`: it never goes on with other numbers.
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
from megatron.offload.tiers.tier import Tier
from megatron.offload.tiers.transfer import TRANSFER_ERRORS, Transfer

logger = logging.getLogger(__name__)


class OnlyCopy:
    """What moves in one stream, its tiers, and what moving it took.

    Args:
        prefix: what each of its sentences begins with.
        tiers: the first that takes something has it.
        device: in whose memory it is used.
        members: all that moves; may change while they move.
        name: of a member, as a sentence has it after "those of".

    Attributes:
        checkpoint: to resume from should bytes be lost; empty: it is not known.
        peak_bytes: the most in memory, of the times at which `note_peak` looked.
        refused_bytes: that no tier took, since this was said or set to 0.
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
        self._refusal = ""  # why, if a write failed
        self._has_warned = False
        # I/O threads notify it: a write or a read has ended. Held for a few instructions.
        self._ended = Condition()
        device.room.add(self)

    def ended(self, one: MovingStorage, direction: str, transfer: Transfer) -> None:
        """A write or a read of a member has ended; an I/O thread calls this as a rule."""
        with self._ended:
            self._ended.notify_all()
        if (tracer := Tracer.current()) is not None:
            tracer.moved(direction, self._stream, self._name(one), transfer, one.num_bytes)

    # -- To a tier --------------------------------------------------------------------------------

    def put_away(self, one: MovingStorage) -> bool:
        """Starts to write a member to the first tier that takes it; whether one does.

        Where none does, it stays in memory.
        """
        after = None if self._device.is_host else self._device.record_event()
        if one.write_error is not None:
            self._refusal, one.write_error = str(one.write_error), None
        for tier in self.tiers:
            try:
                if one.begin_write(tier, after):
                    return True
            except TRANSFER_ERRORS as error:  # its threads are gone, say
                self._refusal = str(error)
        self.refused_bytes += one.num_bytes
        return False

    def warn_of_refused(self, where: str) -> None:
        """Warns once of what no tier took; what failed on a drive, that drive has said already.

        Args:
            where: they stay, for people, and which flag bounds it.
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
        """Blocks until all that was put away is where it is to stay."""
        for one in list(self._members):
            one.wait_for_write()
        for tier in self.tiers:
            tier.wait_for_writes()

    # -- And back ---------------------------------------------------------------------------------

    def bring(self, one: MovingStorage, by: Callable[[], None] | None = None) -> None:
        """Has a member in memory, where the calling thread's next operations may use it.

        Args:
            one: of the members.
            by: does it, and may do it again where it has failed; None: `one.bring`.

        Raises:
            LostStateError: it could not be read back.
            torch.OutOfMemoryError: as torch has raised it.
        """
        work = by or one.bring
        try:
            self._device.room.read(work)
        except (torch.OutOfMemoryError, OffloadError):
            raise
        except TRANSFER_ERRORS as error:
            # Not the error itself, here and elsewhere: who keeps log records would keep the frames
            # that it has passed, and with them what they hold of the tier.
            reason = str(error)
            logger.warning("%sa read failed (%s); trying once more", self._prefix, reason)
            try:
                self._device.room.read(work)
            except torch.OutOfMemoryError:
                raise
            except TRANSFER_ERRORS as again:
                raise LostStateError(
                    f"{self._prefix}those of {self._name(one)} ({format_size(one.num_bytes)}; "
                    f"{one.block}) could not be read back: {again}; there is no other copy, so "
                    "training stops; check the disk and resume from "
                    f"{self.checkpoint or 'the last checkpoint'}"
                ) from again

    def give_up_reads(self) -> None:
        """Lets go of what was read ahead, and waits for what leaves. See `ReadsAhead`."""
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
        """Blocks until something holds, which is looked at whenever a transfer has ended.

        Args:
            is_time: whether it holds.
            of: members whose transfers it depends on; None: all.
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
        """Around what may make compute wait for the tiers."""
        self._clock.read()
        with self._clock.timed(self._add_stall), self._device.annotate(f"wait for {self._stream}"):
            yield

    def _add_stall(self, seconds: float) -> None:
        self._stall_s += seconds

    @property
    def stall_s(self) -> float:
        """Seconds that compute has waited, as far as the device has come."""
        self._clock.read()
        return self._stall_s

    def note_peak(self) -> None:
        """Looks how much is in memory."""
        self.peak_bytes = max(self.peak_bytes, self.memory_bytes)
