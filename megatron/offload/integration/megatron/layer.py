# SPDX-License-Identifier: Apache-2.0
"""What happens around a transformer layer's forward: `LayerCalls`.

Its activations are captured at its end (why there: Note [Why per-node capture] in
`saved/graph.py`), or it is recomputed in backward, as the policy says.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron.offload.engine import OffloadEngine
from megatron.offload.integration.megatron.groups import ATTENTION, MLP, LayerDivision
from megatron.offload.placement.policy import Placement
from megatron.offload.planning.marks import LayerMarks
from megatron.offload.planning.profiler import Profiler
from megatron.offload.saved.scope import Scope


class LayerCalls:
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

    def close(self) -> None:
        """Takes what it put there off the model."""
        if self._division is not None:
            self._division.close()

    def layer(
        self,
        forward: Callable[..., Any],
        layer: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """See `calls.Connection`."""
        engine, name = self._engine, self._names.get(layer)
        # No tape: not inside a forward pass that backward will follow, e.g. a recomputation.
        if name is None or engine.tape is None or not torch.is_grad_enabled():
            return forward(layer, *args, **kwargs)
        scope = dataclasses.replace(engine.scope, layer=name)
        inputs = [*_tensors(args), *_tensors(kwargs.values())]
        # Without an input that wants a gradient, nothing would ask for the recomputation.
        recomputes = engine.place_layer(scope) is Placement.RECOMPUTE and _any_requires_grad(inputs)
        if self._profiler is not None:
            marks = self._profiler.begin_layer(scope, inputs, recomputes=recomputes)
            if marks is not None:
                forward = self._noted(forward, self._profiler, marks)
        if recomputes:
            engine.statistics.recomputed_layers += 1
            result = _recomputed(forward, layer, args, kwargs)
        else:
            result = self._captured(forward, layer, args, kwargs, scope, inputs)
        if self._profiler is not None:
            self._profiler.end_layer(_tensors(result))
        return result

    def _captured(
        self,
        forward: Callable[..., Any],
        layer: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        scope: Scope,
        inputs: list[torch.Tensor],
    ) -> Any:
        """Runs a layer and has what it saved taken over."""
        engine = self._engine
        if self._division is None:
            result = forward(layer, *args, **kwargs)
            engine.capture(scope, outputs=_tensors(result), inputs=inputs)
            return result
        return self._divided(self._division, scope, inputs, lambda: forward(layer, *args, **kwargs))

    def _divided(
        self,
        division: LayerDivision,
        scope: Scope,
        inputs: list[torch.Tensor],
        forward: Callable[[], Any],
    ) -> Any:
        """Captures attention as soon as it is done, the rest at the end. Without a middle, all."""
        middles: list[torch.Tensor] = []

        def reached(middle: torch.Tensor) -> None:
            middles.append(middle)
            attention = dataclasses.replace(scope, group=ATTENTION)
            self._engine.capture(attention, outputs=[middle], inputs=inputs)
            if self._profiler is not None:
                self._profiler.reach_middle(middle)

        with division.watching(reached):
            result = forward()
        rest = dataclasses.replace(scope, group=MLP) if middles else scope
        self._engine.capture(rest, outputs=_tensors(result), inputs=[*inputs, *middles])
        return result

    @staticmethod
    def _noted(
        forward: Callable[..., Any], profiler: Profiler, marks: LayerMarks
    ) -> Callable[..., Any]:
        """The forward, which tells when it runs again in backward."""
        runs = 0

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal runs
            runs += 1
            with profiler.recomputation(marks) if runs > 1 else contextlib.nullcontext():
                return forward(*args, **kwargs)

        return run


def _recomputed(
    forward: Callable[..., Any],
    layer: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Runs a layer so that only its inputs are kept, by Megatron's own means.

    Those restore the states of all random number generators, and take tensors by position only.
    """
    values = [*args, *kwargs.values()]
    places = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]

    def run(*tensors: torch.Tensor) -> Any:
        present = list(values)
        for place, tensor in zip(places, tensors, strict=True):
            present[place] = tensor
        named = dict(zip(kwargs, present[len(args) :], strict=True))
        return forward(layer, *present[: len(args)], **named)

    tensors = [values[place] for place in places]
    for place in places:
        values[place] = None  # what is kept is kept by the checkpoint alone
    return checkpoint(run, False, *tensors)


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
