# SPDX-License-Identifier: Apache-2.0
"""What small trainings with and without offload share: a model, `Stack`, and the doors, `moving`.

Tests that train both ways and compare bits begin here. What they compare is theirs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from megatron.offload import (
    LayerMajor,
    offload_activations,
    offload_optimizer,
    offload_parameters,
)
from megatron.offload.integration.torch.offload import ActivationOffload
from megatron.offload.integration.torch.optimizer import OptimizerOffload
from megatron.offload.integration.torch.parameter_offload import ParameterOffload
from tests.support.layer_major import one_by_one
from tests.support.models import Block

Steps = Callable[[list[torch.Tensor]], list[torch.Tensor]]


class Stack(torch.nn.Module):
    """Layers of a kind behind a linear one, and a micro-batch's share of a loss.

    Args:
        hidden: size of the layers.
        num_layers: so many of them.
        micro_batches: of a step.
        layer: makes one.
        recomputes: its layers, in checkpoints.
    """

    def __init__(
        self,
        hidden: int,
        num_layers: int,
        micro_batches: int = 1,
        layer: Callable[[int], torch.nn.Module] = Block,
        *,
        recomputes: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.micro_batches, self.recomputes = micro_batches, recomputes
        self.first = torch.nn.Linear(hidden, hidden)
        self.layers = torch.nn.ModuleList(layer(hidden) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = self.run(layer, x)
        return x.float().square().mean() / self.micro_batches

    def run(self, layer: torch.nn.Module, x: torch.Tensor) -> Any:
        """A layer's forward pass; a model may call it in a way of its own."""
        return checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)


@dataclass
class Moved:
    """The handles of what moves."""

    activations: ActivationOffload | None = None
    parameters: ParameterOffload | None = None
    states: OptimizerOffload | None = None

    def steps(self, model: torch.nn.Module, units: int | None) -> Steps:
        """Steps of a model in that many units; None: one micro-batch after the other."""
        if units is None:
            return lambda batches: one_by_one(model, batches)
        layer_major = LayerMajor(model, units, offload=self.activations)
        return lambda batches: layer_major.step(batches, model)


@contextlib.contextmanager
def moving(
    streams: Container[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    directory: Path | None = None,
    *,
    activations: Mapping[str, Any] | None = None,
    parameters: Mapping[str, Any] | None = None,
    states: Mapping[str, Any] | None = None,
) -> Iterator[Moved]:
    """Some streams of a training are on a tier, and back in memory behind it.

    Args:
        streams: has "activations", "parameters" and "states", or some of these words.
        model: of the training; `optimizer`, its optimizer.
        directory: for the tiers; None: they are in host memory.
        activations: settings of these; by default all move.
        parameters: settings of these.
        states: settings of these; by default their buckets and window are smaller than a model's.
    """
    moved = Moved()
    with contextlib.ExitStack() as handles:
        if "activations" in streams:
            moved.activations = handles.enter_context(
                offload_activations(model, directory, **{"min_bytes": 1, **(activations or {})})
            )
        if "parameters" in streams:
            moved.parameters = handles.enter_context(
                offload_parameters(model, directory, **(parameters or {}))
            )
        if "states" in streams:
            small = {"bucket_bytes": 1 << 15, "window_bytes": 1 << 17}
            moved.states = handles.enter_context(
                offload_optimizer(optimizer, directory, **{**small, **(states or {})})
            )
        yield moved
