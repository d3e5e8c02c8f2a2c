# SPDX-License-Identifier: Apache-2.0
"""Autograd together with other hooks, modes and compilers.

Each computes plain and with all that autograd saved on the tier, and has to give the same bits, or
is refused by torch in words.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from megatron.offload import Scope
from tests.autograd.roundtrip import (
    CONTEXT,
    Watch,
    layer,
    leaf,
    run_both,
    seed,
    ways,
)
from tests.support.models import Double, settle

# -- Other users of autograd's hooks and modes --------------------------------------------------


@ways()
def test_hooks_within_hooks(engine, way):
    def scenario(watch: Watch):
        x = leaf(6, 4)

        def function():
            y = layer(x)
            with torch.autograd.graph.save_on_cpu():
                y = y.sin() * y.exp()
            return layer(torch.cat([y, y]))

        watch.call(function, inputs=[x]).sum().backward()
        return x.grad

    run_both(scenario, engine, way)


def test_where_hooks_are_forbidden_torch_says_so(engine):
    x = leaf(6, 4)
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"),
        pytest.raises(RuntimeError, match="no hooks here"),
        engine.saved_tensors_hooks(),
    ):
        layer(x)


@ways()
def test_gradient_and_module_hooks(engine, way):
    def scenario(watch: Watch):
        seed(5)
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4))
        x, seen = leaf(6, 4), []
        module[1].register_full_backward_hook(lambda m, i, o: seen.append(i[0].clone()))
        module[0].weight.register_hook(lambda g: g * 2)
        module[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))

        def function():
            y = module(x * 1)
            y.register_hook(lambda g: g + 1)
            return y.exp()

        watch.call(function, inputs=[x, *module.parameters()]).sum().backward()
        return [seen, x.grad, *(p.grad for p in module.parameters())]

    run_both(scenario, engine, way)


@ways()
@pytest.mark.filterwarnings("ignore")
def test_anomaly_detection(engine, way):
    def scenario(watch: Watch):
        x = leaf(6, 4)
        with torch.autograd.set_detect_anomaly(True):
            watch.call(layer, x).sum().backward()
            watch.call(lambda: (x * 0).sqrt().exp(), inputs=[x]).sum().backward()

    run_both(scenario, engine, way)


@ways()
def test_autocast(engine, way):
    def scenario(watch: Watch):
        x, w = leaf(6, 4), leaf(4, 4, number=4)
        with torch.autocast("cpu", torch.bfloat16):
            y = watch.call(lambda: F.layer_norm(layer(x @ w) @ w, [4]) @ w, inputs=[x, w])
        y.float().sum().backward()
        return [x.grad, w.grad]

    run_both(scenario, engine, way)


@ways()
def test_defaults_of_the_moment_do_not_matter(engine, way):
    def scenario(watch: Watch):
        x = leaf(6, 4)
        try:
            torch.set_default_dtype(torch.float64)
            with torch.device("meta"):
                watch.call(layer, x).sum().backward()
        finally:
            torch.set_default_dtype(torch.float32)
        return x.grad

    run_both(scenario, engine, way)


@ways()
def test_forward_mode_over_backward_mode(engine, way):
    def scenario(watch: Watch):
        x, tangent = leaf(6, 4), leaf(6, 4, number=4).detach()
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            y = watch.call(lambda: (dual * 1).exp().sin(), inputs=[x])
            (gradient,) = watch.call(
                lambda: torch.autograd.grad(y.sum(), x, create_graph=True), inputs=[x]
            )
            return [t.detach() for t in torch.autograd.forward_ad.unpack_dual(gradient)]

    # What the nodes saved is also held by the tangents: captured, it is still there.
    run_both(scenario, engine, way, moves=way == CONTEXT)


@ways()
def test_vectorised_operations(engine, way):
    def scenario(watch: Watch):
        x = leaf(6, 4)
        watch.call(
            lambda: torch.vmap(lambda row: layer(row).exp())(x * 1), inputs=[x]
        ).sum().backward()
        return x.grad

    run_both(scenario, engine, way)


def test_function_transforms_work_or_refuse_in_words(engine):
    x = leaf(6, 4).detach()

    def loss(x):
        return layer(x).sum()

    with (
        engine.saved_tensors_hooks(),
        pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"),
    ):
        torch.func.grad(loss)(x)
    assert torch.func.grad(loss)(x).shape == x.shape


# -- Compiled regions ---------------------------------------------------------------------------

compiles_in_threads = pytest.mark.skipif(
    torch.__version__.startswith("2.10."),
    reason="torch 2.10 crashes where a second thread compiles, also without any hooks",
)


@compiles_in_threads
@ways()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_region(engine, way, backend):
    w = leaf(4, 4, number=4)
    compiled = torch.compile(lambda x: layer(x @ w).exp() * x[:3].sin(), backend=backend)

    def scenario(watch: Watch):
        x = leaf(6, 4)
        w.grad = None
        for _ in range(2):
            watch.call(lambda: compiled(x * 1), inputs=[x, w]).sum().backward()
        return [x.grad, w.grad]

    torch._dynamo.reset()
    run_both(scenario, engine, way)
    torch._dynamo.reset()


@compiles_in_threads
@ways()
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_region_for_any_size(engine, way):
    compiled = torch.compile(lambda x: layer(x).exp(), backend="aot_eager", dynamic=True)

    def scenario(watch: Watch):
        x = leaf(6, 4)
        watch.call(lambda: compiled(x * 1), inputs=[x]).sum().backward()
        return x.grad

    torch._dynamo.reset()
    step = run_both(scenario, engine, way)
    torch._dynamo.reset()
    assert step.unsupported == 0, "the compiler's hints on a tensor can be missed"


@pytest.mark.slow
@compiles_in_threads
@pytest.mark.filterwarnings("ignore")
def test_hooks_inside_a_compiled_region(engine):
    def scenario(watch: Watch):
        x = leaf(6, 4)

        @torch.compile(backend="aot_eager")
        def function(x):
            with watch.region():
                return layer(x).exp()

        y = function(x * 1).clone()
        watch.settle()
        y.sum().backward()
        return x.grad

    torch._dynamo.reset()
    run_both(scenario, engine, CONTEXT)
    torch._dynamo.reset()


@ways()
@pytest.mark.filterwarnings("ignore")
def test_a_scripted_function(engine, way):
    scripted = torch.jit.trace(lambda x: (x.sin() * x.exp()).tanh(), leaf(6, 4))

    def scenario(watch: Watch):
        x = leaf(6, 4)
        for _ in range(3):  # the third run is an optimised one
            watch.call(lambda: scripted(x * 1), inputs=[x]).sum().backward()
        return x.grad

    run_both(scenario, engine, way)


def test_a_mode_that_makes_tensors_up_leaves_nothing_behind(engine):
    dtype = torch.float16  # that nothing else here has used
    w, x = torch.ones(10, dtype=dtype, requires_grad=True), torch.ones(10, dtype=dtype)
    with FakeTensorMode(allow_non_fake_inputs=True), engine.saved_tensors_hooks():
        w * x
    with engine.step(), engine.saved_tensors_hooks():
        y = (w * x).sum()
    settle(engine)
    y.backward()
    assert torch.equal(w.grad, x)


def test_a_part_that_another_backward_pass_has_freed_is_unsupported(engine):
    x, w, b = (torch.ones(8, requires_grad=True) for _ in range(3))
    with engine.step():
        used = Double.apply(x * w).sum()
        torch.autograd.grad(used, w)
        y = used + (b * 2).exp().sum()
        engine.capture(Scope(), [y], [x])
        y.backward(inputs=[b])
    assert torch.equal(b.grad, 2 * torch.full((8,), 2.0).exp())
