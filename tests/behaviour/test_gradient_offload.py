# SPDX-License-Identifier: Apache-2.0
"""Gradients of layers that leave when their unit's backward is over: the same bits, less memory."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.offload import (
    ConfigurationError,
    LayerMajor,
    offload_activations,
    offload_optimizer,
    offload_parameters,
)
from megatron.offload.errors import InterruptedStepError, LostStateError, OffloadError
from megatron.offload.integration.torch.parameter_offload import ParameterOffload
from megatron.offload.parameters import gradients as gradients_file
from megatron.offload.parameters.away_gradient import AwayGradient, Piece, piece_of
from megatron.offload.parameters.gradients import Gradients
from megatron.offload.states.bucket import Where
from megatron.offload.tiers.drive import Drive
from tests.behaviour.test_layer_major_steps import HIDDEN, LAYERS, VOCABULARY, Language
from tests.support.layer_major import failing_at, one_by_one

MICRO_BATCHES = 8


@pytest.fixture(autouse=True)
def weights_leave_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is smaller together, as in a model that is not that small."""
    monkeypatch.setattr(gradients_file, "ALONE_BYTES", 1 << 12)


class Recomputed(Language):
    """Recomputes its layers, and scales what each has made by a parameter of the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(HIDDEN))

    def run(self, layer: torch.nn.Module, x: torch.Tensor) -> Any:
        return checkpoint(layer, x, use_reentrant=False)

    def loss(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return super().loss(x * self.scale, tokens)


def batches_of(step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randint(VOCABULARY, (2, 16), generator=draw) for _ in range(MICRO_BATCHES)]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, foreach=False)


def fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


class Trained:
    """A model after some steps.

    Args:
        directory: for whatever moves; None: nothing does.
        make: the model.
        optimizer: of it, and `clip`, the norm of its gradients at most.
        units: of a layer-major step; None: one micro-batch after the other.
        calls: steps of micro-batches before one of the optimizer.
        offloads_states: else the optimizer has all parameters in memory.
        settings: of the parameters.
    """

    def __init__(
        self,
        directory: Path | None,
        make: Callable[[], torch.nn.Module] = Language,
        optimizer: Callable[[Any], torch.optim.Optimizer] = fused,
        *,
        clip: float | None = None,
        units: int | None = LAYERS,
        calls: int = 1,
        offloads_states: bool = True,
        moves_activations: bool = False,
        steps: int = 3,
        **settings: Any,
    ) -> None:
        model = make()
        steps_by = optimizer(model.parameters())
        self.used: list[tuple[int, torch.Tensor]] = []
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.resident_bytes: list[int] = []
        torch.manual_seed(7)
        with contextlib.ExitStack() as handles:
            activations = self.handle = None
            if directory is not None:
                if moves_activations:
                    activations = offload_activations(model, directory, min_bytes=1)
                    handles.enter_context(activations)
                settings = {"gradients": "on", **settings}
                self.handle = offload_parameters(model, directory, **settings)
                handles.enter_context(self.handle)
                if offloads_states:
                    sizes = {"bucket_bytes": 1 << 15, "window_bytes": 1 << 17}
                    handles.enter_context(offload_optimizer(steps_by, directory, **sizes))
            layer_major = LayerMajor(model, units, offload=activations) if units else None
            self._watch(steps_by)
            for number in range(steps):
                steps_by.zero_grad()
                for call in range(calls):
                    batches = batches_of(number * calls + call)
                    if layer_major is None:
                        losses = one_by_one(model, batches)
                    else:
                        losses = layer_major.step(batches, model)
                    self.losses += [float(loss) for loss in losses]
                self.resident_bytes.append(resident_bytes(model))
                if clip is not None:
                    self.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
                steps_by.step()
            self.counted = self.handle.statistics if self.handle is not None else {}
            self.states = copy.deepcopy(steps_by.state_dict()["state"])
        self.weights = {k: v.clone() for k, v in model.state_dict().items()}

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Keeps the gradients that each step uses, in the order of the parameters."""
        order = [p for group in optimizer.param_groups for p in group["params"]]
        kind, used = type(optimizer), self.used

        def step(self: torch.optim.Optimizer, closure: Any = None) -> Any:
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        number = next(i for i, one in enumerate(order) if one is param)
                        used.append((number, param.grad.clone()))
            return kind.step.__wrapped__(self, closure)

        hooked = torch.optim.Optimizer.profile_hook_step(step)
        hooked.hooked = True  # type: ignore[attr-defined]  # as torch marks those of its classes
        optimizer.__class__ = type("Watched", (kind,), {"step": hooked})

    def assert_is(self, other: Trained) -> None:
        assert (self.losses, self.norms) == (other.losses, other.norms)
        in_order = [sorted(one.used, key=lambda pair: pair[0]) for one in (self, other)]
        assert [n for n, _ in in_order[0]] == [n for n, _ in in_order[1]]
        # A parameter's gradients of several steps stay in their order.
        for (_, ours), (_, theirs) in zip(*in_order, strict=True):
            assert torch.equal(ours, theirs)
        for name, weight in other.weights.items():
            assert torch.equal(self.weights[name], weight), name
        assert self.states.keys() == other.states.keys()
        for number, state in other.states.items():
            for key, value in state.items():
                assert torch.equal(torch.as_tensor(self.states[number][key]), torch.as_tensor(value))


def resident_bytes(model: torch.nn.Module) -> int:
    """Of the gradients of its layers."""
    params = [p for layer in model.layers for p in layer.parameters()]  # type: ignore[union-attr]
    there = [p.grad for p in params if p.grad is not None and piece_of(p) is None]
    pieces = {id(piece): piece for p in params if (piece := piece_of(p)) is not None}
    return sum(g.nbytes for g in there) + sum(p.memory_bytes for p in pieces.values())


@pytest.mark.parametrize(
    ("make", "optimizer", "clip", "settings"),
    [
        (Language, fused, None, {}),
        (Language, adamw, 0.1, {"mode": "host", "units": 3}),
        (Language, fused, 0.1, {"units": 2, "live_units": 3, "io": "buffered"}),
        (Recomputed, fused, 0.1, {"moves_activations": True}),
        (Recomputed, adamw, None, {"offloads_states": False}),
        (Language, fused, 0.1, {"offloads_states": False, "mode": "tiered", "host_budget": 1 << 16}),
        (Language, fused, 0.1, {"calls": 3}),
    ],
)
def test_all_bits_are_the_same(
    make: Callable[[], torch.nn.Module],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    clip: float | None,
    settings: dict[str, Any],
    tmp_path: Path,
) -> None:
    calls = settings.get("calls", 1)
    expected = Trained(None, make, optimizer, clip=clip, units=None, calls=calls)
    found = Trained(tmp_path, make, optimizer, clip=clip, **settings)
    found.assert_is(expected)
