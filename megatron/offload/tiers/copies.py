# SPDX-License-Identifier: Apache-2.0
"""Copies of whole storages between a device and host memory: `ByThreads` and `ByDevice`.

The host tier has one of the two, the pool before the drives (`bounce.py`) a `ByDevice`. On a CPU a
copy occupies a thread. A device with memory of its own runs copies from a queue, and a thread only
notices their ends: see Note [Who waits for whom] in `device/device.py`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from megatron.offload.device.device import Device
from megatron.offload.tiers.access import check_size
from megatron.offload.tiers.bandwidth import BandwidthMeter
from megatron.offload.tiers.io_threads import IoThreads, Piece
from megatron.offload.tiers.purpose import ACTIVATIONS, Purpose
from megatron.offload.tiers.tier import TierStatistics
from megatron.offload.tiers.transfer import TierClosedError, Transfer, ended

logger = logging.getLogger(__name__)


class HostCopies(Protocol):
    """Copies whole storages. Each copy keeps the owner of the host memory alive until it ends."""

    def begin_write(
        self, source: torch.UntypedStorage, address: int, after: Any, owner: object
    ) -> Transfer:
        """Starts to copy a storage to host memory at `address`, after an event of the device."""
        ...

    def begin_read(
        self,
        address: int,
        num_bytes: int,
        deadline: float,
        owner: object,
        into: torch.UntypedStorage | None = None,
    ) -> tuple[torch.UntypedStorage, Transfer]:
        """Starts to copy host memory into a new storage, or into `into`.

        Reads with smaller deadlines go first.
        """
        ...

    def close(self) -> None:
        """Cancels what is queued, waits for what is under way."""
        ...


class ByThreads:
    """Copies within host memory, each in one of a few threads.

    Args:
        device: whose memory is host memory.
        num_threads: copies that run at the same time.
        statistics: count what has moved.
        purpose: what it is for, in sentences.
    """

    def __init__(
        self,
        device: Device,
        num_threads: int,
        statistics: TierStatistics,
        purpose: Purpose = ACTIVATIONS,
    ) -> None:
        self._device = device
        self._statistics = statistics
        # They wait for the queue, and copy.
        self._threads = IoThreads(
            num_threads, f"{purpose.thread_name} host memory", purpose=purpose
        )

    def begin_write(
        self, source: torch.UntypedStorage, address: int, after: Any, owner: object
    ) -> Transfer:
        """See `HostCopies`."""
        num_bytes = source.nbytes()

        def work(_: object = owner) -> None:
            try:
                check_size(source, num_bytes)
                with self._statistics.writes.moving(num_bytes):
                    self._device.copy_to_host(source, address, None)
            except Exception:
                self._statistics.failed_writes += 1
                raise

        return self._threads.submit_write([Piece(num_bytes, work)])

    def begin_read(
        self,
        address: int,
        num_bytes: int,
        deadline: float,
        owner: object,
        into: torch.UntypedStorage | None = None,
    ) -> tuple[torch.UntypedStorage, Transfer]:
        """See `HostCopies`."""
        target = self._device.new_restored(num_bytes) if into is None else into

        def work(_: object = owner) -> None:
            with self._statistics.reads.moving(num_bytes):
                self._device.copy_from_host(address, target)

        return target, self._threads.submit_read(work, deadline, num_bytes)

    def close(self) -> None:
        """See `HostCopies`."""
        self._threads.close()


class ByDevice:
    """Copies that a device runs in the order in which they are queued, in each direction.

    The transfer of a read ends when the read is queued: compute waits for its event on the device.
    The transfer of a write ends when the bytes have arrived.

    Args:
        device: with memory of its own.
        statistics: count what has moved.
        purpose: what it is for, in sentences.
    """

    def __init__(
        self, device: Device, statistics: TierStatistics, purpose: Purpose = ACTIVATIONS
    ) -> None:
        self._device = device
        self._statistics = statistics
        self._writes = CopyWatcher(device, statistics.writes, "to host memory", purpose)
        try:
            self._reads = CopyWatcher(device, statistics.reads, "from host memory", purpose)
        except BaseException:  # e.g. the system starts no more threads
            self._writes.close()
            raise

    def begin_write(
        self, source: torch.UntypedStorage, address: int, after: Any, owner: object
    ) -> Transfer:
        """See `HostCopies`."""
        self._writes.check_open()
        num_bytes = source.nbytes()
        try:
            copied = self._device.copy_to_host(source, address, after)
        except Exception:
            self._statistics.failed_writes += 1
            raise
        check = functools.partial(check_size, source, num_bytes)
        transfer = self._writes.watch(copied, num_bytes, [owner, check], after, check)
        transfer.add_done_callback(self._write_ended)
        return transfer

    def begin_read(
        self,
        address: int,
        num_bytes: int,
        deadline: float,
        owner: object,
        into: torch.UntypedStorage | None = None,
    ) -> tuple[torch.UntypedStorage, Transfer]:
        """See `HostCopies`."""
        self._reads.check_open()
        target = self._device.new_restored(num_bytes) if into is None else into
        copied = self._device.copy_from_host(address, target)
        self._statistics.reads.count(num_bytes)  # the step may end before the bytes arrive
        self._reads.watch(copied, num_bytes, [owner], is_counted=True)
        transfer = ended()
        transfer.events = [copied]
        return target, transfer

    def close(self) -> None:
        """Waits for all copies; a device cannot cancel queued ones."""
        self._writes.close()
        self._reads.close()

    def _write_ended(self, transfer: Transfer) -> None:
        if not transfer.cancelled() and transfer.exception() is not None:
            self._statistics.failed_writes += 1


class _Watched(NamedTuple):
    """A copy that is queued on the device."""

    copied: Any  # its event
    kept: list[Any]  # what must not be freed before it ends
    transfer: Transfer


class CopyWatcher:
    """A daemon thread that notices the ends of a stream's copies, in their order.

    It waits for the device and for no other thread, and ends transfers. Their callbacks may take
    locks that are held for microseconds.

    Args:
        device: that makes the copies.
        meter: counts their bytes, and the time from a copy's beginning to its end.
        direction: of the copies, for the name of the thread.
        purpose: what they are for, in sentences.
    """

    def __init__(
        self,
        device: Device,
        meter: BandwidthMeter,
        direction: str,
        purpose: Purpose = ACTIVATIONS,
    ) -> None:
        self._prefix = purpose.prefix
        self._device = device
        self._meter = meter
        self._queue: queue.SimpleQueue[_Watched | None] = queue.SimpleQueue()
        self._is_closed = False
        name = f"{purpose.thread_name} {direction}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def check_open(self) -> None:
        """Raises TierClosedError if it was closed."""
        if self._is_closed:
            raise TierClosedError

    def watch(
        self,
        copied: Any,
        num_bytes: int,
        kept: list[Any],
        after: Any = None,
        check: Callable[[], None] = lambda: None,
        *,
        is_counted: bool = False,
    ) -> Transfer:
        """A transfer that ends when a queued copy ends.

        Cancelling ends it at once. The copy goes on, and keeps alive what it needs.

        Args:
            copied: the copy's event.
            num_bytes: that it copies.
            kept: what must not be freed before the end; emptied then.
            after: the event that the copy waits for, so that this wait is not counted.
            check: called at the end; raises if the copied bytes are not valid.
            is_counted: the meter has counted the bytes already, and adds the time only.
        """

        def work() -> None:
            self._device.wait_for_event(after)
            with self._meter.moving(num_bytes, is_counted=is_counted):
                self._device.wait_for_event(copied)
                check()
            kept.clear()

        transfer = Transfer(work)
        self._queue.put(_Watched(copied, kept, transfer))
        return transfer

    def close(self) -> None:
        """Waits for all copies, ends the thread."""
        self._is_closed = True
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            watched = None  # while this thread waits, it must keep nothing alive
            try:
                watched = self._queue.get()
                if watched is None:
                    return
                watched.transfer.run()
                if watched.kept:  # the transfer failed or was cancelled; the copy goes on
                    self._device.wait_for_event(watched.copied)
            except BaseException as error:  # any error: no other thread would do this one's work
                # Not the error itself: a handler that stores records would keep its traceback.
                reason = repr(error)
                logger.warning("%sa copy's end was not noticed: %s", self._prefix, reason)
                if watched is not None:
                    watched.transfer.fail("the thread that watches copies was interrupted")
                    with contextlib.suppress(Exception):  # an error of the device: no copy runs
                        self._device.wait_for_event(watched.copied)
            if watched is not None:
                watched.kept.clear()
