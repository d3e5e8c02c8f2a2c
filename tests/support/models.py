# SPDX-License-Identifier: Apache-2.0
"""A small plain-torch model and one step of it, with and without an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.offload import OffloadEngine, Scope
from megatron.offload.activations.placement.policy import Placement
from megatron.offload.tiers.ssd import SsdTier
from tests.support.waiting import SOON_S


class Double(torch.autograd.Function):
    """Saves its input, which its backward looks at."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (_,) = ctx.saved_tensors
        return gradient * 2


class Block(torch.nn.Module):
    """Attention, a norm and an MLP with dropout: views, shared inputs, masks."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(hidden)
        self.qkv = torch.nn.Linear(hidden, 3 * hidden)
        self.up = torch.nn.Linear(hidden, 4 * hidden)
        self.down = torch.nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + torch.nn.functional.scaled_dot_product_attention(q, k, v)
        hidden = torch.nn.functional.gelu(self.up(self.norm(x)))
        return x + torch.nn.functional.dropout(self.down(hidden), 0.1, self.training)


class Stack(torch.nn.Module):
    """Blocks behind a linear layer, and a loss."""

    def __init__(self, hidden: int, num_layers: int, block: Callable[[int], Any] = Block) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(hidden, hidden)
        self.blocks = torch.nn.ModuleList(block(hidden) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Model(torch.nn.Module):
    """A stack of blocks; each is captured as one layer."""

    def __init__(self, hidden: int = 32, num_layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = torch.nn.ModuleList(Block(hidden) for _ in range(num_layers))

    def forward(self, x: torch.Tensor, engine: OffloadEngine | None = None) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            y = block(x)
            if engine is not None and torch.is_grad_enabled():
                engine.capture(Scope(layer=str(index)), outputs=[y], inputs=[x])
            x = y
        return x


def ssd(engine: OffloadEngine) -> SsdTier:
    """The engine's SSD tier."""
    tier = engine.tiers[Placement.SSD]
    assert isinstance(tier, SsdTier)
    return tier


def settle(engine: OffloadEngine, timeout_s: float = SOON_S) -> None:
    """Waits until no write is queued or running, so that a test sees bytes on the tier."""
    assert engine.wait_for_writes(timeout_s), "writes did not end"


def model_and_input() -> tuple[Model, torch.Tensor]:
    """A model whose step offloads 15 MiB, about, and what it computes with."""
    return Model(hidden=64), torch.randn(8, 128, 64)


def run_step(
    model: Model,
    x: torch.Tensor,
    engine: OffloadEngine | None = None,
    between: Callable[[], None] = lambda: None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One forward and backward; `between` runs before backward. Loss and gradients."""
    torch.manual_seed(5)
    model.zero_grad()
    if engine is None:
        loss = model(x).square().mean()
        loss.backward()
    else:
        engine.exclude(model.parameters())
        with engine.step():
            with engine.forward(Scope()) as save_order:
                loss = model(x, engine).square().mean()
            settle(engine)
            between()
            with engine.backward(save_order):
                loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    if x.device.type != "cpu":  # the next `zero_grad` frees those of side streams at once
        torch.get_device_module(x.device).synchronize()
    return loss.detach(), gradients


def assert_same(
    ours: tuple[torch.Tensor, list[torch.Tensor]], plain: tuple[torch.Tensor, list[torch.Tensor]]
) -> None:
    """Loss and every gradient, bit for bit."""
    assert torch.equal(ours[0], plain[0])
    for mine, theirs in zip(ours[1], plain[1], strict=True):
        assert torch.equal(mine, theirs)


def clone_of(module: torch.nn.Module, weights: dict[int, torch.Tensor]) -> torch.nn.Module:
    """A module with a copy of the attributes of another, and weights of its own with a graph."""
    clone = module.__new__(type(module))
    clone.__dict__ = {**vars(module)}
    own = {k: None if one is None else weights[id(one)] for k, one in module._parameters.items()}
    clone.__dict__["_parameters"] = own
    inner = {name: clone_of(one, weights) for name, one in module._modules.items() if one}
    clone.__dict__["_modules"] = inner
    return clone
