# SPDX-License-Identifier: Apache-2.0
"""What one forward pass saved, in order: `SaveOrder`. Its backward pass reads it from the end.

There is one for each micro-batch and model chunk. The hooks append every save, the prefetcher walks
it backwards. It holds no record alive.
"""

from __future__ import annotations

import bisect
import itertools
import weakref

from megatron.offload.activations.saved.record import SavedReference, SavedStorage


class SaveOrder:
    """What one forward pass saved, in order. A storage saved again appears again."""

    def __init__(self) -> None:
        self._saves: list[SavedReference] = []
        self._largest: list[int] = []  # bytes, of each save and all before it
        self._graph = -1  # whose call made the last saves
        self._uses: list[int] = []  # of these saves, negative and so rising
        self._end = 0  # of these saves

    def __len__(self) -> int:
        """Saves that were not taken off."""
        return len(self._saves)

    def append(self, record: SavedStorage) -> None:
        """Notes that a storage was saved, for the first time or once more."""
        before, num_bytes = self._largest[-1:], record.num_bytes
        self._largest.append(before[0] if before and before[0] > num_bytes else num_bytes)
        self._saves.append(weakref.ref(record))

    def arrange(self, num_saves: int, graph: int, use: int) -> None:
        """Puts the last saves among those of the same call of a compiled graph.

        Args:
            num_saves: that belong together.
            graph: number of the graph. A call makes each save once.
            use: when the backward graph needs them: 0 is first.
        """
        begin = len(self._saves) - num_saves
        if graph != self._graph or begin != self._end or -use in self._uses:
            self._graph, self._uses = graph, []
        self._end = len(self._saves)
        later = bisect.bisect(self._uses, -use)
        place = begin - len(self._uses) + later
        self._uses[later:later] = [-use] * num_saves
        if place == begin:
            return
        saves = self._saves[begin:] + self._saves[place:begin]
        self._saves[place:] = saves
        before = self._largest[place - 1] if place else 0
        sizes = (record.num_bytes if (record := one()) else 0 for one in saves)
        self._largest[place:] = itertools.islice(
            itertools.accumulate(sizes, max, initial=before), 1, None
        )

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest storage among the saves that were not taken off."""
        return max(self._largest[-1:], default=0)  # another thread may take the last one off

    def last(self) -> SavedStorage | None:
        """The latest save whose record is alive; None if there is none left."""
        while self._saves:
            record = self._saves[-1]()
            if record is not None:
                return record
            self.drop_last()
        return None

    def drop_last(self) -> None:
        """Takes the latest save off."""
        self._saves.pop()
        self._largest.pop()
