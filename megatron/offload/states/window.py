# SPDX-License-Identifier: Apache-2.0
"""Which buckets are in memory, and how the others come and go: `Window`.

Note [The window]
At most `window_bytes` of states are in memory. The last buckets of a step stay there, and need
neither a write nor a read: a step writes and reads only what does not fit, each byte once. Steps go
through the buckets forwards and backwards in turn, so the buckets that stayed come first: they are
updated at once, and then the whole window is free for reads ahead and writes behind.

The window is in the memory of the device that runs the step. On an accelerator that is three
buckets during the step (one is read, one is updated, one is written) and none between steps. There,
`open.py` puts what --optimizer-state-window asks for into page-locked host memory, as the first
tier. What is in that tier stays, so again a step writes to the drives and reads back only what does
not fit. Copies between host and device overlap the update of the previous bucket.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator, Sequence

from megatron.offload.device.device import Device
from megatron.offload.moving.bucket import Bucket
from megatron.offload.moving.only_copy import OnlyCopy
from megatron.offload.moving.order import first_to_stay, most_together
from megatron.offload.moving.storage import Where
from megatron.offload.sizes import format_size
from megatron.offload.tiers.transfer import TRANSFER_ERRORS

ON_DEVICE = 3  # buckets in an accelerator's memory at a time, see Note [The window]


class Window:
    """Which buckets are in memory, within bounds.

    Args:
        buckets: all, in the optimizer's order; may grow between steps.
        copies: brings buckets and puts them away.
        device: in whose memory buckets are.
        window_bytes: that they may take there; one bucket always may, on an accelerator three.
        expected_bytes: returns the bytes of a bucket, before the first step as well.
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
        self._goes_up = False  # whether the last step went from the first bucket to the last

    # -- A step -----------------------------------------------------------------------------------

    def begin_step(self) -> Iterator[Bucket]:
        """All buckets, in the order of the step that begins: the reverse of the last step's."""
        self._goes_up = not self._goes_up
        self._copies.refused_bytes = 0
        return self._in_order(self._goes_up)

    def prefetch(self) -> None:
        """Starts to read what the next step needs first, as far as there is room."""
        order = self._in_order(not self._goes_up)
        self.read_ahead(collections.deque(one for one in order if one.where is Where.ON_TIER))

    def end_step(self) -> None:
        """Warns once about states for which no tier had room."""
        window = format_size(self._room_bytes)
        self._copies.warn_of_refused(f"beside the window of {window} (--optimizer-state-window)")

    def _in_order(self, goes_up: bool) -> Iterator[Bucket]:
        return iter(self._buckets) if goes_up else reversed(self._buckets)

    def first_to_stay(self, buckets: Sequence[Bucket]) -> int:
        """Index of the first bucket that stays in memory after the step."""
        sizes = [self._expected_bytes(one) for one in buckets]
        beside = 1 if self._device.is_host else ON_DEVICE
        return first_to_stay(sizes, self._room_bytes, beside)

    def read_ahead(self, ahead: collections.deque[Bucket]) -> None:
        """Starts to read the next buckets, while there is room, and removes them from `ahead`."""
        while ahead:
            bucket = ahead[0]
            bucket.take_back()
            if bucket.where is Where.ON_TIER:
                if not self._has_room(bucket.num_bytes):
                    return
                try:
                    bucket.begin_read()
                except TRANSFER_ERRORS:  # `bring` reads again, and reports the error
                    return
            ahead.popleft()

    # -- A bucket ---------------------------------------------------------------------------------

    def bring(self, bucket: Bucket, ahead: collections.deque[Bucket] | None = None) -> None:
        """Brings a bucket to memory, so that the calling thread's next operations may use it.

        Args:
            bucket: needed now; if it has no states yet, waits for room for them.
            ahead: needed after it; read as soon as there is room.

        Raises:
            LostStateError: it could not be read back.
            torch.OutOfMemoryError: no memory for it, even after reads ahead were given up.
        """
        bucket.take_back()
        if bucket.storage is None:
            self.wait_for_room(self._expected_bytes(bucket))
        if bucket.where is Where.IN_MEMORY:
            bucket.use_here()  # Ctrl-C may have come before, or another stream is current
        elif bucket.where is not Where.NOWHERE:
            self._copies.bring(bucket, functools.partial(self._bring, bucket, ahead))

    def _bring(self, bucket: Bucket, ahead: collections.deque[Bucket] | None) -> None:
        """`Bucket.bring`; reads ahead meanwhile."""

        def is_there() -> bool:
            if ahead:
                self.read_ahead(ahead)  # writes that have ended have made room
            return not bucket.is_arriving

        bucket.begin_read()
        self._copies.wait_until(is_there, of=[bucket])
        bucket.bring()

    def put_away(self, bucket: Bucket) -> None:
        """Starts to write a bucket to the first tier that has room; else it stays in memory."""
        if bucket.where is not Where.NOWHERE:  # else the optimizer has no states for it
            self._copies.put_away(bucket)

    def keep(self, bucket: Bucket) -> None:
        """Puts a bucket in memory away, unless the window has room for it."""
        if bucket.layout is None:
            bucket.forget()
        elif not self._has_room(0):
            self.put_away(bucket)
            self.wait_for_room(0)

    # -- Room -------------------------------------------------------------------------------------

    @property
    def _room_bytes(self) -> int:
        """Bytes of the window; on an accelerator at least three buckets, so that copies overlap.

        Three in a row: an embedding is a large one by itself, and those beside it are small.
        """
        if self._device.is_host:
            return self.window_bytes
        sizes = [self._expected_bytes(one) for one in self._buckets]
        return max(self.window_bytes, most_together(sizes, ON_DEVICE))

    def _has_room(self, num_bytes: int) -> bool:
        return self._copies.memory_bytes + num_bytes <= self._room_bytes

    def wait_for_room(self, num_bytes: int) -> None:
        """Blocks until writes have made room. If no write is under way, exceeds the window."""
        self._copies.wait_until(lambda: self._has_room(num_bytes) or not self._copies.is_writing)
