# SPDX-License-Identifier: Apache-2.0
"""Connects the engine to a Megatron model: `install`.

A trainer calls it once, after the model is wrapped for data parallelism and the optimizer is
built. It checks that this megatron-core and these settings are known to work before it touches
anything, and `uninstall` leaves Megatron as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.offload.activations.engine import OffloadEngine
from megatron.offload.activations.open import check_tiers
from megatron.offload.activations.placement.policy import Policy
from megatron.offload.config import OffloadConfig
from megatron.offload.device.open import open_device
from megatron.offload.errors import ConfigurationError
from megatron.offload.integration.megatron.chunked_loss import ChunkedLoss
from megatron.offload.integration.megatron.decorators import Function, connect
from megatron.offload.integration.megatron.last_backward import LastBackward
from megatron.offload.integration.megatron.layer_major import (
    LayerMajorHooks,
    check_layer_major,
    only_chunk,
)
from megatron.offload.integration.megatron.model_states import ModelStates
from megatron.offload.integration.megatron.patch_points import decorate
from megatron.offload.integration.megatron.recomputable import check_recomputation
from megatron.offload.integration.megatron.refused import ACTIVATIONS, CHUNKED_LOSS, TILED_MLP
from megatron.offload.integration.megatron.replayable_functions import add_functions
from megatron.offload.integration.megatron.tiled_mlps import TiledMlps, check_mlps
from megatron.offload.integration.megatron.versions import check_version
from megatron.offload.integration.own_attributes import Replaced
from megatron.offload.integration.training_steps import TrainingSteps
from megatron.offload.layer_major.config import LayerMajorConfig
from megatron.offload.planner.libraries import check_libraries
from megatron.offload.planner.online.consensus import RankConsensus
from megatron.offload.planner.online.stage import Stage
from megatron.offload.planner.profile.profiler import Profiler

# Wrappers that give parameters other memory for each layer, which would be taken for activations.
_REFUSED_WRAPPERS = ("FullyShardedDataParallel", "TorchFullyShardedDataParallel", "MegatronFSDP")


class MegatronHooks:
    """What Megatron's decorated functions call: a `decorators.TrainingHooks`."""

    def __init__(
        self,
        engine: OffloadEngine,
        model_chunks: Sequence[torch.nn.Module],
        settings: Any,
        profiler: Profiler | None = None,
    ) -> None:
        # Imported here, because they import megatron-core, which not every user has installed.
        from megatron.offload.integration.megatron.layer_hooks import LayerHooks
        from megatron.offload.integration.megatron.schedule_hooks import ScheduleHooks

        layers = LayerHooks(engine, model_chunks, profiler)
        schedule = ScheduleHooks(engine, settings, layers.end_forward, profiler)
        self.layer, self.close = layers.layer, layers.close
        self.forward_step, self.backward_step = schedule.forward_step, schedule.backward_step
        self._forgetting = (layers.clear, schedule.clear)

    def evaluation_step(self, step: Function, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs a forward pass of an evaluation as it is."""
        return step(*args, **kwargs)

    def clear(self) -> None:
        """Forgets passes that did not come to their end."""
        for clear in self._forgetting:
            clear()


class MegatronOffload:
    """Activation offload in a running trainer. Made by `install`."""

    def __init__(
        self,
        steps: TrainingSteps | None,
        model_chunks: Sequence[torch.nn.Module],
        calls: MegatronHooks | None = None,
        replaced: Sequence[Replaced] = (),
        states: ModelStates | None = None,
        layer_major: LayerMajorHooks | None = None,
    ) -> None:
        self._steps = steps
        self._calls = calls
        self._replaced = list(replaced)
        self._states = states
        self._model_chunks = list(model_chunks)
        self._schedule: LayerMajorHooks | LastBackward | None = layer_major
        if layer_major is None and states is not None and states.parts:
            self._schedule = LastBackward(states.prefetch, len(self._model_chunks), calls)
        first = self._schedule or calls
        self._patches = decorate() if first is not None else []
        if first is not None:
            connect(first)

    @property
    def engine(self) -> OffloadEngine | None:
        """What moves the bytes; None with offload off."""
        return self._steps.engine if self._steps is not None else None

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A context around the passes of one training step, forward and backward, no evaluation."""
        try:
            if self._steps is None:
                yield
            else:
                with self._steps.step(_stationary_tensors(self._model_chunks)):
                    yield
        finally:
            for hooks in (self._schedule, self._calls):
                if hooks is not None:
                    hooks.clear()
        if self._steps is not None:
            self._steps.decide()

    def pause(self) -> None:
        """Says that what follows until the next step is no training: evaluation, a checkpoint.

        Otherwise the planner counts all time between two steps as a part of them.
        """
        if self._steps is not None:
            self._steps.pause()

    @property
    def statistics(self) -> dict[str, int | float]:
        """Counters of the last step, see `StepStatistics`; empty with offload off.

        With `auto` also what was predicted and what was measured, see `Planner.metrics`.
        """
        return self._steps.statistics if self._steps is not None else {}

    def summary(self) -> str:
        """A few lines for the end of a run, of activations and states; empty with offload off."""
        texts = [self._steps.summary()] if self._steps is not None else []
        if self._states is not None:
            texts.append(self._states.summary(with_drives=self._steps is None))
        return "\n".join(filter(None, texts))

    def uninstall(self) -> None:
        """Restores Megatron's functions; activations stay in memory from now on."""
        while self._replaced:
            self._replaced.pop().close()
        if self._schedule is not None or self._calls is not None:
            connect(None)
        if isinstance(self._schedule, LayerMajorHooks):
            self._schedule.close()
        if self._calls is not None:
            self._calls.close()
        while self._patches:
            self._patches.pop()()

    def close(self) -> None:
        """Uninstalls, waits for transfers and gives the disk space back."""
        self.uninstall()
        if self._steps is not None:
            self._steps.close()
            self._steps = None


def install(
    config: OffloadConfig,
    model_chunks: Sequence[torch.nn.Module],
    *,
    reserve_bytes: int = 0,
    num_local_ranks: int = 1,
    policy: Policy | None = None,
    run_directory: Path | None = None,
    states: ModelStates | None = None,
    layer_major: LayerMajorConfig | None = None,
) -> MegatronOffload:
    """Makes the model's activations go where `config` says.

    Args:
        config: with mode `off` every call of the result does nothing, and nothing is touched but
            the loss and MLPs, if they are to be computed in pieces.
        model_chunks: the model chunks of this rank, wrapped in DistributedDataParallel or not.
        reserve_bytes: SSD space to allocate before training, see `estimate.activation_bytes`.
        num_local_ranks: ranks on this machine, which share its memory.
        policy: chooses a placement for each layer and storage; default: what `config` says.
        run_directory: with `auto`, what was measured is written there.
        states: of `offload_model_states`; they are told of each step's last backward pass. The
            caller closes them.
        layer_major: runs steps unit by unit, with offload or without.

    Raises:
        ConfigurationError: the version, a setting, the plan's file or the directory cannot work.
    """
    layer_major = layer_major or LayerMajorConfig()
    if not config.enabled and not config.in_pieces and not layer_major.enabled:
        return MegatronOffload(None, model_chunks, states=states)
    check_wrappers(model_chunks)
    settings = _transformer_config(model_chunks)
    _check(config, settings, layer_major, plans=config.plans and policy is None)

    def units(
        engine: OffloadEngine | None, run_layer: Any, profiler: Profiler | None
    ) -> LayerMajorHooks | None:
        if not layer_major.enabled:
            return None
        near = (lambda: None) if states is None else states.prefetch
        model = only_chunk(model_chunks)
        return LayerMajorHooks(layer_major, model, settings, engine, run_layer, near, profiler)

    with contextlib.ExitStack() as undo:
        replaced = _replaced(config, model_chunks)
        for one in replaced:  # first: a plan recomputes no part of what is computed otherwise
            one.connect()
            undo.callback(one.close)
        if not config.enabled:
            schedule = units(None, None, None)
            offload = MegatronOffload(None, model_chunks, None, replaced, states, schedule)
            undo.pop_all()
            return offload
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        device = open_device(device_of(model_chunks))

        def planned() -> tuple[RankConsensus, Stage]:
            from megatron.offload.integration.megatron.process_groups import consensus_of, stage_of

            by_operation = config.granularity == "operation"
            stage = stage_of(
                model_chunks, settings, num_local_ranks, layer_major, by_operation=by_operation
            )
            return consensus_of(device.device, settings), stage

        steps = TrainingSteps(
            config,
            device,
            rank=rank,
            num_local_ranks=num_local_ranks,
            reserve_bytes=reserve_bytes,
            policy=policy,
            planned=planned,
            run_directory=run_directory,
            beside=None if states is None else states.auto,
        )
        undo.callback(steps.close)
        add_functions()
        steps.engine.note_models(model_chunks)
        calls = MegatronHooks(steps.engine, model_chunks, settings, steps.profiler)
        schedule = units(steps.engine, calls.layer, steps.profiler)
        undo.pop_all()
    return MegatronOffload(steps, model_chunks, calls, replaced, states, schedule)


def _replaced(config: OffloadConfig, model_chunks: Sequence[torch.nn.Module]) -> list[Replaced]:
    """What computes in the place of modules, not yet connected."""
    replaced: list[Replaced] = []
    if config.chunks_loss:
        replaced.append(ChunkedLoss(model_chunks, config.chunk_tokens))
    if config.tiles_mlps:
        replaced.append(TiledMlps(model_chunks, config.tile_tokens))
    return replaced


def check(
    config: OffloadConfig,
    settings: Any,
    *,
    reserve_bytes: int = 0,
    num_local_ranks: int = 1,
    layer_major: LayerMajorConfig | None = None,
) -> None:
    """Checks everything that can be found wrong before a model is built.

    Args:
        config: what the flags ask for.
        settings: the model's `TransformerConfig`.
        reserve_bytes: SSD space that each rank will allocate.
        num_local_ranks: ranks on this machine, which share the directories and the memory.
        layer_major: in which order the flags ask for steps to run.

    Raises:
        ConfigurationError: the version, a setting or the directory cannot work.
    """
    _check(config, settings, layer_major or LayerMajorConfig(), plans=config.plans)
    if config.enabled:
        check_tiers(config, reserve_bytes=reserve_bytes, num_local_ranks=num_local_ranks)


def _check(
    config: OffloadConfig, settings: Any, layer_major: LayerMajorConfig, *, plans: bool
) -> None:
    """What `check` and `install` both make sure of; `plans`: the planner will be needed."""
    if config.enabled or config.in_pieces or layer_major.enabled:
        check_version()
    check_layer_major(layer_major, settings, boundary=config.boundary)
    if config.chunks_loss:
        CHUNKED_LOSS.check(settings)
    if config.tiles_mlps:
        TILED_MLP.check(settings)
        check_mlps(settings)
    if config.enabled:
        check_settings(settings)
        check_layers(config, settings)
        check_recomputation(config, settings)
        if plans:
            check_libraries("--activation-offload auto")


def check_settings(settings: Any) -> None:
    """Raises ConfigurationError for settings of a TransformerConfig that offload cannot join."""
    ACTIVATIONS.check(settings)
    for name in ("fp8", "fp4"):
        # What each pass makes of the weights is plain bytes, which look like an activation's; kept
        # from one pass to the next, they are learned to outlive the step.
        if getattr(settings, name, None) and getattr(
            settings, "disable_parameter_transpose_cache", False
        ):
            raise ConfigurationError(
                f"disable_parameter_transpose_cache cannot be combined with offload in {name}: "
                "each micro-batch makes weights of its own, which would be moved as activations "
                "are; drop --disable-parameter-transpose-cache"
            )


def check_wrappers(model_chunks: Sequence[torch.nn.Module]) -> None:
    """Raises ConfigurationError for a model whose parameters are sharded over data parallelism."""
    module: Any = model_chunks[0]
    while module is not None:
        name = type(module).__name__
        if name in _REFUSED_WRAPPERS:
            raise ConfigurationError(
                f"{name} cannot be combined with offload: it gives parameters memory for each "
                "layer anew; use DistributedDataParallel, with the distributed optimizer"
            )
        module = getattr(module, "module", None)


def check_layers(config: OffloadConfig, settings: Any) -> None:
    """Raises ConfigurationError for layers that are not there."""
    # An encoder and a decoder count from 1 each; `num_layers` is the decoder's.
    num_layers = max(
        getattr(settings, name, None) or 0 for name in ("num_layers", "encoder_num_layers")
    )
    for flag, layers in (
        ("--activation-offload-layers", config.offload_layers),
        ("--activation-recompute-layers", config.recompute_layers),
    ):
        if layers is None or not num_layers:
            continue
        numbers = range(1, num_layers + 1)
        every = (f"{block}.{number}" for block in ("encoder", "decoder") for number in numbers)
        if (missing := layers.missing(every)) is not None:
            raise ConfigurationError(
                f"{flag} names layer {missing}; the model has {num_layers}, counted from 1"
            )


def device_of(model_chunks: Sequence[torch.nn.Module]) -> torch.device:
    """Where a rank's parameters are. A chunk may have none: `pipeline_model_parallel_layout`."""
    return next(param.device for chunk in model_chunks for param in chunk.parameters())


def _transformer_config(model_chunks: Sequence[torch.nn.Module]) -> Any:
    module: Any = model_chunks[0]
    while not hasattr(module, "config") and hasattr(module, "module"):
        module = module.module
    return module.config


def _stationary_tensors(model_chunks: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Parameters, buffers, and the flat buffers that data parallelism keeps them in."""
    for chunk in model_chunks:
        for parameter in chunk.parameters():
            yield parameter
            gradient = getattr(parameter, "main_grad", None)
            if gradient is not None:
                yield gradient
        # Not chunk.buffers(): DistributedDataParallel has a list of that name.
        yield from torch.nn.Module.buffers(chunk)
