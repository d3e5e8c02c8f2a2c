# SPDX-License-Identifier: Apache-2.0
"""What a script does to parameters on a tier holds, as without: whatever way, at any moment."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import offload_optimizer, offload_parameters

HIDDEN, LAYERS, STEPS = 16, 6, 3


class Layer(torch.nn.Module):
    """With a parameter of one element, beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.up = torch.nn.Linear(HIDDEN, HIDDEN)
        self.gate = torch.nn.Parameter(torch.full((1,), 0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate * torch.tanh(self.up(self.norm(x)))


class Net(torch.nn.Module):
    """Layers between what stays in memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = torch.nn.Linear(HIDDEN, HIDDEN)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.last = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x).square().mean()


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(step))


def values(param: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-0.3, 0.4, param.numel()).reshape(param.shape)


def _swap(param: torch.nn.Parameter) -> None:
    torch.utils.swap_tensors(param, torch.nn.Parameter(values(param)))


def _numpy(param: torch.nn.Parameter) -> None:
    param.detach().numpy()[...] = values(param).numpy()


def _add_to_data(param: torch.nn.Parameter) -> None:
    param.data += 0.125  # as PEFT merges


def _normal(param: torch.nn.Parameter) -> None:
    torch.manual_seed(2)
    torch.nn.init.normal_(param, std=0.1)


def _vector(param: torch.nn.Parameter) -> None:
    torch.nn.utils.vector_to_parameters(values(param).flatten(), [param])


def _permute(param: torch.nn.Parameter) -> None:
    param.data = param.data.view(-1).flip(0).mul(0.9).view(param.shape)


def _transpose(param: torch.nn.Parameter) -> None:
    param.data = param.data.t()  # the same memory


WAYS: dict[str, Callable[[torch.nn.Parameter], Any]] = {
    "p.data = t": lambda p: setattr(p, "data", values(p)),
    "p.data = p.data.t()": _transpose,
    "p.data = f(p.data)": _permute,
    "set_": lambda p: p.set_(values(p)),
    "swap_tensors": _swap,
    "vector_to_parameters": _vector,
    "copy_": lambda p: p.copy_(values(p)),
    "mul_": lambda p: p.mul_(0.5),
    "fill_": lambda p: p.fill_(0.1),
    "zero_": lambda p: p.zero_(),
    "clamp_": lambda p: p.clamp_(-0.1, 0.1),
    "p[...] = t": lambda p: p.__setitem__(..., values(p)),
    "init.normal_": _normal,
    "foreach": lambda p: torch._foreach_mul_([p], 0.5),
    "p.data.mul_": lambda p: p.data.mul_(0.5),
    "p.data += t": _add_to_data,
    "p.view(-1).mul_": lambda p: p.view(-1).mul_(0.5),
    "numpy": _numpy,
}
MOMENTS = ("before", "after backward", "between", "after the step", "after evaluation", "forgotten")
DOORS = ("parameters", "parameters states")
WHERE = ((0, "gate"), (3, "up.weight"), (5, "up.weight"))


def train(
    write: Callable[[Net], None], moment: str, door: str, directory: Path | None, mode: str = "ssd"
) -> dict[str, torch.Tensor] | str:
    """Weights behind a few steps; or what autograd says of it.

    Args:
        write: called once, in the second step.
        moment: one of MOMENTS.
        door: what is on a tier.
        directory: for what is on a tier.
        mode: of its tier.
    """
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = {"mode": mode} | ({"directory": directory} if mode == "ssd" else {})
    with contextlib.ExitStack() as handles:
        if "parameters" in door:
            handles.enter_context(offload_parameters(model, **settings))
        if "states" in door:
            sizes = {"bucket_bytes": 1 << 11, "window_bytes": 1 << 11}
            handles.enter_context(offload_optimizer(optimizer, **settings, **sizes))

        def at(now: str, step: int) -> None:
            if (now, step) == (moment, 1):
                with torch.no_grad():
                    write(model)

        try:
            for step in range(STEPS):
                at("before", step)
                loss = model(batch(step))
                at("between", step)
                loss.backward()
                at("after backward", step)
                optimizer.step()
                optimizer.zero_grad()
                at("after the step", step)
                with torch.no_grad():
                    model(batch(9))
                at("after evaluation", step)
                loss = model(batch(8))
                at("forgotten", step)
                del loss
        except RuntimeError as error:
            return str(error).splitlines()[0][:60]
        return {name: value.clone() for name, value in model.state_dict().items()}


def _to_one(layer: int, name: str, way: str, model: Net) -> None:
    WAYS[way](model.layers[layer].get_parameter(name))


@functools.cache
def expected(layer: int, name: str, way: str, moment: str) -> dict[str, torch.Tensor] | str:
    return train(functools.partial(_to_one, layer, name, way), moment, "", None)


@functools.cache
def untouched() -> dict[str, torch.Tensor]:
    found = train(lambda _: None, "before", "", None)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("door", DOORS)
def test_what_is_written_holds(door: str, way: str, moment: str, tmp_path: Path) -> None:
    """To one parameter alone: who writes to the first ones has shown the rest, perhaps."""
    for layer, name in WHERE[: 2 if "states" in door else 3]:
        if name == "gate" and way == "p.data = p.data.t()":
            continue  # it has one element
        wanted = expected(layer, name, way, moment)
        write = functools.partial(_to_one, layer, name, way)
        found = train(write, moment, door, tmp_path, "ssd" if layer == 3 else "host")
        assert_same(found, wanted, f"{layer}.{name}")
        if isinstance(wanted, dict):
            assert not all(torch.equal(wanted[k], v) for k, v in untouched().items())


def assert_same(
    found: dict[str, torch.Tensor] | str, wanted: dict[str, torch.Tensor] | str, what: str = ""
) -> None:
    if isinstance(found, str) or isinstance(wanted, str):
        assert found == wanted, what
        return
    for key, value in wanted.items():
        assert torch.equal(found[key], value), f"{what}: {key}"
