# SPDX-License-Identifier: Apache-2.0
"""The one place that wires the rooms: `OffloadEngine`.

Integrations tell it where in the step they are and which layer has just run. Read it top to bottom:
the wiring, then a step: it begins and ends, layers are captured, backward begins. The way of
one activation: `capture/hooks.py`, then `transfer/writer.py` on its way out,
`transfer/prefetcher.py` and `transfer/reader.py` on its way back.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from megatron.offload.activations.allocators import say_what_stays
from megatron.offload.activations.capture.context import SavingContext
from megatron.offload.activations.capture.hooks import SavedTensorHooks
from megatron.offload.activations.capture.layer import LayerCapture
from megatron.offload.activations.capture.tensor_swapper import TensorSwapper
from megatron.offload.activations.memory_report import MemoryReport
from megatron.offload.activations.open import open_tiers
from megatron.offload.activations.placement.policy import FixedPolicy, Placement, Policy
from megatron.offload.activations.saved.cache import LongLived, TensorCache
from megatron.offload.activations.saved.encoded import CODECS
from megatron.offload.activations.saved.norms import Norms
from megatron.offload.activations.saved.observer import Observer
from megatron.offload.activations.saved.save_order import SaveOrder
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.activations.saved.weight_casts import WeightCasts
from megatron.offload.activations.stats.compute_waits import ComputeWaits
from megatron.offload.activations.stats.memory_sampler import MemorySampler
from megatron.offload.activations.stats.traffic import Traffic
from megatron.offload.activations.step_context import StepContext
from megatron.offload.activations.transfer.dispatcher import Dispatcher
from megatron.offload.activations.transfer.lead import Lead
from megatron.offload.activations.transfer.reader import Reader
from megatron.offload.activations.transfer.write_batch import WriteBatch
from megatron.offload.activations.transfer.writer import Writer
from megatron.offload.config import DEFAULT_INFLIGHT_BYTES, OffloadConfig
from megatron.offload.device.clock import Clock
from megatron.offload.device.device import Device
from megatron.offload.device.open import open_device
from megatron.offload.errors import PREFIX, ConfigurationError
from megatron.offload.machine.own_process import OwnProcess
from megatron.offload.stats.statistics import StepStatistics
from megatron.offload.stats.trace import Tracer
from megatron.offload.tiers.budget import ByteBudget
from megatron.offload.tiers.tier import Tier

logger = logging.getLogger(__name__)


class OffloadEngine:
    """Activation offload of one process.

    The threads that compute save and use tensors; the dispatcher's thread starts the transfers, the
    tiers' threads carry them out.

    Attributes:
        config: the settings.
        rank: global rank, for error messages.
        hooks: `pack` and `unpack` for single tensors; layers and contexts use them.
        writer: the way out, `reader`: the way back, `dispatcher`: its thread starts both.
        other_devices: bytes that the last step saved on other devices than this; they stay.
        cache: knows which saved tensors are the same bytes, and which never move.
        tensor_swapper: moves what waits between two units of layers; None: that stays in memory.
        memory_report: writes what peaks are made of; None: the settings ask for no report.

    Args:
        config: must have offload enabled.
        device: where activations live.
        rank: global rank, for error messages.
        num_local_ranks: processes on this machine, which share its memory.
        reserve_bytes: SSD space to allocate at once; more is allocated when it is needed.
        policy: chooses placements; default: everything of at least `config.min_bytes` goes where
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
        self._process = OwnProcess(PREFIX)
        self.config = config
        self.rank = rank
        self._policy = policy or FixedPolicy(
            config.min_bytes,
            Placement(config.safe_mode),
            offloaded=config.offload_layers,
            recomputed=config.recompute_layers,
            recompute_input=Placement(config.recompute_input) if config.recompute_input else None,
        )
        counted = StepStatistics()
        waits = ComputeWaits(Clock(device), counted, is_host=device.is_host)
        self._step = StepContext(waits, counted)
        self._tiers = open_tiers(
            config, device, reserve_bytes=reserve_bytes, num_local_ranks=num_local_ranks
        )
        with contextlib.ExitStack() as opened:  # closes them if a later line raises
            for tier in self.tiers.values():
                opened.callback(tier.close)
            self.dispatcher = Dispatcher("activation-offload transfers")
            opened.callback(self.dispatcher.close)
            self._wire(device)
            opened.pop_all()

    def _wire(self, device: Device) -> None:
        """Builds what stands between autograd and the tiers."""
        config, step, rank = self.config, self._step, self.rank
        self._traffic = Traffic(self.tiers)
        self._device = device
        self._peak = None if device.is_host else device.peak_reader()
        asked_bytes = config.inflight_bytes
        self._inflight = ByteBudget(DEFAULT_INFLIGHT_BYTES if asked_bytes is None else asked_bytes)
        self.writer = Writer(
            device, self.dispatcher, self._inflight, grows=asked_bytes is None, step=step
        )
        self.reader = Reader(device, self.dispatcher, self._inflight, step=step, rank=rank)
        self._lead = Lead(device, self.waits)
        self.cache = TensorCache(device.device)
        self._casts = WeightCasts(device.device)
        self._norms = Norms()
        self.other_devices: dict[torch.device, int] = {}
        self.hooks = SavedTensorHooks(
            self.cache,
            self._policy,
            self._tiers,
            self.writer,
            self.reader,
            step,
            min_bytes=config.min_bytes,
            casts=self._casts,
            device=device,
            replays=config.replay != "off",
            codec=CODECS.get(config.codec),
            norms=self._norms,
        )
        self._layers = LayerCapture(self.hooks, self.cache, self.writer, step)
        self.tensor_swapper: TensorSwapper | None = None
        if config.boundary != "keep":
            self.tensor_swapper = TensorSwapper(
                self.cache,
                self._tiers[Placement(config.boundary)],
                config.min_bytes,
                self.writer,
                self.hooks,
                self.reader,
                device=device,
            )
        if config.trace_file is not None:
            names = {placement.value: tier for placement, tier in self.tiers.items()}
            step.tracer = Tracer(config.trace_file, rank, names, self._memory)
        self.memory_report: MemoryReport | None = None
        if config.memory_report_file is not None:
            self.memory_report = MemoryReport(
                config.memory_report_file, rank, device, self.cache, step
            )
        logger.info("activation offload: to %s", self.where)
        say_what_stays(device.device, plans=config.plans)

    # -- The step: an integration calls these ----------------------------------------------------

    def exclude(self, tensors: Iterable[torch.Tensor], *, are_inputs: bool = False) -> None:
        """These tensors' storages never move: parameters, buffers, flat gradients, inputs."""
        self.cache.exclude(tensors, are_inputs=are_inputs)

    def note_weights(self, tensors: Iterable[torch.Tensor]) -> None:
        """A step begins with these parameters: copies of them in another type never move."""
        self._casts.begin_step(tensors)
        self._norms.begin_step()

    def note_returned(self, tensors: Iterable[torch.Tensor]) -> None:
        """A part of the model returns these in a forward pass: recipes may use them."""
        self.hooks.note_returned(tensors)

    def note_models(self, models: Iterable[torch.nn.Module]) -> None:
        """These models train: what their norms add to a variance is found in their modules."""
        self._norms.add(models)

    def keep_casts(self, changing: Iterable[torch.Tensor] | None = None) -> None:
        """Parameters are about to change, see `WeightCasts.keep`."""
        self._casts.keep(changing)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A context around all forward and backward passes of a training step.

        Raises:
            OffloadError: this is a child process.
        """
        self._process.check()
        self._device.begin_phase("step")
        if self._peak is not None:
            self._peak.reset()
        statistics = self._step.statistics = StepStatistics()
        self.waits.begin_step(self.statistics, in_detail=self._step.observer is not None)
        self.writer.begin_step()
        self._traffic.begin_step()
        if self.tracer is not None:
            self.tracer.begin_step()
        if self.memory_report is not None:
            self.memory_report.begin_step()
        try:
            yield
            self.waits.end_step()
        finally:  # of a step that an interrupt left behind, Python may run it in another one
            if self.statistics is statistics:
                self._end_step()

    def _end_step(self) -> None:
        if self.memory_report is not None:
            self.memory_report.end_step()
        self.reader.end_prefetch()
        self.dispatcher.drain()
        for tier in self.tiers.values():  # the optimizer's step does not need what backward read
            tier.trim()
        self.statistics.long_lived_bytes = self.cache.end_step(self.writer.read_storages)
        self._count_left()
        self._count_reserved()
        self.writer.end_step()
        self._traffic.end_step(self.statistics)
        if self.tracer is not None:
            self.tracer.end_step()

    def _count_left(self) -> None:
        """Counts the step's saved tensors that cannot move."""
        left, counted = self.cache.take_left_alone(), self.statistics
        counted.unsupported = left.num_unsupported
        counted.unsupported_bytes = left.unsupported_bytes
        counted.held_bytes += left.held_bytes
        counted.other_device_bytes = left.other_devices.total()
        self.other_devices = dict(left.other_devices)

    def _count_reserved(self) -> None:
        """Counts what the device's allocator holds, and how much of it the step could not use."""
        reusable_bytes = self._device.reusable_bytes()
        if reusable_bytes is not None and self._peak is not None:
            reserved_bytes = self._device.allocated_bytes() + reusable_bytes
            self.statistics.reserved_bytes = reserved_bytes
            self.statistics.fragmented_bytes = max(reserved_bytes - self._peak.peak_bytes(), 0)

    def forward(self, scope: Scope) -> contextlib.AbstractContextManager[SaveOrder]:
        """A context around one forward pass. Yields its save order, which `backward` takes."""
        return self._step.forward(scope)

    def within(self, scope: Scope) -> contextlib.AbstractContextManager[None]:
        """A context around a layer: what is saved meanwhile belongs to this scope."""
        return self._step.within(scope)

    def begin_layer(self) -> None:
        """A layer's forward is launched next: waits if the host is too far ahead of the device."""
        self._lead.begin_layer()

    def bound_lead(self, most_layers: int | None) -> None:
        """Sets how many layers forward may be launched ahead of the device; see `Lead`."""
        self._lead.most_layers = most_layers

    def place_layer(self, scope: Scope) -> Placement:
        """The placement of a layer or a part of it. The caller carries out `RECOMPUTE`."""
        return self._policy.place_layer(scope)

    def place(self, scope: Scope, num_bytes: int) -> Placement:
        """The placement of a storage of this size that a layer, or a part of it, saves."""
        return self._policy.place(scope, num_bytes)

    @property
    def device(self) -> torch.device:
        """The device whose activations move."""
        return self._device.device

    @property
    def divides_layers(self) -> bool:
        """Whether the policy places the parts of a layer separately, see `Policy`."""
        return getattr(self._policy, "divides_layers", False)

    def capture(
        self,
        scope: Scope,
        outputs: Iterable[torch.Tensor],
        inputs: Iterable[torch.Tensor],
        *,
        captured: Iterable[Any] = (),
        recomputes: bool = False,
        batch: WriteBatch | None = None,
    ) -> None:
        """Takes over what a layer saved. Call it at the end of its forward pass, or within it too.

        Args:
            scope: the layer's place in the step.
            outputs: the tensors that the layer returned.
            inputs: the tensors that it was called with.
            captured: autograd's nodes that earlier calls in this layer had as outputs. Not their
                tensors: the caller would keep these in memory after their write.
            recomputes: the layer runs again in backward: only inputs that require a gradient can
                move, not masks and tables that other layers share, nor what ran after it.
            batch: collects what the calls within the layer capture; the caller submits it when the
                layer ends. None: it is submitted now.
        """
        self._layers.capture(
            scope, outputs, inputs, captured=captured, recomputes=recomputes, batch=batch
        )

    def new_batch(self) -> WriteBatch:
        """A batch for the calls of `capture` within one layer."""
        return WriteBatch(self.writer)

    @property
    def copying_nodes(self) -> set[type]:
        """Types of autograd nodes that save copies: Note [Leaves] in `saved/autograd_graph.py`."""
        return self._layers.copying_nodes

    def saved_tensors_hooks(self) -> SavingContext:
        """The hooks as a context, for models without layers that can be captured one by one."""
        return SavingContext(self.hooks, self.new_batch())

    def prefetch(self, save_order: SaveOrder, *, opens_at_once: bool = False) -> None:
        """The next backward pass is that of `save_order`: starts to read what it needs first.

        Args:
            save_order: from `forward`.
            opens_at_once: backward begins in the layers that filled the save order. Else it first
                runs the loss, where memory is scarcest unless the loss is chunked, and the
                prefetcher reads one storage only until then.
        """
        self.writer.make_room(2 * save_order.largest_bytes)  # one is read while one waits for use
        self.reader.begin_prefetch(save_order, opens_at_once or self.config.chunks_loss)

    @contextlib.contextmanager
    def backward(self, save_order: SaveOrder) -> Iterator[None]:
        """A context around the backward pass of the forward pass that filled `save_order`."""
        self._device.begin_phase("backward")
        self.prefetch(save_order)
        if self.sampler is not None:
            self.sampler.enter("backward")
        try:
            yield
        finally:
            self.reader.end_prefetch()
            if self.sampler is not None:
                self.sampler.enter("")

    def end_layers(self) -> None:
        """The last layer of a forward pass has run: the loss may come next and take much memory."""
        self._device.begin_phase("loss")
        self.hooks.end_layers()

    def wait_for_writes(self, timeout_s: float | None = None) -> bool:
        """Blocks until no write is under way; False if `timeout_s` passed before.

        Training never needs it; tests and measurements do.
        """
        return self.writer.wait_for_writes(timeout_s) and all(
            tier.wait_for_writes(timeout_s) for tier in self.tiers.values()
        )

    def close(self) -> None:
        """Waits for transfers, ends the threads and gives memory and disk space back.

        In a child process, which has none of them, it does nothing.
        """
        if not self._process.is_this:
            return
        self._casts.keep()  # graphs may outlive the engine, and weights change
        self.dispatcher.close()
        if self.tracer is not None:
            self.tracer.close()
        for tier in self.tiers.values():
            tier.close()

    # -- For integrations, reports and planners -------------------------------------------------

    @property
    def statistics(self) -> StepStatistics:
        """Counters of the step under way, or of the last one."""
        return self._step.statistics

    @property
    def waits(self) -> ComputeWaits:
        """How long compute waited for transfers."""
        return self._step.waits

    @property
    def scope(self) -> Scope:
        """Where in the step compute is."""
        return self._step.scope

    @property
    def save_order(self) -> SaveOrder | None:
        """The save order of the forward pass under way; None outside of one."""
        return self._step.save_order

    def observe(self, observer: Observer | None) -> None:
        """From now on this observer hears what layers save; None: no observer."""
        self._step.observer = observer

    @property
    def tracer(self) -> Tracer | None:
        """Draws the timeline of the first steps; None: the settings ask for no timeline."""
        return self._step.tracer

    @property
    def sampler(self) -> MemorySampler | None:
        """Samples the memory of the step under way; None: this step is not sampled."""
        return self._step.sampler

    def _memory(self) -> dict[str, float]:
        """Bytes by what takes them, for the timeline."""
        return {
            "device memory": self._device.allocated_bytes(),
            "on its way to the tiers": self.writer.bytes_in_flight,
            **{f"on {p.value}": tier.used_bytes for p, tier in self.tiers.items()},
        }

    @property
    def where(self) -> str:
        """Where activations go, as a sentence shows it."""
        return " and ".join(str(tier) for tier in self.tiers.values()) or "device memory alone"

    @property
    def inflight_bytes(self) -> int:
        """Most bytes on their way to the tiers, and most that are read ahead, at present."""
        return self._inflight.limit_bytes

    @property
    def long_lived(self) -> list[LongLived]:
        """Storages that were found to outlive the step and stay in memory."""
        return self.cache.long_lived

    @property
    def tiers(self) -> dict[Placement, Tier]:
        """The host and SSD tiers that activations may go to, without what chooses of the two."""
        return {p: tier for p, tier in self._tiers.items() if p is not Placement.TIERED}
