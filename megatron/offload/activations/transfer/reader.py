# SPDX-License-Identifier: Apache-2.0
"""Reads records back from their tier, each once, whichever thread asks first: `Reader`.

The thread that computes asks when it needs a record, the prefetcher (in the dispatcher's thread)
asks ahead. The prefetcher decides which record is next, the tier knows where its bytes are.
"""

from __future__ import annotations

import collections
import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.offload.activations.saved.recipe import Recipe
from megatron.offload.activations.saved.record import SavedReference, SavedStorage, State
from megatron.offload.activations.saved.save_order import SaveOrder
from megatron.offload.activations.saved.scope import span_name
from megatron.offload.activations.saved.view import SavedView
from megatron.offload.activations.step_context import StepContext
from megatron.offload.activations.transfer.dispatcher import Dispatcher
from megatron.offload.activations.transfer.prefetcher import Prefetcher
from megatron.offload.activations.transfer.run_ahead_limit import HostRunAheadLimit
from megatron.offload.device.device import Device
from megatron.offload.errors import StorageError
from megatron.offload.stats.trace import WAIT, Tracer
from megatron.offload.tiers.budget import ByteBudget
from megatron.offload.tiers.transfer import TRANSFER_ERRORS, TierClosedError, Transfer

_NOW = float("-inf")  # the deadline of a read that compute waits for
_SOON = 0.0  # of a read that compute will wait for next; the prefetcher counts from 1
_LET_GO_LOOKS, _LET_GO_S = 1000, 0.001  # at memory that was given up: a second at the most
_NOTICEABLE_S = 0.0002  # a shorter wait is the hand-over between two threads


