# SPDX-License-Identifier: Apache-2.0
"""Which buckets are in memory, and how the others come and go: `Window`.

Note [The window]
At most `window_bytes` of states are in memory. The last buckets of a step stay there, and need
neither a write nor a read: a step moves what does not fit, once out and once in, and nothing else.
Steps go through the buckets in turn forwards and backwards, so that those that stayed come first:
they are updated at once, and then all of the window is there to read ahead and to write behind.

This is memory of the device that the step runs on. An accelerator's is what a run is short of:
there it is three buckets, of whatever size (one arrives, one is updated, one leaves), and none
between steps. `open.py` puts what --optimizer-state-window asks for into page-locked host memory
instead, as the first tier: what it holds it keeps, so that again a step moves to the drives and
back only what does not fit. Copies over the link overlap the update of the bucket before.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megatron.offload.device.device import Device
from megatron.offload.errors import LostStateError
from megatron.offload.machine.condition import Condition
from megatron.offload.states.bucket import Bucket, Where
from megatron.offload.states.faults import warn_of_full_tiers, warn_of_retry
from megatron.offload.tiers.tier import Tier, close_when_dropped

ON_DEVICE = 3  # buckets in an accelerator's memory at a time, see Note [The window]


class Window:
    """Brings buckets to memory and puts them on tiers, within bounds.

    Args:
        tiers: where buckets go; the first that takes one has it. Closed with this.
        device: in whose memory buckets are.
        window_bytes: that they may take there; one bucket always may, of an accelerator three.
        expected_bytes: of a bucket, before the first step as well.
        lost: the error for a bucket that cannot be read back, of the error that says why.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        device: Device,
        window_bytes: int,
        expected_bytes: Callable[[Bucket], int],
        lost: Callable[[Bucket, Exception], LostStateError],
    ) -> None:
        self.tiers = list(tiers)
        self.window_bytes = window_bytes
        self.buckets: list[Bucket] = []
        self._device = device
        self._expected_bytes = expected_bytes
        self._lost = lost
        self._goes_up = False  # the order of the last step
        self._refused_bytes = 0  # that no tier took in this step
        self._refusal = ""  # why, if a write failed
        self._has_warned = False
        # Told by I/O threads: a write or a read has ended. Held for a few instructions.
        self._changed = Condition()
        device.room.add(self)
        self._when_dropped = close_when_dropped(self, self.tiers)

    def tell_changed(self) -> None:
        """A write or a read of a bucket has ended. Called in whatever thread."""
        with self._changed:
            self._changed.notify_all()

    # -- A step -----------------------------------------------------------------------------------

    def begin_step(self) -> Iterator[Bucket]:
        """All buckets, in the order of the step that begins: against that of the last one."""
        self._goes_up = not self._goes_up
        self._refused_bytes = 0
        return self._in_order(self._goes_up)

    def prefetch(self) -> None:
        """Begins to read what the next step needs first, as far as there is room."""
        order = self._in_order(not self._goes_up)
        self.read_ahead(collections.deque(one for one in order if one.where is Where.ON_TIER))

    def end_step(self) -> None:
        """Warns once of what no tier took; what failed on a drive, that drive has said already."""
        if self._refused_bytes and not self._has_warned:
            self._has_warned = True
            warn_of_full_tiers(self._refused_bytes, self.num_bytes, self._room_bytes, self._refusal)

    def _in_order(self, goes_up: bool) -> Iterator[Bucket]:
        return iter(self.buckets) if goes_up else reversed(self.buckets)

    def first_to_stay(self, buckets: Sequence[Bucket]) -> int:
        """From which one on the buckets of a step stay in memory. Others come beside them."""
        sizes = [self._expected_bytes(one) for one in buckets]
        beside = 1 if self._device.is_host else ON_DEVICE
        room = self._room_bytes - beside * max(sizes, default=0)
        index = len(buckets)
        while index and room >= sizes[index - 1]:
            room -= sizes[index - 1]
            index -= 1
        return index

    def read_ahead(self, ahead: collections.deque[Bucket]) -> None:
        """Begins to read the next buckets, as many as there is room for, and takes them out."""
        while ahead:
            bucket = ahead[0]
            bucket.take_back()
            if bucket.where is Where.ON_TIER:
                if not self._has_room(bucket.num_bytes):
                    return
                try:
                    bucket.begin_read()
                except Exception:  # whoever needs it tries again, and says so
                    return
            ahead.popleft()

    # -- A bucket ---------------------------------------------------------------------------------

    def bring(self, bucket: Bucket, ahead: collections.deque[Bucket] | None = None) -> None:
        """Has a bucket in memory, where the calling thread's next operations may use it.

        Args:
            bucket: needed now; nowhere if it has no states yet, and then there is room for them.
            ahead: needed after it, to be read as soon as there is room.

        Raises:
            LostStateError: it could not be read back.
            torch.OutOfMemoryError: as torch has raised it.
        """
        bucket.take_back()
        if bucket.storage is None:
            self.wait_for_room(self._expected_bytes(bucket))
        if bucket.where in (Where.NOWHERE, Where.IN_MEMORY):
            return
        try:
            events = self._device.room.read(functools.partial(self._read, bucket, ahead))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            warn_of_retry(error)
            events = self._read_again(bucket)
        if events is not None:
            assert bucket.storage is not None
            self._device.use_after(bucket.storage, events)

    def _read(
        self, bucket: Bucket, ahead: collections.deque[Bucket] | None
    ) -> Sequence[Any] | None:
        """As `Bucket.read`; what is needed next is read ahead meanwhile."""
        if bucket.where is Where.ON_TIER:
            bucket.begin_read()
        bucket.watch()
        with self._changed:
            while bucket.is_coming:
                if ahead:
                    self.read_ahead(ahead)  # writes that have ended have made room
                self._changed.wait()
        return bucket.end_read()

    def _read_again(self, bucket: Bucket) -> Sequence[Any] | None:
        try:
            return self._device.room.read(bucket.read)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise self._lost(bucket, error) from error

    def give_up_reads(self) -> None:
        """Lets go of buckets that were read ahead, and waits for those that leave.

        See `ReadsAhead`.
        """
        for bucket in self.buckets:
            bucket.give_up_read()
            bucket.wait_for_write()

    def put_away(self, bucket: Bucket) -> None:
        """Writes a bucket to the first tier that takes it; where none does, it stays."""
        if bucket.where is Where.NOWHERE:
            return  # the optimizer keeps nothing of these parameters
        event = None if self._device.is_host else self._device.record_event()
        if bucket.write_error is not None:
            self._refusal, bucket.write_error = str(bucket.write_error), None
        for tier in self.tiers:
            try:
                if bucket.begin_write(tier, event):
                    return
            except Exception as error:  # its threads are gone, say
                self._refusal = str(error)
        self._refused_bytes += bucket.num_bytes

    def keep(self, bucket: Bucket) -> None:
        """Puts a bucket away that has come to memory, unless there is room for it."""
        if bucket.layout is None:
            bucket.forget()
        elif not self._has_room(0):
            self.put_away(bucket)
            self.wait_for_room(0)

    # -- Room -------------------------------------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        """Bytes of states that are in memory now, of all buckets."""
        return sum(one.memory_bytes for one in self.buckets)

    @property
    def num_bytes(self) -> int:
        """Bytes of all states that move."""
        return sum(one.num_bytes for one in self.buckets)

    @property
    def _room_bytes(self) -> int:
        """Of the window; on an accelerator the three largest buckets fit, or nothing overlaps."""
        if self._device.is_host:
            return self.window_bytes
        return max(self.window_bytes, ON_DEVICE * max(map(self._expected_bytes, self.buckets)))

    def _has_room(self, num_bytes: int) -> bool:
        return self.memory_bytes + num_bytes <= self._room_bytes

    def wait_for_room(self, num_bytes: int) -> None:
        """Writes that end make room. Where none is under way, the window is exceeded."""
        for one in self.buckets:
            one.watch()
        with self._changed:
            while not self._has_room(num_bytes) and self._is_writing():
                self._changed.wait()

    def _is_writing(self) -> bool:
        return any(one.where is Where.WRITING for one in self.buckets)

    def wait_for_writes(self) -> None:
        """Blocks until no write is under way."""
        for bucket in self.buckets:
            bucket.wait_for_write()
        for tier in self.tiers:
            tier.wait_for_writes()

    def close(self) -> None:
        """Forgets all buckets, and ends the tiers."""
        self.buckets = []
        self._when_dropped.detach()
        for tier in self.tiers:
            tier.close()
