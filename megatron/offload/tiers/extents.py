# SPDX-License-Identifier: Apache-2.0
"""Which bytes of a file are taken: `ExtentAllocator`.

Best fit with coalescing of neighbours. The SSD tier calls it under its own lock; it never does I/O
and knows no files. In steady state (each step saves the same sizes) every request finds the extent
that the previous step gave back, so the space in use stops growing after one step.

Note [Interrupted in the middle]
A signal's handler may raise between any two lines here. What is taken is written down in one
assignment, so it is always right; what is free is said in several places, which may then disagree.
So each operation that changes these says so before and after, and where one did not come to its
end, the next one makes them anew of what is taken.
"""

from __future__ import annotations

import bisect
import itertools


class ExtentAllocator:
    """Hands out extents `[offset, offset + num_bytes)` of a space that can grow at its end.

    Sizes are rounded up to `granule` bytes, so that every offset is a multiple of it.
    Not thread-safe.
    """

    def __init__(self, granule: int) -> None:
        self.granule = granule
        self.size_bytes = 0  # of the whole space
        self.used_bytes = 0
        self._taken: dict[int, int] = {}  # size by start
        # Free extents three ways: by (size, offset) for best fit, by either end for coalescing.
        self._by_size: list[tuple[int, int]] = []
        self._size_at: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}
        self._borders: set[int] = set()  # extents do not merge across these offsets
        self._is_whole = True  # see Note [Interrupted in the middle]

    def grow(self, num_bytes: int, *, apart: bool = False) -> None:
        """Adds `num_bytes` (a multiple of the granule) at the end of the space.

        `apart`: no extent will lie partly in the new space and partly in what was there before.
        """
        if num_bytes % self.granule:
            raise ValueError(f"{num_bytes} is not a multiple of the granule {self.granule}")
        self._make_whole()
        self._is_whole = False
        start = self.size_bytes
        if apart:
            self._borders.add(start)
        self.size_bytes += num_bytes
        self._insert(start, num_bytes)
        self._is_whole = True

    def round_up(self, num_bytes: int) -> int:
        """`num_bytes` rounded up to whole granules (at least one)."""
        return max(-(-num_bytes // self.granule), 1) * self.granule

    def allocate(self, num_bytes: int) -> int | None:
        """The offset of the smallest free extent that fits `num_bytes`; None if none fits."""
        self._make_whole()
        wanted = self.round_up(num_bytes)
        index = bisect.bisect_left(self._by_size, (wanted, -1))
        if index == len(self._by_size):
            return None
        size, start = self._by_size[index]
        self._is_whole = False
        self._remove(start, size)
        if size > wanted:
            self._insert(start + wanted, size - wanted)
        self._taken[start] = wanted
        self.used_bytes += wanted
        self._is_whole = True
        return start

    def free(self, start: int) -> None:
        """Gives an extent back; it merges with free neighbours.

        Raises:
            ValueError: no extent that starts there is taken.
        """
        self._make_whole()
        if start not in self._taken:
            raise ValueError(f"no extent at offset {start} is taken")
        self._is_whole = False
        size = self._taken.pop(start)
        self.used_bytes -= size
        after = self._size_at.get(start + size)
        if after is not None and start + size not in self._borders:
            self._remove(start + size, after)
            size += after
        self._insert(start, size)
        self._is_whole = True

    @property
    def free_at_end_bytes(self) -> int:
        """Free bytes at the end of the space, which growth would add to."""
        self._make_whole()
        start = self._start_of_end.get(self.size_bytes)
        return 0 if start is None else self.size_bytes - start

    @property
    def largest_free_bytes(self) -> int:
        """The largest request that would succeed without growing."""
        self._make_whole()
        return self._by_size[-1][0] if self._by_size else 0

    def _make_whole(self) -> None:
        """Makes what is free anew, if an operation has ended in its middle."""
        if self._is_whole:
            return
        self._by_size, self._size_at, self._start_of_end = [], {}, {}
        self.used_bytes = sum(self._taken.values())
        end = 0
        for start, size in [*sorted(self._taken.items()), (self.size_bytes, 0)]:
            borders = sorted(one for one in self._borders if end < one < start)
            for first, last in itertools.pairwise([end, *borders, start]):
                if first < last:
                    self._insert(first, last - first)
            end = start + size
        self._is_whole = True

    def _insert(self, start: int, size: int) -> None:
        before = self._start_of_end.get(start)
        if before is not None and start not in self._borders:
            self._remove(before, start - before)
            start, size = before, size + start - before
        bisect.insort(self._by_size, (size, start))
        self._size_at[start] = size
        self._start_of_end[start + size] = start

    def _remove(self, start: int, size: int) -> None:
        del self._by_size[bisect.bisect_left(self._by_size, (size, start))]
        del self._size_at[start]
        del self._start_of_end[start + size]
