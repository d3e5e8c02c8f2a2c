# SPDX-License-Identifier: Apache-2.0
"""What happens around a transformer layer's forward: `LayerHooks`.

Its activations are captured at its end (why there: Note [Why per-node capture] in
`activations/saved/autograd_graph.py`), or it or a part of it is recomputed in backward, as the
policy says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.random import CheckpointWithoutOutputFunction
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron.offload.activations.capture.hooks import PLAIN_TORCH
from megatron.offload.activations.engine import OffloadEngine
from megatron.offload.activations.placement.policy import SELECTIVE, WHOLE_LAYER, Placement
from megatron.offload.activations.saved.autograd_graph import node_of
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.integration.megatron.checkpointed_layers import (
    CheckpointedLayers,
    first_layers,
)
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
from megatron.offload.planner.profile.profiler import Profiler
from megatron.offload.planner.profile.timings import LayerTimings

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
        by_chunk = [layer_names([chunk]) for chunk in model_chunks]
        self._names = {layer: name for names in by_chunk for layer, name in names.items()}
        self._last_layers = {[*names][-1] for names in by_chunk if names}
        self._checkpoints = CheckpointedLayers(engine)
        self._first_layers = first_layers(model_chunks)
        self._division = None
        if engine.divides_layers or engine.config.granularity != "layer":
            operations = engine.config.granularity == "operation"
            self._division = LayerDivision(self._names, operations=operations)
        engine.copying_nodes.add(CheckpointWithoutOutputFunction._backward_cls)

    def end_forward(self, outputs: Iterable[torch.Tensor]) -> None:
        """The forward pass of a micro-batch has ended.

        Args:
            outputs: what it gave, the loss or what goes to the next stage.
        """
        self._checkpoints.end(outputs)

    def clear(self) -> None:
        """Forgets a forward pass that did not come to its end."""
        self._checkpoints.clear()

    def close(self) -> None:
        """Removes the hooks that find the middle of the model's layers."""
        if self._division is not None:
            self._division.close()

    def layer(
        self,
        forward: Callable[..., Any],
        layer: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Runs a layer as its placement says: recomputed in backward, or with what it saved
        captured.

        Args:
            forward: Megatron's own, undecorated.
            layer: one of the model's; any other just runs.
            args: of `forward`, without the layer.
            kwargs: of `forward`.
        """
        engine, name = self._engine, self._names.get(layer)
        # No save order: not inside a forward pass that backward will follow, e.g. a recomputation.
        if name is None or engine.save_order is None:
            return forward(layer, *args, **kwargs)
        scope = dataclasses.replace(engine.scope, layer=name)
        inputs = [*_tensors(args), *_tensors(kwargs.values())]
        self._checkpoints.begin_layer(scope, inputs, is_first=layer in self._first_layers)
        if not torch.is_grad_enabled():
            return forward(layer, *args, **kwargs)
        # Without an input that wants a gradient, nothing would ask for the recomputation.
        recomputes = engine.place_layer(scope) is Placement.RECOMPUTE and _any_requires_grad(inputs)
        engine.begin_layer()
        timings = None
        if self._profiler is not None:
            timings = self._profiler.begin_layer(scope, inputs, recomputes=recomputes)
        if recomputes:
            engine.statistics.recomputed_layers += 1
            again = self._noted(scope, timings, WHOLE_LAYER, functools.partial(forward, layer))
            result = recomputed(again, args, kwargs)
            num_bytes = sum(tensor.nbytes for tensor in inputs if tensor.requires_grad)
            moves = engine.place(scope, num_bytes) is not Placement.KEEP
            if moves or engine.sampler is not None:
                engine.capture(scope, _tensors(result), inputs, recomputes=True)
        else:
            run = functools.partial(forward, layer, *args, **kwargs)
            result = self._captured(run, layer, scope, inputs, timings)
        if self._profiler is not None:
            self._profiler.end_layer(_tensors(result))
        if layer in self._last_layers:
            engine.end_layers()
        return result

    def _captured(
        self,
        run: Callable[[], Any],
        layer: torch.nn.Module,
        scope: Scope,
        inputs: list[torch.Tensor],
        timings: LayerTimings | None,
    ) -> Any:
        """Runs a layer and captures what it saved."""
        division, engine = self._division, self._engine
        if division is None:
            result = run()
            engine.capture(scope, outputs=_tensors(result), inputs=inputs)
            return result
        parts: list[str] = []
        selective: list[str] = []
        runners: dict[str, Callable[[], OpRunner]] = {}
        if engine.divides_layers and has_parts(layer) and _any_requires_grad(inputs):
            if timings is not None:
                timings.has_parts = True
            parts = [part for part in _PARTS if self._recomputes(scope, part)]
            others = [part for part in _PARTS if part not in parts]
            selective = [part for part in others if self._recomputes(scope, part + SELECTIVE)]
            runners = self._runners(scope, others, selective, timings)
        engine.statistics.recomputed_parts += len(parts) + len(selective)
        noted = functools.partial(self._noted, scope, timings)
        pieces = _PiecewiseCapture(engine, self._profiler, scope, inputs, parts, selective)
        with recomputing(layer, parts, noted), operating(layer, runners):
            with division.watching(pieces.reach):
                result = run()
            pieces.end(_tensors(result))
        return result

    def _recomputes(self, scope: Scope, part: str) -> bool:
        placement = self._engine.place_layer(dataclasses.replace(scope, part=part))
        return placement is Placement.RECOMPUTE

    def _runners(
        self,
        scope: Scope,
        parts: Iterable[str],
        selective: Collection[str],
        timings: LayerTimings | None,
    ) -> dict[str, Callable[[], OpRunner]]:
        """How the selective operations of these parts run, where not as usual."""
        runners: dict[str, Callable[[], OpRunner]] = {}
        for part in parts:
            if part in selective:
                runners[part] = functools.partial(
                    Recompute, functools.partial(self._noted, scope, timings, part + SELECTIVE)
                )
            elif timings is not None and self._profiler is not None:
                runners[part] = functools.partial(Timed, self._profiler, timings, part)
        return runners

    def _noted(
        self, scope: Scope, timings: LayerTimings | None, part: str, function: Function
    ) -> Function:
        """A function of the layer, which tells when it runs again in backward."""
        profiler, sampler, runs = self._profiler, self._engine.sampler, 0
        if (timings is None or profiler is None) and sampler is None:
            return function

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal runs
            runs += 1
            if runs == 1:
                return function(*args, **kwargs)
            measured: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if timings is not None and profiler is not None:
                measured = profiler.recomputation(timings, part)
            with measured:
                result = function(*args, **kwargs)
            # Selective operations are not told from the graph that they are in.
            if sampler is not None and not part.endswith(SELECTIVE):
                name = "" if part == WHOLE_LAYER else part
                sampler.note_recomputed(dataclasses.replace(scope, part=name), _tensors(result))
            return result

        return run


class _PiecewiseCapture:
    """Captures one running layer: attention as soon as it is done, the rest at the end.

    Each of them operation by operation, if the layer's division tells of operations. Without a
    middle the rest belongs to no part.

    Args:
        engine: captures.
        profiler: is told when the middle is reached; None: nothing measures it.
        scope: of the layer.
        inputs: of the layer.
        again: the parts that run again in backward.
        selective: the parts whose selective operations do. They are captured at their end: before,
            they hold what they are about to discard.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        profiler: Profiler | None,
        scope: Scope,
        inputs: list[torch.Tensor],
        again: Collection[str],
        selective: Collection[str],
    ) -> None:
        self._engine = engine
        self._profiler = profiler
        self._scope = scope
        self._inputs = inputs
        self._again = again
        self._selective = selective
        self._part = ATTENTION  # that runs
        self._scopes: dict[str, Scope] = {}  # by part
        # Nodes, not tensors: what has left for a tier is to leave memory.
        self._captured: list[Any] = []
        self._batch = engine.new_batch()
        self._middles: list[torch.Tensor] = []  # of an MLP that runs again: it starts from there

    def reach(self, tensors: list[torch.Tensor], is_middle: bool) -> None:
        """An operation begins: captures what ran before it. See `Reached`."""
        if is_middle and self._part == ATTENTION:
            self._capture(ATTENTION, tensors)
            self._part = MLP
            if MLP in self._again:
                self._middles = tensors
            if self._profiler is not None:
                self._profiler.reach_middle(tensors[0])
        elif not is_middle and self._part not in self._selective:
            self._capture(self._part, tensors)

    def end(self, outputs: list[torch.Tensor]) -> None:
        """The layer has run: captures the rest."""
        self._capture(MLP if self._part == MLP else "", outputs)
        self._batch.submit()
        self._engine.hooks.end_layer()

    def _capture(self, part: str, tensors: list[torch.Tensor]) -> None:
        scope = self._scopes.get(part)
        if scope is None:
            scope = self._scopes[part] = dataclasses.replace(self._scope, part=part)
        self._engine.capture(
            scope,
            outputs=tensors,
            inputs=[*self._inputs, *self._middles],
            captured=self._captured,
            recomputes=part in self._again,
            batch=self._batch,
        )
        with PLAIN_TORCH():
            self._captured.extend([node_of(tensor) for tensor in tensors])


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
