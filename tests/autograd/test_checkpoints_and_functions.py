# SPDX-License-Identifier: Apache-2.0
"""Recomputation, and functions whose backward is written in Python.

Each computes plain and with all that autograd saved on the tier, and has to give the same bits or
the same kind of error.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils import checkpoint as ckpt
from torch.utils.checkpoint import checkpoint

from megatron.offload import Scope
from tests.autograd.roundtrip import (
    CONTEXT,
    Watch,
    layer,
    leaf,
    run_both,
    ways,
)
from tests.support.models import Double, settle

# -- Recomputation ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@ways()
@pytest.mark.parametrize("outer", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("inner", [True, False, None], ids=["reentrant", "not reentrant", "none"])
def test_checkpoints_in_checkpoints(engine, way, outer, inner):
    def scenario(watch: Watch):
        x = leaf(8, 4)

        def innermost(y):
            return layer(F.dropout(y, 0.2))

        def middle(y):
            y = y.sin()
            if inner is not None:
                y = checkpoint(innermost, y, use_reentrant=inner)
            return layer(y)

        def function(y):
            y = checkpoint(middle, y * 1, use_reentrant=outer)
            return checkpoint(middle, torch.cat([y, y, y, y]), use_reentrant=outer)

        watch.call(function, x).square().sum().backward()
        return x.grad

    # One that is not reentrant has hooks of its own on all that is saved in it.
    run_both(scenario, engine, way, moves=outer or way == CONTEXT)


def test_backward_of_a_checkpoint_under_the_hooks(engine, monkeypatch):
    # Backward begins before the context ends, which hands over whatever there is.
    monkeypatch.setattr("megatron.offload.activations.transfer.write_batch._ENOUGH_BYTES", 1)

    def scenario(watch: Watch):
        x = leaf(8, 4)
        with watch.region():  # also what is saved during recomputation
            y = checkpoint(layer, (x * 1).exp(), use_reentrant=True).clone()
            watch.settle()
            y.sum().backward()
        return x.grad

    run_both(scenario, engine, CONTEXT)


@ways()
def test_selective_checkpoint(engine, way):
    def scenario(watch: Watch):
        x, w = leaf(4, 4), leaf(4, 4, number=4)

        def context():
            return ckpt.create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

        def function(x):
            y = checkpoint(
                lambda y: layer((y @ w).sin() @ w), x * 1, use_reentrant=False, context_fn=context
            )
            return y.exp()

        watch.call(function, x, inputs=[x, w]).sum().backward()
        return [x.grad, w.grad]

    run_both(scenario, engine, way)


def test_capture_recomputes_no_checkpoint(engine):
    num_calls = 0
    x = leaf(8, 4)

    def function(y):
        nonlocal num_calls
        num_calls += 1
        return layer(y)

    with engine.step():
        y = checkpoint(function, x * 1, use_reentrant=False)
        engine.capture(Scope(), [y], [x])
        assert num_calls == 1
        y.sum().backward()
    assert num_calls == 2


def test_a_layer_captured_twice_is_read_once(engine):
    x = leaf(8, 4)
    with engine.step():
        y = layer(x)
        engine.capture(Scope(), [y], [x])
        y = y.clone()
        settle(engine)
        engine.capture(Scope(), [y], [x])
        settle(engine)
        y.sum().backward()
    assert engine.statistics.read_bytes == engine.statistics.written_bytes > 0
    assert engine.statistics.already_hooked == 0, "they are ours"


# -- Functions written in Python ----------------------------------------------------------------


class SavesAll(torch.autograd.Function):
    """Saves inputs, an output, an intermediate, None; keeps a number, and a tensor by itself."""

    @staticmethod
    def forward(ctx, x, w, power):
        middle = x.exp()
        result = middle * w
        ctx.power = power
        ctx.kept = middle + 1
        ctx.save_for_backward(x, None, w, middle, result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        x, nothing, w, middle, result = ctx.saved_tensors
        again = ctx.saved_tensors
        assert nothing is None and torch.equal(again[0], x) and ctx.power == 3
        return gradient * (result + ctx.kept - middle - 1) * x.exp() / middle, middle * w * 0, None


@ways()
def test_a_function_that_saves_inputs_outputs_and_other_things(engine, way):
    def scenario(watch: Watch):
        x, w = leaf(6, 4), leaf(4, number=4)
        watch.call(lambda: SavesAll.apply(x * 1, w * 1, 3), inputs=[x, w]).sum().backward()
        return [x.grad, w.grad]

    run_both(scenario, engine, way)


class SortedAndWhere(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        values, order = x.sort()
        ctx.mark_non_differentiable(order)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(order, values)
        return values, order, x.clone()

    @staticmethod
    def backward(ctx, of_values, of_order, of_copy):
        order, values = ctx.saved_tensors
        assert of_order is None and of_copy is None
        return torch.zeros_like(values).scatter(-1, order, of_values * values.sign())


@ways()
def test_a_function_with_outputs_without_gradients(engine, way):
    def scenario(watch: Watch):
        x = leaf(6, 4)
        values, order, _ = watch.call(lambda: SortedAndWhere.apply(x * 1), inputs=[x])
        values.sum().backward()
        return [x.grad, order]

    run_both(scenario, engine, way)


class HalvesInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.sigmoid_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x * (1 - x)


@ways()
def test_a_function_that_changes_its_input(engine, way):
    def scenario(watch: Watch):
        x = leaf(6, 4)
        watch.call(lambda: HalvesInPlace.apply(x * 1), inputs=[x]).sum().backward()
        return x.grad

    run_both(scenario, engine, way)


class TwiceDifferentiable(torch.autograd.Function):
    """In the newer form, with a separate `setup_context`, and vectorised."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.exp(), x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output[0])

    @staticmethod
    def backward(ctx, of_exp, of_sin):
        x, exp = ctx.saved_tensors
        return of_exp * exp + of_sin * x.cos()


@ways()
@pytest.mark.parametrize("vectorised", [False, True])
def test_a_function_whose_backward_is_differentiated(engine, way, vectorised):
    def scenario(watch: Watch):
        x = leaf(6, 4)
        apply = torch.vmap(TwiceDifferentiable.apply) if vectorised else TwiceDifferentiable.apply
        a, b = watch.call(lambda: apply(x * 1), inputs=[x])
        (first,) = watch.call(
            lambda: torch.autograd.grad((a * b).sum(), x, create_graph=True), inputs=[x]
        )
        return [first.detach(), *torch.autograd.grad(first.square().sum(), x)]

    run_both(scenario, engine, way)


class OverwritesWhatItSaved(Double):
    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        x.zero_()  # another node saved the same tensor
        return gradient * 2


@ways()
@pytest.mark.parametrize("settled", [True, False])
def test_what_backward_changes_in_place_is_an_error_for_others(engine, way, settled):
    engine.is_prompt = settled

    def scenario(watch: Watch):
        x = leaf(6, 4)
        with watch.region():
            y = (x * 1).exp()
            z = OverwritesWhatItSaved.apply(y).clone()
        watch.capture([z], [x])
        del y
        if settled:
            watch.settle()
        z.sum().backward()
        return x.grad

    run_both(scenario, engine, way, moves=False)
