# SPDX-License-Identifier: Apache-2.0
"""An MLP over tiles of tokens, against the same in one piece and in fp64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from megatron.offload.ops.tiled_mlp import Tiles, tile_tokens_of, tiled

HIDDEN, WIDE, TOKENS = 32, 96, 300
TILES = (100, 64, 7)  # tokens: of 300 an equal part, and others


class Gated(torch.nn.Module):
    """A gated MLP as Llama has one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(HIDDEN, WIDE, bias=False)
        self.up = torch.nn.Linear(HIDDEN, WIDE)
        self.down = torch.nn.Linear(WIDE, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def mlp(dtype: torch.dtype = torch.float32) -> Gated:
    torch.manual_seed(1)
    return Gated().to(dtype)


def tokens(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(2, TOKENS // 2, HIDDEN).to(dtype).requires_grad_()


Found = dict[str, torch.Tensor]


def passes(module: Gated, x: torch.Tensor, tile_tokens: int | None, **autocast: Any) -> Found:
    """Result and gradients. None: in one piece."""
    with torch.autocast("cpu", enabled=bool(autocast), **autocast):
        y = (
            module(x)
            if tile_tokens is None
            else tiled(module, x, [*module.parameters()], Tiles(tile_tokens))
        )
    weight = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
    (y * weight).sum().backward()
    assert y.shape == x.shape
    found = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
    if x.grad is not None:
        found["x"] = x.grad
    return {"y": y.detach(), **found}


def error(found: Found, exact: Found) -> float:
    """Root of the mean of squared errors, of all gradients, relative."""
    off = sum(float((found[n].double() - exact[n]).square().sum()) for n in exact if n != "y")
    return (off / sum(float(exact[n].square().sum()) for n in exact if n != "y")) ** 0.5


@pytest.mark.parametrize("tile_tokens", TILES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_as_near_to_fp64_as_those_of_one_piece(
    dtype: torch.dtype, tile_tokens: int
) -> None:
    module, x = mlp(dtype), tokens(dtype)
    exact = passes(copy.deepcopy(module).double(), x.detach().double().requires_grad_(), None)
    eager = passes(copy.deepcopy(module), x.detach().clone().requires_grad_(), None)
    found = passes(module, x, tile_tokens)
    assert found.keys() == exact.keys()
    assert error(found, exact) <= 1.5 * error(eager, exact)
    torch.testing.assert_close(found["y"], eager["y"])


def test_autocast_is_in_backward_what_it_was_in_forward() -> None:
    bf16 = {"dtype": torch.bfloat16}
    eager = passes(mlp(), tokens(), None, **bf16)
    found = passes(mlp(), tokens(), 100, **bf16)
    exact = passes(mlp(torch.float64), tokens().detach().double().requires_grad_(), None)
    assert found["y"].dtype == eager["y"].dtype == torch.bfloat16
    module, seen = mlp(), list[torch.dtype]()
    module.gate.register_forward_hook(lambda *call: seen.append(call[-1].dtype))
    passes(module, tokens(), 100, **bf16)
    assert seen == [torch.bfloat16] * 6
    assert 1e-4 < error(found, exact) <= 1.5 * error(eager, exact)


def test_a_parameter_hears_of_its_gradient_once() -> None:
    module, heard = mlp(), list[str]()
    for name, one in module.named_parameters():
        one.register_post_accumulate_grad_hook(lambda _, name=name: heard.append(name))
    passes(module, tokens(), 10)
    assert sorted(heard) == sorted(name for name, _ in module.named_parameters())


def test_what_is_frozen_gets_no_gradient() -> None:
    module, x = mlp(), tokens().detach()
    module.gate.requires_grad_(False)
    expected = passes(copy.deepcopy(module), x, None)
    found = passes(module, x, 100)
    assert found.keys() == expected.keys() == {"y", "up.weight", "up.bias", "down.weight"}
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one)


def test_two_parameters_with_one_gradient_have_it_each() -> None:
    """Autograd may give both the same tensor."""
    a, b = (torch.nn.Parameter(torch.ones(HIDDEN)) for _ in range(2))
    x = tokens()
    tiled(lambda tile: tile * (a + b), x, [a, b], Tiles(100)).sum().backward()
    assert a.grad is not None and b.grad is not None
    torch.testing.assert_close(a.grad, x.detach().sum((0, 1)))
    assert torch.equal(a.grad, b.grad)


def test_only_the_input_is_kept() -> None:
    module, x = mlp(), tokens()
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        tiled(module, x, [*module.parameters()], Tiles(100))
    own = {one.data_ptr() for one in module.parameters()}
    others = [one for one in kept if one.data_ptr() not in own]
    assert {one.data_ptr() for one in others} == {x.data_ptr()}


def test_what_was_dropped_in_forward_is_dropped_in_backward() -> None:
    dropout, x = torch.nn.Dropout(0.5), tokens()
    torch.manual_seed(6)
    y = tiled(lambda tile: dropout(tile), x, [], Tiles(100))
    state = torch.get_rng_state()
    torch.rand(7)
    y.sum().backward()
    assert x.grad is not None and 0.4 < float((y != 0).float().mean()) < 0.6
    assert torch.equal(x.grad != 0, y != 0)
    later = torch.rand(3)
    torch.set_rng_state(state)
    torch.rand(7)
    assert torch.equal(later, torch.rand(3)), "backward leaves the generator as it was"


def test_one_tile_is_no_tile() -> None:
    module, x, seen = mlp(), tokens(), list[torch.Size]()
    module.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape))
    y = tiled(module, x, [*module.parameters()], Tiles(TOKENS))
    assert seen == [x.shape] and torch.equal(y, module(x))
    tiled(module, x, [*module.parameters()], Tiles(299))
    assert seen[2:] == [(1, 150, HIDDEN)] * 2, "of equal length"


def test_tiles_are_as_long_as_tokens_are_wide() -> None:
    assert (tile_tokens_of(4096), tile_tokens_of(64)) == (4096, 1024)
