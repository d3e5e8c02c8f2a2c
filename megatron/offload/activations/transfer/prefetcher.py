# SPDX-License-Identifier: Apache-2.0
"""Brings activations back before backward asks for them: `Prefetcher`.

Backward needs storages in reverse order of their last save. So once a backward pass is next, the
prefetcher walks the save order of its forward pass from the end. It holds no record alive.

It runs in the dispatcher's thread, concurrently with the thread that computes, which reports what
it has used.
"""

from __future__ import annotations

import collections
import itertools
import math
import time
import weakref
from collections.abc import Callable

from megatron.offload.activations.saved.record import SavedReference, SavedStorage, State
from megatron.offload.activations.saved.save_order import SaveOrder
from megatron.offload.activations.transfer.pace import FORGETTING, TOLERATED_WAIT
from megatron.offload.tiers.budget import ByteBudget

_AWAY = (State.QUEUED, State.WRITING, State.ON_TIER)  # not in memory, or about to leave it


class Prefetcher:
    """Keeps a window of restored bytes ahead of the backward pass.

    The window holds the largest storage that is still to be read, which is read while backward
    works on the one before it (double buffering), and what turned out to be missing: if compute
    waited t seconds for a read, a window that is larger by t times the read bandwidth would have
    had it in time. One wait doubles the window at most: a drive or a machine that stood still once
    says nothing of the next read. Waits of up to `TOLERATED_WAIT` do not count. What has been
    passed does not count: the logits, often the largest, are saved last and used first.

    Attributes:
        is_held: whether nothing is read ahead for now; compute reads what it needs itself.

    Args:
        begin_read: starts the read of a record that is on a tier, unless another thread has; says
            whether it did. Records with smaller numbers are needed sooner.
        budget: its limit is the most bytes that are read, or being read, before backward has used
            them. It also bounds the bytes in flight to the tiers.
    """

    def __init__(
        self, begin_read: Callable[[SavedStorage, float], bool], budget: ByteBudget
    ) -> None:
        self.is_held = False
        self._begin_read = begin_read
        self._budget = budget
        self._save_order: SaveOrder | None = None
        self._num_begun = 0
        self._missing_bytes = 0.0
        self._began_s = 0.0  # when the backward pass began
        self._pass_s = 0.0  # how long the previous one took
        self._tolerated_s = 0.0  # how long this one may still wait
        self._has_used_one = False  # of this save order
        # Bytes that were read, or are being read, and not used yet. An entry leaves when its record
        # is used or dies, whichever comes first; its bytes are in `_left` until `advance` runs.
        self._ahead: dict[SavedReference, int] = {}
        self._ahead_bytes = 0
        self._left: collections.deque[int] = collections.deque()
        self._resume_after: float = math.inf  # length of `_left` at which `advance` runs again

    def start(self, save_order: SaveOrder, opens_at_once: bool = False) -> None:
        """Backward of this save order begins or comes next. The caller then calls `advance`.

        Until the first use, only one storage is read, unless the window `opens_at_once`.
        """
        if self._save_order is not save_order:
            self._has_used_one = opens_at_once
            self._missing_bytes *= FORGETTING
            self._began_s = time.perf_counter()
            self._tolerated_s = TOLERATED_WAIT * self._pass_s
            self._save_order = save_order

    def stop(self) -> None:
        """The backward pass is over."""
        if self._save_order is not None:
            self._pass_s = time.perf_counter() - self._began_s
        self._save_order = None

    # Runs in the thread that computes.
    def used(self, record: SavedStorage) -> bool:
        """Backward has used a storage: it leaves the window. Returns whether to call `advance`.

        Not after each use: waking another thread takes longer than all the rest of a use.
        """
        num_bytes = self._ahead.pop(weakref.ref(record), None)
        if num_bytes is not None:
            self._left.append(num_bytes)
        is_first, self._has_used_one = not self._has_used_one, True
        return is_first or len(self._left) >= self._resume_after

    def waited(self, seconds: float, bytes_per_s: float) -> None:
        """Compute had to wait for the storage that it is about to use.

        The first one of a backward pass does not count: no window would have helped. Neither does
        a wait in forward, for a comparison. In both cases there is no window yet.
        """
        counted_s = max(seconds - self._tolerated_s, 0.0)
        self._tolerated_s = max(self._tolerated_s - seconds, 0.0)
        self._missing_bytes += min(counted_s * bytes_per_s, self.window_bytes)

    def advance(self) -> None:
        """Starts reads until the window is full; one storage always fits."""
        while (
            not self.is_held
            and (save_order := self._save_order) is not None
            and (record := save_order.last()) is not None
        ):
            # Compute may be ahead of this thread: then it has used every view, and needs no read.
            if record.num_unused_views > 0 and record.state in _AWAY:
                while self._left:
                    self._ahead_bytes -= self._left.popleft()
                wanted_bytes = self._ahead_bytes + record.num_bytes
                if self._ahead_bytes and wanted_bytes > self.window_bytes:
                    self._resume_after = self._num_that_hold(self.window_bytes / 2)
                    return
                self._begin(record)
            save_order.drop_last()
        self._resume_after = math.inf

    def _num_that_hold(self, num_bytes: float) -> int:
        """How many of those ahead, in order of use, take so many bytes; at most all of them."""
        sizes = list(self._ahead.values())
        return 1 + sum(total < num_bytes for total in itertools.accumulate(sizes[:-1]))

    @property
    def window_bytes(self) -> float:
        """How many bytes ahead it reads at present."""
        save_order = self._save_order
        if save_order is None or not self._has_used_one:
            return 0
        wanted_bytes = save_order.largest_bytes + self._missing_bytes
        return min(wanted_bytes, self._budget.limit_bytes)

    def _begin(self, record: SavedStorage) -> None:
        """Reads a record, or keeps it in memory if its write has not ended."""
        # Entered first: compute may read it and let it die before this thread goes on.
        reference = weakref.ref(record, self._died)
        self._ahead[reference] = record.num_bytes
        self._ahead_bytes += record.num_bytes
        self._num_begun += 1
        is_ahead = False
        try:
            is_ahead = record.cancel_write() is not None
            if not is_ahead:
                is_ahead = self._begin_read(record, self._num_begun)
        except BaseException:
            self._save_order = None  # e.g. out of memory; compute reads what it needs itself
            raise
        finally:
            if not is_ahead:
                self._died(reference)

    # Runs in the thread that computes, while the dispatcher's has nothing to do.
    def take_ahead(self) -> list[SavedStorage]:
        """Takes out of the window what was read ahead and not used yet."""
        references = list(self._ahead)
        for reference in references:
            self._died(reference)
        return [record for one in references if (record := one()) is not None]

    def _died(self, reference: SavedReference) -> None:
        num_bytes = self._ahead.pop(reference, None)
        if num_bytes is not None:
            self._left.append(num_bytes)
