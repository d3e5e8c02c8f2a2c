# SPDX-License-Identifier: Apache-2.0
"""Host memory for a tier: `HostArena`, one mapping that hands out ranges of exact size.

The host tier, the pool before the drives and the staging buffers have one each. It reserves address
space for the whole budget at once; the system commits memory when it is touched, and the arena
keeps it for reuse until it is closed. It rounds sizes up to pages only: torch's own pinned
allocator rounds up to powers of two, which can double the memory (pytorch#95823). It never moves a
byte and knows no tensors.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import logging
import mmap
import threading
import weakref

from megatron.offload.device.device import Device
from megatron.offload.sizes import MIB, format_size
from megatron.offload.tiers.extents import ExtentAllocator
from megatron.offload.tiers.mapped import prefer_huge_pages
from megatron.offload.tiers.purpose import ACTIVATIONS, Purpose

logger = logging.getLogger(__name__)

GROWTH_BYTES = 256 * MIB  # pinned at a time, because each call costs much whatever its size
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python has no name for it before 3.12


class HostArena:
    """Page-aligned host memory within a budget. Thread-safe.

    Args:
        budget_bytes: never exceeded; 0: nothing ever fits.
        device: if it pins host memory, the arena page-locks its memory, in steps as it grows.
            None: the memory is pageable. Page-locking a step takes a tenth of a second, so a thread
            of its own locks the next step when less than one step is free.
        purpose: what it is for, in sentences.
        flag: the end of the name of the flag that sets its budget.

    Raises:
        ConfigurationError: the system has no address space of that size.
    """

    def __init__(
        self,
        budget_bytes: int,
        device: Device | None = None,
        purpose: Purpose = ACTIVATIONS,
        flag: str = "host-budget",
    ) -> None:
        self._purpose = purpose
        self._flag = purpose.flag(flag)
        self.budget_bytes = budget_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        self._pinned_for = device if device is not None and device.pins_host_memory else None
        self.growth_failed = False  # whether it stopped growing although budget was left
        self._extents = ExtentAllocator(mmap.PAGESIZE)
        self._freed: collections.deque[int] = collections.deque()  # taken in by the next allocation
        # A thread that grows the arena holds it for as long as the system takes to pin a range, and
        # takes the lock below under it.
        self._growing = threading.Lock()
        # Protects the extents and all below. Held for microseconds; no other is taken under it.
        self._lock = threading.Lock()
        self._grows_ahead = self._pinned_for is not None  # False after a refusal or `close`
        self._ahead: threading.Thread | None = None  # pins the next step
        self._closed = False
        self._pinned_addresses: list[int] = []
        self._forkable = weakref.WeakValueDictionary[int, _Forkable]()  # by offset
        self._mapping = (
            _reserve(self.budget_bytes, purpose, self._flag) if self.budget_bytes else None
        )
        self._address = 0
        if self._mapping is not None:
            # For a moment only: while such a view exists, the mapping cannot be closed.
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        if self._pinned_for is not None:
            # For an arena that is dropped without `close`: the driver must not take memory for
            # pinned that the system has given to other owners.
            weakref.finalize(self, _unpin, self._pinned_for, self._pinned_addresses, self._mapping)

    @property
    def pinned(self) -> bool:
        """Whether its memory is page-locked for a device."""
        return self._pinned_for is not None

    @property
    def size_bytes(self) -> int:
        """What the arena has grown to, taken or free; at most this much memory is committed."""
        return self._extents.size_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that are taken, in whole pages."""
        with self._lock:
            self._take_in_freed()
            return self._extents.used_bytes

    def allocate(self, num_bytes: int) -> int | None:
        """The offset of a free range; grows the arena if needed. None: the budget is used up.

        Raises:
            RuntimeError: the arena is closed.
        """
        offset = self._allocate_free(num_bytes)
        while offset is None and self._make_room(num_bytes):
            offset = self._allocate_free(num_bytes)
        return offset

    def _allocate_free(self, num_bytes: int) -> int | None:
        with self._lock:
            if self._closed:
                raise RuntimeError("the arena is closed")
            self._take_in_freed()
            if num_bytes > GROWTH_BYTES:
                self._grows_ahead = False  # such a range needs a step of its own size
            offset = self._extents.allocate(num_bytes)
            if offset is not None and self._is_short and self._ahead is None:
                self._ahead = threading.Thread(
                    target=self._grow_ahead,
                    name=f"{self._purpose.thread_name} pinning",
                    daemon=True,
                )
                try:
                    self._ahead.start()
                except RuntimeError:  # the system starts no more threads: `allocate` grows then
                    self._ahead, self._grows_ahead = None, False
            return offset

    def free(self, offset: int) -> None:
        """Gives a range back; its memory stays committed. Takes no lock: finalizers call it."""
        self._freed.append(offset)

    def address(self, offset: int) -> int:
        """The address of an allocated range, valid until it is freed or the arena closed."""
        return self._address + offset

    def forkable(self, offset: int, num_bytes: int) -> object:
        """Lets child processes inherit an allocated range, as long as the result lives."""
        found = self._forkable.get(offset)
        if found is None:
            assert self._mapping is not None
            found = self._forkable[offset] = _Forkable(self._mapping, offset, num_bytes)
        return found

    def keep_mapped(self) -> object:
        """Keeps the memory mapped, even after `close`, as long as the result lives."""
        assert self._mapping is not None
        return memoryview(self._mapping)

    def close(self) -> None:
        """Returns all memory to the system; only ranges of `keep_mapped` may be used after it."""
        with self._lock:
            self._closed, self._grows_ahead = True, False
            ahead = self._ahead
        if ahead is not None:
            ahead.join()
        with self._growing, self._lock:
            if self._pinned_for is not None:
                _unpin(self._pinned_for, self._pinned_addresses)
            if self._mapping is not None:
                with contextlib.suppress(BufferError):  # a caller of `keep_mapped` holds it
                    self._mapping.close()

    def _make_room(self, num_bytes: int) -> bool:
        """Grows for a request; whether it may fit now (another thread may take the room)."""
        with self._growing:
            with self._lock:
                missing = self._extents.round_up(num_bytes)
                if self._extents.largest_free_bytes >= missing:
                    return True  # another thread has grown it meanwhile
                if self._pinned_for is None:
                    missing -= self._extents.free_at_end_bytes
                left = self.budget_bytes - self._extents.size_bytes
                if missing > left or self.growth_failed or self._closed:
                    return False
            try:
                self._grow(min(max(missing, GROWTH_BYTES), left))
            except RuntimeError:
                self.growth_failed = True
                return False
            return True

    @property
    def _is_short(self) -> bool:
        """Called under the lock. Whether to pin the next step ahead of need."""
        free_bytes = self._extents.size_bytes - self._extents.used_bytes
        left_bytes = self.budget_bytes - self._extents.size_bytes
        return self._grows_ahead and free_bytes < GROWTH_BYTES and left_bytes > 0

    # Runs in a thread of its own, which waits only for the system and for a thread that grows.
    def _grow_ahead(self) -> None:
        while True:
            with self._growing:
                with self._lock:
                    if not self._is_short:
                        self._ahead = None
                        return
                    left = self.budget_bytes - self._extents.size_bytes
                try:
                    self._grow(min(GROWTH_BYTES, left), is_needed=False)
                except RuntimeError:  # a thread that needs room tries again, and warns
                    with self._lock:
                        self._grows_ahead = False

    def _grow(self, num_bytes: int, is_needed: bool = True) -> None:
        """Called under `_growing`. Raises RuntimeError if the system does not pin the memory."""
        if self._pinned_for is not None:
            self._pin(self._pinned_for, num_bytes, is_needed)
        with self._lock:
            # CUDA refuses copies of memory that was page-locked in two pieces.
            self._extents.grow(num_bytes, apart=self.pinned)

    def _pin(self, device: Device, num_bytes: int, is_needed: bool) -> None:
        """Page-locks the next `num_bytes` of the mapping, or raises RuntimeError."""
        address = self._address + self._extents.size_bytes
        try:
            device.pin(address, num_bytes)
        except RuntimeError as error:
            if not is_needed:
                raise
            logger.warning(
                "%s%s more of host memory could not be pinned (%s); the %s that is pinned stays in "
                "use, and what does not fit goes elsewhere; raise the limit of locked memory "
                "(ulimit -l) or of the container's memory (cgroup), or set a smaller %s",
                self._purpose.prefix,
                format_size(num_bytes),
                str(error),
                format_size(self._extents.size_bytes),
                self._flag,
            )
            raise
        self._pinned_addresses.append(address)

    def _take_in_freed(self) -> None:
        """Called under the lock."""
        while self._freed:
            self._extents.free(self._freed.popleft())


