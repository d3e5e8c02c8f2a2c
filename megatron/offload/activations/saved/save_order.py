# SPDX-License-Identifier: Apache-2.0
"""What one forward pass saved, in order: `SaveOrder`. Its backward pass reads it from the end.

There is one for each micro-batch and model chunk. The hooks append every save, the prefetcher walks
it backwards. It holds no record alive.
"""

from __future__ import annotations

import weakref

from megatron.offload.activations.saved.record import SavedReference, SavedStorage


class SaveOrder:
    """What one forward pass saved, in order. A storage saved again appears again."""

    def __init__(self) -> None:
        self._saves: list[SavedReference] = []
        self._largest: list[int] = []  # bytes, of each save and all before it

    def append(self, record: SavedStorage) -> None:
        """Notes that a storage was saved, for the first time or once more."""
        before, num_bytes = self._largest[-1:], record.num_bytes
        self._largest.append(max(before[0], num_bytes) if before else num_bytes)
        self._saves.append(weakref.ref(record))

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
