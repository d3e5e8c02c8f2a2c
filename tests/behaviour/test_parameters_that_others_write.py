# SPDX-License-Identifier: Apache-2.0
"""What a script does to parameters on a tier holds, as without: whatever way, at any moment."""

from __future__ import annotations

import copy
import functools
import io
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support.training import moving

HIDDEN, LAYERS = 16, 6
SMALL = {"bucket_bytes": 1 << 12, "window_bytes": 1 << 12}  # a bucket is a layer's


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
MOMENTS = ("after backward", "between", "after the step", "after evaluation", "forgotten")
DOORS = ("parameters", "parameters states", "parameters activations")
WHERE = ((0, "gate"), (3, "up.weight"), (5, "up.weight"))  # one of them in each step
Outcome = tuple[list[str], dict[str, torch.Tensor]]  # what autograd says, and weights at the end


def train(way: str | None, moment: str, door: str = "", directory: Path | None = None) -> Outcome:
    """A few steps; but for the first and the last one, a parameter is written in each.

    Args:
        way: how; None: nothing is written.
        moment: one of MOMENTS.
        door: what is on a tier.
        directory: for what is on a tier; None: in host memory.
    """
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    said: list[str] = []
    with moving(door, model, optimizer, directory, states=SMALL):

        def at(now: str) -> None:
            if now == moment and written is not None and way is not None:
                layer, name = written
                with torch.no_grad():
                    WAYS[way](model.layers[layer].get_parameter(name))

        for step, written in enumerate((None, *WHERE, None)):
            if way == "p.data = p.data.t()" and written == (0, "gate"):
                continue  # it has one element
            try:
                loss = model(batch(step))
                at("between")
                loss.backward()
                at("after backward")
                optimizer.step()
                optimizer.zero_grad()
                at("after the step")
                if written is not None:
                    with torch.no_grad():
                        model(batch(9))
                    at("after evaluation")
                    loss = model(batch(8))
                    at("forgotten")
            except RuntimeError as error:
                said.append(f"{step}: {str(error).splitlines()[0][:60]}")
                optimizer.zero_grad()
            del loss
        return said, {name: value.clone() for name, value in model.state_dict().items()}


@functools.cache
def expected(way: str | None, moment: str) -> Outcome:
    return train(way, moment)