def _unpin(device: Device, addresses: list[int], _: mmap.mmap | None = None) -> None:
    """Unpins what `pin` pinned; the memory is still mapped."""
    while addresses:
        device.unpin(addresses.pop(0))


class _Forkable:
    """A range that child processes inherit; they share its pages until a process writes to them."""

    def __init__(self, mapping: mmap.mmap, offset: int, num_bytes: int) -> None:
        self._range = mapping, offset, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._advise(mmap.MADV_DOFORK)

    def __del__(self) -> None:
        # The arena is closed, or an interrupt has ended `__init__`.
        with contextlib.suppress(ValueError, AttributeError):
            self._advise(mmap.MADV_DONTFORK)

    def _advise(self, advice: int) -> None:
        mapping, offset, num_bytes = self._range
        mapping.madvise(advice, offset, num_bytes)


def _reserve(num_bytes: int, purpose: Purpose, flag: str) -> mmap.mmap:
    """Private memory that is committed page by page, as it is touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise purpose.refusal(
            f"no address space for {format_size(num_bytes)} of host memory ({error.strerror}); set "
            f"a smaller {flag}, or raise the limit (ulimit -v, "
            "vm.overcommit_memory)"
        ) from None
    # Without this, forked data loader workers keep a copy of every page written after the fork.
    mapping.madvise(mmap.MADV_DONTFORK)
    prefer_huge_pages(mapping)
    return mapping
