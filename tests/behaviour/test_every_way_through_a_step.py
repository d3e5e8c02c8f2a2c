# SPDX-License-Identifier: Apache-2.0
"""Invariant 9: evaluation, exceptions, skipped and repeated backward leave the engine usable."""

from __future__ import annotations

import gc

import pytest
import torch

from megatron.offload import Scope
from tests.support.models import Model, assert_same, run_step, settle, ssd
from tests.support.waiting import wait_until


@pytest.fixture
def check(engine):
    """After the test: the next step works and nothing is left."""
    model, x = Model(), torch.randn(3, 17, 32)
    plain = run_step(model, x)
    yield model, x
    gc.collect()
    settle(engine)
    wait_until(lambda: ssd(engine).used_bytes == 0, "space leaked")  # a read may still be under way
    assert_same(run_step(model, x, engine), plain)
    assert engine.statistics.tier_used_bytes == 0


def test_a_forward_without_backward(engine, check):
    model, x = check
    with engine.step(), engine.forward(Scope()):
        model(x, engine)


def test_evaluation_between_steps_saves_nothing(engine, check):
    model, x = check
    with engine.step(), torch.no_grad(), engine.forward(Scope()):
        model(x, engine)
    assert engine.statistics.offloaded_storages == 0


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_mid_step(engine, check, where):
    model, x = check

    class Explodes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError("in backward")

    with pytest.raises(ArithmeticError), engine.step():
        with engine.forward(Scope()) as save_order:
            y = Explodes.apply(model(x, engine))
            y = model(y, engine)
            if where == "forward":
                raise ArithmeticError("in forward")
        settle(engine)
        with engine.backward(save_order):
            y.sum().backward()
    del y


def test_backward_twice_through_one_graph(engine, check):
    model, x = check
    x = x.clone().requires_grad_()
    engine.exclude(model.parameters())
    model.eval()
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    with engine.step(), engine.forward(Scope()) as save_order:
        loss = model(x, engine).square().sum()
        settle(engine)
        for last in (False, False, True):
            with engine.backward(save_order):
                (gradient,) = torch.autograd.grad(loss, x, retain_graph=not last)
            assert torch.equal(gradient, expected)
            engine.dispatcher.drain()  # else the next pass may find what this one has used
    assert engine.statistics.read_bytes >= 3 * engine.statistics.written_bytes
    model.train()
    del loss


def test_a_graph_that_outlives_the_step_still_works(engine, check):
    model, x = check
    x = x.clone().requires_grad_()
    model.eval()
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    with engine.step(), engine.forward(Scope()):
        loss = model(x, engine).square().sum()
        settle(engine)
    assert engine.statistics.tier_used_bytes > 0
    with engine.step():
        pass
    (gradient,) = torch.autograd.grad(loss, x)
    assert torch.equal(gradient, expected)
    model.train()
    del loss


def test_micro_batches_whose_backwards_come_in_any_order(engine, check):
    model, _ = check
    model.eval()
    inputs = [torch.randn(3, 17, 32, requires_grad=True) for _ in range(3)]
    expected = [torch.autograd.grad(model(x).square().sum(), x)[0] for x in inputs]
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        passes = []
        with engine.step():
            for index, x in enumerate(inputs):
                with engine.forward(Scope(micro_batch=index)) as save_order:
                    passes.append((model(x, engine).square().sum(), save_order))
            settle(engine)
            for index in order:
                loss, save_order = passes[index]
                with engine.backward(save_order):
                    (gradient,) = torch.autograd.grad(loss, inputs[index])
                assert torch.equal(gradient, expected[index])
        del passes, loss
    model.train()
