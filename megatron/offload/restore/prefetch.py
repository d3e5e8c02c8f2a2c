# SPDX-License-Identifier: Apache-2.0
"""Brings activations back before backward asks for them: `Tape`, `Prefetcher`.

The engine notes every save on a tape, one per micro-batch and model chunk, and tells the prefetcher
when the backward pass of a tape begins. Backward needs the storages of a tape in reverse order of
their last save, so the prefetcher walks the tape from its end. It holds no record alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from megatron.offload.saved.record import SavedReference, SavedStorage, State

_FORGETTING = 0.7  # of what was missing, from one backward pass to the next


class Tape:
    """What one forward pass saved, in order. A storage saved again appears again."""

    def __init__(self) -> None:
        self._saves: list[SavedReference] = []
        self.largest_bytes = 0

    def append(self, record: SavedStorage) -> None:
        """Notes a save."""
        self._saves.append(weakref.ref(record))
        self.largest_bytes = max(self.largest_bytes, record.num_bytes)

    def last(self) -> SavedStorage | None:
        """The latest save that is still there and of use; None at the tape's beginning."""
        while self._saves:
            record = self._saves[-1]()
            if record is not None:
                return record
            self._saves.pop()
        return None

    def drop_last(self) -> None:
        """Takes the latest save off the tape."""
        self._saves.pop()


class Prefetcher:
    """Keeps a window of restored bytes ahead of the backward pass.

    The window holds two of the tape's largest storages, one ready and one being read (double
    buffering), and what turned out to be missing: where compute waited t seconds for a read, a
    window larger by t times the read bandwidth would have had it in time.

    Args:
        begin_read: starts the read of a record that is on a tier; the smaller the number that
            comes with it, the sooner it is needed.
        limit_bytes: most bytes that are read, or being read, before anybody has used them.
    """

    def __init__(self, begin_read: Callable[[SavedStorage, float], None], limit_bytes: int) -> None:
        self._begin_read = begin_read
        self._limit_bytes = limit_bytes
        self._tape: Tape | None = None
        self._num_begun = 0
        self._missing_bytes = 0.0
        self._has_used_one = False  # of this tape
        # Bytes of what was read, or is being read, and not used yet. An entry goes when its record
        # is used or dies, whichever comes first.
        self._ahead: dict[SavedReference, int] = {}

    def start(self, tape: Tape) -> None:
        """Backward of this tape begins: reads what is needed first, and no more.

        Before it reaches the layers, backward goes through the loss, where memory is scarcest. The
        window opens when the first storage is used.
        """
        self._tape = tape
        self._has_used_one = False
        self._missing_bytes *= _FORGETTING
        self._fill(0)

    def stop(self) -> None:
        """The backward pass is over."""
        self._tape = None

    def used(self, record: SavedStorage) -> None:
        """Backward has used a storage: it leaves the window."""
        self._has_used_one = True
        self._ahead.pop(weakref.ref(record), None)

    def waited(self, seconds: float, bytes_per_s: float) -> None:
        """Compute had to wait for the storage that it is about to use.

        For the first one of a backward pass no window would have helped.
        """
        if self._has_used_one:
            self._missing_bytes += seconds * bytes_per_s

    def advance(self) -> None:
        """Starts reads until the window is full."""
        if self._tape is not None:
            self._fill(min(self.window_bytes, self._limit_bytes))

    @property
    def window_bytes(self) -> float:
        """How far ahead it reads, were there no limit."""
        return (2 * self._tape.largest_bytes if self._tape else 0) + self._missing_bytes

    def _fill(self, window_bytes: float) -> None:
        """Starts reads until so many bytes are ahead; one storage always fits."""
        while self._tape is not None:
            record = self._tape.last()
            if record is None:
                return
            if record.state is State.ON_TIER and record.take_back() is None:
                ahead_bytes = sum(self._ahead.values())
                if ahead_bytes and ahead_bytes + record.num_bytes > window_bytes:
                    return
                self._num_begun += 1
                self._begin_read(record, self._num_begun)
                self._ahead[weakref.ref(record, self._died)] = record.num_bytes
            # Else it is still in memory, or on its way already.
            self._tape.drop_last()

    def _died(self, reference: SavedReference) -> None:
        self._ahead.pop(reference, None)
