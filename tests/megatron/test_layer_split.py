# SPDX-License-Identifier: Apache-2.0
"""The attention and the MLP of a layer get placements of their own, where a policy wants that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.offload import OffloadConfig, OffloadEngine, Placement, Scope
from megatron.offload.integration.megatron import layer_hooks as layer_module
from megatron.offload.integration.megatron.layer_hooks import LayerHooks

HIDDEN = 32


class Layer(torch.nn.Module):
    """Named as Megatron's is, where it matters; `attention` and `mlp` tell what each part saves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.input_layernorm = torch.nn.LayerNorm(HIDDEN)
        self.attention = torch.nn.Linear(HIDDEN, HIDDEN)
        self.pre_mlp_layernorm: torch.nn.Module | None = torch.nn.LayerNorm(HIDDEN)
        self.mlp = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        x = x + self.attention(self.input_layernorm(x)).sigmoid()
        norm = self.pre_mlp_layernorm
        return x + self.mlp(norm(x) if norm is not None else x).tanh(), None


class Divider:
    """Wants parts; sends those that it is told to host memory, and notes what it was asked."""

    divides_layers = True

    def __init__(self, moving: set[str]) -> None:
        self.moving = moving
        self.asked: dict[str, int] = {}

    def place_layer(self, scope: Scope) -> Placement:
        return Placement.KEEP

    def place(self, scope: Scope, num_bytes: int) -> Placement:
        self.asked[scope.part] = self.asked.get(scope.part, 0) + 1
        return Placement.HOST if scope.part in self.moving else Placement.KEEP


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> Iterator[Layer]:
    layer = Layer()
    monkeypatch.setattr(layer_module, "layer_names", lambda _: {layer: "decoder.1"})
    yield layer


def run(layer: Layer, policy: Divider | None) -> tuple[list[torch.Tensor], int]:
    """One step. Gradients, and how many storages moved."""
    config = OffloadConfig(mode="host", min_bytes=1, host_budget=1 << 24)
    engine = OffloadEngine(config, policy=policy)
    engine.exclude(layer.parameters())
    calls = LayerHooks(engine, [layer])
    x = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(2), requires_grad=True)
    layer.zero_grad()
    with engine.step():
        with engine.forward(Scope()) as save_order:
            output, _ = calls.layer(Layer.forward, layer, (x * 1,), {})
        with engine.backward(save_order):
            output.sum().backward()
    moved = engine.statistics.offloaded_storages
    calls.close()
    engine.close()
    assert not (layer.pre_mlp_layernorm or layer)._forward_pre_hooks
    return [p.grad.clone() for p in (x, *layer.parameters()) if p.grad is not None], moved


def test_each_storage_belongs_to_one_group(block: Layer) -> None:
    whole, num_all = run(block, None)
    moved = {}
    for moving in ({"attention"}, {"mlp"}, {"attention", "mlp"}):
        gradients, moved[tuple(sorted(moving))] = run(block, Divider(moving))
        assert all(map(torch.equal, gradients, whole))
    assert moved["attention",] > 0 and moved["mlp",] > 0
    assert moved["attention",] + moved["mlp",] == moved["attention", "mlp"] == num_all


def test_attention_comes_first_and_what_both_parts_use_is_the_mlps(block: Layer) -> None:
    policy = Divider(set())
    run(block, policy)
    assert list(policy.asked) == ["attention", "mlp"]
    # Norm: input, mean, deviation; linear: input; sigmoid or tanh: its result. The middle of the
    # layer is the input of the second norm.
    assert policy.asked == {"attention": 5, "mlp": 5}


def test_a_layer_without_a_middle_is_not_divided(block: Layer) -> None:
    block.pre_mlp_layernorm = None
    policy = Divider({""})
    _, moved = run(block, policy)
    assert list(policy.asked) == [""] and moved == run(block, None)[1]


def test_a_middle_that_autograd_does_not_know_divides_nothing(block: Layer) -> None:
    policy = Divider({""})
    forward = Layer.forward

    def detached(layer: Layer, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert layer.pre_mlp_layernorm is not None
        layer.pre_mlp_layernorm(x.detach())
        norm, layer.pre_mlp_layernorm = layer.pre_mlp_layernorm, None
        try:
            return forward(layer, x)
        finally:
            layer.pre_mlp_layernorm = norm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layer, "forward", detached)
        run(block, policy)
    assert "attention" not in policy.asked


def test_a_policy_that_wants_no_groups_hooks_nothing(block: Layer, tmp_path: Path) -> None:
    engine = OffloadEngine(OffloadConfig(mode="host", min_bytes=1, host_budget=1 << 24))
    calls = LayerHooks(engine, [block])
    assert block.pre_mlp_layernorm is not None and not block.pre_mlp_layernorm._forward_pre_hooks
    calls.close()
    engine.close()
