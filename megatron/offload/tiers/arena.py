# SPDX-License-Identifier: Apache-2.0
"""Host memory for activations: `HostArena`, one mapping that hands out ranges of exact size.

The host tier owns one and copies into it. Address space for the whole budget is reserved at once,
memory is committed as it is touched and stays for reuse until the arena is closed. Sizes are
rounded up to pages and to nothing else: torch's own pinned allocator rounds up to powers of two,
which can double the memory (pytorch#95823). It never moves a byte and knows nothing of tensors.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import logging
import mmap
import threading

from megatron.offload.device.device import Device
from megatron.offload.errors import ConfigurationError
from megatron.offload.sizes import MIB, format_size
from megatron.offload.tiers.extents import ExtentAllocator

logger = logging.getLogger(__name__)

GROWTH_BYTES = 256 * MIB  # at a time, so that pinning costs once per range and not per tensor
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python has no name for it before 3.12


class HostArena:
    """Page-aligned host memory within a budget. Thread-safe.

    Args:
        budget_bytes: never exceeded; 0: nothing ever fits.
        device: if it pins host memory, the arena is page-locked for it, in steps as it grows.
            None: it is pageable.

    Raises:
        ConfigurationError: no address space of that size.
    """

    def __init__(self, budget_bytes: int, device: Device | None = None) -> None:
        self.budget_bytes = budget_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        self._pinned_for = device if device is not None and device.pins_host_memory else None
        self.growth_failed = False  # it stopped growing although budget was left
        self._extents = ExtentAllocator(mmap.PAGESIZE)
        self._freed: collections.deque[int] = collections.deque()  # taken in by the next allocation
        # Protects the extents and growth. Held for microseconds, or for the time that the system
        # takes to pin a range; no other lock is taken under it.
        self._lock = threading.Lock()
        self._closed = False
        self._pinned_addresses: list[int] = []
        self._mapping = _reserve(self.budget_bytes) if self.budget_bytes else None
        self._address = 0
        if self._mapping is not None:
            # For a moment only: as long as such a view exists, the mapping cannot be closed.
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    @property
    def pinned(self) -> bool:
        """Whether its memory is page-locked for a device."""
        return self._pinned_for is not None

    @property
    def size_bytes(self) -> int:
        """What the arena has grown to, taken or free; at most as much memory is committed."""
        return self._extents.size_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that are taken, in whole pages."""
        with self._lock:
            self._take_in_freed()
            return self._extents.used_bytes

    def allocate(self, num_bytes: int) -> int | None:
        """The offset of a free range, growing where there is none; None: the budget is used up.

        Raises:
            RuntimeError: the arena is closed.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the arena is closed")
            self._take_in_freed()
            offset = self._extents.allocate(num_bytes)
            if offset is None and self._make_room(num_bytes):
                offset = self._extents.allocate(num_bytes)
            return offset

    def free(self, offset: int) -> None:
        """Gives a range back; its memory stays committed. Takes no lock: finalizers call it."""
        self._freed.append(offset)

    def address(self, offset: int) -> int:
        """Where an allocated range begins in memory, until it is freed or the arena closed."""
        return self._address + offset

    def close(self) -> None:
        """Gives all memory back to the system. Nobody may use a range any more."""
        with self._lock:
            self._closed = True
            if self._pinned_for is not None:
                for address in self._pinned_addresses:
                    self._pinned_for.unpin(address)
            self._pinned_addresses.clear()
            if self._mapping is not None:
                self._mapping.close()

    def _make_room(self, num_bytes: int) -> bool:
        """Called under the lock. Grows for a request; whether it did."""
        missing = self._extents.round_up(num_bytes)
        if self._pinned_for is None:
            missing -= self._extents.free_at_end_bytes
        left = self.budget_bytes - self._extents.size_bytes
        if missing > left or self.growth_failed:
            return False
        growth = min(max(missing, GROWTH_BYTES), left)
        if self._pinned_for is not None and not self._pin(self._pinned_for, growth):
            self.growth_failed = True
            return False
        # CUDA refuses copies of memory that was page-locked in two pieces.
        self._extents.grow(growth, apart=self.pinned)
        return True

    def _pin(self, device: Device, num_bytes: int) -> bool:
        """Page-locks the next `num_bytes` of the mapping; whether it could be done."""
        address = self._address + self._extents.size_bytes
        try:
            device.pin(address, num_bytes)
        except RuntimeError as error:
            logger.warning(
                "activation offload: %s more of host memory could not be pinned (%s); the %s that "
                "is pinned is used on, and what does not fit goes elsewhere; raise the limit of "
                "locked memory (ulimit -l) or of the container's memory (cgroup), or set a smaller "
                "--activation-offload-host-budget",
                format_size(num_bytes),
                error,
                format_size(self._extents.size_bytes),
            )
            return False
        self._pinned_addresses.append(address)
        return True

    def _take_in_freed(self) -> None:
        """Called under the lock."""
        while self._freed:
            self._extents.free(self._freed.popleft())


def _reserve(num_bytes: int) -> mmap.mmap:
    """Private memory that is committed page by page, as it is touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise ConfigurationError(
            f"no address space for {format_size(num_bytes)} of host memory ({error.strerror}); set "
            "a smaller --activation-offload-host-budget, or raise the limit (ulimit -v, "
            "vm.overcommit_memory)"
        ) from None
    # A data loader's forked worker would keep a copy of every page that is written after the fork.
    mapping.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
