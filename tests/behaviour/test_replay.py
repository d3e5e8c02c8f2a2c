# SPDX-License-Identifier: Apache-2.0
"""What is a cheap function of other saved tensors is computed again, with the bytes that it had."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.offload import ChangedInPlaceError, OffloadEngine, Placement, Scope
from megatron.offload.activations.placement.plan import Plan, PlannedPart
from megatron.offload.activations.placement.plan_policy import PlannedPolicy
from megatron.offload.activations.saved import (
    available,
    checked_programs,
    recipes,
    replayable_nodes,
)
from megatron.offload.activations.saved.recipe import Layout, Program, Step
from megatron.offload.activations.saved.recipe_search import RecipeSearch
from megatron.offload.activations.saved.replayable_nodes import add_function
from megatron.offload.activations.saved.view import SavedView
from tests.support.models import settle

SHAPE = (8, 48)
WAYS = ["context", "nodes"]
MakeEngine = Callable[..., OffloadEngine]


@pytest.fixture
def make_engine(make_engine: MakeEngine) -> MakeEngine:
    """Engines that replay."""
    return lambda **changes: make_engine(**{"replay": "on", **changes})


@pytest.fixture
def engine(make_engine: MakeEngine) -> OffloadEngine:
    return make_engine()


@contextlib.contextmanager
def forward_pass(engine: OffloadEngine, *models: nn.Module, layer: str = "") -> Iterator[None]:
    engine.note_models(models)
    engine.note_weights([])
    with engine.forward(Scope(layer=layer)):
        yield


def run(engine: OffloadEngine, way: str, function: Callable[..., Tensor], *inputs: Tensor) -> Any:
    """Its result; what it saved was taken in one of the two ways."""
    if way == "context":
        with engine.saved_tensors_hooks():
            return function(*inputs)
    result = function(*inputs)
    engine.capture(engine.scope, [result], inputs)
    return result


def train(
    engine: OffloadEngine | None,
    way: str,
    function: Callable[..., Tensor],
    make: Callable[[], list[Tensor]],
    model: nn.Module | None = None,
    num_steps: int = 3,
) -> list[Tensor]:
    """Gradients of all steps, with offload or without."""
    found = []
    for step in range(num_steps):
        torch.manual_seed(step)
        inputs = make()
        if engine is None:
            result = function(*inputs)
            result.backward(torch.linspace(-1, 1, result.numel()).view(result.shape).to(result))
        else:
            with engine.step(), forward_pass(engine, *filter(None, [model])):
                result = run(engine, way, function, *inputs)
                settle(engine)
                result.backward(torch.linspace(-1, 1, result.numel()).view(result.shape).to(result))
        found += [one.grad for one in inputs if one.grad is not None]
        if model is not None:
            found += [one.grad.clone() for one in model.parameters() if one.grad is not None]
    return found


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape or SHAPE).to(dtype).requires_grad_()


def weights(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [leaf(dtype=dtype), leaf(48, 64, dtype=dtype), leaf(64, 32, dtype=dtype)]


def between(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The function between two matrix products: the second one saves its result."""

    def layer(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return function(x @ first) @ second

    return layer


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "tanh gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": lambda x: F.relu(x * x.abs()),
    "leaky relu": lambda x: F.leaky_relu(x, 0.2),
    "tanh": lambda x: torch.tanh(x * x),
    "sigmoid": lambda x: torch.sigmoid(x.pow(2)),
    "softplus": lambda x: F.softplus(x, 2.0, 5.0),
    "log sigmoid": F.logsigmoid,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.25),
    "clamp": lambda x: x.clamp(-0.5, 0.75),
    "sine": lambda x: torch.sin(x).cos(),
    "exp": lambda x: torch.exp(-x.abs()),
    "erf": torch.erf,
    "square root": lambda x: (x * x).sqrt(),
    "power": lambda x: x.pow(3),
    "squared relu": lambda x: F.relu(x).square(),
    "quotient": lambda x: x / (x.abs() + 1.0),
    "difference": lambda x: x * x - F.silu(x),
    "sum with a factor": lambda x: torch.add(x * x, F.silu(x), alpha=0.3),
    "python gelu": lambda x: 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x.pow(3)))),
    "subtracted from a scalar": lambda x: x * (1.5 - torch.sigmoid(x)),
    "cast": lambda x: F.silu(x.double()).to(x.dtype),
    "chosen": lambda x: torch.where(x > 0, F.silu(x), x * x),
    "transposed": lambda x: F.silu(x.t()).t().contiguous(),
    "parts": lambda x: torch.cat([F.silu(one) for one in x.chunk(2, -1)], -1),
    "slices": lambda x: torch.cat((-F.silu(x)[:, 32:], F.silu(x)[:, :32]), -1),
    "unbound": lambda x: torch.stack(F.silu(x.view(8, 2, 32)).unbind(1), 1).flatten(1),
    "views": lambda x: F.silu(x.view(4, 2, 64).unsqueeze(1)).squeeze(1).reshape(8, 64),
    "gated": lambda x: torch.cat((F.glu(x, -1), F.glu(-x, -1)), -1),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_its_gradients_are_the_same_and_it_moves_less(make_engine, name, dtype, way):
    engine = make_engine()
    layer = between(FUNCTIONS[name])
    plain = train(None, way, layer, lambda: weights(dtype))
    ours = train(engine, way, layer, lambda: weights(dtype))
    assert all(map(torch.equal, ours, plain)) and len(ours) == len(plain) == 9
    counted = engine.statistics
    assert counted.replayed_bytes >= SHAPE[0] * 64 * dtype.itemsize and counted.num_replays
    off = make_engine(replay="off")
    assert all(map(torch.equal, train(off, way, layer, lambda: weights(dtype)), plain))
    assert off.statistics.replayed_bytes == 0
    assert counted.offloaded_bytes < off.statistics.offloaded_bytes


