# SPDX-License-Identifier: Apache-2.0
"""One test for each way of using autograd that a training script may take.

Each computes plain and with all that autograd saved on the tier, and has to give the same bits
(`roundtrip.run_both`); afterwards nothing is left on the tier and the engine works. This file:
orders of backward, parts of graphs, regions without gradients, threads, interruptions. Its
neighbours: checkpoints and functions, hooks and compilers, shared storages, kinds of tensors.
"""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from megatron.offload import Scope
from tests.autograd.roundtrip import (
    Watch,
    layer,
    leaf,
    on_own_thread,
    run_both,
    ways,
)
from tests.support.models import settle

# -- Orders of backward -------------------------------------------------------------------------


@ways()
def test_gradients_of_gradients_of_gradients(engine, way):
    def scenario(watch: Watch):
        x = leaf(6, 4)
        value = watch.call(layer, x).square().sum()
        found = []
        for _ in range(3):
            (gradient,) = watch.call(
                lambda value=value: torch.autograd.grad(value, x, create_graph=True), inputs=[x]
            )
            found.append(gradient.detach())
            value = gradient.square().sum()
        return found

    run_both(scenario, engine, way)


@ways()
def test_a_gradient_penalty_in_the_loss(engine, way):
    def scenario(watch: Watch):
        x, w = leaf(6, 4), leaf(4, 4, number=4)

        def loss():
            y = layer(x @ w)
            (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y.square().sum() + (gradient.norm() - 1).square()

        watch.call(loss, inputs=[x, w]).backward()
        return [x.grad, w.grad]

    run_both(scenario, engine, way)


@ways()
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_several_graphs_at_once_run_in_any_order(engine, way, order):
    def scenario(watch: Watch):
        leaves = [leaf(6, 4, number=i) for i in range(3)]
        results = [watch.call(layer, x) for x in leaves]
        found = []
        for index in order:
            found += torch.autograd.grad(results[index].square().sum(), leaves[index])
            results[index] = None
        return found

    run_both(scenario, engine, way)


@ways()
def test_graphs_that_share_a_part(engine, way):
    def scenario(watch: Watch):
        x = leaf(8, 4)
        trunk = watch.call(layer, x)
        heads = [watch.call(f, trunk) for f in (torch.tanh, torch.sin, layer)]
        return [
            torch.autograd.grad(head.sum(), x, retain_graph=index < 2)
            for index, head in enumerate(heads)
        ]

    run_both(scenario, engine, way)


@ways()
def test_backward_twice_without_retaining_raises_as_always(engine, way):
    def scenario(watch: Watch):
        x = leaf(6, 4)
        y = watch.call(layer, x).sum()
        y.backward()
        y.backward()

    run_both(scenario, engine, way)


@ways()
def test_gradients_accumulate_over_micro_batches(engine, way):
    def scenario(watch: Watch):
        w = leaf(4, 4)
        for number in range(4):
            x = leaf(6, 4, number=number).detach()
            watch.call(lambda x=x: layer(x @ w), inputs=[w]).square().sum().backward()
        return w.grad

    run_both(scenario, engine, way)


@ways()
def test_a_step_of_the_optimizer_between_save_and_use_raises(engine, way):
    def scenario(watch: Watch):
        w = leaf(4, 4)
        hidden = watch.call(lambda: (w * 1).exp(), inputs=[w])
        result = watch.call(lambda: hidden @ w)
        with torch.no_grad():
            w.add_(1)
        result.sum().backward()

    run_both(scenario, engine, way, moves=False)


# -- Parts of a graph ---------------------------------------------------------------------------


@ways()
def test_the_gradient_of_a_part(engine, way):
    def scenario(watch: Watch):
        x = leaf(6, 4)
        first = watch.call(layer, x)
        second = watch.call(layer, first)
        return torch.autograd.grad(second.sum(), first)  # the first layer is never asked

    run_both(scenario, engine, way)


@ways()
def test_backward_with_chosen_inputs(engine, way):
    def scenario(watch: Watch):
        x, w = leaf(6, 4), leaf(4, 4, number=4)
        watch.call(lambda: layer(x @ w), inputs=[x, w]).sum().backward(inputs=[w])
        return [x.grad, w.grad]

    run_both(scenario, engine, way)


@ways()
def test_gradients_that_are_never_computed(engine, way):
    def scenario(watch: Watch):
        return watch.call(layer, leaf(6, 4)).detach()

    run_both(scenario, engine, way, moves=False)


@ways()
def test_a_branch_that_is_dropped(engine, way):
    def scenario(watch: Watch):
        x = leaf(6, 4)
        kept, dropped = watch.call(lambda: (layer(x), layer(x.exp())), inputs=[x])
        del dropped
        kept.sum().backward()
        return x.grad

    run_both(scenario, engine, way)


@ways()
def test_a_very_deep_graph_that_is_dropped(engine, way):
    def scenario(watch: Watch):
        def chain(x):
            for _ in range(2000):
                x = x.sin()
            return x

        return watch.call(chain, leaf(1)).detach()

    engine.is_prompt = False
    run_both(scenario, engine, way, moves=False)


@ways()
def test_detached_and_constant_parts(engine, way):
    def scenario(watch: Watch):
        x = leaf(6, 4)

        def function():
            y = layer(x)
            return y * y.detach().exp() + layer(x.detach())[0]

        watch.call(function, inputs=[x]).sum().backward()
        return x.grad

    run_both(scenario, engine, way)


# -- Regions without gradients ------------------------------------------------------------------


@ways()
@pytest.mark.parametrize("region", [torch.no_grad, torch.inference_mode], ids=lambda r: r.__name__)
def test_evaluation_between_forward_and_backward(engine, way, region):
    def scenario(watch: Watch):
        x = leaf(6, 4)
        y = watch.call(layer, x)
        with region():
            evaluated = watch.call(layer, x).clone()
        y.sum().backward()
        return [x.grad, evaluated.clone()]

    run_both(scenario, engine, way)


@ways()
def test_regions_without_gradients_inside_a_layer(engine, way):
    def scenario(watch: Watch):
        x = leaf(6, 4)

        def function():
            with torch.no_grad():
                scale = x.abs().amax()
                with torch.enable_grad():
                    inner = x.exp()
            return layer(x / scale) * inner.sum()

        watch.call(function, inputs=[x]).sum().backward()
        return x.grad

    run_both(scenario, engine, way)


@ways()
def test_an_inference_tensor_is_refused_as_always(engine, way):
    def scenario(watch: Watch):
        with torch.inference_mode():
            table = torch.ones(4)
        return watch.call(lambda x: x * table, leaf(6, 4)).sum().backward()

    run_both(scenario, engine, way, moves=False)


# -- Threads ------------------------------------------------------------------------------------


@ways()
def test_backward_on_another_thread(engine, way):
    def scenario(watch: Watch):
        x = leaf(6, 4)
        y = watch.call(layer, x)
        on_own_thread(y.sum().backward)
        return x.grad

    run_both(scenario, engine, way)


@ways()
def test_forward_and_backward_of_several_threads_at_once(engine, way):
    def scenario(watch: Watch):
        leaves = [leaf(20, 8, number=i) for i in range(4)]

        def work(x):
            for _ in range(5):
                watch.call(layer, x).square().sum().backward()

        threads = [threading.Thread(target=work, args=(x,)) for x in leaves]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [x.grad for x in leaves]

    run_both(scenario, engine, way)


def test_backward_of_several_threads_at_once_through_a_shared_part(engine):
    failures = []
    for _ in range(40):
        x = leaf(1000)
        with engine.saved_tensors_hooks():
            trunk = (x * 1).exp()
            heads = [(trunk * trunk).clone() for _ in range(4)]
        del trunk
        settle(engine)
        together = threading.Barrier(4)

        def work(head, x=x, together=together):
            together.wait()
            try:
                torch.autograd.grad(head.sum(), x, retain_graph=True)
            except Exception as error:
                failures.append(repr(error))

        threads = [threading.Thread(target=work, args=(head,)) for head in heads]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        del heads
    assert not failures, failures[0]


# -- Interruptions ------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("in backward")


@ways()
@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_an_exception_in_forward(engine, way, error):
    def scenario(watch: Watch):
        x = leaf(6, 4)

        def function():
            y = layer(x)
            if y.numel():
                raise error("in forward")

        with contextlib.suppress(error):
            watch.call(function, inputs=[x])
        watch.call(layer, x).sum().backward()
        return x.grad

    run_both(scenario, engine, way)


@ways()
def test_an_exception_in_backward(engine, way):
    def scenario(watch: Watch):
        x = leaf(6, 4)

        def function():
            return layer(x), layer(Fails.apply(layer(x * 2)))

        with pytest.raises(ArithmeticError, match="in backward"):
            torch.cat(watch.call(function, inputs=[x])).sum().backward()
        watch.call(layer, x).sum().backward()
        return x.grad

    run_both(scenario, engine, way)


def test_a_generator_that_is_left_early(engine):
    x = leaf(6, 4)

    def layers(y):
        with engine.saved_tensors_hooks():
            for _ in range(5):
                y = layer(torch.cat([y, y]))
                yield y

    with engine.step(), engine.forward(Scope()) as save_order:
        steps = layers(x)
        next(steps)
        y = next(steps).clone()
        steps.close()
        moved_storages = engine.statistics.offloaded_storages
        assert moved_storages > 0
        y = layer(torch.cat([y, y]))  # outside of the hooks
        assert engine.statistics.offloaded_storages == moved_storages
        settle(engine)
        with engine.backward(save_order):
            (ours,) = torch.autograd.grad(y.sum(), x)
    z = x
    for _ in range(3):
        z = layer(torch.cat([z, z]))
    assert torch.equal(ours, torch.autograd.grad(z.sum(), x)[0])
