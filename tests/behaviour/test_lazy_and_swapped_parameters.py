# SPDX-License-Identifier: Apache-2.0
"""Parameters that get their memory in the first forward pass, or another's in between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import offload_activations
from tests.support.same_training import digest

WIDTH, LAYERS = 32, 3
WAYS: dict[str, dict[str, Any]] = {
    "moves": {},
    "stays": {"mode": "keep"},
    "recomputes": {"mode": "keep", "recompute_layers": "all"},
}


class Layer(torch.nn.Module):
    """A linear layer, lazy or not, and two norms."""

    def __init__(self, *, lazy: bool) -> None:
        super().__init__()
        self.linear: torch.nn.Module = torch.nn.Linear(WIDTH, WIDTH)
        self.batch_norm: torch.nn.Module = torch.nn.BatchNorm1d(WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        if lazy:
            self.linear, self.batch_norm = torch.nn.LazyLinear(WIDTH), torch.nn.LazyBatchNorm1d()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.nn.functional.gelu(self.linear(self.norm(x)))
        out: torch.Tensor = self.batch_norm(x)
        return out


def net(*, lazy: bool = False) -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(*(Layer(lazy=lazy) for _ in range(LAYERS)))


def noise(seed: int) -> torch.Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_of(model: torch.nn.Module, seed: int, *, autocast: bool) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss: torch.Tensor = model(noise(seed)).float().square().mean()
    return loss


def offloaded(
    model: torch.nn.Module, folder: Path, way: str | None
) -> contextlib.AbstractContextManager[Any]:
    if way is None:
        return contextlib.nullcontext()
    directory = folder if "mode" not in WAYS[way] else None
    return offload_activations(model, directory, min_bytes=1, **WAYS[way])


@pytest.fixture(autouse=True)
def swaps() -> Iterator[None]:
    """`Module.to` and `load_state_dict` swap all parameters, as they do those of a subclass."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_lazy_modules_get_their_parameters_in_the_first_pass(
    way: str, autocast: bool, tmp_path: Path
) -> None:
    def run(way: str | None) -> list[str]:
        model, found = net(lazy=True), []
        with offloaded(model, tmp_path, way) as handle:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for seed in range(3):
                loss = loss_of(model, seed, autocast=autocast)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                found.append(digest(loss))
            if way is not None:
                moved = ("offloaded_bytes", "replayed_bytes", "recomputed_layers")
                assert any(handle.statistics[name] for name in moved)
        return [*found, *(digest(one) for one in model.parameters())]

    assert run(way) == run(None)


def load(model: torch.nn.Module) -> None:
    model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()})


CHANGES: dict[str, Callable[[torch.nn.Module], object]] = {
    "load_state_dict": load,
    "to": lambda model: model.to(torch.float64).to(torch.float32),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("after_backward", [True, False], ids=["after backward", "instead of it"])
def test_parameters_may_be_swapped_between_steps(
    way: str,
    autocast: bool,
    change: Callable[[torch.nn.Module], object],
    after_backward: bool,
    tmp_path: Path,
) -> None:
    def run(way: str | None) -> list[str]:
        model, found = net(), []
        with offloaded(model, tmp_path, way):
            for seed in range(3):
                loss = loss_of(model, seed, autocast=autocast)
                found.append(digest(loss))
                if after_backward or seed == 2:
                    loss.backward()  # type: ignore[no-untyped-call]
                del loss
                change(model)
        return [*found, *(digest(one.grad) for one in model.parameters() if one.grad is not None)]

    assert run(way) == run(None)