def _cases() -> Iterator[Any]:
    """All; of more than parameters each way and each moment at least once without --slow."""
    for door, (number, way), (place, moment) in itertools.product(
        DOORS, enumerate(WAYS), enumerate(MOMENTS)
    ):
        is_refused = moment == "between" or (way, moment) == ("swap_tensors", "forgotten")
        if door == "parameters activations" and is_refused:
            continue  # by autograd, for what it has saved; that is with the offload of activations
        is_slow = door != "parameters" and (number + place) % len(MOMENTS)
        yield pytest.param(door, way, moment, marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.parametrize(("door", "way", "moment"), list(_cases()))
def test_what_is_written_holds(door: str, way: str, moment: str, tmp_path: Path) -> None:
    """To one parameter of a step alone: who writes to the first ones has shown the rest, perhaps.

    Each way and each moment meet both kinds of tiers.
    """
    is_on_ssd = (list(WAYS).index(way) + MOMENTS.index(moment) + DOORS.index(door)) % 2
    found, weights = train(way, moment, door, tmp_path if is_on_ssd else None)
    said, wanted = expected(way, moment)
    assert found == said
    for name, weight in wanted.items():
        assert torch.equal(weights[name], weight), name
    plain = expected(None, moment)[1]
    assert said or not all(torch.equal(wanted[name], weight) for name, weight in plain.items())


def _steps_alone(param: torch.Tensor) -> None:
    """As an optimizer of one parameter that is fused into backward."""
    assert param.grad is not None
    param.data.add_(param.grad, alpha=-0.1)
    param.grad = None


def _hook_each(model: torch.nn.Module) -> None:
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(_steps_alone)


def _hook_next(model: torch.nn.Module) -> None:
    """As LOMO: a parameter is updated when the gradient of the next one is there."""

    def step(gradient: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    _steps_alone(param)
        return gradient

    for param in model.parameters():
        param.register_hook(step)


@pytest.mark.parametrize("hook", [_hook_each, _hook_next])
@pytest.mark.parametrize("is_on_ssd", [False, True], ids=["host", "ssd"])
def test_what_hooks_of_gradients_write_through_data_holds(
    hook: Callable[[torch.nn.Module], None], is_on_ssd: bool, tmp_path: Path
) -> None:
    def run(door: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        model, losses = Net(), []
        hook(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with moving(door, model, optimizer, tmp_path if is_on_ssd else None):
            for step in range(4):
                loss = model(batch(step))
                loss.backward()
                losses.append(loss.detach())
            return losses, {name: value.clone() for name, value in model.state_dict().items()}

    (losses, weights), (expected_losses, expected_weights) = run("parameters"), run("")
    assert losses == expected_losses and losses[0] != losses[-1]
    assert all(torch.equal(weights[name], one) for name, one in expected_weights.items())


def _set(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    param.data = value


def _assign_slice(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    param.data.view(-1)[:] = value.flatten()


LAYERS_WRITE: dict[str, Callable[[torch.nn.Parameter, torch.Tensor], Any]] = {
    "p.data.copy_": lambda param, value: param.data.copy_(value),
    "p.data = t": _set,
    "p.data.view": _assign_slice,
    "p.data.add_": lambda param, value: param.data.add_(value),
    "init": lambda param, value: torch.nn.init.constant_(param.data, float(value.mean())),
    "p.detach": lambda param, value: param.detach().copy_(value),
}


class Norm(Layer):
    """Sets its scale by its first batch, as ActNorm does, and bounds a weight in each pass."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.zeros(HIDDEN))
        self._way = way
        self._is_new = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_new:
            self._is_new = False
            LAYERS_WRITE[self._way](self.scale, 1 / (x.detach().std(0) + 1e-2))
        self.up.weight.data.clamp_(-0.2, 0.2)
        return super().forward(x * self.scale)


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("way", LAYERS_WRITE)
def test_what_a_layer_writes_to_itself_in_its_forward_holds(
    way: str, recomputes: bool, tmp_path: Path
) -> None:
    """Through `param.data` too, which leaves the version of the parameter alone."""

    def run(door: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        model, losses = Net(), []
        model.layers = torch.nn.ModuleList(Norm(way) for _ in range(LAYERS))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        is_on_ssd = list(LAYERS_WRITE).index(way) % 2
        with moving(door, model, optimizer, tmp_path if is_on_ssd else None):
            kinds: set[type] = set()
            optimizer.register_step_pre_hook(lambda *_: kinds.update(map(type, model.parameters())))
            for step in range(3):
                x = model.first(batch(step))
                for layer in model.layers:
                    x = checkpoint(layer, x, use_reentrant=False) if recomputes else layer(x)
                loss = model.last(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            assert kinds == {torch.nn.Parameter}  # else optimizers of torch take other paths
            return losses, {name: value.clone() for name, value in model.state_dict().items()}

    (losses, weights), (expected_losses, expected_weights) = run("parameters"), run("")
    assert losses == expected_losses and len(set(losses)) == len(losses)
    assert all(torch.equal(weights[name], one) for name, one in expected_weights.items())
    assert float(weights["layers.3.up.weight"].abs().max()) > 0.19


def test_a_copy_of_a_layer_that_computes_is_plain(tmp_path: Path) -> None:
    """While parameters are watched: what is copied or saved then has parameters like any other."""
    model, found = Net(), []

    def copy_it(layer: torch.nn.Module, *_: Any) -> None:
        file = io.BytesIO()
        torch.save(layer.gate, file)
        file.seek(0)
        found.append((copy.deepcopy(layer.up), torch.load(file, weights_only=False)))

    with moving("parameters", model, torch.optim.SGD(model.parameters()), tmp_path):
        for layer in model.layers:
            layer.norm.register_forward_hook(functools.partial(_call, copy_it, layer))
        with torch.no_grad():
            model(batch(0))
    assert len(found) == LAYERS
    for layer, (up, gate) in zip(model.layers, found, strict=True):
        assert torch.equal(up.weight, layer.up.weight) and torch.equal(gate, layer.gate)
        for param in (up.weight, up.bias, gate):
            assert type(param) is torch.nn.Parameter
            assert not {"_away", "_read"} & vars(param).keys()


def _call(function: Callable[[torch.nn.Module], None], layer: torch.nn.Module, *_: Any) -> None:
    function(layer)


class Spectral(torch.nn.Module):
    """A layer with complex weights, as Fourier neural operators have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(HIDDEN // 2 + 1, dtype=torch.complex64))
        self.up = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.up(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=HIDDEN)))


@pytest.mark.parametrize("door", DOORS)
def test_complex_parameters_move(door: str, tmp_path: Path) -> None:
    def run(streams: str) -> dict[str, torch.Tensor]:
        model = Net()
        model.layers = torch.nn.ModuleList(Spectral() for _ in range(LAYERS))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with moving(streams, model, optimizer, tmp_path, states=SMALL):
            for step in range(3):
                model(batch(step)).backward()
                with torch.no_grad():
                    model.layers[step].weight.mul_(0.5)
                optimizer.step()
                optimizer.zero_grad()
        return {name: one.detach().clone() for name, one in model.state_dict().items()}

    found, expected = run(door), run("")
    assert all(torch.equal(found[name], one) for name, one in expected.items())
