# SPDX-License-Identifier: Apache-2.0
"""Writes new records to their tiers, within a bound of bytes in flight: `Writer`.

The hooks call `write` for each record; the thread that computes submits records to the dispatcher,
whose thread starts the writes. The policy has chosen the tier, and the tier's threads move the
bytes. `Reader` is the way back.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

from megatron.offload.activations.saved.record import SavedReference, SavedStorage
from megatron.offload.activations.saved.scope import layer_of, span_name
from megatron.offload.activations.step_context import StepContext
from megatron.offload.activations.transfer.dispatcher import Dispatcher
from megatron.offload.device.device import Device
from megatron.offload.stats.trace import WAIT
from megatron.offload.tiers.budget import ByteBudget
from megatron.offload.tiers.tier import Tier
from megatron.offload.tiers.transfer import Transfer


class Outgoing:
    """A storage that is to be written, which holds its bytes in flight.

    Attributes:
        record: of the storage.
        num_bytes: of memory that stays until it is written.
        tier: to write to.
        moved_bytes: a mask moves fewer.
        stream: of the device, on which its operation ran.
        read_storage: `_cdata` of the memory that the tier reads; None: it has not begun.
    """

    __slots__ = (
        *("__weakref__", "moved_bytes", "num_bytes", "read_storage", "record", "stream", "tier"),
    )

    def __init__(
        self, record: SavedReference, num_bytes: int, tier: Tier, moved_bytes: int, stream: Any
    ) -> None:
        self.record = record
        self.num_bytes = num_bytes
        self.tier = tier
        self.moved_bytes = moved_bytes
        self.stream = stream
        self.read_storage: int | None = None


class Writer:
    """Writes records in the background. Forward waits only while too many bytes are in flight.

    Args:
        device: that the memory is on.
        dispatcher: its thread starts the writes.
        inflight: bounds the bytes that were submitted and have not arrived.
        grows: whether the bound may be raised to what a layer saves: with a lower one, forward
            would wait at the end of each layer for what it has just submitted, however fast the
            tiers are. On a device that runs behind the host the bound is two layers, because what
            was submitted may not be computed yet.
        step: counts what is offloaded, what the tiers reject and how long forward waits.
    """

    def __init__(
        self,
        device: Device,
        dispatcher: Dispatcher,
        inflight: ByteBudget,
        *,
        grows: bool,
        step: StepContext,
    ) -> None:
        self._device = device
        self._dispatcher = dispatcher
        self._inflight = inflight
        self._grows = grows
        self._grows_by_layer = grows and not device.is_host
        self._layer: tuple[int, int, str, int] | None = None  # the call that saved last
        self._layer_bytes = 0
        self._step = step
        self._rejected_bytes = self._num_rejected = 0  # rejected by the tiers in this step

    # -- In the thread that computes ------------------------------------------------------------

    def write(self, record: SavedStorage, tier: Tier) -> Outgoing:
        """Queues a new record to be written. No write begins before the caller submits the result.

        Args:
            record: in memory; its operation is on the stream of the calling thread, or on one that
                this stream has waited for.
            tier: to write to.
        """
        record.queue_write()
        if self._grows_by_layer:
            self._make_room_for_two_layers(record)
        counted = self._step.statistics
        counted.offloaded_bytes += record.num_bytes
        counted.offloaded_storages += 1
        stream = record.stream  # that has saved it just now, where the hooks have noted one
        if stream is None and not self._device.is_host:
            stream = self._device.current_stream()
        return Outgoing(weakref.ref(record), record.saved_bytes, tier, record.num_bytes, stream)

    def submit(self, outgoing: list[Outgoing]) -> None:
        """Submits records to the dispatcher. Waits while too many bytes are in flight."""
        fitting: list[Outgoing] = []
        try:
            for one in outgoing:
                record = one.record()
                if record is not None and record.moves_a_copy:
                    with self._device.use_stream(one.stream):
                        record.copy_span()
                        if record.moves_bits:
                            record.pack_bits()
                            saved_bytes = one.num_bytes - one.moved_bytes
                            self._step.statistics.bit_packed_bytes += saved_bytes
                del record
                if not self._inflight.try_acquire(one, one.num_bytes):
                    self._dispatch(fitting)
                    fitting = []
                    self.make_room(sum(other.num_bytes for other in outgoing))
                    began = time.perf_counter()  # host time: the timeline shows the host waiting
                    with self._step.waits.for_room():
                        self._inflight.acquire(one, one.num_bytes)
                    if self._step.tracer is not None and self._device.is_host:
                        self._step.tracer.span(WAIT, "wait for room to write", began)
                fitting.append(one)
        finally:  # also after Ctrl-C during the wait
            self._dispatch(fitting)

    def make_room(self, num_bytes: int) -> None:
        """Raises the bound on bytes in flight to so many, unless the user has set the bound."""
        if self._grows and num_bytes > self._inflight.limit_bytes:
            self._inflight.limit_bytes = num_bytes

    def _make_room_for_two_layers(self, record: SavedStorage) -> None:
        """Raises the bound to a layer that is computed and one that is queued behind it."""
        scope = record.scope
        layer = scope.chunk, scope.micro_batch, scope.layer, self._step.num_entered
        if layer != self._layer:
            self._layer, self._layer_bytes = layer, 0
        if layer_of(scope.layer):
            self._layer_bytes += record.saved_bytes
            self.make_room(2 * self._layer_bytes)

    def _dispatch(self, outgoing: list[Outgoing]) -> None:
        if not outgoing:
            return
        # Usually one event for all: after it the bytes exist, and the copies of parts too.
        produced: dict[Any, Any] = {}
        if not self._device.is_host:
            produced = {s: self._device.record_event(s) for s in {one.stream for one in outgoing}}
            for one in outgoing:
                record = one.record()
                if record is not None and record.moves_a_copy:
                    record.ready = (produced[one.stream],)
                del record
        self._dispatcher.submit(
            *(
                functools.partial(self._begin_write, one, produced.get(one.stream))
                for one in outgoing
            )
        )

    # -- In the dispatcher's thread -------------------------------------------------------------

    def _begin_write(self, outgoing: Outgoing, produced: Any) -> None:
        record = outgoing.record()
        memory = record.memory_to_write() if record is not None else None
        if record is None or memory is None:  # the graph was dropped, or backward needs it already
            self._inflight.release(outgoing)
            return
        outgoing.read_storage = memory._cdata
        started = None
        try:
            started = outgoing.tier.begin_write(memory, produced)
        finally:
            if started is None:
                record.keep_in_memory()
                self._rejected_bytes += outgoing.moved_bytes
                self._num_rejected += 1
                self._inflight.release(outgoing)
        if started is not None:
            block, transfer = started
            record.begin_write(block, transfer)
            transfer.add_done_callback(self._end_of_write(outgoing, block.tier))

    # -- In the thread of the tier that has moved the bytes -------------------------------------

    def _end_of_write(self, outgoing: Outgoing, tier: Tier) -> Callable[[Any], None]:
        """Tells the record how its write ended, if the record is alive. Keeps no record alive."""

        def end(transfer: Transfer) -> None:
            record = outgoing.record()
            if self._step.tracer is not None:
                scope = record.scope if record is not None else None
                name, num_bytes = span_name(scope), outgoing.moved_bytes
                self._step.tracer.transfer(
                    "write", tier, name, transfer, num_bytes, scope=str(scope)
                )
            if record is not None:
                failed = transfer.error is not None
                record.end_write(failed=failed or not record.has_all_in_bits)
            del record  # first: a thread that sees nothing in flight may end the step
            self._inflight.release(outgoing)
            if (sampler := self._step.sampler) is not None:  # the end of the step removes it
                sampler.transfer_ended()

        return end

    # -- At the borders of a step ---------------------------------------------------------------

    def begin_step(self) -> None:
        """From now on counts what the tiers reject."""
        self._rejected_bytes = self._num_rejected = 0
        self._layer = None

    def end_step(self) -> None:
        """Subtracts what the tiers rejected. Call it after the dispatcher was drained."""
        counted = self._step.statistics
        counted.rejected_bytes = self._rejected_bytes
        counted.offloaded_bytes -= self._rejected_bytes
        counted.offloaded_storages -= self._num_rejected

    def wait_for_writes(self, timeout_s: float | None = None) -> bool:
        """Blocks until all that was submitted was written or failed; False after `timeout_s`."""
        self._dispatcher.drain()
        return self._inflight.wait_until_free(timeout_s)

    @property
    def read_storages(self) -> set[int]:
        """`_cdata` of storages that tiers read from, for writes that were given up as well."""
        found = {one.read_storage for one in self._inflight.holders}
        return {one for one in found if one is not None}

    @property
    def bytes_in_flight(self) -> int:
        """Bytes that were submitted and have not arrived yet."""
        return self._inflight.taken_bytes
