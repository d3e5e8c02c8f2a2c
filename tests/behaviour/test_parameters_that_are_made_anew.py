# SPDX-License-Identifier: Apache-2.0
"""Parameters that are other objects, or have another class, from one call of their layer on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import ConfigurationError, offload_activations, offload_parameters

HIDDEN, LAYERS = 32, 4


class Layer(torch.nn.Module):
    def __init__(self, kind: Callable[[], torch.nn.Module]) -> None:
        super().__init__()
        self.first, self.last = kind(), torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.last(self.first(x).tanh())
        return result


class Net(torch.nn.Module):
    def __init__(self, kind: Callable[[], torch.nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList(Layer(kind) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def usual() -> torch.nn.Module:
    return torch.nn.Linear(HIDDEN, HIDDEN)


def lazy() -> torch.nn.Module:
    return torch.nn.LazyLinear(HIDDEN)


def with_lazy_norm() -> torch.nn.Module:
    """With buffers that have no shape either."""
    return torch.nn.Sequential(torch.nn.LazyLinear(HIDDEN), torch.nn.LazyBatchNorm1d())


def steps(model: torch.nn.Module) -> list[torch.Tensor]:
    """Losses and the last gradients."""
    x = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(4))
    torch.manual_seed(5)  # lazy modules draw in their first call
    found = []
    for _ in range(3):
        model.zero_grad()
        loss = model(x)
        loss.backward()
        found.append(loss.detach())
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [*found, *grads, *model.state_dict().values()]


def assert_same_bits(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


REPLACED: dict[str, Callable[[torch.nn.Parameter], torch.nn.Parameter]] = {
    "Parameter(w)": torch.nn.Parameter,
    "frozen": lambda w: torch.nn.Parameter(w, requires_grad=False),
    "Parameter(w.data)": lambda w: torch.nn.Parameter(w.data),
    "Parameter(2 w)": lambda w: torch.nn.Parameter(w.detach() * 2),
}


@pytest.mark.parametrize("wants_gradients", [True, False])
@pytest.mark.parametrize("way", REPLACED)
@pytest.mark.parametrize("mode", ["ssd", "host"])
def test_a_parameter_made_of_one_that_is_away_has_its_values(
    mode: str, way: str, wants_gradients: bool, tmp_path: Path
) -> None:
    def run(door: Any) -> list[Any]:
        model = Net(usual)
        with door(model):
            steps(model)
            for layer in (model.layers[0], model.layers[3]):
                assert isinstance(layer.first.weight, torch.nn.Parameter)
                with torch.set_grad_enabled(wants_gradients):
                    made = REPLACED[way](layer.first.weight)
                assert type(made) is torch.nn.Parameter and made.is_leaf
                layer.first.weight = made
            return steps(model)

    found = run(lambda model: offload_parameters(model, tmp_path, mode=mode))
    assert_same_bits(found, run(contextlib.nullcontext))


def test_a_copy_of_one_that_is_away_is_no_parameter() -> None:
    """`detach` alone gives a plain tensor, as ever."""
    model = Net(usual)
    with offload_parameters(model, mode="host"):
        steps(model)
        assert type(model.layers[0].first.weight.detach()) is torch.Tensor  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [lazy, with_lazy_norm])
@pytest.mark.parametrize(
    "settings",
    [{"mode": "ssd"}, {"mode": "auto"}, {"mode": "ssd", "recompute_layers": "all"}],
    ids=["ssd", "auto", "recomputed"],
)
def test_activations_of_lazy_modules_have_the_same_bits(
    settings: dict[str, Any], kind: Callable[[], torch.nn.Module], tmp_path: Path
) -> None:
    """A recomputed layer is, from its second call on; in its first one it makes its parameters."""
    model = Net(kind)
    with offload_activations(model, tmp_path, min_bytes=1, **settings) as offload:
        found = steps(model)
        again = offload.statistics.get("recomputed_layers", 0)
        assert bool(again) is ("recompute_layers" in settings)
    assert_same_bits(found, steps(Net(kind)))


def test_parameters_of_lazy_modules_move_once_they_have_a_shape() -> None:
    model = Net(lazy)
    with pytest.raises(ConfigurationError, match="weight of a lazy module has no shape; call the"):
        offload_parameters(model, mode="host")
    expected = Net(lazy)
    assert_same_bits(steps(model), steps(expected))
    with offload_parameters(model, mode="host"):
        assert_same_bits(steps(model), steps(expected))
