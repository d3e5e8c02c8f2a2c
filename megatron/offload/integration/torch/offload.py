# SPDX-License-Identifier: Apache-2.0
"""A model whose activations are offloaded: `ActivationOffload`, the handle that the door gives.

It puts the hooks on the model and takes them off, opens the engine at the first forward pass and
closes it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron.offload.activations.engine import OffloadEngine
from megatron.offload.config import OffloadConfig
from megatron.offload.device.open import open_device
from megatron.offload.errors import ConfigurationError
from megatron.offload.integration.engine_passes import EnginePasses
from megatron.offload.integration.open_streams import OPEN, Handle
from megatron.offload.integration.own_attributes import Replaced
from megatron.offload.integration.torch.compute_device import compute_device
from megatron.offload.integration.torch.forward_steps import ForwardSteps
from megatron.offload.integration.torch.layer_calls import LayerCalls
from megatron.offload.integration.torch.layers import called_parts
from megatron.offload.integration.torch.liger_functions import add_liger_functions
from megatron.offload.integration.torch.module_hooks import ModuleHooks
from megatron.offload.integration.torch.passes import Passes
from megatron.offload.integration.torch.ranks import local_world_size, planned_stage, rank
from megatron.offload.integration.torch.report import (
    held_again,
    opening_of,
    report_of,
    warnings_of,
)
from megatron.offload.integration.torch.stationary import (
    is_sharded,
    modules_in,
    stationary_tensors,
    unsharded_tensors,
)
from megatron.offload.integration.torch.step_log import StepLog
from megatron.offload.integration.training_steps import TrainingSteps
from megatron.offload.layer_major.config import refusal
from megatron.offload.planner.online.consensus import RankConsensus
from megatron.offload.planner.online.stage import Stage
from megatron.offload.planner.profile.pipeline_schedule import layer_major_position

logger = logging.getLogger(__name__)

_HOLDING_STEPS = 2  # so many in a row, and the next one will hold new tensors too

# A model has one handle at a time: two would take each other's tensors.


@atexit.register
def _close_all() -> None:
    has_failed = getattr(sys, "last_value", None) is not None
    for handle in OPEN.activations:
        handle.end(has_failed=has_failed)


class ActivationOffload(Handle):
    """Activation offload of a model, from `offload_activations` until `close`.

    Attributes:
        layers: the names of the layers, in the order of the model.

    Args:
        config: with mode `off` nothing is touched.
        models: that train together.
        layers: of them, by module.
        replaced: what computes in the place of modules (chunked losses, tiled MLPs), to be
            connected until `close`; with mode `off` too.
        run_directory: with `auto`, what was measured is written there.

    Raises:
        ConfigurationError: a model has a handle already.
    """

    def __init__(
        self,
        config: OffloadConfig,
        models: Sequence[torch.nn.Module],
        layers: Mapping[torch.nn.Module, str],
        *,
        replaced: Sequence[Replaced] = (),
        run_directory: Path | None = None,
        inside_graphs: bool = False,
    ) -> None:
        self.layers = list(layers.values())
        self._names = dict(layers)
        self._units: dict[torch.nn.Module, int] = {}  # of layer-major steps, where `auto` plans
        self._alternates = False
        self._config = config
        self._models = tuple(models)
        self._run_directory = run_directory
        self._steps: TrainingSteps | None = None
        self._calls = LayerCalls(layers)
        self._inside_graphs = inside_graphs
        self._passes = Passes(
            self._open,
            functools.partial(compute_device, self._models),
            config.min_bytes,
            self._step,
            self._around_forward,
        )
        self._hooks = ModuleHooks()
        self._closing = contextlib.ExitStack()  # what is to be undone
        self._seen_steps: ForwardSteps | None = None  # where a file gets a line for each
        self._log_hooks = ModuleHooks()
        self._watched: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # sharded modules
        self._num_steps = 0
        self._has_warned_of_held = False
        self._num_holding = 0  # the latest steps of which new storages have lived on
        self._summary = ""
        self._statistics: dict[str, int | float] = {}
        self._is_closed = not config.enabled
        if config.enabled:
            self._hook(layers)
        self._replaced: list[Replaced] = []
        try:
            for one in replaced:
                one.connect()
                self._replaced.append(one)
        except BaseException:  # the caller gets no handle to close
            self.close()
            raise
        OPEN.activations.add(self)

    @property
    def _hooked(self) -> Sequence[torch.nn.Module]:
        return () if self._is_closed else self._models

    def is_of(self, modules: Set[torch.nn.Module]) -> bool:
        """Whether the models have one of these modules."""
        return any(one in modules for model in self._models for one in model.modules())

    @property
    def engine(self) -> OffloadEngine | None:
        """What moves the bytes; None before the first forward pass and after `close`."""
        return self._steps.engine if self._steps is not None else None

    @property
    def statistics(self) -> dict[str, int | float]:
        """Counters of the last step, see `StepStatistics`; empty before the first.

        With `auto` also what was predicted and what was measured, see `Planner.metrics`.
        """
        return self._steps.statistics if self._steps is not None else self._statistics

    def summary(self) -> str:
        """A few lines for people: what a step moved. Empty if there was no step."""
        return self._steps.summary() if self._steps is not None else self._summary

    @contextlib.contextmanager
    def layer_major_step(self, device: torch.device) -> Iterator[EnginePasses]:
        """A step whose passes the caller runs, unit by unit; yields what is to be told of them."""
        if self._is_closed:
            yield EnginePasses(None, hooks_tensors=True)
            return
        with self._passes.whole_step(device) as steps:
            yield EnginePasses(
                steps.engine,
                hooks_tensors=True,
                around_forward=self._calls.forward,
                profiler=steps.profiler,
            )

    @contextlib.contextmanager
    def layer_major_evaluation(self, device: torch.device) -> Iterator[EnginePasses]:
        """Forward passes without gradients, unit by unit: what waits between units may move.

        It stays while a step is under way, whose graphs wait for backward.
        """
        engine = None
        if not self._is_closed and self._config.boundary != "keep":
            engine = self._passes.idle_engine(device)
        with contextlib.ExitStack() as contexts:
            if engine is not None:
                engine.exclude(stationary_tensors(modules_in(self._models)))
                contexts.enter_context(engine.step())
            yield EnginePasses(engine, hooks_tensors=False)

    def run_in_units(self, units: Mapping[torch.nn.Module, int], *, alternates: bool) -> None:
        """Says, before the first step, that steps run unit by unit: `auto` plans for those.

        Raises:
            ConfigurationError: there is a plan for other steps already, or for other layers.
        """
        if not self._config.plans or self._is_closed:
            return
        if self._units and (dict(units), alternates) != (self._units, self._alternates):
            raise refusal(
                "mode='auto' plans for the units of one LayerMajor, and this model has another; "
                "give it the same units, or a fixed mode: ssd, host or tiered"
            )
        if self._steps is not None and not self._units:
            raise refusal(
                "mode='auto' has begun to plan steps that run one micro-batch after the other; "
                "make LayerMajor before the first step"
            )
        if units.keys() != self._names.keys():
            raise refusal(
                "mode='auto' plans for the layers that offload_activations has found, and these "
                "are others; give both the same model and layers="
            )
        self._units, self._alternates = dict(units), alternates
        self._calls.units = self._units

    def opening(self) -> str:
        """One line for the beginning of a run: the layers found, and where activations will go."""
        return opening_of(self._config, self._models, self.layers)

    def report(self) -> str:
        """What was found in the model, where its activations go, `auto`'s plan and the summary.

        Read it when memory is not what you expected.
        """
        planner = self._steps.planner if self._steps is not None else None
        plan = planner.table if planner is not None else ""
        return report_of(
            self._config,
            self._models,
            self.layers,
            self.engine,
            plan,
            self.summary(),
            holds_again=self._num_holding >= _HOLDING_STEPS,
            inside_graphs=self._inside_graphs,
        )

    def log_steps(self, path: Path, *, in_turns: bool = False) -> None:
        """Writes a line for each step from now on.

        Args:
            path: of the file.
            in_turns: each step waits for a line on the standard input.
        """
        log = StepLog(path, in_turns=in_turns)
        self._seen_steps = seen = ForwardSteps(log, lambda: self.statistics)
        for model in self._models:
            self._log_hooks.add(model, seen.begin, seen.end, outside_of_graphs=True)

    def told_steps(self, *, counts_tokens: bool) -> StepLog | None:
        """The log, if there is one; the caller tells it from now on where steps begin and end.

        Args:
            counts_tokens: the log goes on to count the tokens that the model is called with.
        """
        if self._seen_steps is None:
            return None
        return self._seen_steps.hand_over(counts_tokens=counts_tokens)

    def _close_log(self) -> None:
        if self._seen_steps is not None:
            self._log_hooks.remove()
            self._seen_steps.close()
            self._seen_steps = None

    def close(self) -> None:
        """Takes the hooks off, waits for transfers and gives memory and disk space back."""
        self.end(has_failed=sys.exc_info()[1] is not None)

    def end(self, *, has_failed: bool) -> None:
        """The same as `close`.

        Args:
            has_failed: an error ends the training: what it has not come to is no surprise.
        """
        self._close_log()
        while self._replaced:
            self._replaced.pop().close()
        if self._is_closed:
            return
        self._is_closed = True
        self._closing.close()
        self._hooks.remove()
        try:
            self._passes.close(has_failed=has_failed)
        finally:
            self._close_steps(has_failed)

    def _close_steps(self, has_failed: bool) -> None:
        if self._steps is None:
            if not has_failed and not self._passes.saw_forward:
                logger.warning(
                    "activation offload: no forward pass with gradients was seen of %s; give the "
                    "module whose forward the training calls",
                    " and ".join(type(model).__name__ for model in self._models),
                )
            return
        self._summary = self._steps.summary()
        self._statistics = self._steps.statistics
        steps, self._steps = self._steps, None
        steps.close()

    # -- Hooks ----------------------------------------------------------------------------------

    def _hook(self, layers: Mapping[torch.nn.Module, str]) -> None:
        modules = {one for model in self._models for one in model.modules()}
        for model in (one for handle in OPEN.activations for one in handle._hooked):
            if not modules.isdisjoint(model.modules()):
                raise ConfigurationError(
                    f"the activations of {type(model).__name__} are offloaded already; close the "
                    "first handle, or give all models in one call"
                )
        # Trainers call parts of a model by themselves: the body, and the head in pieces. A graph
        # would end before these.
        called = self._models
        if not self._inside_graphs:
            called = tuple(one for model in self._models for one in called_parts(model))
        for module in dict.fromkeys(called):
            self._hooks.add(
                module,
                self._passes.begin_forward,
                self._passes.end_forward,
                outside_of_graphs=True,
            )
        for layer in layers:
            self._hooks.add(layer, self._calls.begin, self._calls.end, outside_of_graphs=False)
            self._hooks.add_of_graph(layer, self._calls.begin, self._calls.run, self._calls.end)
        self._watch_sharded(modules_in(self._models))

    def _watch_sharded(self, modules: Iterable[torch.nn.Module]) -> None:
        """Excludes what FSDP gathers, as soon as it has, also in modules that it has come to since.

        See Note [Views of parameters] in `stationary.py`.
        """
        for module in modules:
            if is_sharded(module) and module not in self._watched:
                self._watched.add(module)
                self._hooks.add_before(module, self._exclude_unsharded)

    def _exclude_unsharded(self, module: torch.nn.Module) -> None:
        if self._steps is not None:
            self._steps.engine.exclude(unsharded_tensors(module))

    # -- Steps ----------------------------------------------------------------------------------

    def _open(self, of_compute: torch.device) -> TrainingSteps:
        with OffloadConfig.speaking_of_settings():
            device = open_device(of_compute)
            self._steps = steps = TrainingSteps(
                self._config,
                device,
                rank=rank(),
                num_local_ranks=local_world_size(),
                planned=lambda: self._planned(device.device),
                run_directory=self._run_directory,
            )
        steps.engine.note_models(self._models)
        add_liger_functions()
        hook = register_optimizer_step_pre_hook(_BeforeSteps(steps.engine))
        self._closing.callback(hook.remove)
        weakref.finalize(self, _close, steps, hook)  # if the script lets go of it without `close`
        self._calls.connect(self._passes, self._steps.engine, self._steps.profiler)
        return self._steps

    def _planned(self, device: torch.device) -> tuple[RankConsensus, Stage]:
        """What the planner has to know."""
        layers = [(self._units.get(layer, 0), name) for layer, name in self._names.items()]
        if self._units:
            position = layer_major_position(self._units.values(), alternates=self._alternates)
            return planned_stage(layers, device, position)
        why_not = "layers inside of compiled graphs" if self._inside_graphs else ""
        return planned_stage(layers, device, why_not_recomputed=why_not)

    @contextlib.contextmanager
    def _around_forward(self, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
        self._hooks.connect()
        graphs: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._inside_graphs:
            from megatron.offload.integration.torch.compiled_graphs import moving_in_graphs

            graphs = moving_in_graphs(self._calls, self._names.values(), self._config.min_bytes)
            self._calls.note_sizes(inputs)
        with self._calls.forward(), graphs:
            yield

    @contextlib.contextmanager
    def _step(self, steps: TrainingSteps) -> Iterator[None]:
        if self._config.plans and self._num_steps and not self._calls.num_calls:
            raise ConfigurationError(
                f"none of the {len(self.layers)} layers was called in the first step, and auto "
                "decides layer by layer; with torch.compile, give inside_graphs=True (PyTorch 2.11 "
                "or newer) or compile the layers instead of the model (layer.compile()); else name "
                "the layers with layers=, or use mode='ssd' or 'host'"
            )
        modules = modules_in(self._models)
        self._watch_sharded(modules)
        gathered = (one for module in self._watched for one in unsharded_tensors(module))
        with steps.step(itertools.chain(stationary_tensors(modules), gathered)):
            yield
        if not self._passes.is_whole:
            return
        self._num_steps += 1
        if self._num_steps == 1:
            self._warn()
        else:
            self._note_held(steps.engine)

    def _note_held(self, engine: OffloadEngine) -> None:
        """After a later step: the first one alone learns what lives on for good."""
        holds = engine.statistics.long_lived_bytes >= max(self._config.min_bytes, 1)
        self._num_holding = self._num_holding + 1 if holds else 0
        if self._num_holding == _HOLDING_STEPS and not self._has_warned_of_held:
            self._has_warned_of_held = True
            logger.warning("activation offload: %s", held_again(engine))

    def _warn(self) -> None:
        """After the first step: what a user would not expect."""
        assert self._steps is not None
        engine = self._steps.engine
        for sentence in warnings_of(self._config, self._models, engine, self._inside_graphs):
            logger.warning("activation offload: %s", sentence)


class _BeforeSteps:
    """Tells an engine that an optimizer is about to change parameters."""

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        params = [one for group in optimizer.param_groups for one in group["params"]]
        self._engine.keep_casts(params)


def _close(steps: TrainingSteps, hook: torch.utils.hooks.RemovableHandle) -> None:
    hook.remove()
    steps.close()
