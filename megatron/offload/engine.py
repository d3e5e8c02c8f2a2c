# SPDX-License-Identifier: Apache-2.0
"""The one place that wires the rooms: `OffloadEngine`.

Integrations tell it where in the step they are and which layer has just run; nothing else of the
package is called from outside. Read it top to bottom: a step begins, a layer's activations are
captured and written, backward begins, they are read ahead and handed back, the step ends.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from megatron.offload.capture.context import SavingContext
from megatron.offload.capture.hooks import PLAIN_TORCH, SavedTensorHooks, needed_together
from megatron.offload.config import DEFAULT_INFLIGHT_BYTES, OffloadConfig
from megatron.offload.device.allocator import MIMALLOC, allocator_name
from megatron.offload.device.device import Device
from megatron.offload.device.open import open_device
from megatron.offload.errors import ConfigurationError
from megatron.offload.placement.policy import FixedPolicy, Placement, Policy
from megatron.offload.saved.autograd_graph import (
    is_kept_by_accumulator,
    node_of,
    saved_tensors_between,
)
from megatron.offload.saved.cache import LongLived, TensorCache
from megatron.offload.saved.observer import Observer
from megatron.offload.saved.record import SavedReference, SavedStorage, SavedView, State
from megatron.offload.saved.scope import Scope
from megatron.offload.stats.statistics import StepStatistics
from megatron.offload.stats.traffic import Traffic
from megatron.offload.tiers.budget import ByteBudget
from megatron.offload.tiers.open import open_tiers
from megatron.offload.tiers.ssd import SsdTier
from megatron.offload.tiers.tier import Tier
from megatron.offload.transfer.dispatcher import Dispatcher
from megatron.offload.transfer.prefetcher import Prefetcher, SaveOrder
from megatron.offload.transfer.reader import Reader

logger = logging.getLogger(__name__)

_NOTICEABLE_S = 0.0002  # a shorter wait is the hand-over between threads
_HAS_HOOKS = "hooks have already been set"  # autograd's words: somebody else has taken this tensor


class Outgoing(NamedTuple):
    """A storage that is to be written."""

    record: SavedReference
    num_bytes: int
    tier: Tier


class _Captured(threading.local):
    """Each thread's own: what it saves until it hands it over; None: it hands over at once."""

    outgoing: list[Outgoing] | None = None


