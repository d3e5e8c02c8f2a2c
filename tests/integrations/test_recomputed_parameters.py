# SPDX-License-Identifier: Apache-2.0
"""Layers that run again in backward and write to their parameters in their forward: same bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import ChangedInPlaceError, offload_activations
from megatron.offload.integration.torch import parameter_snapshot
from tests.support.same_training import digest, gradients_of

HIDDEN, TOKENS = 32, 16


class Codebook(torch.nn.Module):
    """Moves a parameter towards what it is given, beside its gradient, as a VQ-VAE may."""

    def __init__(self, size: int, counted: bool) -> None:
        super().__init__()
        self.project = torch.nn.Linear(HIDDEN, HIDDEN)
        self.codes = torch.nn.Parameter(torch.randn(size, HIDDEN))
        self.bias = torch.nn.Parameter(torch.zeros(HIDDEN))
        self.counted = counted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.project(x)
        made = x + self.codes.mean(0) + self.bias
        mean = x.detach().mean((0, 1))
        if self.counted:
            with torch.no_grad():
                self.bias.lerp_(mean, 0.5)
        self.codes.data.lerp_(mean, 0.25)
        return made.tanh()


def trained_codebooks(
    size: int, counted: bool, directory: Path, recompute: str | None
) -> list[Any]:
    torch.manual_seed(3)
    first = torch.nn.Linear(HIDDEN, HIDDEN)
    net = torch.nn.Sequential(
        first, torch.nn.Sequential(*(Codebook(size, counted) for _ in range(3)))
    )
    found = []
    layers = ["Codebook"]
    with offload_activations(
        net, directory, layers=layers, min_bytes=1, recompute_layers=recompute
    ) as offload:
        for _ in range(3):
            loss = net(torch.randn(2, TOKENS, HIDDEN)).square().mean()
            loss.backward()
            codes = [digest(one) for one in net.parameters()]
            found.append((digest(loss), gradients_of(net), codes))
            net.zero_grad()
        assert offload.statistics["recomputed_layers"] == (3 if recompute else 0)
    return found


@pytest.mark.parametrize("counted", [False, True])
def test_a_layer_runs_again_with_the_parameters_that_it_writes_to(
    counted: bool, tmp_path: Path
) -> None:
    expected = trained_codebooks(8, counted, tmp_path, None)
    assert trained_codebooks(8, counted, tmp_path, "all") == expected


def test_a_layer_that_writes_to_a_large_parameter_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameter_snapshot, "MOST_COPIED_BYTES", 1 << 16)
    with pytest.raises(ChangedInPlaceError, match="writes to its parameter codes while it runs"):
        trained_codebooks(2000, False, tmp_path, "all")


class Renormed(torch.nn.Module):
    """Renorms rows of a weight in its forward, which autograd counts though no row is too long."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.rows = torch.nn.Embedding(TOKENS, HIDDEN, max_norm=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(x) * self.rows(torch.arange(TOKENS))


class Renorming(torch.nn.Module):
    """Begins to divide a weight by its norm when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(HIDDEN, HIDDEN)
        self.divides = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.divides:
            with torch.no_grad():
                self.project.weight.div_(self.project.weight.norm())
        return x + self.project(x).tanh()


class Layers(torch.nn.Module):
    layers: Any

    def __init__(self, kind: type[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(kind() for _ in range(2))
        self.calls_again = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.layers[0](x) if self.calls_again else x


def found_in(
    net: Layers, params: Mapping[str, torch.Tensor], step: int, *, retains: bool = False
) -> list[str]:
    """Digests of what a pass with these tensors as its parameters gives, and leaves of them."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(2, TOKENS, HIDDEN, generator=generator).to(next(iter(params.values())).dtype)
    result = torch.func.functional_call(net, dict(params), (x.requires_grad_(),))
    loss = result.float().square().mean()
    leaves = [one for one in params.values() if one.is_leaf] or [x]
    grads = [
        one
        for keeps in ((True, False) if retains else (False,))
        for one in torch.autograd.grad(loss, [*leaves, x], retain_graph=keeps)
    ]
    return [digest(one) for one in (loss, *grads, *params.values())]