@pytest.mark.parametrize("way", WAYS)
def test_where_a_plan_keeps_all_nothing_is_replayed_until_another_plan_comes(offload_config, way):
    policy = PlannedPolicy(1, Placement.SSD)
    plain = train(None, way, between(F.silu), weights)
    engine = OffloadEngine(offload_config(replay="on"), policy=policy)
    try:
        for replays in (True, False, True):
            line = PlannedPart(0, "", "layer", Placement.KEEP, 8, replays=replays)
            policy.follow(Plan((line,)))
            ours = train(engine, way, between(F.silu), weights)
            assert len(ours) == len(plain) and all(map(torch.equal, ours, plain))
            counted, size = engine.statistics, 8 * 64 * 4
            assert counted.offloaded_bytes == 0
            assert counted.replayed_bytes == size * replays
            assert counted.num_replays == replays
    finally:
        engine.close()


class RMSNorm(nn.Module):
    """As models of transformers have it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


def norms(dtype: torch.dtype) -> dict[str, nn.Module]:
    torch.manual_seed(7)
    return {
        "layer norm": nn.LayerNorm(64, eps=1e-3).to(dtype),
        "layer norm without bias": nn.LayerNorm(64, bias=False).to(dtype),
        "rms norm": nn.RMSNorm(64, eps=1e-6).to(dtype),
        "rms norm of transformers": RMSNorm(64, 1e-6).to(dtype),
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", norms(torch.float32))
def test_what_a_norm_gives_is_computed_again(make_engine, name, dtype, way):
    def gradients(engine: OffloadEngine | None) -> list[Tensor]:
        norm = norms(dtype)[name]
        return train(engine, way, between(norm), lambda: weights(dtype), norm)

    engine = make_engine()
    assert all(map(torch.equal, gradients(engine), gradients(None)))
    assert engine.statistics.replayed_bytes >= SHAPE[0] * 64 * dtype.itemsize


class TakenBack:
    """Hooks that have a module's parameters in memory while it computes alone, as ZeRO 3 does."""

    def __init__(self, module: nn.Module) -> None:
        self.whole = {one: one.data for one in module.parameters()}
        module.register_forward_pre_hook(self.gather)
        module.register_forward_hook(self.take_back)
        module.register_full_backward_pre_hook(self.gather)

    def gather(self, *_: Any) -> None:
        for one, data in self.whole.items():
            one.data = data.clone()

    def take_back(self, *_: Any) -> None:
        for one in self.whole:
            one.data = one.data.new_empty(0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", norms(torch.float32))
def test_it_is_computed_of_parameters_that_others_have_taken_back(make_engine, name, way):
    def gradients(engine: OffloadEngine | None, *, takes_back: bool = True) -> list[Tensor]:
        norm = norms(torch.float32)[name]
        if takes_back:
            TakenBack(norm)
        return train(engine, way, between(norm), weights, norm)

    engine, other = make_engine(), make_engine()
    assert all(map(torch.equal, gradients(engine), gradients(None)))
    gradients(other, takes_back=False)
    if way == "context":  # whose hooks see the parameter while it is there
        assert engine.statistics.replayed_bytes == other.statistics.replayed_bytes > 0


def do_nothing(*_: Any) -> None:
    """A hook."""


@pytest.mark.parametrize("way", WAYS)
def test_hooks_of_a_module_in_backward_change_nothing(make_engine, way):
    """torch puts functions of its own around a module for them, which return what they get."""

    def replayed_bytes(hooks: bool) -> int:
        def gradients(engine: OffloadEngine | None) -> list[Tensor]:
            model = nn.Sequential(nn.LayerNorm(64), nn.Sigmoid(), nn.Identity())
            for module in model if hooks else ():
                module.register_full_backward_hook(do_nothing)
            return train(engine, way, between(model), weights, model)

        engine = make_engine()
        assert all(map(torch.equal, gradients(engine), gradients(None)))
        return engine.statistics.replayed_bytes

    assert replayed_bytes(hooks=True) == replayed_bytes(hooks=False) > 0


@pytest.mark.parametrize("way", WAYS)
def test_a_function_that_returns_what_it_gets_for_a_while_is_not_taken_to_go_on(make_engine, way):
    """As one that trains for quantization from some step on."""
    num_calls = 0

    class Later(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.detach() if num_calls < 4 else 0.5 * x

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients

    def later(x: Tensor) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        return Later.apply(F.silu(x))

    def gradients(engine: OffloadEngine | None) -> list[Tensor]:
        nonlocal num_calls
        num_calls = 0
        return train(engine, way, between(later), weights, num_steps=6)

    assert all(map(torch.equal, gradients(make_engine()), gradients(None)))


def normed(x: Tensor, first: Tensor, second: Tensor, norm: nn.LayerNorm, eps: float) -> Tensor:
    return F.layer_norm(x @ first, [64], norm.weight, norm.bias, eps) @ second


def test_a_norm_whose_module_says_another_eps_is_saved(make_engine):
    engine, norm = make_engine(), nn.LayerNorm(64, eps=1e-5)
    train(engine, "nodes", lambda *a: normed(*a, norm, 0.1), weights, norm)
    assert engine.statistics.replayed_bytes == 0


def test_a_norm_of_which_nothing_is_known_does_not_stop_a_forward_pass(make_engine):
    def layer(x: Tensor, first: Tensor, second: Tensor, norm: nn.LayerNorm) -> Tensor:
        h = F.layer_norm(x @ first, [64], norm.weight, norm.bias, 0.1)
        return (h * (1.0 + h)) @ second

    engine, norm = make_engine(), nn.LayerNorm(64, eps=1e-5)
    for way in WAYS:
        ours = train(engine, way, lambda *a: layer(*a, norm), weights, norm)
        norm.zero_grad()
        plain = train(None, way, lambda *a: layer(*a, norm), weights, norm)
        norm.zero_grad()
        assert all(map(torch.equal, ours, plain))


def test_a_sum_with_a_scalar_of_a_norm_that_is_not_saved_does_not_stop_it_either(make_engine):
    def layer(x: Tensor, first: Tensor, second: Tensor, norm: nn.LayerNorm) -> Tensor:
        return (1.0 + F.layer_norm(x @ first, [64], norm.weight, norm.bias, 0.1)) @ second

    engine, norm = make_engine(), nn.LayerNorm(64, eps=1e-5)
    train(engine, "nodes", lambda *a: layer(*a, norm), weights, norm)
    assert engine.statistics.replayed_bytes == 0


def test_an_operand_that_was_changed_does_not_stop_a_forward_pass(make_engine):
    engine = make_engine(mode="keep")
    x, first, second = weights()
    with engine.step(), forward_pass(engine), engine.saved_tensors_hooks():
        h = x @ first
        act = F.silu(h)
        with torch.no_grad():
            h.add_(1)
        result = (act + (1.0 + h)) @ second
        with pytest.raises(ChangedInPlaceError):
            result.sum().backward()


def test_an_eps_that_only_now_makes_a_difference_is_not_taken_for_that_of_forward(make_engine):
    engine, norm = make_engine(), nn.LayerNorm(64, eps=1e-12)
    tiny = [False, False, False, True]

    def make() -> list[Tensor]:
        factor = 1e-4 if tiny.pop(0) else 1.0
        return [one.detach().mul_(factor).requires_grad_() for one in weights()]

    function = lambda *a: normed(*a, norm, 2e-12)  # noqa: E731
    train(engine, "nodes", function, make, norm)
    assert engine.statistics.replayed_bytes  # the bytes did not show it
    with pytest.raises(RuntimeError, match="eps"):
        train(engine, "nodes", function, make, norm, num_steps=1)


@pytest.mark.parametrize("way", WAYS)
def test_scalars_may_differ_between_steps_and_within_a_layer(make_engine, way):
    steps: list[float] = []

    def layer(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        steps.append(1.0)
        h = x @ first
        one = h * (F.silu(h) + len(steps))
        other = h * (F.silu(h) + (3 - len(steps)))
        return (one * other) @ second

    plain = train(None, way, layer, weights, num_steps=6)
    steps.clear()
    engine = make_engine()
    assert all(map(torch.equal, train(engine, way, layer, weights, num_steps=6), plain))
    assert engine.statistics.replayed_bytes


@pytest.mark.parametrize("way", WAYS)
def test_a_sum_with_a_tensor_that_wants_no_gradient_is_none_with_a_scalar(make_engine, way):
    def layer(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        h = x @ first
        return (h * (F.silu(h) + torch.arange(64.0))) @ second

    engine = make_engine()
    ours = train(engine, way, layer, weights)
    assert all(map(torch.equal, ours, train(None, way, layer, weights)))


def living(kind: type) -> int:
    gc.collect()
    return sum(type(one) is kind for one in gc.get_objects())


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda h: h.t().contiguous(),
    "channels last": lambda h: h.view(1, 5, 2, 11).contiguous(memory_format=torch.channels_last),
    "cast": lambda h: h.view(1, 5, 2, 11).to(memory_format=torch.channels_last),
    "wider": lambda h: h.view(1, 5, 2, 11).to(torch.double, memory_format=torch.channels_last),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_what_becomes_nan_is_not_taken_for_something_that_was_changed(make_engine, dtype):
    """As where fp16 overflows, and the script leaves the step out. A cast changes bits of NaN."""
    steps: list[int] = []

    def make() -> list[Tensor]:
        steps.append(0)
        inputs = weights(dtype)
        if len(steps) % 12 > 3:
            inputs[0].data[::2] = float("inf")
        return inputs

    def layer(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        h = x @ first
        return (F.layer_norm(h.float(), (64,)).sin() + h.float().sin()).to(dtype) @ second

    engine = make_engine()
    plain = train(None, "context", layer, make, num_steps=12)
    ours = train(engine, "context", layer, make, num_steps=12)
    assert any(one.isnan().any() for one in plain) and engine.statistics.replayed_bytes
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def assert_no_layout_is_guessed(
    engine: OffloadEngine, layer: Callable[..., Tensor], num_columns: int
) -> None:
    """A CPU rounds the last few values of a sigmoid otherwise, which shows for some inputs only.

    It does not for those of the first steps, in which recipes are compared.
    """
    steps: list[int] = []

    def make() -> list[Tensor]:
        steps.append(0)
        x = 4 * torch.randn(5, 48) if len(steps) % 12 > 4 else torch.zeros(5, 48)
        return [x.requires_grad_(), leaf(48, num_columns)]

    plain = train(None, "context", layer, make, num_steps=12)
    assert all(map(torch.equal, train(engine, "context", layer, make, num_steps=12), plain))


@pytest.mark.parametrize("copy", COPIES)
def test_the_layout_of_a_copy_that_is_not_saved_is_not_guessed(make_engine, copy):
    def layer(x: Tensor, first: Tensor) -> Tensor:
        h = x @ first
        square = h * h
        return torch.sigmoid(COPIES[copy](h)).sin().sum() + square.sum()

    assert_no_layout_is_guessed(make_engine(), layer, 22)


class Scaled(torch.autograd.Function):
    """Saves its input, and returns a function of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return gradient * (s + x * s * (1 - s))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_right", [True, False])
def test_a_function_that_was_added_counts_if_it_gives_the_bytes(
    make_engine, monkeypatch, way, is_right
):
    monkeypatch.setattr(replayable_nodes, "_of_functions", {})
    add_function(Scaled, lambda x: x * x.sigmoid() if is_right else x * x.tanh())
    layer = between(Scaled.apply)
    engine = make_engine()
    assert all(
        map(torch.equal, train(engine, way, layer, weights), train(None, way, layer, weights))
    )
    assert bool(engine.statistics.replayed_bytes) is is_right


@pytest.mark.parametrize("way", WAYS)
def test_random_numbers_are_not_drawn_again(make_engine, way):
    layer = between(lambda x: F.dropout(F.silu(x), 0.5))
    engine = make_engine()
    assert all(
        map(torch.equal, train(engine, way, layer, weights), train(None, way, layer, weights))
    )
    assert engine.statistics.replayed_bytes == 2 * SHAPE[0] * 64 * 4  # the noise, silu times it


def saved_by(engine: OffloadEngine, make: Callable[[], Tensor]) -> tuple[Tensor, list[SavedView]]:
    """The result, and what stands for each saved tensor that is computed again."""
    result = make()
    nodes, found = [result.grad_fn], []
    while nodes:
        node = nodes.pop()
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                data = getattr(node, name).data
                if isinstance(data, SavedView) and data.saved.recipe is not None:
                    found.append(data)
        nodes += [one for one, _ in node.next_functions if one is not None]
    return result, found


def test_its_memory_is_given_up_and_taken_once_for_several_uses(engine):
    x, first, second = weights()
    gone = []

    def make() -> Tensor:
        h = F.silu(x @ first)
        gone.append(h.untyped_storage()._weak_ref())
        return h @ second + h @ second

    with engine.step(), forward_pass(engine), engine.saved_tensors_hooks():
        result, found = saved_by(engine, make)
    settle(engine)
    gc.collect()
    assert torch.UntypedStorage._expired(gone[0])
    assert len({id(one.saved) for one in found}) == 1 and len(found) == 2
    result.sum().backward()
    assert engine.statistics.num_replays == 1
    assert all(one.saved.peeked is None for one in found)
    torch.UntypedStorage._free_weak_ref(gone[0])


def test_what_another_holds_is_not_computed_again(engine):
    x, first, second = weights()
    with engine.step(), forward_pass(engine), engine.saved_tensors_hooks():
        held = F.silu(x @ first)
        result = held @ second
        assert engine.statistics.replayed_bytes
        result.sum().backward()
    assert engine.statistics.num_replays == 0


@pytest.mark.parametrize("which", ["operand", "parameter", "result"])
def test_what_was_changed_in_place_raises(engine, which):
    x, first, second = weights()
    factor = nn.Parameter(torch.randn(64))
    with engine.step(), forward_pass(engine), engine.saved_tensors_hooks():
        h = x @ first
        act = F.silu(h) * factor
        result = act @ second
        with torch.no_grad():
            {"operand": h, "parameter": factor, "result": act}[which].add_(1)
        del h, act
        with pytest.raises(ChangedInPlaceError):
            result.sum().backward()


def test_an_operand_that_was_changed_raises_where_nothing_else_needs_it(engine):
    x, first, second = weights()
    with engine.step(), forward_pass(engine), engine.saved_tensors_hooks():
        h = x @ first
        result = F.silu(h) @ second
        with torch.no_grad():
            h.add_(1)
        del h
        with pytest.raises(ChangedInPlaceError):
            torch.autograd.grad(result.sum(), second)


def test_a_parameter_that_changes_where_no_version_shows_it_is_the_one_of_forward(engine):
    def gradients(moves: bool) -> list[Tensor]:
        torch.manual_seed(0)
        x, first, second = weights()
        factor = nn.Parameter(torch.randn(64))
        with contextlib.ExitStack() as stack:
            if moves:
                stack.enter_context(engine.step())
                stack.enter_context(forward_pass(engine))
                stack.enter_context(engine.saved_tensors_hooks())
            result = (F.silu(x @ first) + factor) @ second
            factor.data.mul_(2)
            result.sum().backward()
        return [x.grad, first.grad, second.grad]

    assert all(map(torch.equal, gradients(True), gradients(False)))
    assert engine.statistics.num_replays


@pytest.mark.parametrize("way", WAYS)
def test_a_buffer_that_is_written_to_unseen_is_the_one_of_forward(make_engine, way):
    """Scales and averages are, behind the operation, and not in the first steps."""
    scale = torch.ones(64)

    def layer(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return (F.silu(x @ first) * scale) @ second

    def train_with(engine: OffloadEngine | None) -> list[Tensor]:
        scale.fill_(1.5)
        found: list[Tensor] = []
        for step in range(12):
            torch.manual_seed(step)
            x, first, second = weights()
            with contextlib.ExitStack() as stack:
                if engine is not None:
                    stack.enter_context(engine.step())
                    stack.enter_context(forward_pass(engine))
                    engine.exclude([scale])
                    result = run(engine, way, layer, x, first, second)
                else:
                    result = layer(x, first, second)
                if step > 3:
                    scale.data.mul_(1.25)
                result.square().sum().backward()
            found += [x.grad, first.grad, second.grad]
        return found

    plain = train_with(None)
    engine = make_engine()
    assert all(map(torch.equal, train_with(engine), plain))
    assert engine.statistics.num_replays  # of the last step


@pytest.mark.parametrize("way", WAYS)
def test_what_an_operand_was_before_it_was_changed_is_not_computed_again(make_engine, way):
    """Autograd does not need the scale where its own operation is not asked for a gradient."""

    def train_with(engine: OffloadEngine | None) -> list[Tensor]:
        steps: list[int] = []

        def gradients() -> list[Tensor]:
            torch.manual_seed(len(steps))
            x, first, second = weights()
            scale = torch.full((64,), 1.5)

            def layer(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
                act = F.silu(x @ first) * scale
                steps.append(0)
                if len(steps) > 3:
                    scale.mul_(1.25)
                return act @ second

            if engine is None:
                result = layer(x, first, second)
            else:
                result = run(engine, way, layer, x, first, second)
                settle(engine)
            return list(torch.autograd.grad(result.square().sum(), [second]))

        found: list[Tensor] = []
        for _ in range(6):
            with contextlib.ExitStack() as stack:
                if engine is not None:
                    stack.enter_context(engine.step())
                    stack.enter_context(forward_pass(engine))
                found += gradients()
        return found

    assert all(map(torch.equal, train_with(make_engine()), train_with(None)))


@pytest.mark.parametrize("first_value", [0, 1])
def test_what_is_written_to_a_few_places_is_seen_in_the_end(make_engine, first_value):
    """Of a result that no operation saves, and from some step on."""
    steps: list[int] = []

    def layer(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        act = F.silu(x @ first)
        squared = act * act
        steps.append(0)
        if len(steps) > 3:
            squared.data.view(-1)[first_value::2] = 0  # of the others none
        return squared.neg() @ second

    # An accelerator says it in whatever runs on the device next.
    with pytest.raises(RuntimeError, match="behind autograd's back"):
        train(make_engine(), "context", layer, weights, num_steps=24)
    assert len(steps) > 3


@pytest.mark.parametrize("last", [Tensor.detach, lambda one: one[:3], lambda one: one.t()])
def test_a_result_has_memory_of_its_own(last):
    x = torch.randn(6, 6)
    expected = last(x.sin()).clone(memory_format=torch.preserve_format)
    layout = Layout(tuple(expected.shape), expected.stride(), x.dtype)
    for first in (torch.sin, Tensor.sin_):  # of the second the operand's memory is the result's
        program = Program((Step(first, (~0,)), Step(last, (0,))), layout)
        result = program.run([x.clone()])
        assert torch.equal(result, expected) and result.stride() == expected.stride()
        assert result.untyped_storage().nbytes() == expected.nbytes and result._base is None


@pytest.mark.parametrize("way", WAYS)
def test_what_was_changed_without_autograd_is_saved(make_engine, way):
    steps: list[int] = []

    def layer(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        steps.append(0)
        h = x @ first
        act = F.silu(h)
        with (
            torch.no_grad()
        ):  # what is saved is not what its node gave, as a comparison may not see
            act.mul_(2 if len(steps) > 3 else 1)
        return act @ second

    plain = train(None, way, layer, weights, num_steps=5)
    steps.clear()
    engine = make_engine()
    assert all(map(torch.equal, train(engine, way, layer, weights, num_steps=5), plain))
    assert engine.statistics.replayed_bytes == 0  # of the last step


def test_backward_may_run_twice_and_through_itself(make_engine):
    def gradients(engine: OffloadEngine | None) -> list[Tensor]:
        torch.manual_seed(0)
        x, first, second = weights()
        with contextlib.ExitStack() as stack:
            if engine is not None:
                stack.enter_context(engine.step())
                stack.enter_context(forward_pass(engine))
                stack.enter_context(engine.saved_tensors_hooks())
            result = between(F.gelu)(x, first, second).square().sum()
            found = [torch.autograd.grad(result, x, retain_graph=True)[0] for _ in range(2)]
            (one,) = torch.autograd.grad(result, x, create_graph=True)
            (two,) = torch.autograd.grad(one.square().sum(), x, create_graph=True)
            two.sum().backward()
        return [*found, one, two, x.grad, first.grad, second.grad]

    engine = make_engine()
    assert all(map(torch.equal, gradients(engine), gradients(None)))
    assert engine.statistics.num_replays > 2


def test_several_threads_run_backward_through_one_graph(engine):
    x, first, second = weights()
    with engine.step(), forward_pass(engine), engine.saved_tensors_hooks():
        result = between(F.gelu)(x, first, second)
    settle(engine)
    found: list[Tensor] = []

    def backward() -> None:
        found.extend(torch.autograd.grad(result.sum(), first, retain_graph=True))

    threads = [threading.Thread(target=backward) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    (expected,) = torch.autograd.grad(between(F.gelu)(x, first, second).sum(), first)
    assert len(found) == 8 and all(torch.equal(one, expected) for one in found)


def test_a_chain_of_thousands_of_operations_is_followed_for_a_moment_only(make_engine):
    def chain(x: Tensor) -> Tensor:
        for _ in range(3000):
            x = -x
        return x

    engine, layer = make_engine(), between(chain)
    ours = train(engine, "context", layer, weights, num_steps=1)
    assert all(map(torch.equal, ours, train(None, "", layer, weights, num_steps=1)))
    assert engine.statistics.replayed_bytes == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_search_that_finds_nothing_is_made_less_often_and_another_as_before(
    make_engine, monkeypatch, way
):
    engine = make_engine()
    searches: list[int] = []
    bytes_of_steps = []
    begin = RecipeSearch.__init__

    def count(self: RecipeSearch, *args: Any) -> None:
        searches[-1] += 1
        begin(self, *args)

    monkeypatch.setattr(RecipeSearch, "__init__", count)

    def layer(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        y = x @ first
        return F.silu(y) @ second + (torch.sin(y) + torch.cumsum(y, 1)) @ second  # a sum without

    for _ in range(200):
        searches.append(0)
        with engine.step(), forward_pass(engine):
            result = run(engine, way, layer, *weights())
            engine.end_layers()
            result.sum().backward()
        bytes_of_steps.append(engine.statistics.replayed_bytes)
    assert searches[:8] == [2] * 8  # the activation's result, and the sum
    assert searches[8:64] == [1] * 56 and searches.count(2) == 8 + 3
    assert len(set(bytes_of_steps)) == 1 and bytes_of_steps[0] == 8 * 64 * 4


def test_what_is_known_of_shapes_is_bounded(make_engine, monkeypatch):
    monkeypatch.setattr(checked_programs, "_MOST_PROGRAMS", 8)
    monkeypatch.setattr(recipes, "_MOST_KINDS", 8)
    monkeypatch.setattr(available, "_MOST_PLACES", 8)
    sizes: list[int] = []

    def make() -> list[Tensor]:
        sizes.append(0)
        return [leaf(8 + len(sizes) % 40, 48), leaf(48, 64), leaf(64, 32)]

    def layer(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        h = x @ first
        return (F.silu(h) * (torch.sigmoid(h.square()) + 1.0)) @ second

    engine = make_engine()
    plain = train(None, "context", layer, make, num_steps=40)
    before = living(Program)
    assert all(map(torch.equal, train(engine, "context", layer, make, num_steps=40), plain))
    assert living(Program) <= before + 8 and engine.statistics.replayed_bytes
    train(make_engine(codec="int8"), "context", layer, make, num_steps=40)
    assert living(Program) <= before + 16


@pytest.mark.parametrize("way", WAYS)
def test_a_result_is_found_behind_many_of_its_kind_that_are_not(make_engine, way):
    engine = make_engine()

    def layer(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        y = x @ first
        result = y @ second
        for _ in range(9):
            result = result + (torch.cumsum(y, 1) + torch.cumsum(y, 1)) @ second
        return result + (torch.sin(y) + torch.cos(y)) @ second

    for _ in range(12):
        with engine.step(), forward_pass(engine):
            result = run(engine, way, layer, *weights())
            engine.end_layers()
            result.sum().backward()
        assert engine.statistics.replayed_bytes == 8 * 64 * 4


def test_what_stays_in_memory_is_computed_again_too(make_engine):
    """With everything kept, what is left in memory is what others are computed of."""
    engine = make_engine(mode="keep")
    layer = between(F.gelu)
    assert all(
        map(torch.equal, train(engine, "nodes", layer, weights), train(None, "", layer, weights))
    )
    counted = engine.statistics
    assert counted.replayed_bytes == SHAPE[0] * 64 * 4 and not counted.offloaded_bytes


@pytest.mark.parametrize("mode", ["ssd", "keep"])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_computed_again_is_counted_once_by_what_made_it(make_engine, way, mode):
    def layer(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        h = (x * 1 @ first).view(8, 2, 32).transpose(0, 1)
        return (torch.sin(h) * torch.cos(h)).sum((0, 2)) + second.sum() * torch.softmax(h, 0).sum()

    engine = make_engine(mode=mode)
    train(engine, way, layer, weights)
    counted = engine.statistics
    made = counted.unreplayed_by_operation
    size = SHAPE[0] * 64 * 4
    assert made["Mm"] == size and made["Softmax"] == size  # `h` is saved by two operations
    assert made["Mul"] == SHAPE[0] * SHAPE[1] * 4
    assert counted.unreplayed_bytes == sum(made.values())
    assert counted.replayed_bytes == 2 * size
    assert not any("View" in name or "Transpose" in name for name in made)


def test_inputs_and_operations_of_users_have_names_too(engine):
    x, mask = leaf(), torch.randn(SHAPE)
    with engine.step(), forward_pass(engine), engine.saved_tensors_hooks():
        for _ in range(2):
            (Scaled.apply(x * 1) * mask).square().sum().backward()
    made = engine.statistics.unreplayed_by_operation
    size = mask.nbytes
    assert made == {"no operation with a gradient": size, "Mul": 2 * size + 2 * size}


def test_a_leaf_is_not_made_by_an_operation(engine):
    x, weight = leaf().detach(), leaf()
    with engine.step(), forward_pass(engine), engine.saved_tensors_hooks():
        result = x[1:] * weight.clone()[1:].square()
    num_bytes = x.nbytes + weight.nbytes
    assert engine.statistics.unreplayed_by_operation == {"no operation with a gradient": num_bytes}
    result.sum().backward()


def test_without_replay_nothing_of_it_is_counted(make_engine):
    engine = make_engine(replay="off")
    train(engine, "nodes", between(F.silu), weights)
    assert engine.statistics.unreplayed_bytes == 0
    assert not engine.statistics.unreplayed_by_operation


class Listener:
    """Hears what a step saved, as `Observer` has it."""

    def __init__(self) -> None:
        self.moved, self.stayed_bytes, self.replayed, self.for_replay = [], {}, [], []
        self.num_replays = 0

    def moves(self, scope: Scope, num_bytes: int) -> None:
        self.moved.append(num_bytes)

    def stayed(self, scope: Scope, storage: torch.UntypedStorage) -> None:
        self.stayed_bytes[storage._cdata] = storage.nbytes()

    def replays(
        self, scope: Scope, storage: torch.UntypedStorage, copied_bytes: int, _: int
    ) -> None:
        self.replayed.append((scope.layer, storage.nbytes(), copied_bytes))

    def saves_for_replay(self, scope: Scope, num_bytes: int) -> None:
        self.for_replay.append((scope.layer, num_bytes))

    @contextlib.contextmanager
    def replaying(self, scope: Scope, *, decodes: bool) -> Iterator[None]:
        assert scope.layer == "decoder.1"
        self.num_replays += 1
        yield


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["keep", "ssd"])
def test_an_observer_hears_of_what_is_replayed_and_of_what_is_saved_for_it(make_engine, mode, way):
    """A wider copy is replayed of the narrower tensor, which is saved in its place."""
    engine = make_engine(mode=mode)
    engine.observe(listener := Listener())
    norm = nn.LayerNorm(64)

    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return norm((x @ w).float() * v) @ torch.ones(64, 8)

    inputs = [leaf(dtype=torch.bfloat16), leaf(48, 64, dtype=torch.bfloat16), leaf(8, 64)]
    with engine.step(), forward_pass(engine, norm, layer="decoder.1"):
        result = run(engine, way, function, *inputs)
        settle(engine)
        result.sum().backward()
    size = 8 * 64 * 4
    assert ("decoder.1", size, 0) in listener.replayed
    assert listener.num_replays == len(listener.replayed) == engine.statistics.num_replays
    assert sum(one[1] for one in listener.replayed) == engine.statistics.replayed_bytes
    saved = listener.moved if mode == "ssd" else list(listener.stayed_bytes.values())
    assert saved.count(size // 2) == 1
    assert listener.for_replay == [("decoder.1", size // 2)]
