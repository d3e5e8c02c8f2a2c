# SPDX-License-Identifier: Apache-2.0
"""A part of a layer runs again in backward, and the layer is as it was afterwards."""

from __future__ import annotations

import pytest
import torch
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.offload import OffloadEngine, Scope
from megatron.offload.integration.megatron.layer_hooks import LayerHooks
from megatron.offload.integration.megatron.recomputation import has_parts, recomputed, recomputing
from tests.support.models import settle

HIDDEN = 8

pytestmark = pytest.mark.usefixtures("with_cpu_runtime")


class Layer(torch.nn.Module):
    """Its parts have the names of Megatron's and count how often they run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = torch.nn.Linear(HIDDEN, HIDDEN)
        self.second = torch.nn.Linear(HIDDEN, HIDDEN)
        self.runs = {"attention": 0, "mlp": 0}
        self.fails = False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        middle, context = self._forward_attention(hidden_states=x, attention_mask=None)
        if self.fails:
            raise ArithmeticError("no such attention")
        return self._forward_mlp(middle, None, padding_mask=None), context

    def _forward_attention(
        self, hidden_states: torch.Tensor, attention_mask: None
    ) -> tuple[torch.Tensor, None]:
        self.runs["attention"] += 1
        dropped = torch.nn.functional.dropout(self.first(hidden_states).sigmoid(), 0.5)
        return hidden_states + dropped, attention_mask

    def _forward_mlp(
        self, hidden_states: torch.Tensor, inference_context: None, padding_mask: None
    ) -> torch.Tensor:
        self.runs["mlp"] += 1
        dropped = torch.nn.functional.dropout(self.second(hidden_states).tanh(), 0.5)
        return hidden_states + dropped


def run(layer: Layer, parts: list[str]) -> list[torch.Tensor]:
    """Gradients of the input and the parameters, after two layers of the same weights."""
    torch.manual_seed(2)
    x = torch.randn(4, HIDDEN, requires_grad=True)
    layer.zero_grad()
    y = x * 1
    for _ in range(2):
        with recomputing(layer, parts, lambda _, function: function):
            y, _ = layer(y)
    y.sum().backward()
    return [p.grad.clone() for p in (x, *layer.parameters()) if p.grad is not None]


@pytest.mark.parametrize("parts", [["attention"], ["mlp"], ["attention", "mlp"]], ids=str)
def test_only_the_part_that_is_named_runs_again(parts: list[str]) -> None:
    layer = Layer()
    usual = run(layer, [])
    assert layer.runs == {"attention": 2, "mlp": 2}
    again = run(layer, parts)
    assert len(again) == 5 and all(map(torch.equal, usual, again))
    assert layer.runs == {part: 6 if part in parts else 4 for part in layer.runs}


def test_the_layer_is_as_it_was_also_after_an_error() -> None:
    layer = Layer()
    own = dict(vars(layer))
    layer.fails = True
    with pytest.raises(ArithmeticError), recomputing(layer, ["attention"], lambda _, f: f):
        layer(torch.zeros(1, HIDDEN))
    layer.fails = False
    assert vars(layer) == own


def test_what_somebody_else_put_on_a_layer_is_put_back() -> None:
    layer = Layer()
    theirs = layer._forward_mlp
    vars(layer)["_forward_mlp"] = theirs
    with recomputing(layer, ["mlp"], lambda _, function: function):
        assert vars(layer)["_forward_mlp"] is not theirs
    assert vars(layer)["_forward_mlp"] is theirs


def test_a_layer_of_another_make_has_no_parts() -> None:
    assert has_parts(Layer()) and not has_parts(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("named", [True, False])
def test_the_input_of_a_recomputed_layer_leaves_memory_and_comes_back(
    named: bool, engine: OffloadEngine
) -> None:
    layer, x = Layer(), torch.randn(4, HIDDEN, requires_grad=True)
    engine.exclude(layer.parameters())
    with engine.step():
        with engine.forward(Scope()) as save_order:
            hidden = x * 1
            given = StorageWeakRef(hidden.untyped_storage())
            args, kwargs = ((), {"x": hidden}) if named else ((hidden,), {})
            y, _ = recomputed(layer.forward, args, kwargs)
            engine.capture(Scope(layer="decoder.1"), [y], [hidden], recomputes=True)
            del hidden, args, kwargs
            settle(engine)
            assert given.expired()
        with engine.backward(save_order):
            y.sum().backward()
    assert engine.statistics.read_bytes == 16 * HIDDEN
    assert layer.runs == {"attention": 2, "mlp": 2}


@pytest.mark.parametrize("is_known", [True, False])
def test_what_a_checkpoint_without_output_starts_from_leaves_memory(
    is_known: bool, engine: OffloadEngine
) -> None:
    """It saves copies of its inputs that are leaves; `LayerHooks` says so."""
    if is_known:
        LayerHooks(engine, [])
    x = torch.randn(1000, requires_grad=True)
    weight = torch.full((1000,), 3.0, requires_grad=True)
    engine.exclude([weight])
    with engine.step():
        with engine.forward(Scope()) as save_order:
            hidden = x * 2
            saved = StorageWeakRef(hidden.untyped_storage())
            checkpoint = CheckpointWithoutOutput(fp8=None)
            y = checkpoint.checkpoint(torch.tanh, hidden)
            del hidden
            z = y * weight
            checkpoint.discard_output_and_register_recompute(z)
            del y
            engine.capture(Scope(0, 0, "decoder.1"), [z], [x])
            settle(engine)
            assert saved.expired() is is_known
        with engine.backward(save_order):
            z.sum().backward()
    assert (engine.statistics.offloaded_bytes == 4000) is is_known
    plain = x.detach().requires_grad_()
    (torch.tanh(plain * 2) * weight).sum().backward()
    assert x.grad is not None and plain.grad is not None
    assert torch.equal(x.grad, plain.grad)
