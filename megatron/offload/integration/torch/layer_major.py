# SPDX-License-Identifier: Apache-2.0
"""Layer-major steps of any PyTorch model: `LayerMajor`."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from megatron.offload.errors import STEPS_PREFIX
from megatron.offload.integration.engine_passes import EnginePasses
from megatron.offload.integration.hook import OutsideOfGraphs
from megatron.offload.integration.open_parameters import unit_backward
from megatron.offload.integration.process_groups import ProcessGroupConsensus
from megatron.offload.integration.torch.compute_device import likely_device
from megatron.offload.integration.torch.layers import find_layers
from megatron.offload.integration.torch.module_hooks import is_compiled
from megatron.offload.integration.torch.offload import ActivationOffload
from megatron.offload.integration.torch.passes import tensors_in
from megatron.offload.integration.torch.refusals import STEP_WRAPPERS, check_models
from megatron.offload.integration.torch.sharded_units import ShardedUnits
from megatron.offload.layer_major.config import LayerMajorConfig, refusal
from megatron.offload.layer_major.other_numbers import OtherNumbers
from megatron.offload.layer_major.random_numbers import TorchGenerators
from megatron.offload.layer_major.schedule import LayerMajorSchedule
from megatron.offload.layer_major.unit_passes import UnitPasses
from megatron.offload.layer_major.units import params_by_unit, units_of

logger = logging.getLogger(__name__)

_CACHES = ("cache", "past_key_values")  # arguments of layers in transformers 5.24, and before
_MODES = ("training", "_disable_adapters", "_active_adapter", "merged_adapters")

B = TypeVar("B")
R = TypeVar("R")


class LayerMajor:
    """Runs the micro-batches of a step unit by unit, a unit being some consecutive layers.

        layer_major = LayerMajor(model, units=4)
        losses = layer_major.step(micro_batches, lambda batch: model(**batch).loss / len(...))
        optimizer.step()

    in place of a loop over micro-batches with `loss.backward()` in each. Parameters that come in
    for a unit then do so once for all micro-batches: what FSDP2 (`fully_shard`) has sharded is
    gathered once for forward and once for backward of a step, and its gradients are reduced once.
    Gradients have the same bits, unless it `alternates`; random numbers are the same. `evaluate`
    does the same for forward passes alone:

        losses = layer_major.evaluate(batches, lambda model, batch: model(**batch).loss)

    Args:
        model: whose layers `offload_activations` would find; with FSDP2 its root, or around it.
        units: of layers; None: each layer is one.
        layers: see `offload_activations`.
        offload: of the model's activations, which then go on their way in these steps as well.
        alternates: every second unit takes the micro-batches in descending order: what one has
            just made is used next, gradients are added in that order, and what layers keep from
            one micro-batch to the next (BatchNorm's running means) meets them in it.

    Raises:
        ConfigurationError: this model cannot be run so; says why.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        units: int | None = None,
        *,
        layers: Iterable[str | type[torch.nn.Module]] | None = None,
        offload: ActivationOffload | None = None,
        alternates: bool = False,
    ) -> None:
        check_models((model,), STEPS_PREFIX)
        if isinstance(units, bool) or not isinstance(units, int | None):
            raise refusal(f"units={units!r} is no number of units; None: each layer is one")
        if not isinstance(alternates, bool):
            raise refusal(f"alternates={alternates!r} is neither True nor False")
        found = find_layers((model,), layers)
        _check(model, found)
        with LayerMajorConfig.speaking_of_settings():
            self.units = units_of(list(found), units)
        if offload is not None:
            offload.run_in_units(self.units, alternates=alternates)
        self._model = model
        self._offload = offload
        self._alternates = alternates
        self._device = torch.device("cpu")  # of compute, since the first step
        self._schedule: LayerMajorSchedule | None = None  # opened by the first step
        self._sharded: ShardedUnits | None = None  # of the step before
        self._consensus: ProcessGroupConsensus | None = None
        self._hooks: list[RemovableHandle] = []
        self._says_caches = False  # in the evaluation under way
        self._has_said_caches = False
        # Of the evaluation under way: what gives the modes of modules, and what they were.
        self._modes: tuple[Callable[[], list[Any]], list[Any]] | None = None

    def step(
        self, micro_batches: Iterable[B], loss_of: Callable[[B], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Adds the gradients of all micro-batches to the parameters'; the losses, detached.

        Args:
            micro_batches: of the step, at least one.
            loss_of: calls the model with one of them; its result is what backward begins with, so
                divide it by their number for the mean. Runs in threads, one at a time.

        Raises:
            ConfigurationError: the model does not run its layers in one order, or is a part of what
                FSDP2 has sharded; or a step before has failed, and this FSDP2 cannot be reset.
        """
        batches = list(micro_batches)
        if not batches:
            raise refusal("a step without micro-batches has nothing to run")

        def forward_of(batch: B) -> Callable[[], torch.Tensor]:
            return lambda: loss_of(batch)

        if self._sharded is not None:
            self._sharded.check_not_lost()
        self._sharded = sharded = ShardedUnits(self._model, self.units)
        self._consensus = sharded.consensus()
        inputs = list(tensors_in(batches))
        schedule = self._opened(sharded, inputs)
        with contextlib.ExitStack() as contexts:
            if self._offload is None:
                own = EnginePasses(None, hooks_tensors=True)
            else:
                own = contexts.enter_context(self._offload.layer_major_step(self._device))
                if self._offload.engine is not None:
                    self._offload.engine.exclude(inputs, are_inputs=True)
            params = params_by_unit(self._model, self.units)
            own.around_backward = lambda unit, is_last: unit_backward(
                params.get(unit, ()), is_last=is_last
            )
            passes: UnitPasses = contexts.enter_context(sharded.step(own))
            forwards = [forward_of(one) for one in batches]
            losses = schedule.run(forwards, torch.Tensor.backward, passes)
        return [one.detach() for one in losses]

    def evaluate(self, batches: Iterable[B], fn: Callable[[torch.nn.Module, B], R]) -> list[R]:
        """Runs forward passes without gradients; what `fn` gave of each batch, in their order.

        Each unit runs all batches before the next, so what comes in for a unit (parameters on a
        tier) comes once for all of them. Results are the bits of a loop over the batches, and so
        are random numbers; where layers draw any (dropout in training mode) each batch goes on
        alone from there. Hidden states wait between units as in a step. Modules stay in the mode
        that they are in. `fn` may call the model several times, and `generate`.

        Args:
            batches: read whole before the first one runs.
            fn: called with the model and a batch, under `torch.no_grad`, in threads, one at a time.
                Tensors that it returns are detached.

        Raises:
            ConfigurationError: FSDP2 has sharded the model; or a later batch draws random numbers
                before an earlier one does; or `fn` changes the mode of modules, or adapters, while
                other batches run.
        """
        batches = list(batches)
        sharded = ShardedUnits(self._model, self.units)
        if sharded.device is not None:
            raise refusal(
                "evaluation: FSDP2 frees what it has gathered after each batch, which evaluate "
                "cannot follow yet; call the sharded model batch by batch"
            )
        schedule = self._opened(sharded, list(tensors_in(batches)))

        def forward_of(batch: B) -> Callable[[], R]:
            return lambda: fn(self._model, batch)

        self._says_caches = len(batches) > 1 and not self._has_said_caches
        modules = list(self._model.modules())
        self._modes = functools.partial(_modes_of, modules), _modes_of(modules)
        with contextlib.ExitStack() as contexts:
            contexts.callback(setattr, self, "_says_caches", False)
            contexts.callback(setattr, self, "_modes", None)
            passes = EnginePasses(None, hooks_tensors=False)
            if self._offload is not None:
                moving = self._offload.layer_major_evaluation(self._device)
                passes = contexts.enter_context(moving)
            results = schedule.evaluate([forward_of(one) for one in batches], passes)
        return [_detached(one) for one in results]

    def close(self) -> None:
        """Takes the hooks off the layers."""
        while self._hooks:
            self._hooks.pop().remove()

    def _opened(self, sharded: ShardedUnits, inputs: Sequence[torch.Tensor]) -> LayerMajorSchedule:
        """The schedule; made once it is certain where the model computes."""
        if self._schedule is not None:
            return self._schedule
        # What FSDP keeps on the host is computed with elsewhere.
        self._device = sharded.device or likely_device((self._model,), inputs)
        self._schedule = LayerMajorSchedule(
            self.units,
            self._device,
            TorchGenerators(self._device),
            others=OtherNumbers(self._model.modules()),
            varies=self._skips_layers,
            alternates=self._alternates,
            on_any_rank=self._on_any_rank,
        )
        self._hook()
        return self._schedule

    def _skips_layers(self) -> bool:
        """Whether a layer may be left out of a pass, as transformers' models do."""
        rates = (vars(one).get("layerdrop") for one in self._model.modules() if one.training)
        return any(isinstance(rate, int | float) and rate > 0 for rate in rates)

    def _on_any_rank(self, holds: bool) -> bool:
        consensus = self._consensus
        return bool(consensus.largest([holds])[0]) if consensus is not None else holds

    def _hook(self) -> None:
        """At the first step, to be the first of all hooks, also where FSDP came after us.

        Others (FSDP's, ours) run when the layer's turn has come.
        """
        enter = OutsideOfGraphs(self._enter)
        self._hooks = [
            layer.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
            for layer in self.units
        ]

    def _enter(self, layer: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        assert self._schedule is not None
        if self._modes is not None and self._modes[0]() != self._modes[1]:
            raise refusal(
                "evaluation: what evaluate calls has changed the mode of modules (train, eval, "
                "adapters that are switched), and other batches run meanwhile; change it around "
                "evaluate"
            )
        if self._says_caches and any(kwargs.get(name) is not None for name in _CACHES):
            self._says_caches, self._has_said_caches = False, True
            logger.warning(
                "%sevaluation: the keys and values of all batches are in memory at a time, not "
                "only of one; if fn does not use them, call the model with use_cache=False",
                STEPS_PREFIX,
            )
        return self._schedule.enter_layer(layer, (args, kwargs))


def _modes_of(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """What a caller may switch of modules for a while: training or evaluation, adapters of PEFT."""
    return [
        value if name == "training" else repr(value)
        for module in modules
        for name, value in vars(module).items()
        if name in _MODES
    ]


def _detached(result: R) -> R:
    detached: R = tree_map_only(torch.Tensor, _without_graph, result)
    return detached


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _check(model: torch.nn.Module, layers: dict[torch.nn.Module, str]) -> None:
    if len(layers) < 2:
        raise refusal(
            "a layer-major step needs a model with layers that repeat; name them with layers="
        )
    for module in model.modules():
        instead = STEP_WRAPPERS.get(type(module).__name__)
        if instead is not None:
            raise refusal(
                f"{type(module).__name__} cannot run layer-major steps: it expects one backward "
                f"pass for each forward pass of the whole model; use {instead}"
            )
        if is_compiled(module) and not layers.keys().isdisjoint(module.modules()):
            raise refusal(
                "a compiled module cannot pause between its layers; compile what is inside of the "
                "layers, or nothing"
            )
