# SPDX-License-Identifier: Apache-2.0
"""Views of parameters on a tier that other code makes between passes, and holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import offload_parameters
from megatron.offload.integration.torch.parameter_offload import ParameterOffload
from tests.behaviour.test_parameters_that_others_write import Net, batch

SETTINGS: dict[str, dict[str, Any]] = {"ssd": {"mode": "ssd"}, "host": {"mode": "host"}}
PENALTIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "square": lambda weight: weight.square().sum(),
    "flat": lambda weight: weight.view(-1).square().sum(),
    "a row": lambda weight: weight[0].square().sum(),
    "transposed": lambda weight: (weight.t() * weight.t()).sum(),
    "detached too": lambda weight: (weight * weight.detach()).view(-1).square().sum(),
}


def opened(model: Net, mode: str | None, directory: Path) -> ParameterOffload | None:
    if mode is None:
        return None
    return offload_parameters(model, directory if mode == "ssd" else None, **SETTINGS[mode])


@pytest.mark.parametrize("mode", SETTINGS)
@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_penalty_may_be_computed_of_views_before_the_model_is_called(
    penalty: str, mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its backward pass comes after those of the layers, whose parameters are away by then."""

    def train(mode: str | None) -> list[torch.Tensor]:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        handle = opened(model, mode, tmp_path)
        for step in range(3):
            of_weights = [PENALTIES[penalty](one) for one in model.parameters() if one.dim() == 2]
            loss = sum(of_weights) + model(batch(step))
            loss.backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        if handle is not None:
            handle.close()
        return [one.detach() for one in model.parameters()]

    assert all(map(torch.equal, train(mode), train(None)))
    assert "other code holds a view" not in caplog.text


def weight_of(model: Net) -> torch.Tensor:
    return next(one for one in model.layers[2].parameters() if one.dim() == 2)


@pytest.mark.parametrize("mode", SETTINGS)
@pytest.mark.parametrize("steps", [0, 1])
def test_an_array_of_numpy_is_the_parameter_as_long_as_it_is_held(
    steps: int, mode: str, tmp_path: Path
) -> None:
    def train(mode: str | None) -> list[torch.Tensor]:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def step(number: int) -> None:
            model(batch(number)).backward()
            optimizer.step()
            optimizer.zero_grad()

        handle = opened(model, mode, tmp_path)
        step(0)
        array = weight_of(model).detach().numpy()
        for number in range(steps):
            step(number + 1)
        with torch.no_grad():
            model(batch(5))
        seen = torch.tensor(array)
        array *= 0.5
        found = [seen, model(batch(6)).detach()]
        step(7)
        if handle is not None:
            window = handle.window
            assert window is not None
            held = window.memory_bytes
            del array
            step(8)
            model(batch(9))
            for unit in window.units:
                unit.wait_for_write()
            assert window.memory_bytes < held
            handle.close()
        else:
            step(8)
        return [*found, *(one.detach() for one in model.parameters())]

    assert all(map(torch.equal, train(mode), train(None)))


@pytest.mark.parametrize("is_on_tier", [False, True], ids=["in memory", "on a tier"])
def test_a_view_that_is_held_over_a_step_is_told_of_once(
    is_on_tier: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with offload_parameters(model, tmp_path):
        for step in range(4):
            model(batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if is_on_tier:
                with torch.no_grad():
                    model(batch(step))
            if step == 1:
                held = [weight_of(model).detach(), model.first.weight.detach()]
                assert "holds" not in caplog.text
    said = [one for one in caplog.messages if "other code holds a view" in one]
    assert len(said) == 1 and "those of unit 3 of 6 since before a step" in said[0]
    assert ("what it writes there is lost" if is_on_tier else "they stay in memory") in said[0]
    assert len(held) == 2
