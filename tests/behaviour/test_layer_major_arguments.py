# SPDX-License-Identifier: Apache-2.0
"""Layer-major steps: what layers write into what they get, numbers that are not torch's, layers
that are skipped. Losses and gradients are those of a step in the usual order.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megatron.offload import ConfigurationError, LayerMajor

WIDTH, LAYERS, MICRO_BATCHES = 8, 4, 3


class Layer(torch.nn.Module):
    """Adds to its input what a linear layer makes of it, times a factor that `scale` gives."""

    def __init__(self, scale: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.scale = scale
        self.numpy = np.random.default_rng(5)
        self.generators = {"torch": torch.Generator().manual_seed(5)}

    def forward(self, x: torch.Tensor, box: Any) -> torch.Tensor:
        made = torch.relu(self.linear(x))
        result: torch.Tensor = x + made * self.scale(self, box, made)
        return result


class Model(torch.nn.Module):
    """Layers that get the same container, and a loss with what is in it in the end."""

    def __init__(
        self,
        scale: Callable[..., Any] = lambda *_: 1.0,
        box: Callable[[], Any] = dict,
        loss: Callable[[Any], Any] = lambda box: 0.0,
        skips: Callable[[int, int], bool] = lambda call, layer: False,
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.layers = torch.nn.ModuleList(Layer(scale) for _ in range(LAYERS))
        self.make_box, self.loss, self.skips = box, loss, skips
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        call, self.calls = self.calls, self.calls + 1
        box = self.make_box()
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            if not self.skips(call, number):
                x = layer(x, box)
        loss: torch.Tensor = x.square().mean() + self.loss(box)
        return loss


def append(_: Layer, box: list[Any], made: torch.Tensor) -> float:
    box.append(made.square().mean())
    return 1.0


def add_up(_: Layer, box: dict[str, Any], made: torch.Tensor) -> float:
    box["sum"] = box.get("sum", 0.0) + made.square().mean()
    return 1.0


def count(_: Layer, box: dict[str, int], __: torch.Tensor) -> float:
    box["calls"] = box.get("calls", 0) + 1
    return 0.5 * box["calls"]


def count_in_a_list(_: Layer, box: list[int], __: torch.Tensor) -> float:
    box.append(1)
    return 0.5 * len(box)


def use_all(_: Layer, box: list[torch.Tensor], made: torch.Tensor) -> torch.Tensor:
    box.append(made.mean())
    return torch.stack(box).sum()


def trained(model: Model, units: int | None) -> list[Any]:
    """Losses and gradients of three steps; units None: one micro-batch after the other."""
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    model = copy.deepcopy(model)
    layer_major = LayerMajor(model, units) if units else None
    found: list[Any] = []
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        batches = [torch.randn(2, WIDTH, generator=draw) for _ in range(MICRO_BATCHES)]
        if layer_major is not None:
            losses = layer_major.step(batches, model)
        else:
            losses = [model(one) for one in batches]
            for loss in losses:
                loss.backward()
        found += [float(loss.detach()) for loss in losses]
        found.append(
            {n: p.grad.tolist() for n, p in model.named_parameters() if p.grad is not None}
        )
        model.zero_grad()
    return found


@pytest.mark.parametrize("units", [2, 3, LAYERS])
@pytest.mark.parametrize(
    ("scale", "box", "loss"),
    [
        (append, list, sum),
        (add_up, dict, lambda box: box["sum"]),
        (count, dict, lambda box: 0.0),
        (count_in_a_list, list, lambda box: 0.0),
        (use_all, list, sum),
    ],
)
def test_what_layers_write_into_lists_and_dicts_is_there_for_the_next(
    scale: Any, box: Any, loss: Any, units: int
) -> None:
    model = Model(scale, box, loss)
    assert trained(model, units) == trained(model, None)


@pytest.mark.parametrize("units", [2, LAYERS])
@pytest.mark.parametrize(
    "scale",
    [
        lambda *_: random.random(),
        lambda *_: float(np.random.rand()),
        lambda layer, *_: float(layer.numpy.random()),
        lambda layer, *_: float(torch.rand((), generator=layer.generators["torch"])),
    ],
    ids=["random", "numpy", "numpy generator", "torch generator"],
)
def test_numbers_that_nothing_counts_make_steps_run_in_the_usual_order(
    scale: Any, units: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(scale)
    expected = trained(model, None)
    with caplog.at_level(logging.WARNING):
        assert trained(model, units) == expected
    assert caplog.text.count("random numbers that are not torch's") == 1


@pytest.mark.parametrize("units", [2, LAYERS])
@pytest.mark.parametrize("skipped", [{0}, {1}, {3}, {2, 3}, {1, 2}, {1, 2, 3}])
def test_layers_that_are_skipped_in_some_passes(
    skipped: set[int], units: int, caplog: pytest.LogCaptureFixture
) -> None:
    """In the second step, after one with all layers: whole units of a micro-batch are empty."""
    model = Model(skips=lambda call, layer: call in (3, 5, 7) and layer in skipped)
    # Steps in units begin their passes in the order of the micro-batches too.
    assert trained(model, units) == trained(model, None)
    assert not caplog.text  # and not in the usual order


class Dropping(Model):
    """Skips layers at random, as transformers' models do, and has dropout."""

    def __init__(self, layerdrop: float) -> None:
        super().__init__(skips=lambda *_: self.training and float(torch.rand([])) < self.layerdrop)
        self.layerdrop = layerdrop
        self.first = torch.nn.Sequential(self.first, torch.nn.Dropout(0.5))
        for layer in self.layers:
            layer.register_forward_hook(lambda _, __, x: torch.nn.functional.dropout(x, 0.1))


@pytest.mark.parametrize("layerdrop", [0.0, 0.5])
def test_a_model_that_skips_layers_at_random_meets_the_same_dropout(
    layerdrop: float, caplog: pytest.LogCaptureFixture
) -> None:
    model = Dropping(layerdrop)
    assert trained(model, 2) == trained(model, None)
    assert ("skips layers at random" in caplog.text) is (layerdrop > 0)


def test_a_state_that_layers_keep_in_an_attribute_is_refused() -> None:
    """The model sets it back when a pass begins; in units other passes have begun meanwhile."""

    def kept(layer: Layer, _: Any, made: torch.Tensor) -> torch.Tensor:
        scale = vars(layer).get("state", torch.ones(1)) + made.mean()
        vars(layer)["state"] = scale
        return scale

    class Resets(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                vars(layer).pop("state", None)
            return super().forward(x)

    model = Resets(kept)
    trained(model, None)
    with pytest.raises(ConfigurationError, match="used what another one has computed"):
        trained(model, 2)
