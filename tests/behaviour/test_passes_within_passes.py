# SPDX-License-Identifier: Apache-2.0
"""Backward passes that a hook runs within another, through layers whose parameters move."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import offload_activations
from megatron.offload.errors import OffloadError
from tests.support.training import moving

HIDDEN = 16


class Layer(torch.nn.Module):
    """A residual one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(HIDDEN, 32), torch.nn.Linear(32, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.2 * self.down(torch.tanh(self.up(x)))


def solves(z: torch.Tensor, z0: torch.Tensor, f0: torch.Tensor, steps: int) -> None:
    """The gradient of `z` is a fixed point, to which a hook comes by passes through `f0`."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        found = gradient
        for _ in range(steps):
            found = torch.autograd.grad(f0, z0, found, retain_graph=True)[0] + gradient
        return found

    z.register_hook(hook)


class Equilibrium(Layer):
    """A deep equilibrium layer: its forward registers the hook on its own result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.tanh(super().forward(x) * 0.3 + x)
        if z.requires_grad:
            z0 = z.detach().requires_grad_()
            solves(z, z0, torch.tanh(super().forward(z0) * 0.3 + x.detach()) * 0.3, 2)
        return z


class Within(torch.nn.Module):
    """Layers whose passes a hook in the middle of another layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(6))
        self.last = self.layers[5]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z0 = torch.ones(4, HIDDEN, requires_grad=True)
        f0 = z0
        for layer in self.layers[:4]:
            x = layer(x)
            f0 = layer(f0)

        def between(_: Any, args: Any, result: torch.Tensor) -> None:
            solves(result, z0, f0 * 0.1, 2)

        handle = self.last.down.register_forward_hook(between)
        x = self.last(self.layers[4](x))
        handle.remove()
        return x


class Gradient(Layer):
    """Its forward asks for the gradient of an energy, and goes on with its own weights."""

    with_graph = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            energy = super().forward(x).square().sum()
            (found,) = torch.autograd.grad(energy, x, create_graph=self.with_graph)
        return super().forward(x) - 0.1 * found


def stack(layer: Callable[[], torch.nn.Module]) -> Callable[[], torch.nn.Module]:
    return lambda: torch.nn.Sequential(
        torch.nn.Linear(HIDDEN, HIDDEN), *(layer() for _ in range(5))
    )


MODELS = {"own hook": stack(Equilibrium), "other layers": Within, "inside": stack(Gradient)}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("streams", ["parameters", "activations", "parameters activations states"])
def test_they_have_the_same_bits(streams: str, model: str, tmp_path: Path) -> None:
    def run(streams: str) -> list[torch.Tensor]:
        torch.manual_seed(1)
        made, losses = MODELS[model](), []
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
        with moving(streams, made, optimizer, tmp_path):
            for step in range(3):
                x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(step))
                loss = made(x).square().mean()
                loss.backward()
                losses.append(loss.detach())
                losses += [p.grad.clone() for p in made.parameters() if p.grad is not None]
                optimizer.step()
                optimizer.zero_grad()
        return [*losses, *(one.detach().clone() for one in made.parameters())]

    found, expected = run(streams), run("")
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert all(bool(one.isfinite().all()) for one in found)


@pytest.mark.parametrize("model", MODELS)
def test_layers_that_are_recomputed_have_the_same_bits(model: str, tmp_path: Path) -> None:
    def run(around: Callable[[torch.nn.Module], Any]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        made = MODELS[model]()
        with around(made):
            x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(0))
            made(x).square().mean().backward()
        return [p.grad.clone() for p in made.parameters() if p.grad is not None]

    def recomputing(made: torch.nn.Module) -> Any:
        return offload_activations(made, tmp_path, min_bytes=1, recompute_layers="all")

    assert all(map(torch.equal, run(recomputing), run(contextlib.nullcontext)))


def test_a_gradient_with_a_graph_is_refused_where_weights_come_layer_by_layer(
    tmp_path: Path,
) -> None:
    made = MODELS["inside"]()
    for layer in made:
        layer.with_graph = True  # type: ignore[assignment]
    with (
        moving("parameters", made, torch.optim.SGD(made.parameters()), tmp_path),
        pytest.raises(OffloadError, match="backward pass with create_graph=True"),
    ):
        made(torch.randn(4, HIDDEN))
