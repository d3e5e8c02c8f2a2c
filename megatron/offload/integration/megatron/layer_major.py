# SPDX-License-Identifier: Apache-2.0
"""Layer-major steps of a Megatron model without pipeline parallelism: `LayerMajorHooks`.

Megatron's loop over micro-batches stays as it is: `forward_backward_no_pipelining` calls
`forward_step` and `backward_step` for one after the other. Here the forward steps of all but the
last one are only noted; that of the last one runs all passes of the step, unit by unit, and
backward steps have nothing left to do. So what comes before and after the loop (the scaling of the
loss, the reduction of gradients, the number of tokens) is Megatron's own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megatron.offload.activations.engine import OffloadEngine
from megatron.offload.integration.engine_passes import EnginePasses
from megatron.offload.integration.hook import Hook
from megatron.offload.integration.megatron.bucket_group import count_anew, set_main_grad
from megatron.offload.integration.megatron.decorators import Function
from megatron.offload.integration.megatron.refused import STEPS
from megatron.offload.integration.open_parameters import unit_backward
from megatron.offload.integration.own_attributes import replaced
from megatron.offload.layer_major.config import LayerMajorConfig, refusal
from megatron.offload.layer_major.random_numbers import TorchGenerators
from megatron.offload.layer_major.schedule import LayerMajorSchedule
from megatron.offload.layer_major.units import params_by_unit, units_of
from megatron.offload.planner.profile.profiler import Profiler

_MEGATRON = "megatron::"  # before the names of Megatron's generators, among torch's
_CURRENT = "_current_state_name"  # of Megatron's tracker: the generator that runs now


class LayerMajorHooks:
    """Runs the passes of a step unit by unit: a `decorators.TrainingHooks`.

    Args:
        config: how layers are divided.
        model: the only model chunk.
        settings: its `TransformerConfig`.
        engine: of the activations; None: they stay in memory.
        run_layer: captures what layers save; None: they run as they are.
        first_unit: called when a step's backward comes to the first layers' unit, the last one
            that runs: the optimizer's step is near.
        profiler: is told of all passes; None: nothing measures them.
    """

    def __init__(
        self,
        config: LayerMajorConfig,
        model: torch.nn.Module,
        settings: Any,
        engine: OffloadEngine | None,
        run_layer: Callable[..., Any] | None,
        first_unit: Callable[[], None],
        profiler: Profiler | None = None,
    ) -> None:
        # Imported here, because it imports megatron-core, which not every user has installed.
        from megatron.offload.integration.megatron.layer_hooks import layer_names
        from megatron.offload.integration.megatron.process_groups import consensus_of

        self._settings = settings
        self._evaluates = config.evaluates
        self._model = model
        self._run_layer = run_layer
        self._device = next(model.parameters()).device
        units = units_of(list(layer_names([model])), config.num_units)
        consensus = consensus_of(self._device, settings)
        self._schedule = LayerMajorSchedule(
            units,
            self._device,
            _Generators(self._device),
            alternates=config.alternates,
            on_any_rank=lambda holds: bool(consensus.largest([holds])[0]),
        )
        # First of all hooks: the others, which bring a layer's parameters, run when its turn has
        # come.
        self._hooks = [
            layer.register_forward_pre_hook(Hook(self._enter), prepend=True, with_kwargs=True)
            for layer in units
        ]
        self._passes = _Passes(engine, settings, first_unit, profiler)
        params = params_by_unit(model, units)
        self._passes.around_backward = lambda unit, is_last: unit_backward(
            params.get(unit, ()), is_last=is_last
        )
        count_anew(model)
        self._signature: inspect.Signature | None = None  # of Megatron's forward step
        # Of the step under way: forward steps, each with the list that it adds what it reports to.
        self._noted: list[tuple[Callable[[], Any], list[Any]]] = []

    def layer(self, forward: Function, layer: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs a layer's forward; the turn of its unit has come."""
        if self._run_layer is None:
            return forward(layer, *args, **kwargs)
        return self._run_layer(forward, layer, args, kwargs)

    def forward_step(self, step: Function, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Notes the forward step of a micro-batch, or runs all of them."""
        if not torch.is_grad_enabled():
            return step(*args, **kwargs)

        def run_step(runs: Sequence[Callable[[], Any]]) -> list[Any]:
            self._passes.clear()
            return self._schedule.run(runs, self._backward, self._passes)

        return self._note(run_step, step, args, kwargs)

    def evaluation_step(self, step: Function, args: tuple[Any, ...], kwargs: Any) -> Any:
        """The same for passes that no backward pass follows, if the flags ask for it."""
        if not self._evaluates:
            return step(*args, **kwargs)

        def evaluate(runs: Sequence[Callable[[], Any]]) -> list[Any]:
            return self._schedule.evaluate(runs, EnginePasses(None, hooks_tensors=False))

        return self._note(evaluate, step, args, kwargs)

    def _note(
        self,
        run_all: Callable[[Sequence[Callable[[], Any]]], list[Any]],
        step: Function,
        args: tuple[Any, ...],
        kwargs: Any,
    ) -> Any:
        """Notes a forward step; with the last micro-batch's, runs those of all."""
        self._signature = self._signature or inspect.signature(step)
        named = self._signature.bind(*args, **kwargs)
        reports = named.arguments["forward_data_store"]
        own = named.arguments["forward_data_store"] = []
        run = functools.partial(step, *named.args, **named.kwargs)
        self._noted.append((run, own))
        none = torch.zeros([], dtype=torch.int, device=self._device)
        if len(self._noted) < named.arguments["num_microbatches"]:
            return none, none  # no loss, and no tokens yet
        noted, self._noted = self._noted, []
        # Megatron's timers of passes count one at a time, and here several have begun.
        with replaced(self._settings, timers=None):
            results = run_all([run for run, _ in noted])
        for _, own in noted:
            reports.extend(own)
        return none, sum((tokens for _, tokens in results), none)

    def backward_step(self, step: Function, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Does nothing: the last forward step runs, or will run, all passes."""
        return None

    def clear(self) -> None:
        """Forgets a step that did not come to its end."""
        self._noted = []
        self._passes.clear()

    def close(self) -> None:
        """Takes the hooks off the layers."""
        while self._hooks:
            self._hooks.pop().remove()
        count_anew(self._model)

    def _enter(self, layer: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return self._schedule.enter_layer(layer, (args, kwargs))

    def _backward(self, result: Any) -> None:
        """Megatron's own backward step, of what its forward step gave."""
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.utils import get_model_type

        step = getattr(schedules.backward_step, "__wrapped__", schedules.backward_step)
        given = {"output_tensor": result[0], "config": self._settings}
        if "model_type" in inspect.signature(step).parameters:  # in 0.16.1, not in 0.19.1
            given["model_type"] = get_model_type(self._model)
        step(input_tensor=None, output_tensor_grad=None, **given)


class _Passes(EnginePasses):
    """Also says when the optimizer's step is near."""

    def __init__(
        self,
        engine: OffloadEngine | None,
        settings: Any,
        first_unit: Callable[[], None],
        profiler: Profiler | None = None,
    ) -> None:
        def unsynchronized() -> Any:  # asked for each time: trainers set it late
            context = getattr(settings, "no_sync_func", None) or contextlib.nullcontext
            return context()

        super().__init__(
            engine, hooks_tensors=False, unsynchronized=unsynchronized, profiler=profiler
        )
        self._first_unit = first_unit
        self._has_told = False
        self._fuses = bool(getattr(settings, "gradient_accumulation_fusion", False))

    @contextlib.contextmanager
    def backward(self, unit: int, micro_batch: int, *, is_last: bool) -> Iterator[None]:
        """See `UnitPasses`."""
        if unit == 0 and not self._has_told:
            self._has_told = True
            self._first_unit()
        with super().backward(unit, micro_batch, is_last=is_last):
            yield

    @contextlib.contextmanager
    def elsewhere(self, leaf: torch.Tensor) -> Iterator[Callable[[], torch.Tensor | None]]:
        """See `UnitPasses`: DistributedDataParallel's hooks add to `main_grad`, often in fp32.

        Raises:
            ConfigurationError: a kernel adds to it, after which nothing tells the two apart.
        """
        own = getattr(leaf, "main_grad", None)
        if own is None:
            yield lambda: None
            return
        if self._fuses:
            raise refusal(
                "layers of several units use one weight (a tied embedding?), and "
                "gradient_accumulation_fusion adds its gradients unit by unit, not micro-batch by "
                "micro-batch; pass --no-gradient-accumulation-fusion, or for an embedding "
                "--untie-embeddings-and-output-weights"
            )
        came = torch.zeros_like(own)
        set_main_grad(leaf, came)
        try:
            yield lambda: came.to(leaf.dtype)  # which it was cast from
        finally:
            set_main_grad(leaf, own)

    def clear(self) -> None:
        """Between two steps."""
        super().clear()
        self._has_told = False


class _Generators(TorchGenerators):
    """Torch's generators, and those that Megatron keeps beside them for tensor parallelism.

    With sequence parallelism all layers run within one of these: which one it is belongs to the
    state as well.
    """

    def states(self) -> dict[str, torch.Tensor]:
        """See `Generators`.

        Raises:
            ConfigurationError: Megatron keeps generators whose states cannot be put aside.
        """
        states, tracker = super().states(), _tracker()
        for name, state in tracker.get_states().items():
            if not isinstance(state, torch.Tensor):
                raise refusal(
                    "random number generators for CUDA graphs (--te-rng-tracker) cannot take turns "
                    "among micro-batches; drop --te-rng-tracker"
                )
            states[_MEGATRON + name] = state
        current = getattr(tracker, _CURRENT, "")
        states[_CURRENT] = torch.tensor(list(current.encode()), dtype=torch.uint8)
        return states

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """See `Generators`."""
        super().set_states(states)
        tracker = _tracker()
        tracker.set_states(
            {
                name.removeprefix(_MEGATRON): state
                for name, state in states.items()
                if name.startswith(_MEGATRON)
            }
        )
        if hasattr(tracker, _CURRENT):
            setattr(tracker, _CURRENT, bytes(states[_CURRENT].tolist()).decode())


def _tracker() -> Any:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker()


def check_layer_major(config: LayerMajorConfig, settings: Any, *, boundary: str) -> None:
    """Raises ConfigurationError for what cannot run layer-major steps.

    Args:
        config: what the flags ask for.
        settings: the model's `TransformerConfig`.
        boundary: where tensors wait between units.
    """
    if config.evaluates and not config.enabled:
        raise refusal(
            "--layer-major-eval on is for the units of --layer-major-units; give that as well, or "
            "leave it out"
        )
    if config.evaluates and getattr(settings, "sequence_parallel", False):
        raise refusal(
            "--layer-major-eval on cannot be combined with --sequence-parallel, which has all "
            "layers run within a random number generator of its own; drop one of them"
        )
    if not config.enabled:
        if boundary != "keep":
            raise refusal(
                f"--activation-boundary {boundary} is for what waits between the units of "
                "--layer-major-units; give that as well, or leave it out"
            )
        return
    if settings.pipeline_model_parallel_size > 1:
        raise refusal(
            "--layer-major-units needs a model on one pipeline stage: with "
            "--pipeline-model-parallel-size above 1 stages already take turns by micro-batch; drop "
            "one of them"
        )
    STEPS.check(settings)
    if getattr(settings, "recompute_granularity", None) == "full":
        raise refusal(
            "--layer-major-units cannot be combined with --recompute-granularity full, whose "
            "checkpoints hide the layers; use --activation-recompute-layers"
        )
    if config.alternates and "global_aux_loss" in (
        getattr(settings, "moe_router_load_balancing_type", None) or ()
    ):
        raise refusal(
            "--layer-major-order alternating cannot be combined with global_aux_loss among "
            "moe_router_load_balancing_type: that loss depends on the micro-batches before; use "
            "ascending"
        )


def only_chunk(model_chunks: Sequence[torch.nn.Module]) -> torch.nn.Module:
    """The model of a rank without virtual pipelining.

    Raises:
        ConfigurationError: there are several chunks.
    """
    if len(model_chunks) != 1:
        raise refusal("--layer-major-units needs a model in one chunk")
    return model_chunks[0]