def in_place_of(param: torch.Tensor, *, kind: str) -> torch.Tensor:
    """What a script may put in a parameter's place."""
    leaf = (param.detach() * 1.01).to(param.dtype).requires_grad_()
    if kind == "computed":
        return leaf * 1
    return leaf.detach().flatten().view_as(param).requires_grad_() if kind == "view" else leaf


@pytest.mark.parametrize("kind", ["leaf", "computed", "view"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_may_write_to_what_functional_call_puts_in_a_parameters_place(
    dtype: torch.dtype, kind: str, tmp_path: Path
) -> None:
    def run(recompute: str | None) -> list[list[str]]:
        torch.manual_seed(3)
        net = Layers(Renormed).to(dtype)
        with offload_activations(net, tmp_path, min_bytes=1, recompute_layers=recompute) as offload:
            found = []
            for step in range(2):
                params = {name: in_place_of(one, kind=kind) for name, one in net.named_parameters()}
                found.append(found_in(net, params, step))
            assert offload.statistics["recomputed_layers"] == (2 if recompute else 0)
        return found

    assert run("all") == run(None)


def test_a_layer_may_write_to_a_parameter_and_change_it_in_later_calls_only(
    tmp_path: Path,
) -> None:
    def run(recompute: str | None) -> list[list[str]]:
        torch.manual_seed(3)
        net = Layers(Renormed).to(torch.bfloat16)
        for layer in net.layers:
            layer.rows.weight.data.mul_(0.01)
        with offload_activations(net, tmp_path, min_bytes=1, recompute_layers=recompute):
            found = []
            for step in range(3):
                found.append(found_in(net, dict(net.named_parameters()), step))
                for layer in net.layers:
                    layer.rows.weight.data.mul_(300)
        return found

    assert run("all") == run(None)


def test_a_layer_that_writes_to_a_parameter_may_get_another_before_it(tmp_path: Path) -> None:
    def run(recompute: str | None) -> list[list[str]]:
        torch.manual_seed(3)
        net = Layers(Renormed).to(torch.bfloat16)
        with offload_activations(net, tmp_path, min_bytes=1, recompute_layers=recompute):
            params = dict(net.named_parameters())
            found = [found_in(net, params, 0)]
            for layer in net.layers:
                layer.scale = torch.nn.Parameter(torch.ones((), dtype=torch.bfloat16))
                layer.rows.weight.data.mul_(3)
            return [*found, found_in(net, params, 1)]

    assert run("all") == run(None)


def test_a_layer_that_writes_to_a_parameter_runs_again_twice_and_is_called_twice(
    tmp_path: Path,
) -> None:
    def run(recompute: str | None) -> list[list[str]]:
        torch.manual_seed(3)
        net = Layers(Renormed)
        params = dict(net.named_parameters())
        with offload_activations(net, tmp_path, min_bytes=1, recompute_layers=recompute):
            found = [found_in(net, params, step, retains=True) for step in range(2)]
            net.calls_again = True  # and the second call leaves the rows as they are
            return [*found, *(found_in(net, params, step) for step in range(2))]

    assert run("all") == run(None)


def test_a_parameter_that_the_layer_writes_to_and_the_script_too_is_told_of(
    tmp_path: Path,
) -> None:
    torch.manual_seed(3)
    net = Layers(Renormed)
    with offload_activations(net, tmp_path, min_bytes=1, recompute_layers="all"):
        x = torch.randn(2, TOKENS, HIDDEN, requires_grad=True)
        loss = net(x).square().mean()
        with torch.no_grad():
            net.layers[0].rows.weight.mul_(1.1)
        with pytest.raises(
            ChangedInPlaceError, match="weight, of a layer that is to be recomputed"
        ):
            loss.backward()


def test_a_layer_that_begins_to_write_to_a_parameter_is_told_of_and_runs_again_from_then_on(
    tmp_path: Path,
) -> None:
    def run(recompute: str | None) -> list[list[str]]:
        torch.manual_seed(3)
        net = Layers(Renorming)
        params = dict(net.named_parameters())
        with offload_activations(net, tmp_path, min_bytes=1, recompute_layers=recompute):
            found_in(net, params, 0)
            net.layers[1].divides = True
            if recompute is None:
                found_in(net, params, 1)
            else:
                with pytest.raises(ChangedInPlaceError, match="writes to its parameter weight"):
                    found_in(net, params, 1)
            return [found_in(net, params, step) for step in range(2)]

    assert run("all") == run(None)
