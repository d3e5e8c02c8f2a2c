# SPDX-License-Identifier: Apache-2.0
"""Invariant 4: an activation changed between save and use raises, as autograd itself would."""

from __future__ import annotations

import pytest
import torch

from megatron.offload import ChangedInPlaceError, Scope, offload_activations
from tests.support.models import settle


@pytest.mark.parametrize("on_tier", [True, False])
def test_change_after_capture_raises_and_names_the_layer(engine, write_gate, on_tier):
    x = torch.randn(1000, requires_grad=True)
    with engine.step(), engine.forward(Scope()) as save_order:
        y = x.exp()
        engine.capture(Scope(micro_batch=2, layer="decoder.7"), [y], [x])
        if on_tier:
            write_gate.open.set()
            settle(engine)
        z = y.view(10, 100)
        loss = (z * 1).sum()
        z[0].add_(1)  # through a view: the version counter is shared
        with engine.backward(save_order), pytest.raises(ChangedInPlaceError) as raised:
            loss.backward()
    message = str(raised.value)
    assert "micro-batch 2 layer decoder.7" in message
    assert "float32 of shape (1000,) is at version 1; expected version 0" in message


def test_change_before_capture_is_left_to_autograd(engine):
    x = torch.randn(1000, requires_grad=True)
    with engine.step(), engine.forward(Scope()):
        y = x.exp()
        y.add_(1)
        engine.capture(Scope(), [y], [x])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_change_of_another_tensor_at_the_same_version_is_no_error(engine):
    x = torch.randn(1000, requires_grad=True)
    with engine.step(), engine.forward(Scope()) as save_order:
        y = x.exp()
        expected = y.detach().clone()
        engine.capture(Scope(), [y], [x])
        settle(engine)
        loss = y.sum()
        (x.detach().clone()).add_(1)
        with engine.backward(save_order):
            loss.backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("on_tier", [True, False])
def test_what_a_node_changes_in_backward_is_an_error_for_the_next(engine, write_gate, on_tier):
    with engine.step():
        y = torch.randn(1000)
        views = [engine.hooks.pack(tensor) for tensor in (y, y.view(10, 100))]
        del y
        if on_tier:
            write_gate.open.set()
            settle(engine)
        first = engine.hooks.unpack(views[0])
        assert first._version == 0
        first.zero_()
        with pytest.raises(ChangedInPlaceError):
            engine.hooks.unpack(views[1])


class ReturnsWhatItSaved(torch.autograd.Function):
    """Saves gradients that it has computed in forward, as fused losses do."""

    @staticmethod
    def forward(ctx, weight, clones):
        ctx.save_for_backward(torch.full_like(weight, 2.0))
        ctx.clones = clones
        return weight.sum() * 2.0

    @staticmethod
    def backward(ctx, gradient):
        (saved,) = ctx.saved_tensors
        return saved.clone() if ctx.clones else saved, None


@pytest.mark.parametrize("clones", [True, False])
def test_a_gradient_that_was_saved_and_then_changed_says_so(clones, tmp_path):
    """AccumulateGrad takes what we have built as it is: the script changes it in `.grad`."""
    weight = torch.nn.Parameter(torch.ones(1000))
    model = torch.nn.Identity()
    model.forward = lambda: ReturnsWhatItSaved.apply(weight, clones)
    with offload_activations(model, tmp_path, min_bytes=1):
        loss = model()
        for _ in range(2):
            loss.backward(retain_graph=True)  # the second one adds to the first in place
        if clones:
            loss.backward()
            assert torch.equal(weight.grad, torch.full((1000,), 6.0))
        else:
            with pytest.raises(ChangedInPlaceError, match="a gradient, have it return a clone"):
                loss.backward()


@pytest.mark.parametrize("kind", ["small", "excluded", "conjugated", "inside of a large one"])
def test_change_of_what_stays_raises_in_a_context_too(make_engine, kind):
    engine = make_engine(min_bytes=1 << 20)
    x = torch.ones(1000, requires_grad=True, dtype=torch.cfloat)
    factor = torch.ones(1000, dtype=torch.cfloat)
    if kind == "excluded":
        factor = torch.ones(1 << 18, dtype=torch.cfloat)
        x = torch.ones(1 << 18, requires_grad=True, dtype=torch.cfloat)
        engine.exclude([factor])
    elif kind == "inside of a large one":
        factor = torch.ones(1 << 18, dtype=torch.cfloat)[:1000]
    with engine.step(), engine.saved_tensors_hooks():
        y = x * (factor.conj() if kind == "conjugated" else factor)
    factor.mul_(2)
    with pytest.raises(ChangedInPlaceError, match="modified by an inplace operation"):
        y.abs().sum().backward()


def test_change_of_a_part_that_is_too_small_to_move_raises_after_a_capture(make_engine):
    engine = make_engine(min_bytes=1 << 20)
    x = torch.randn(512, 512, requires_grad=True)
    with engine.step():
        large = x @ torch.randn(512, 640)  # 1.25 MiB
        part = large[:128]
        loss = (part * part).sum()
        engine.capture(Scope(), [loss], [x])
        with torch.no_grad():
            large.mul_(2)
        # It has no hooks, so autograd itself sees the change.
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .*\[128, 640\]"):
            loss.backward()


def test_a_step_of_the_optimizer_between_forward_and_backward_raises(engine):
    weight = torch.nn.Parameter(torch.randn(64, 64))
    engine.exclude([weight])
    x = torch.randn(8, 64, requires_grad=True)
    with engine.step(), engine.saved_tensors_hooks():
        loss = torch.nn.functional.linear(x, weight).sum()
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(ChangedInPlaceError):
        loss.backward()