class Reader:
    """Brings records back: ahead of backward if possible, else while backward waits.

    A thread holds its lock for a tenth of a millisecond, and takes a record's lock under it.

    Args:
        device: that the memory is on.
        dispatcher: its thread reads ahead, and builds the tensors of what it has read.
        inflight: its limit also bounds what is read ahead, and how far the host runs ahead.
        step: counts what is forwarded and how long compute waits.
        rank: global rank, for error messages.
    """

    def __init__(
        self,
        device: Device,
        dispatcher: Dispatcher,
        inflight: ByteBudget,
        *,
        step: StepContext,
        rank: int,
    ) -> None:
        self.prefetcher = Prefetcher(self.begin_read, inflight)
        self._device = device
        self._dispatcher = dispatcher
        self._step = step
        self._rank = rank
        self._run_ahead = HostRunAheadLimit(device, inflight, step.waits)
        self._beginning = threading.Lock()
        # Reads that have ended well, whose tensors the dispatcher is to build; it is called once
        # for several that end together.
        self._ended: collections.deque[tuple[SavedReference, Transfer]] = collections.deque()
        self._will_build = False
        device.room.add(self)

    # -- Ahead of backward ----------------------------------------------------------------------

    def begin_prefetch(self, save_order: SaveOrder, opens_at_once: bool) -> None:
        """The next backward pass reads `save_order`. See `OffloadEngine.prefetch`."""
        start = functools.partial(self.prefetcher.start, save_order, opens_at_once)
        self._dispatcher.submit(start, self.prefetcher.advance)

    def end_prefetch(self) -> None:
        """The backward pass is over: nothing more is read ahead."""
        self._dispatcher.submit(self.prefetcher.stop)

    def hold_prefetch(self, is_held: bool) -> None:
        """Has nothing read ahead until the opposite is said."""
        self.prefetcher.is_held = is_held
        if not is_held:
            self._dispatcher.submit(self.prefetcher.advance)

    def read_ahead(self, record: SavedStorage) -> None:
        """A record is needed soon, out of the order of a backward pass."""
        self._dispatcher.submit(functools.partial(self._read_soon, weakref.ref(record)))

    # Runs in the dispatcher's thread.
    def _read_soon(self, reference: SavedReference) -> None:
        record = reference()
        if record is not None:
            self.begin_read(record, _SOON)

    def begin_read(self, record: SavedStorage, deadline: float) -> bool:
        """Starts the read of a record, unless another thread has; returns whether it did.

        Args:
            record: on a tier, or until just now.
            deadline: reads with smaller numbers go first.
        """
        with self._beginning:
            if record.state is not State.ON_TIER:
                return False
            if deadline != _NOW and record.num_unused_views <= 0:
                return False  # compute has read it itself meanwhile, and has used it
            memory, transfer = record.block.tier.begin_read(record.block, deadline)
            record.begin_read(memory, transfer, transfer.events)
        transfer.add_done_callback(self._end_of_read(weakref.ref(record)))
        return True

    def _end_of_read(self, reference: SavedReference) -> Callable[[Any], None]:
        """Has the tensors built; if the read failed, the thread that waits for it raises."""

        def end(transfer: Transfer) -> None:
            if self._step.tracer is not None:
                _trace_read(self._step.tracer, reference, transfer)
            if (sampler := self._step.sampler) is not None:  # the end of the step removes it
                sampler.transfer_ended()
            if transfer.error is None:
                self._ended.append((reference, transfer))
                if not self._will_build:
                    self._will_build = True
                    self._dispatcher.submit(self._build_views)

        return end

    # Runs in the dispatcher's thread.
    def _build_views(self) -> None:
        self._will_build = False  # first: the loop below may miss what ends from now on
        while self._ended:
            reference, ended = self._ended.popleft()
            record = reference()
            if record is not None:
                record.build_views(ended)
            del record, ended

    # -- In the thread that computes ------------------------------------------------------------

    def note_use(self, tensor: torch.Tensor, record: SavedStorage | None = None) -> None:
        """The calling thread's stream uses a tensor in the memory in which it was saved.

        Autograd would hold that memory until backward, so a script may use it on several streams
        and not tell the allocator.

        Args:
            tensor: that is saved, or that backward gets.
            record: of its bytes; None: it has none.
        """
        if self._device.is_host:
            return
        stream = self._device.current_stream()
        is_known = record is not None and record.ready is None and record.stream == stream
        if not is_known:
            self._device.used_on(tensor, stream)
        if record is not None:
            record.stream = stream

    def wait_for_read(self, record: SavedStorage, *, for_good: bool = True) -> torch.UntypedStorage:
        """The record's bytes in memory: still there (forwarded), read ahead, or read now.

        Args:
            record: whose bytes are needed.
            for_good: they are not needed on the tier any more, so a write under way is cancelled.

        Raises:
            StorageError: the tier could not read them.
            torch.OutOfMemoryError: no memory for them, even after reads ahead were given up.
        """
        forwarded = record.state not in (State.READING, State.RESTORED)
        ready = record.ready
        memory = record.cancel_write() if for_good else record.memory_not_left_yet
        if memory is not None and forwarded:
            self._step.statistics.forwarded_bytes += record.num_bytes
        try:
            if memory is None or record.ready is not ready:  # else the memory is another read's
                memory, ready = self._device.room.read(functools.partial(self._read, record))
        except torch.OutOfMemoryError:
            raise
        except TRANSFER_ERRORS as error:
            advice = (
                "call close() of the handle after the backward pass"
                if isinstance(error, TierClosedError)
                else "check the disk and resume from the last checkpoint"
            )
            raise StorageError(
                f"rank {self._rank} could not read an activation of {record.scope} back "
                f"({record.block}): {error}; its gradient would be wrong, so training stops; "
                f"{advice}"
            ) from error
        if ready is not None:
            self._use_after(memory, ready, record)
        if not record.moves_bits:
            return memory
        return self._device.room.read(functools.partial(self._unpacked, record, memory))

    def computed(self, record: SavedStorage) -> torch.UntypedStorage | None:
        """The bytes of a record with a recipe, if another use or another owner has them."""
        memory = record.cancel_write()
        if memory is not None and record.ready is not None:
            self._device.use_after(memory, record.ready)
        return memory

    def compute(
        self, record: SavedStorage, recipe: Recipe, operands: list[torch.Tensor | None]
    ) -> torch.UntypedStorage:
        """Computes the bytes of a record again, on the stream of the calling thread.

        Where no other backward pass can follow, operands that were saved for this recipe alone go,
        and the result stays until the nodes that saved it have run.
        """
        if not self._device.is_host:
            sampled = () if recipe.sample is None else (recipe.sample.values,)
            self._use_operands(recipe, [*operands, *sampled])
        computed = self._device.room.read(lambda: recipe.run(list(operands)))
        is_last = recipe.frees and recipe.is_exact and _is_last_backward()
        memory = record.replayed(computed.untyped_storage(), is_last)
        if is_last:  # after the bytes are there: another thread looks at them second
            recipe.operands, recipe.bases = [], []
        self._step.statistics.num_replays += 1
        if record.state is not State.ON_TIER and not self._device.is_host:
            record.ready = (self._device.record_event(),)  # other uses may be on other streams
        return memory

    def _use_operands(self, recipe: Recipe, operands: Sequence[torch.Tensor | None]) -> None:
        """The calling thread's stream computes what others may have saved the operands of."""
        stream = self._device.current_stream()
        events = () if stream == recipe.stream else (self._device.record_event(recipe.stream),)
        for one in operands:
            if one is None or one.device != self._device.device:
                continue  # numbers may be on the CPU, and shapes alone on none
            if events:
                self._device.use_after(one.untyped_storage(), events)
            else:
                self._device.used_on(one, stream)

    def _read(self, record: SavedStorage) -> tuple[torch.UntypedStorage, Sequence[Any] | None]:
        """A record's bytes in memory once they have arrived, and the events to wait for."""
        memory, ready = None, record.ready
        while memory is None or record.ready is not ready:
            if record.state is State.ON_TIER:
                self.begin_read(record, _NOW)
            if not record.has_arrived:
                self._stall(record)
            ready = record.ready
            memory = record.end_read()
        return memory, ready

    def give_up_reads(self) -> None:
        """Frees what was read ahead, and reads nothing ahead until the next backward pass.

        See `ReadsAhead`.
        """
        self._dispatcher.submit(self.prefetcher.stop)
        self._dispatcher.drain()
        let_go = [record.give_up_read() for record in self.prefetcher.take_ahead()]
        for _ in range(_LET_GO_LOOKS):  # an I/O thread and the dispatcher hold it a moment longer
            if all(memory is None or memory.expired() for memory in let_go):
                break
            time.sleep(_LET_GO_S)
            self._dispatcher.drain()

    def _unpacked(self, record: SavedStorage, memory: torch.UntypedStorage) -> torch.UntypedStorage:
        """A mask as it was saved, unpacked once; a use on another stream waits for that."""
        unpacked = record.unpacked(memory)
        if unpacked is not memory and not self._device.is_host:
            record.ready = (self._device.record_event(),)
        return unpacked

    def use_built(self, view: SavedView, tensor: torch.Tensor) -> None:
        """The stream of the calling thread uses a tensor that was built ahead."""
        if view.ready is not None:
            self._use_after(tensor.untyped_storage(), view.ready, view.saved)

    def _use_after(
        self, memory: torch.UntypedStorage, ready: Sequence[Any], record: SavedStorage
    ) -> None:
        if not ready or not self._step.waits.is_timed:  # mostly: timing costs as much as the wait
            self._device.use_after(memory, ready)
            return
        with self._step.waits.for_read(record.scope):
            self._device.use_after(memory, ready)

    def _stall(self, record: SavedStorage) -> None:
        """Waits until a read has ended, well or badly, and reports the wait to the prefetcher."""
        began = time.perf_counter()  # host time, because the host reads ahead
        with (
            self._step.waits.for_read(record.scope),
            self._device.annotate("activation offload: wait for a read"),
        ):
            record.wait_for_read()
        waited_s = time.perf_counter() - began
        if self._step.tracer is not None and self._device.is_host:  # else `StepTrace` draws it
            self._step.tracer.span(WAIT, f"read of {span_name(record.scope)}", began)
        if waited_s > _NOTICEABLE_S:
            rate = record.block.tier.statistics.reads.bytes_per_s or 0.0
            self._dispatcher.submit(functools.partial(self.prefetcher.waited, waited_s, rate))

    def end_use(self, view: SavedView) -> None:
        """Backward gets a view: frees the memory after its last use, and reads further ahead."""
        record = view.saved
        record.view_used(view)
        if record.ready is not None and record.num_unused_views <= 0 and record.recipe is None:
            self._run_ahead.used(record.saved_bytes)
        if self.prefetcher.used(view.saved):
            self._dispatcher.submit(self.prefetcher.advance)


def _is_last_backward() -> bool:
    """Whether a backward pass is under way that frees its graph (`retain_graph=False`)."""
    autograd: Any = torch._C._autograd
    return torch._C._current_graph_task_id() >= 0 and not (
        autograd._get_current_graph_task_keep_graph()
    )


# Runs in the thread of the tier that has moved the bytes.
def _trace_read(tracer: Tracer, reference: SavedReference, transfer: Transfer) -> None:
    record = reference()
    if record is not None and record.block is not None:
        name, scope = span_name(record.scope), str(record.scope)
        tracer.transfer("read", record.block.tier, name, transfer, record.num_bytes, scope=scope)
        tracer.sample_memory()