class OffloadEngine:
    """Activation offload of one process.

    Whoever computes saves and uses; the dispatcher's thread starts the transfers, the tiers' threads
    carry them out.

    Args:
        config: must have offload enabled.
        device: where activations live.
        rank: global rank, for error messages.
        num_local_ranks: processes on this machine, which share its memory.
        reserve_bytes: SSD space to allocate at once; more is allocated when it is needed.
        policy: chooses placements; default: everything of at least `config.min_bytes` to where
            the mode says, in the layers that the config names.

    Raises:
        ConfigurationError: a directory, a budget or the device cannot work.
    """

    def __init__(
        self,
        config: OffloadConfig,
        device: Device | torch.device | str = "cpu",
        *,
        rank: int = 0,
        num_local_ranks: int = 1,
        reserve_bytes: int = 0,
        policy: Policy | None = None,
    ) -> None:
        if not config.enabled:
            raise ConfigurationError("the engine was asked for with --activation-offload off")
        if isinstance(device, str | torch.device):
            device = open_device(device)
        self.config = config
        self.rank = rank
        self.statistics = StepStatistics()  # of the step under way, or the last one
        self.observer: Observer | None = None  # hears what layers save
        # Of nodes that save copies of their own, see Note [Leaves] in `saved/autograd_graph.py`.
        self.copying_nodes: set[type] = set()
        self._policy = policy or FixedPolicy(
            config.min_bytes,
            Placement(config.safe_mode),
            offloaded=config.offload_layers,
            recomputed=config.recompute_layers,
        )
        self._device = device
        asked_bytes = config.inflight_bytes
        self._inflight = ByteBudget(DEFAULT_INFLIGHT_BYTES if asked_bytes is None else asked_bytes)
        self._tiers = open_tiers(
            config,
            device,
            reserve_bytes=reserve_bytes,
            num_local_ranks=num_local_ranks,
        )
        self._traffic = Traffic(self.tiers)
        self._cache = TensorCache(device.device)
        self._hooks = SavedTensorHooks(self._cache, mover=self)
        self._dispatcher = Dispatcher("activation-offload transfers")
        self._reader = Reader(device, self._dispatcher, self._stalled, rank)
        self._prefetcher = Prefetcher(self._reader.begin, limit_bytes=self._inflight.limit_bytes)
        self._captured = _Captured()  # of the layer or operation under way
        self._refused_bytes = self._num_refused = 0  # by the tiers, in this step
        self._scope = Scope()
        self._save_order: SaveOrder | None = None  # of the forward pass under way
        logger.info("activation offload: to %s", self.where)
        if device.is_host and allocator_name() != MIMALLOC:
            logger.info(
                "activation offload: memory comes from %s, which may keep what offload frees",
                allocator_name(),
            )

    # -- The step, as an integration tells it ---------------------------------------------------

    def exclude(self, tensors: Iterable[torch.Tensor]) -> None:
        """These tensors' storages never move: parameters, buffers, flat gradient buffers."""
        self._cache.exclude(tensors)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around all forward and backward passes of a training step."""
        self.statistics = StepStatistics()
        self._refused_bytes = self._num_refused = 0
        self._traffic.begin_step()
        try:
            yield
        finally:
            self._dispatcher.submit(self._prefetcher.stop)
            self._dispatcher.drain()
            self.statistics.long_lived_bytes = self._cache.end_step()
            counted, self._cache.num_unsupported = self._cache.num_unsupported, 0
            self.statistics.unsupported = counted
            self._take_off_refused()
            self._traffic.end_step(self.statistics)

    @contextlib.contextmanager
    def forward(self, scope: Scope) -> Iterator[SaveOrder]:
        """Around one forward pass. Its save order is what `backward` of the same pass asks for."""
        outer = self._scope, self._save_order
        self._scope, self._save_order = scope, SaveOrder()
        try:
            yield self._save_order
        finally:
            self._scope, self._save_order = outer

    def capture(
        self,
        scope: Scope,
        outputs: Iterable[torch.Tensor],
        inputs: Iterable[torch.Tensor],
    ) -> None:
        """Takes over what a layer saved. Call at the end of its forward pass.

        Args:
            scope: the layer's place in the step.
            outputs: the tensors that the layer returned.
            inputs: the tensors that it was called with.
        """
        with PLAIN_TORCH():
            self._capture(scope, outputs, list(inputs))

    def _capture(
        self, scope: Scope, outputs: Iterable[torch.Tensor], inputs: list[torch.Tensor]
    ) -> None:
        # A stage's input is held by the schedule until its backward: moving it frees nothing.
        leaves = [t for t in inputs if node_of(t) is None and t.layout is torch.strided]
        held = {t.untyped_storage()._cdata for t in leaves}
        found = []
        for node, saved, tensor in saved_tensors_between(outputs, inputs):
            if tensor is None:
                self.statistics.already_hooked += saved.unpack_hook != self._hooks.unpack
                continue
            storage = self._cache.movable_if_saved(tensor)
            if storage is None or storage._cdata in held:
                continue
            if type(node) in self.copying_nodes or not is_kept_by_accumulator(tensor):
                found.append((saved, tensor, storage))
            elif self.observer is not None:
                self.observer.stayed(scope, storage)
        needed_whole = needed_together([(tensor, storage) for _, tensor, storage in found])
        outer, self._scope = self._scope, scope
        captured: list[Outgoing] = []
        try:
            with self._collecting(captured):
                for saved, tensor, storage in found:
                    if self.tier_for(storage.nbytes()) is not None:
                        is_whole = storage._cdata in needed_whole
                        pack: Any = self._hooks.pack_whole if is_whole else self._hooks.pack_found
                        if is_kept_by_accumulator(tensor):
                            pack = self._hooks.emptying(pack, tensor)
                        self._register(saved, pack)
                    elif self.observer is not None:
                        self.observer.stayed(scope, storage)
        finally:
            self._scope = outer
            self._hand_over(captured)

    def _register(self, saved: Any, pack: Callable[[torch.Tensor], Any]) -> None:
        """Hooks one saved tensor, which calls `pack` at once."""
        try:
            saved.register_hooks(pack, self._hooks.unpack)
        except RuntimeError as error:
            if _HAS_HOOKS not in str(error):
                raise
            self.statistics.already_hooked += 1

    def saved_tensors_hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The hooks as a context, for models without layers that can be captured one by one."""
        return SavingContext(self._hooks, self._collecting, self._hand_over)

    @contextlib.contextmanager
    def _collecting(self, captured: list[Outgoing]) -> Iterator[None]:
        """What is saved goes to this list instead of to the dispatcher."""
        outer, self._captured.outgoing = self._captured.outgoing, captured
        try:
            yield
        finally:
            self._captured.outgoing = outer

    def prefetch(self, save_order: SaveOrder, *, opens_at_once: bool = False) -> None:
        """The next backward pass is that of `save_order`: brings back what it needs first.

        Args:
            save order: from `forward`.
            opens_at_once: backward goes straight to the layers that filled the save order. Else it passes
                through the loss, where memory is scarcest, and one storage has to do until then.
        """
        self._allow_in_flight(
            2 * save_order.largest_bytes
        )  # one is read while one waits for its use
        start = functools.partial(self._prefetcher.start, save_order, opens_at_once)
        self._dispatcher.submit(start, self._prefetcher.advance)

    @contextlib.contextmanager
    def backward(self, save_order: SaveOrder) -> Iterator[None]:
        """Around the backward pass of the forward pass that filled `save_order`."""
        self.prefetch(save_order)
        try:
            yield
        finally:
            self._dispatcher.submit(self._prefetcher.stop)

    def close(self) -> None:
        """Waits for transfers, ends the threads and gives memory and disk space back."""
        self._dispatcher.close()
        for tier in self.tiers.values():
            tier.close()

    def place_layer(self, scope: Scope) -> Placement:
        """What becomes of a layer, or a part of it; `RECOMPUTE` is the caller's to carry out."""
        return self._policy.place_layer(scope)

    @property
    def divides_layers(self) -> bool:
        """Whether the policy wants to hear of the parts of a layer, see `Policy`."""
        return getattr(self._policy, "divides_layers", False)

    # -- What the hooks ask (`saved.hooks.Mover`) -----------------------------------------------

    @property
    def scope(self) -> Scope:
        """Where in the step we are."""
        return self._scope

    @property
    def save_order(self) -> SaveOrder | None:
        """The save order of the forward pass under way; None outside of one."""
        return self._save_order

    @property
    def where(self) -> str:
        """Where activations go, for people."""
        return " and ".join(str(tier) for tier in self.tiers.values())

    def tier_for(self, num_bytes: int) -> Tier | None:
        """Where the policy sends so many bytes of the present scope; None: they stay."""
        return self._tiers.get(self._policy.place(self._scope, num_bytes))

    def saved(self, record: SavedStorage, tier: Tier | None) -> None:
        """Has a new record written; notes every save on the save order."""
        if self._save_order is not None:
            self._save_order.append(record)
        if tier is None:
            self.statistics.deduplicated_bytes += record.num_bytes
            return
        if self.observer is not None:
            self.observer.moves(self._scope, record.num_bytes)
        record.stream = self._device.current_stream()
        record.queue_write()
        outgoing = Outgoing(weakref.ref(record), record.num_bytes, tier)
        self.statistics.offloaded_bytes += record.num_bytes
        self.statistics.offloaded_storages += 1
        if self._captured.outgoing is not None:
            self._captured.outgoing.append(outgoing)
        else:
            self._hand_over([outgoing])

    def bring_back(self, record: SavedStorage) -> torch.UntypedStorage:
        """The record's bytes in memory. Raises StorageError if they cannot be read."""
        forwarded = record.state not in (State.READING, State.RESTORED)
        memory = record.take_back()
        if memory is not None:
            self.statistics.forwarded_bytes += record.num_bytes if forwarded else 0
        else:
            memory = self._reader.wait_for(record)
        return memory

    def used(self, view: SavedView) -> None:
        """Has the memory let go after the last use, and what comes next read ahead."""
        view.saved.view_used(view)
        if self._prefetcher.used(view.saved):
            self._dispatcher.submit(self._prefetcher.advance)

    # -- How bytes leave ------------------------------------------------------------------------

    def _hand_over(self, outgoing: list[Outgoing]) -> None:
        """Gives what was saved to the dispatcher. Waits while too many bytes are on their way."""
        batch: list[Outgoing] = []
        try:
            for one in outgoing:
                record = one.record()
                if record is not None:
                    record.gather()
                del record
                if not self._inflight.try_acquire(one.num_bytes):
                    self._submit_writes(batch)
                    batch = []
                    self._allow_in_flight(sum(other.num_bytes for other in outgoing))
                    began = time.perf_counter()
                    self._inflight.acquire(one.num_bytes)
                    self.statistics.write_wait_s += time.perf_counter() - began
                batch.append(one)
        finally:  # also where somebody interrupts the wait
            self._submit_writes(batch)

    def _allow_in_flight(self, num_bytes: int) -> None:
        """Raises the bound on bytes in flight if it is lower, unless it is one that was asked for.

        With less than a layer, forward waits at each layer's end for what it has just handed over,
        however fast the tiers are.
        """
        if self.config.inflight_bytes is None and num_bytes > self._inflight.limit_bytes:
            self._inflight.limit_bytes = self._prefetcher.limit_bytes = num_bytes

    def _submit_writes(self, batch: list[Outgoing]) -> None:
        if batch:
            self._dispatcher.submit(*(functools.partial(self._begin_write, one) for one in batch))

    # Runs in the dispatcher's thread.
    def _begin_write(self, outgoing: Outgoing) -> None:
        record = outgoing.record()
        memory = record.memory_to_write() if record is not None else None
        if record is None or memory is None:  # nobody needs it any more, or somebody already does
            self._inflight.release(outgoing.num_bytes)
            return
        started = None
        try:
            with self._device.use_stream(record.stream):
                started = outgoing.tier.begin_write(memory)
        finally:
            if started is None:
                record.stay()
                self._refused_bytes += outgoing.num_bytes
                self._num_refused += 1
                self._inflight.release(outgoing.num_bytes)
        if started is not None:
            block, transfer = started
            record.begin_writing(block, transfer)
            transfer.add_done_callback(self._end_of_write(outgoing))

    def _take_off_refused(self) -> None:
        """What no tier took was not offloaded after all."""
        self.statistics.rejected_bytes = self._refused_bytes
        self.statistics.offloaded_bytes -= self._refused_bytes
        self.statistics.offloaded_storages -= self._num_refused

    def _end_of_write(self, outgoing: Outgoing) -> Callable[[Future[None]], None]:
        """Tells the record how its write ended, if it is still there: a queue holds none alive."""

        def end(transfer: Future[None]) -> None:
            record = outgoing.record()
            if record is not None:
                record.end_writing(failed=transfer.cancelled() or transfer.exception() is not None)
            del record  # whoever hears that nothing is in flight may end the step
            self._inflight.release(outgoing.num_bytes)

        return end

    # -- How bytes come back --------------------------------------------------------------------

    def _stalled(self, record: SavedStorage, waited_s: float) -> None:
        """Compute had to wait for a read: the read-ahead is to look further."""
        self.statistics.stall_s += waited_s
        if waited_s > _NOTICEABLE_S:
            reads = record.block.tier.statistics.reads
            rate = reads.bytes_per_s or 0.0
            self._dispatcher.submit(functools.partial(self._prefetcher.waited, waited_s, rate))

    # -- For reports and planners --------------------------------------------------------------

    @property
    def inflight_bytes(self) -> int:
        """Most bytes on their way to the tiers, and most that are read ahead, at present."""
        return self._inflight.limit_bytes

    @property
    def long_lived(self) -> list[LongLived]:
        """Storages that were found to outlive the step and stay in memory."""
        return self._cache.long_lived

    @property
    def drive_written_bytes(self) -> dict[str, int]:
        """Bytes written to each SSD directory since the engine was opened."""
        ssd = self._tiers.get(Placement.SSD)
        if not isinstance(ssd, SsdTier):
            return {}
        return {str(d.directory): d.statistics.writes.total_bytes for d in ssd.drives}

    @property
    def tiers(self) -> dict[Placement, Tier]:
        """Host memory and SSDs, those of them that activations may go to.

        Without the one that only chooses among the others.
        """
        return {p: tier for p, tier in self._tiers.items() if p is not Placement.TIERED}
