# SPDX-License-Identifier: Apache-2.0
"""Has records read back from their tier, each once, whoever asks first: `Reader`.

The thread that computes asks when it needs one, the read-ahead (in the dispatcher's thread) before.
Which record is next is the prefetcher's to say, and where its bytes are the tier's.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import torch

from megatron.offload.device.device import Device
from megatron.offload.errors import StorageError
from megatron.offload.saved.record import SavedReference, SavedStorage, State
from megatron.offload.transfer.dispatcher import Dispatcher

_NOW = float("-inf")  # the deadline of a read that compute waits for


class Reader:
    """Of one engine. Its lock is held for a tenth of a millisecond, a record's lock under it.

    Args:
        device: that the memory is on.
        dispatcher: its thread builds the tensors of what was read ahead.
        stalled: is told which record compute has waited for, and how many seconds.
        rank: global rank, for error messages.
    """

    def __init__(
        self,
        device: Device,
        dispatcher: Dispatcher,
        stalled: Callable[[SavedStorage, float], None],
        rank: int,
    ) -> None:
        self._device = device
        self._dispatcher = dispatcher
        self._stalled = stalled
        self._rank = rank
        self._beginning = threading.Lock()

    def begin(self, record: SavedStorage, deadline: float) -> bool:
        """Starts the read of a record, unless somebody else has; whether it did.

        Args:
            record: that is on a tier, or was until just now.
            deadline: reads with a smaller number go first.
        """
        with self._beginning:
            if record.state is not State.ON_TIER:
                return False
            if deadline != _NOW and record.num_unused_views <= 0:
                return False  # compute has had it read itself meanwhile, and is done with it
            with self._device.use_stream(record.stream):
                memory, transfer = record.block.tier.begin_read(record.block, deadline)
            record.begin_reading(memory, transfer)
        transfer.add_done_callback(self._end_of_read(weakref.ref(record)))
        return True

    def _end_of_read(self, reference: SavedReference) -> Callable[[Future[None]], None]:
        """Has the tensors built, unless the read failed: then whoever waits for it says so."""

        def end(transfer: Future[None]) -> None:
            if not transfer.cancelled() and transfer.exception() is None:
                self._dispatcher.submit(functools.partial(_make_ready, reference, transfer))

        return end

    def wait_for(self, record: SavedStorage) -> torch.UntypedStorage:
        """The record's bytes in memory, for compute, which can do nothing else until then.

        Raises:
            StorageError: they could not be read.
        """
        memory = None
        try:
            while memory is None:
                if record.state is State.ON_TIER:
                    self.begin(record, _NOW)
                if not record.has_arrived:
                    self._stall(record)
                memory = record.end_reading()
            return memory
        except Exception as error:
            raise StorageError(
                f"rank {self._rank} could not read an activation of {record.scope} back "
                f"({record.block}): {error}; its gradient would be wrong, so training stops; "
                "check the disk and resume from the last checkpoint"
            ) from error

    def _stall(self, record: SavedStorage) -> None:
        """Waits until a read has ended, well or badly."""
        began = time.perf_counter()
        with self._device.annotate("activation offload: wait for a read"):
            record.wait_until_arrived()
        waited_s = time.perf_counter() - began
        self._stalled(record, waited_s)


# Runs in the dispatcher's thread.
def _make_ready(reference: SavedReference, ended: Future[None]) -> None:
    record = reference()
    if record is not None:
        record.make_ready(ended)
