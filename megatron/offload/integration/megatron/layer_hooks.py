# SPDX-License-Identifier: Apache-2.0
"""What happens around a transformer layer's forward: `LayerHooks`.

Its activations are captured at its end (why there: Note [Why per-node capture] in
`saved/autograd_graph.py`), or it or a part of it is recomputed in backward, as the policy says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.random import CheckpointWithoutOutputFunction
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron.offload.engine import OffloadEngine
from megatron.offload.integration.megatron.layer_split import ATTENTION, MLP, LayerDivision
from megatron.offload.integration.megatron.recomputation import (
    Function,
    has_parts,
    recomputed,
    recomputing,
)
from megatron.offload.integration.megatron.selective_recompute import (
    OpRunner,
    Recompute,
    Timed,
    operating,
)
from megatron.offload.placement.policy import SELECTIVE, WHOLE_LAYER, Placement
from megatron.offload.planner.profile.profiler import Profiler
from megatron.offload.planner.profile.timings import LayerTimings
from megatron.offload.saved.scope import Scope

_PARTS = (ATTENTION, MLP)


class LayerHooks:
    """Runs the layers of a model for an engine, and for a profiler if there is one."""

    def __init__(
        self,
        engine: OffloadEngine,
        model_chunks: Sequence[torch.nn.Module],
        profiler: Profiler | None = None,
    ) -> None:
        self._engine = engine
        self._profiler = profiler
        self._names = layer_names(model_chunks)
        self._division = LayerDivision(self._names) if engine.divides_layers else None
        engine.copying_nodes.add(CheckpointWithoutOutputFunction._backward_cls)

    def close(self) -> None:
        """Takes off the model what was put there to find the middle of its layers."""
        if self._division is not None:
            self._division.close()

    def layer(
        self,
        forward: Callable[..., Any],
        layer: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Runs a layer as it is placed: recomputed in backward, or with what it saved taken over.

        Args:
            forward: Megatron's own, undecorated.
            layer: one of the model's; any other just runs.
            args: of `forward`, without the layer.
            kwargs: of `forward`.
        """
        engine, name = self._engine, self._names.get(layer)
        # No save order: not inside a forward pass that backward will follow, e.g. a recomputation.
        if name is None or engine.save_order is None or not torch.is_grad_enabled():
            return forward(layer, *args, **kwargs)
        scope = dataclasses.replace(engine.scope, layer=name)
        inputs = [*_tensors(args), *_tensors(kwargs.values())]
        # Without an input that wants a gradient, nothing would ask for the recomputation.
        recomputes = engine.place_layer(scope) is Placement.RECOMPUTE and _any_requires_grad(inputs)
        timings = None
        if self._profiler is not None:
            timings = self._profiler.begin_layer(scope, inputs, recomputes=recomputes)
        if recomputes:
            engine.statistics.recomputed_layers += 1
            again = self._noted(timings, WHOLE_LAYER, functools.partial(forward, layer))
            result = recomputed(again, args, kwargs)
            if engine.config.recompute_input != "keep":
                engine.capture(scope, _tensors(result), inputs, recomputes=True)
        else:
            run = functools.partial(forward, layer, *args, **kwargs)
            result = self._captured(run, layer, scope, inputs, timings)
        if self._profiler is not None:
            self._profiler.end_layer(_tensors(result))
        return result

    def _captured(
        self,
        run: Callable[[], Any],
        layer: torch.nn.Module,
        scope: Scope,
        inputs: list[torch.Tensor],
        timings: LayerTimings | None,
    ) -> Any:
        """Runs a layer and has what it saved taken over."""
        division, engine = self._division, self._engine
        if division is None:
            result = run()
            engine.capture(scope, outputs=_tensors(result), inputs=inputs)
            return result
        parts, runners = [], {}
        if has_parts(layer) and _any_requires_grad(inputs):
            if timings is not None:
                timings.has_parts = True
            parts = [part for part in _PARTS if self._recomputes(scope, part)]
            runners = self._runners(scope, [part for part in _PARTS if part not in parts], timings)
        engine.statistics.recomputed_parts += len(parts)
        noted = functools.partial(self._noted, timings)
        with recomputing(layer, parts, noted), operating(layer, runners):
            return self._divided(division, scope, inputs, run)

    def _recomputes(self, scope: Scope, part: str) -> bool:
        placement = self._engine.place_layer(dataclasses.replace(scope, part=part))
        return placement is Placement.RECOMPUTE

    def _runners(
        self, scope: Scope, parts: Iterable[str], timings: LayerTimings | None
    ) -> dict[str, Callable[[], OpRunner]]:
        """How the selective operations of these parts run, where not as usual."""
        runners: dict[str, Callable[[], OpRunner]] = {}
        for part in parts:
            if self._recomputes(scope, part + SELECTIVE):
                self._engine.statistics.recomputed_parts += 1
                runners[part] = functools.partial(
                    Recompute, functools.partial(self._noted, timings, part + SELECTIVE)
                )
            elif timings is not None and self._profiler is not None:
                runners[part] = functools.partial(Timed, self._profiler, timings, part)
        return runners

    def _divided(
        self,
        division: LayerDivision,
        scope: Scope,
        inputs: list[torch.Tensor],
        run: Callable[[], Any],
    ) -> Any:
        """Captures attention as soon as it is done, the rest at the end. Without a middle, all."""
        middles: list[torch.Tensor] = []

        def reached(middle: torch.Tensor) -> None:
            middles.append(middle)
            attention = dataclasses.replace(scope, part=ATTENTION)
            self._engine.capture(attention, outputs=[middle], inputs=inputs)
            if self._profiler is not None:
                self._profiler.reach_middle(middle)

        with division.watching(reached):
            result = run()
        rest = dataclasses.replace(scope, part=MLP) if middles else scope
        self._engine.capture(rest, outputs=_tensors(result), inputs=[*inputs, *middles])
        return result

    def _noted(self, timings: LayerTimings | None, part: str, function: Function) -> Function:
        """A function of the layer, which tells when it runs again in backward."""
        profiler, runs = self._profiler, 0
        if timings is None or profiler is None:
            return function

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal runs
            runs += 1
            with profiler.recomputation(timings, part) if runs > 1 else contextlib.nullcontext():
                return function(*args, **kwargs)

        return run


def layer_names(model_chunks: Sequence[torch.nn.Module]) -> dict[torch.nn.Module, str]:
    """`decoder.7` for each layer: its block's path and its global 1-based number.

    The block is part of the name because T5's encoder and decoder layers share their numbers.
    """
    names: dict[torch.nn.Module, str] = {}
    for chunk in model_chunks:
        for path, block in chunk.named_modules():
            if isinstance(block, TransformerBlock):
                for layer in block.layers:
                    names[layer] = f"{path.rpartition('.')[2]}.{layer.layer_number}"
    return names


def _tensors(values: Any) -> list[torch.Tensor]:
    values = (values,) if isinstance(values, torch.Tensor) else values
    return [value for value in values if isinstance(value, torch.Tensor)]


def _any_requires_grad(tensors: Iterable[torch.Tensor]) -> bool:
    return any(tensor.requires_grad for tensor in tensors)
