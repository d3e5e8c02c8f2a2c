# SPDX-License-Identifier: Apache-2.0
"""Captures the inputs that Megatron's own full recomputation keeps: `CheckpointedLayers`.

`LayerHooks` tells it which layer runs. A checkpoint runs its layers without gradients and saves
their inputs at its own end, of which Megatron does not tell us: they are captured when the next
layer begins, whose input the checkpoint has made, or when the forward pass has ended. It captures
nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron.offload.activations.engine import OffloadEngine
from megatron.offload.activations.placement.policy import INPUT
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.integration.megatron.recomputable import recomputes_fully


class CheckpointedLayers:
    """Captures the inputs of `--recompute-granularity full`'s checkpoints, one after the other."""

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine
        self._scope: Scope | None = None  # of the checkpoint that is not captured yet; None: none
        self._inputs: list[torch.Tensor] = []  # what it was called with

    def begin_layer(self, scope: Scope, inputs: Sequence[torch.Tensor], *, is_first: bool) -> None:
        """A layer is about to run in a forward pass, within a checkpoint or outside of any.

        Args:
            scope: the layer's place in the step.
            inputs: the tensors that it is called with.
            is_first: whether a checkpoint begins with it, if there is one: see `first_layers`.
        """
        is_checkpointed = not torch.is_grad_enabled()
        if is_first or not is_checkpointed:
            self.end(inputs)
            if is_checkpointed:
                self._scope = dataclasses.replace(scope, part=INPUT)
                self._inputs = list(inputs)
        if self._scope is not None:
            self._engine.statistics.recomputed_layers += 1

    def end(self, outputs: Iterable[torch.Tensor]) -> None:
        """The last checkpoint, if there is one, has ended: its inputs are captured.

        Args:
            outputs: what was made from what it returned.
        """
        if self._scope is not None:
            scope, inputs = self._scope, self._inputs
            self.clear()
            self._engine.capture(scope, outputs, inputs, recomputes=True)

    def clear(self) -> None:
        """Forgets the last checkpoint; its inputs stay in memory."""
        self._scope = None
        self._inputs = []


def first_layers(model_chunks: Sequence[torch.nn.Module]) -> set[torch.nn.Module]:
    """The layers with which Megatron's checkpoints begin; none without full recomputation.

    Nothing else tells one checkpoint's layers from the next one's: within a checkpoint, fused
    bias, dropout and addition compute with gradients all the same.
    """
    found: set[torch.nn.Module] = set()
    for chunk in model_chunks:
        for block in chunk.modules():
            if isinstance(block, TransformerBlock) and recomputes_fully(block.config):
                is_uniform = block.config.recompute_method == "uniform"
                found.update(
                    [*block.layers][:: block.config.recompute_num_layers if is_uniform else 1]
                )
    return found
