# SPDX-License-Identifier: Apache-2.0
"""Results of Liger's fused functions are computed again: of stand-ins that train on a CPU.

Like Liger's they save rows, keep constants in the context or nowhere, and write gradients into what
they saved.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.offload import ChangedInPlaceError, offload_activations
from megatron.offload.integration.torch import liger_functions
from megatron.offload.integration.torch.liger_functions import add_liger_functions

HIDDEN, INNER, ROWS = 32, 64, 16


def contiguous(forward: Any) -> Any:
    @functools.wraps(forward)
    def with_contiguous(ctx: Any, *args: Any) -> Any:
        return forward(ctx, *(one.contiguous() if isinstance(one, Tensor) else one for one in args))

    return with_contiguous


def rows(one: Tensor) -> Tensor:
    return one.view(-1, one.shape[-1])


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """Modules of that name, for the time of the test."""

    class LigerSiLUMulFunction(torch.autograd.Function):
        @staticmethod
        @contiguous
        def forward(ctx: Any, a: Tensor, b: Tensor, gate_multiplier: float = 1.0) -> Tensor:
            ctx.save_for_backward(rows(a), rows(b))
            ctx.gate_multiplier = gate_multiplier
            return (F.silu(rows(a) * gate_multiplier) * rows(b)).view(a.shape)

        @staticmethod
        @contiguous
        def backward(ctx: Any, gradient: Tensor) -> Any:
            a, b = ctx.saved_tensors
            gate, up = a.detach().clone().requires_grad_(), b.detach().clone().requires_grad_()
            with torch.enable_grad():
                result = F.silu(gate * ctx.gate_multiplier) * up
            found = torch.autograd.grad(result, (gate, up), rows(gradient))
            a.data.copy_(found[0])  # as its kernel writes, unseen by autograd
            b.data.copy_(found[1])
            return a.view(gradient.shape), b.view(gradient.shape), None

    class LigerRMSNormFunction(torch.autograd.Function):
        @staticmethod
        @contiguous
        def forward(ctx: Any, x: Tensor, weight: Any, eps: float, offset: float = 0.0) -> Tensor:
            x = rows(x)
            rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
            tensors = (x, rstd) if weight is None else (x, weight, rstd)
            ctx.save_for_backward(*tensors)
            ctx.offset, ctx.shape = offset, x.shape
            normed = x * rstd
            return (normed if weight is None else normed * (weight + offset)).view(2, -1, HIDDEN)

        @staticmethod
        @contiguous
        def backward(ctx: Any, gradient: Tensor) -> Any:
            x, *weight, rstd = ctx.saved_tensors
            factor = weight[0] + ctx.offset if weight else 1.0
            gradient = rows(gradient)
            scaled = gradient * factor
            inner = (scaled * x).mean(-1, keepdim=True)
            found = rstd * scaled - rstd**3 * inner * x
            of_weight = (gradient * x * rstd).sum(0) if weight else None
            return found.view(2, -1, HIDDEN), of_weight, None, None

    found = types.SimpleNamespace(silu_mul=LigerSiLUMulFunction, rms_norm=LigerRMSNormFunction)
    monkeypatch.setattr(liger_functions, "_told", set())
    for file, function in (("swiglu", found.silu_mul), ("rms_norm", found.rms_norm)):
        module = types.ModuleType(f"liger_kernel.ops.{file}")
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield found


class Layer(nn.Module):
    """A norm and an MLP, as Liger has transformers compute them."""

    def __init__(self, liger: Any, eps: float, *, has_weight: bool = True) -> None:
        super().__init__()
        self.liger, self.eps = liger, eps
        self.weight = nn.Parameter(torch.rand(HIDDEN)) if has_weight else None
        self.gate, self.up = nn.Linear(HIDDEN, INNER), nn.Linear(HIDDEN, INNER)
        self.down = nn.Linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.liger.rms_norm.apply(x, self.weight, self.eps, 0.5)
        return x + self.down(self.liger.silu_mul.apply(self.gate(normed), self.up(normed), 1.25))


def trained(liger: Any, directory: Path | None, **made: Any) -> tuple[list[Tensor], dict[str, Any]]:
    """Gradients of four steps, and what was counted in the last one."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(liger, eps, **made) for eps in (1e-5, 1e-1)))
    gradients = []
    settings: dict[str, Any] = {"mode": "off"} if directory is None else {"min_bytes": 256}
    with offload_activations(model, directory, **settings) as handle:
        for step in range(4):
            x = torch.randn(2, ROWS // 2, HIDDEN, generator=torch.Generator().manual_seed(step))
            model(x).square().sum().backward()
            gradients += [one.grad.clone() for one in model.parameters() if one.grad is not None]
        return gradients, dict(handle.statistics)


def test_norms_and_products_are_computed_again_with_the_same_bits(
    liger: Any, tmp_path: Path
) -> None:
    expected, _ = trained(liger, None)
    found, counted = trained(liger, tmp_path)
    assert len(found) == 4 * 14 and all(map(torch.equal, found, expected))
    assert counted["replayed_bytes"] == 2 * ROWS * (HIDDEN + INNER) * 4
    # The second layer's input, and what gate and up have made: views of the function's own.
    assert counted["offloaded_bytes"] == ROWS * (HIDDEN + 2 * 2 * INNER) * 4


def test_a_norm_without_a_weight_is_saved(liger: Any, tmp_path: Path) -> None:
    expected, _ = trained(liger, None, has_weight=False)
    found, counted = trained(liger, tmp_path, has_weight=False)
    assert all(map(torch.equal, found, expected))
    assert counted["replayed_bytes"] == 2 * ROWS * INNER * 4


def test_what_a_kernel_has_written_into_is_no_operand_any_more(liger: Any, tmp_path: Path) -> None:
    """As where gradients of weights come in a pass of their own, behind those of inputs."""
    torch.manual_seed(0)
    layer = Layer(liger, 1e-5)
    x = torch.randn(2, ROWS // 2, HIDDEN, requires_grad=True)
    with offload_activations(layer, tmp_path, min_bytes=256):
        loss = layer(x).square().sum()
        torch.autograd.grad(loss, x, retain_graph=True)
        with pytest.raises(ChangedInPlaceError):
            torch.autograd.grad(loss, layer.down.weight)


def test_each_function_is_told_once(liger: Any) -> None:
    add_liger_functions()
    told = liger.rms_norm.forward
    add_liger_functions()
    assert liger.rms_norm.forward is told


def test_calls_that_do_the_same_have_one_program(liger: Any) -> None:
    """So that it is trusted once it has given the bytes twice."""
    add_liger_functions()

    def program(eps: float) -> Any:
        x = torch.randn(2, 4, HIDDEN, requires_grad=True)
        weight = nn.Parameter(torch.rand(HIDDEN))
        return liger.rms_norm.apply(x, weight, eps).grad_fn.replayed_by

    assert program(1e-5) == program(1e-5) != program(1e-1)
    assert hash(program(1e-5)) == hash(program(1e-5))
