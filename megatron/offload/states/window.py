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

from megatron.offload.device.device import Device
from megatron.offload.moving.bucket import Bucket
from megatron.offload.moving.only_copy import OnlyCopy
from megatron.offload.moving.order import first_to_stay
from megatron.offload.moving.storage import Where
from megatron.offload.sizes import format_size
from megatron.offload.tiers.transfer import TRANSFER_ERRORS

ON_DEVICE = 3  # buckets in an accelerator's memory at a time, see Note [The window]


class Window:
    """Which buckets are in memory, within bounds.

    Args:
        buckets: all, in the optimizer's order; may grow between steps.
        copies: brings them and puts them away.
        device: in whose memory buckets are.
        window_bytes: that they may take there; one bucket always may, of an accelerator three.
        expected_bytes: of a bucket, before the first step as well.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        copies: OnlyCopy,
        device: Device,
        window_bytes: int,
        expected_bytes: Callable[[Bucket], int],
    ) -> None:
        self.window_bytes = window_bytes
        self._buckets = buckets
        self._copies = copies
        self._device = device
        self._expected_bytes = expected_bytes
        self._goes_up = False  # the order of the last step

    # -- A step -----------------------------------------------------------------------------------

    def begin_step(self) -> Iterator[Bucket]:
        """All buckets, in the order of the step that begins: against that of the last one."""
        self._goes_up = not self._goes_up
        self._copies.refused_bytes = 0
        return self._in_order(self._goes_up)

    def prefetch(self) -> None:
        """Begins to read what the next step needs first, as far as there is room."""
        order = self._in_order(not self._goes_up)
        self.read_ahead(collections.deque(one for one in order if one.where is Where.ON_TIER))

    def end_step(self) -> None:
        """Warns once of what no tier took."""
        window = format_size(self._room_bytes)
        self._copies.warn_of_refused(f"beside the window of {window} (--optimizer-state-window)")

    def _in_order(self, goes_up: bool) -> Iterator[Bucket]:
        return iter(self._buckets) if goes_up else reversed(self._buckets)

    def first_to_stay(self, buckets: Sequence[Bucket]) -> int:
        """From which one on the buckets of a step stay in memory. Others come beside them."""
        sizes = [self._expected_bytes(one) for one in buckets]
        beside = 1 if self._device.is_host else ON_DEVICE
        return first_to_stay(sizes, self._room_bytes, beside)

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
                except TRANSFER_ERRORS:  # `bring` tries again, and says so
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
        if bucket.where not in (Where.NOWHERE, Where.IN_MEMORY):
            self._copies.bring(bucket, functools.partial(self._bring, bucket, ahead))

    def _bring(self, bucket: Bucket, ahead: collections.deque[Bucket] | None) -> None:
        """As `Bucket.bring`; what is needed next is read ahead meanwhile."""

        def is_there() -> bool:
            if ahead:
                self.read_ahead(ahead)  # writes that have ended have made room
            return not bucket.is_arriving

        bucket.begin_read()
        self._copies.wait_until(is_there, of=[bucket])
        bucket.bring()

    def put_away(self, bucket: Bucket) -> None:
        """Writes a bucket to the first tier that takes it; where none does, it stays."""
        if bucket.where is not Where.NOWHERE:  # else the optimizer keeps nothing of its parameters
            self._copies.put_away(bucket)

    def keep(self, bucket: Bucket) -> None:
        """Puts a bucket away that has come to memory, unless there is room for it."""
        if bucket.layout is None:
            bucket.forget()
        elif not self._has_room(0):
            self.put_away(bucket)
            self.wait_for_room(0)

    # -- Room -------------------------------------------------------------------------------------

    @property
    def _room_bytes(self) -> int:
        """Of the window; on an accelerator the three largest buckets fit, or nothing overlaps."""
        if self._device.is_host:
            return self.window_bytes
        return max(self.window_bytes, ON_DEVICE * max(map(self._expected_bytes, self._buckets)))

    def _has_room(self, num_bytes: int) -> bool:
        return self._copies.memory_bytes + num_bytes <= self._room_bytes

    def wait_for_room(self, num_bytes: int) -> None:
        """Writes that end make room. Where none is under way, the window is exceeded."""
        self._copies.wait_until(lambda: self._has_room(num_bytes) or not self._copies.is_writing)
