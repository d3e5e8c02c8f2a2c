# SPDX-License-Identifier: Apache-2.0
"""Layer-major steps of any PyTorch model: `LayerMajor`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

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
from megatron.offload.layer_major.schedule import LayerMajorSchedule, UnitPasses
from megatron.offload.layer_major.units import params_by_unit, units_of

B = TypeVar("B")


class LayerMajor:
    """Runs the micro-batches of a step unit by unit, a unit being some consecutive layers.

        layer_major = LayerMajor(model, units=4)
        losses = layer_major.step(micro_batches, lambda batch: model(**batch).loss / len(...))
        optimizer.step()

    in place of a loop over micro-batches with `loss.backward()` in each. Parameters that come in
    for a unit then do so once for all micro-batches: what FSDP2 (`fully_shard`) has sharded is
    gathered once for forward and once for backward of a step, and its gradients are reduced once.
    Gradients have the same bits but for what Note [The same sums] in `layer_major/schedule.py`
    lists; random numbers are the same.

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
        check_models((model,))
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
        if self._schedule is None:
            # What FSDP keeps on the host is computed with elsewhere.
            self._device = sharded.device or likely_device((self._model,), inputs)
            self._schedule = self._open()
            self._hook()
        with contextlib.ExitStack() as contexts:
            if self._offload is None:
                own = EnginePasses(None, hooks_tensors=True)
            else:
                own = contexts.enter_context(self._offload.layer_major_step(self._device))
                if self._offload.engine is not None:
                    self._offload.engine.exclude(inputs)
            params = params_by_unit(self._model, self.units)
            own.around_backward = lambda unit, is_last: unit_backward(
                params.get(unit, ()), is_last=is_last
            )
            passes: UnitPasses = contexts.enter_context(sharded.step(own))
            forwards = [forward_of(one) for one in batches]
            losses = self._schedule.run(forwards, torch.Tensor.backward, passes)
        return [one.detach() for one in losses]

    def close(self) -> None:
        """Takes the hooks off the layers."""
        while self._hooks:
            self._hooks.pop().remove()

    def _open(self) -> LayerMajorSchedule:
        """The schedule, once it is certain where the model computes."""
        return LayerMajorSchedule(
            self.units,
            self._device,
            TorchGenerators(self._device),
            others=OtherNumbers(self._model.modules()),
            varies=self._skips_layers,
            alternates=self._alternates,
            on_any_rank=self._on_any_rank,
        )

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
        return self._schedule.enter_layer(layer, (args, kwargs))


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
