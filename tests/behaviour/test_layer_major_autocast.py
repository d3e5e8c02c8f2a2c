# SPDX-License-Identifier: Apache-2.0
"""Layer-major steps under autocast, whose cache of cast weights is one for all threads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import LayerMajor, offload_activations
from tests.support.layer_major import one_by_one
from tests.support.models import Block
from tests.support.training import Stack

pytestmark = pytest.mark.usefixtures("one_thread_for_each_pass")

HIDDEN, LAYERS = 16, 6
Step = Callable[[torch.nn.Module, list[torch.Tensor]], Any]


class Twice(Block):
    """Uses a weight twice, whose gradients come together in bf16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x + self.qkv(self.qkv(x)[..., :HIDDEN].tanh())[..., :HIDDEN]


class ByData(Twice):
    """Of some micro-batches it makes more operations, and of some it wants no gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_odd = bool(x.detach().flatten()[0] > 0)
        for _ in range(40 * is_odd):
            x = x * 1.0
        with torch.set_grad_enabled(is_odd):
            up = self.up(x)[..., :HIDDEN]
        return super().forward(x + up.detach()) + self.up(x)[..., :HIDDEN] * is_odd


class Model(Stack):
    def __init__(self, layer: type[Block] = Twice, *, recomputes: bool = False) -> None:
        super().__init__(HIDDEN, LAYERS, layer=layer, recomputes=recomputes)


def with_recomputation() -> Model:
    return Model(recomputes=True)


def by_data() -> Model:
    return Model(ByData)


def shared() -> Model:
    """Layers of different units have a weight in common."""
    model = Model()
    model.layers[-1].qkv.weight = model.layers[0].qkv.weight
    return model


def shared_and_recomputed() -> Model:
    model = with_recomputation()
    model.layers[-1].qkv.weight = model.layers[0].qkv.weight
    return model


def around(step: Step) -> Step:
    """Autocast is entered around the step."""

    def run(model: torch.nn.Module, batches: list[torch.Tensor]) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return step(model, batches)

    return run


class Within(torch.nn.Module):
    """Autocast is entered by the loss function."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(x)


def within(step: Step) -> Step:
    return lambda model, batches: step(Within(model), batches)


def micro_batches(number: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(number)
    batches = [torch.randn(2, 8, HIDDEN, generator=draw) for _ in range(3)]
    # Those of `ByData` that want no gradients of a weight come first.
    return sorted(batches, key=lambda one: float(one.flatten()[0]))


def trained(model: Model, step: Step, num_batches: int) -> tuple[list[Any], list[torch.Tensor]]:
    """Losses, and gradients and weights of two steps: the first one counts random numbers."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses: list[Any] = []
    tensors: list[torch.Tensor] = []
    for number in range(2):
        optimizer.zero_grad()
        losses += step(model, micro_batches(number)[-num_batches:])
        tensors += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return losses, tensors + list(model.parameters())


@functools.cache
def one_by_one_trained(
    make: Callable[[], Model], where: Callable[[Step], Step], num_batches: int
) -> tuple[list[Any], list[torch.Tensor]]:
    return trained(make(), where(one_by_one), num_batches)


def layer_major(units: int | None, **settings: Any) -> Step:
    steps: list[LayerMajor] = []

    def step(model: torch.nn.Module, batches: list[torch.Tensor]) -> Any:
        inner = model.model if isinstance(model, Within) else model
        if not steps:
            steps.append(LayerMajor(inner, units, **settings))
        return steps[0].step(batches, model)

    return step


def loses_gradients() -> bool:
    """Whether autocast uses a cast that was made without gradients again where they are wanted.

    torch 2.10 does: in a usual loop under one autocast a layer then has no gradients. A layer-major
    step uses no cast again behind a pass, and has them.
    """
    layer, x = torch.nn.Linear(HIDDEN, HIDDEN), torch.ones(1, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            layer(x)
        return not layer(x).requires_grad


@pytest.mark.parametrize("make", [Model, with_recomputation, by_data])
@pytest.mark.parametrize("where", [around, within])
@pytest.mark.parametrize("order", ["ascending", "alternating"])
def test_all_bits_are_the_same(
    make: Callable[[], Model], where: Callable[[Step], Step], order: str
) -> None:
    """Two micro-batches where the order alternates: the sum of two has one value."""
    if make is by_data and where is around and loses_gradients():
        pytest.skip("autocast of this PyTorch loses gradients of a usual loop over micro-batches")
    num_batches = 3 if order == "ascending" else 2
    expected = one_by_one_trained(make, where, num_batches)
    for units in (3, None):
        step = layer_major(units, alternates=order == "alternating")
        losses, tensors = trained(make(), where(step), num_batches)
        assert losses == expected[0]
        assert len(tensors) == len(expected[1])
        assert all(map(torch.equal, tensors, expected[1]))


@pytest.mark.parametrize("where", [around, within])
def test_all_bits_are_the_same_with_offload(where: Callable[[Step], Step], tmp_path: Path) -> None:
    expected = one_by_one_trained(Model, where, 3)
    model = Model()
    with offload_activations(model, tmp_path, min_bytes=1, boundary="ssd") as offload:
        losses, tensors = trained(model, where(layer_major(3, offload=offload)), 3)
    assert losses == expected[0] and all(map(torch.equal, tensors, expected[1]))


@pytest.mark.parametrize("make", [shared, shared_and_recomputed])
@pytest.mark.parametrize("where", [around, within])
@pytest.mark.parametrize("alternates", [False, True])
def test_a_weight_of_two_units_gets_both_gradients(
    make: Callable[[], Model], where: Callable[[Step], Step], alternates: bool
) -> None:
    """As autograd adds those of a micro-batch: in bf16, before they are cast back."""
    num_batches = 2 if alternates else 3  # as above
    expected = one_by_one_trained(make, where, num_batches)
    for units in (3, None):
        step = layer_major(units, alternates=alternates)
        losses, tensors = trained(make(), where(step), num_batches)
        assert losses == expected[0] and all(map(torch.equal, tensors, expected[1]))
