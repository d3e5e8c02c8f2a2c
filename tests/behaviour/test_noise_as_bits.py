# SPDX-License-Identifier: Apache-2.0
"""Dropout's noise on a CPU, 0 or one constant, is saved as bits and comes back bit for bit."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.offload import ChangedInPlaceError, OffloadEngine, Scope
from megatron.offload.activations.saved.bits import bits_bytes
from megatron.offload.activations.saved.noise import may_be_noise, pack_noise, unpack_noise
from megatron.offload.activations.saved.recipe import bits_of
from megatron.offload.activations.saved.resident import ResidentTensor
from tests.support.models import settle

NUM = 4099  # no multiple of 8
SHAPE = (32, 129)
SIZE = 32 * 129
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
WAYS = ["context", "nodes"]
MakeEngine = Callable[..., OffloadEngine]


@pytest.fixture
def make_engine(make_engine: MakeEngine) -> MakeEngine:
    """Engines that replay; every byte moves."""
    return lambda **changes: make_engine(**{"replay": "on", "io": "buffered", **changes})


@pytest.fixture
def engine(make_engine: MakeEngine) -> OffloadEngine:
    return make_engine()


def new_noise(*shape: int, dtype: torch.dtype = torch.float32, p: float = 0.1) -> Tensor:
    """As dropout makes it."""
    return torch.empty(shape or (NUM,), dtype=dtype).bernoulli_(1 - p).div_(1 - p)


def gradients(
    engine: OffloadEngine | None, way: str, function: Callable[[Tensor], Tensor], x: Tensor
) -> list[Tensor]:
    """Of three steps; what operations saved has left memory before backward."""
    found = []
    for step in range(3):
        torch.manual_seed(step)
        one = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        with contextlib.ExitStack() as stack:
            if engine is not None:
                stack.enter_context(engine.step())
                stack.enter_context(engine.forward(Scope()))
            is_context = engine is not None and way == "context"
            with engine.saved_tensors_hooks() if is_context else contextlib.nullcontext():
                result = function(one)
            if engine is not None:
                if way == "nodes":
                    engine.capture(engine.scope, [result], [one])
                settle(engine)
            result.backward(torch.linspace(-1, 1, result.numel()).view(result.shape).to(result))
        assert one.grad is not None
        found += [result.detach(), one.grad]
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_dropout_saves_is_a_bit_a_value(make_engine, dtype, p, way):
    x = torch.randn(SHAPE).to(dtype)
    dropout = nn.Dropout(p)
    engine = make_engine()
    ours = gradients(engine, way, lambda x: dropout(x * 1), x)
    assert all(map(torch.equal, ours, gradients(None, way, lambda x: dropout(x * 1), x)))
    counted = engine.statistics
    if 0 < p < 1:
        assert counted.replayed_bytes == SIZE * dtype.itemsize
        assert counted.offloaded_bytes - bits_bytes(SIZE) < 100  # a scalar is saved too
        assert counted.read_bytes >= bits_bytes(SIZE)
    else:  # a scalar is all that it saves
        assert counted.replayed_bytes == 0 and counted.offloaded_bytes < 100


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {  # and how many noises it has
    "evaluation": (lambda x: F.dropout(x * 1, 0.5, training=False), 0),
    "in place": (lambda x: F.dropout(x * 1, 0.5, inplace=True) * 2, 1),
    "twice": (lambda x: F.dropout(F.dropout(x * 1, 0.5) * 3, 0.1), 2),
    "transposed": (lambda x: F.dropout(x.t() * 1, 0.5).contiguous(), 1),
    "alpha": (lambda x: F.alpha_dropout(x * 1, 0.5, training=True), 1),
    "drop path": (lambda x: x * x.new_empty(SHAPE).bernoulli_(0.5).div_(0.5), 1),
    "autocast": (lambda x: _in_bf16(x), 1),
    "a sum before it": (lambda x: F.dropout(F.silu(x) + x, 0.3) * F.silu(x), 1),
}


def _in_bf16(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.dropout(x @ torch.ones(SHAPE[1], SHAPE[1]), 0.5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_the_same_in_all_ways_to_use_it(make_engine, name, way):
    function, num_noises = FUNCTIONS[name]
    engine, x = make_engine(), torch.randn(SHAPE)
    assert all(
        map(torch.equal, gradients(engine, way, function, x), gradients(None, way, function, x))
    )
    size = SIZE * (2 if name == "autocast" else 4)
    assert engine.statistics.replayed_bytes // size >= num_noises
    assert engine.statistics.replayed_bytes > 0 or not num_noises


def test_two_that_share_their_noise_save_it_once(engine):
    noise = new_noise(*SHAPE)
    expected = noise.clone()
    x = torch.randn(SHAPE, requires_grad=True)
    with engine.step(), engine.forward(Scope()), engine.saved_tensors_hooks():
        result = (x * 1 * noise) + (x * 1) * noise
        del noise
        settle(engine)
        assert engine.statistics.replayed_bytes == SIZE * 4
        result.sum().backward()
    assert torch.equal(x.grad, expected + expected)
    assert engine.statistics.num_replays == 1


@pytest.mark.parametrize("mode", ["ssd", "host", "keep"])
def test_its_memory_is_given_up_and_it_comes_back_bit_for_bit(make_engine, mode):
    changes = {"host_budget": 1 << 20} if mode == "host" else {}
    engine = make_engine(mode=mode, **changes)
    for dtype in DTYPES:
        noise = new_noise(dtype=dtype)
        expected, weak = noise.clone(), noise.untyped_storage()._weak_ref()
        with engine.step():
            packed = engine.hooks.pack(noise)
            del noise
            settle(engine)
            assert torch.UntypedStorage._expired(weak)
            (bits,) = packed.saved.recipe.operands
            assert isinstance(bits, ResidentTensor) is (mode == "keep")
            restored = engine.hooks.unpack(packed)
        torch.UntypedStorage._free_weak_ref(weak)
        assert torch.equal(bits_of(restored), bits_of(expected)) and restored.dtype is dtype
        assert engine.statistics.offloaded_bytes == (0 if mode == "keep" else bits_bytes(NUM))
        assert engine.statistics.kept_bytes == (bits_bytes(NUM) if mode == "keep" else 0)


@pytest.mark.parametrize("mode", ["ssd", "keep"])
def test_a_plan_and_a_memory_report_hear_of_the_bits(make_engine, mode):
    heard: list[tuple[str, int]] = []

    class Listens:
        def moves(self, scope: Scope, num_bytes: int) -> None:
            heard.append(("moves", num_bytes))

        def stayed(self, scope: Scope, storage: torch.UntypedStorage) -> None:
            heard.append(("stayed", storage.nbytes()))

        def replays(
            self, scope: Scope, storage: torch.UntypedStorage, copied_bytes: int, _: int
        ) -> None:
            heard.append(("replays", storage.nbytes()))

        def saves_for_replay(self, scope: Scope, num_bytes: int) -> None:
            heard.append(("for replay", num_bytes))

    engine = make_engine(mode=mode)
    engine.observe(Listens())
    with engine.step():
        packed = engine.hooks.pack(new_noise())
    bits = ("moves" if mode == "ssd" else "stayed", bits_bytes(NUM))
    assert heard == [("for replay", bits_bytes(NUM)), bits, ("replays", NUM * 4)]
    del packed


def test_a_view_of_it_has_its_strides(engine):
    noise = new_noise(60, 70).t()
    expected = noise.clone()
    with engine.step():
        packed = [engine.hooks.pack(one) for one in (noise, noise[3:9])]
        assert all(one.saved.recipe is not None for one in packed)
        del noise
        settle(engine)
        restored, part = [engine.hooks.unpack(one) for one in packed]
    assert torch.equal(restored, expected) and restored.stride() == (1, 70)
    assert torch.equal(part, expected[3:9])


def test_bits_that_are_few_go_where_the_noise_would_go(make_engine):
    engine = make_engine(min_bytes=NUM * 4)
    with engine.step():
        packed = engine.hooks.pack(new_noise())
        small = engine.hooks.pack(new_noise(NUM - 1))
    assert packed.saved.recipe is not None and isinstance(small, ResidentTensor)
    assert engine.statistics.offloaded_bytes == bits_bytes(NUM)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [3, NUM - 1])
@pytest.mark.parametrize("value", [-0.0, math.nan, -1.0, 2.5, math.inf])
def test_what_only_looks_like_noise_moves_as_it_is(engine, value, place, dtype):
    noise = torch.empty(NUM, dtype=dtype).bernoulli_(0.5)
    noise[place] = value  # the second change
    expected = noise.clone()
    assert may_be_noise(noise)
    with engine.step():
        packed = engine.hooks.pack(noise)
        del noise
        settle(engine)
        assert packed.saved.recipe is None
        restored = engine.hooks.unpack(packed)
    assert torch.equal(bits_of(restored), bits_of(expected))
    assert engine.statistics.offloaded_bytes == NUM * dtype.itemsize


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("constant", [1.0, -3.0, -math.inf, math.nan, -0.0, 1e-7])
def test_any_constant_beside_zero_is_restored(dtype, constant):
    tensor = torch.zeros(NUM, dtype=dtype)
    tensor[::3] = constant
    packed = pack_noise(tensor)
    if not bits_of(tensor).any():
        assert packed is None  # it is all zeros in this type
        return
    assert packed is not None
    restored = unpack_noise(packed[0], NUM, dtype, packed[1])
    assert torch.equal(bits_of(restored), bits_of(tensor)) and packed[0].numel() == bits_bytes(NUM)


@pytest.mark.parametrize("num_values", [*range(2, 70), 4096])
def test_any_number_of_values_is_restored(num_values):
    tensor = torch.zeros(num_values)
    tensor[1::2] = 1.25
    packed = pack_noise(tensor)
    assert packed is not None
    assert torch.equal(unpack_noise(packed[0], num_values, torch.float32, packed[1]), tensor)


@pytest.mark.parametrize("fill", [0.0, 1.0])
def test_what_has_one_value_may_not_be_filled_yet_and_moves_as_it_is(engine, fill):
    """The noise of `rrelu` is saved before it is drawn, and no version shows that it was."""
    x = torch.randn(NUM, requires_grad=True)
    found = []
    for is_ours in (False, True):
        torch.manual_seed(1)
        noise = torch.empty(NUM).fill_(fill).fill_(fill)
        with contextlib.ExitStack() as stack:
            if is_ours:
                stack.enter_context(engine.step())
                stack.enter_context(engine.saved_tensors_hooks())
            result = torch._C._nn.rrelu_with_noise(x * 1, noise, 0.1, 0.3, True) * 1
            del noise
        found += torch.autograd.grad(result.sum(), x)
    assert engine.statistics.replayed_bytes == 0
    assert torch.equal(*found)


@pytest.mark.parametrize("num_changes", [0, 1, 3])
def test_what_was_not_made_as_dropout_makes_its_noise_moves_as_it_is(engine, num_changes):
    noise = new_noise().clone()
    for _ in range(num_changes):
        noise.mul_(1)
    with engine.step():
        assert engine.hooks.pack(noise).saved.recipe is None


def test_a_part_of_a_storage_moves_as_it_is(engine):
    whole = torch.zeros(NUM + 1)
    noise = torch.empty(0).set_(whole.untyped_storage(), 1, (NUM,), (1,))
    noise.bernoulli_(0.5)
    expected = noise.clone()
    assert may_be_noise(noise)
    with engine.step():
        packed = engine.hooks.pack(noise)
        assert packed.saved.recipe is None
        del noise, whole
        settle(engine)
        assert torch.equal(engine.hooks.unpack(packed), expected)


def test_noise_that_was_changed_raises(engine):
    x = torch.randn(SHAPE, requires_grad=True)
    with engine.step(), engine.forward(Scope()), engine.saved_tensors_hooks():
        noise = new_noise(*SHAPE)
        result = x * 1 * noise
        assert engine.statistics.replayed_bytes
        noise.add_(1)
        with pytest.raises(ChangedInPlaceError):
            result.sum().backward()


def test_backward_may_run_twice_and_through_itself(make_engine):
    def found(engine: OffloadEngine | None) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(SHAPE, requires_grad=True)
        with contextlib.ExitStack() as stack:
            if engine is not None:
                stack.enter_context(engine.step())
                stack.enter_context(engine.forward(Scope()))
                stack.enter_context(engine.saved_tensors_hooks())
            result = F.dropout(F.gelu(x * 1), 0.3).square().sum()
            first = [torch.autograd.grad(result, x, retain_graph=True)[0] for _ in range(2)]
            (one,) = torch.autograd.grad(result, x, create_graph=True)
            (two,) = torch.autograd.grad(one.square().sum(), x)
        return [*first, one, two]

    engine = make_engine()
    assert all(map(torch.equal, found(engine), found(None)))
    assert engine.statistics.num_replays > 2


def test_without_replay_it_moves_as_it_is(make_engine):
    engine = make_engine(replay="off")
    with engine.step():
        packed: Any = engine.hooks.pack(new_noise())
    assert packed.saved.recipe is None and engine.statistics.offloaded_bytes == NUM * 4
