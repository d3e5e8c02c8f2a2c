# SPDX-License-Identifier: Apache-2.0
"""What is computed again by moving values: chosen rows, repeats, what nothing was appended to."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.offload import OffloadEngine, offload_activations
from megatron.offload.activations.saved.checked_programs import CheckedPrograms
from megatron.offload.activations.saved.recipe import Program
from megatron.offload.activations.saved.replay_operations import index
from megatron.offload.errors import ChangedInPlaceError, OffloadError
from tests.behaviour.test_replay import (
    SHAPE,
    WAYS,
    assert_no_layout_is_guessed,
    between,
    engine,
    forward_pass,
    leaf,
    make_engine,
    run,
    train,
    weights,
)
from tests.support.models import settle

assert make_engine and engine  # fixtures
MakeEngine = Callable[..., OffloadEngine]
ONE = SHAPE[0] * 64  # values of a result
ROWS = torch.tensor([3, 3, 0, 7, -1, 2, 5, 3])
COLUMNS = torch.arange(63, -1, -1)
MASK = torch.arange(16) % 2 == 0


def deviation(x: Tensor) -> Tensor:
    """A norm as Cohere's models have it: the mean is subtracted twice."""
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + 1e-3)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: F.silu(x)[ROWS.to(x.device)],
    "columns": lambda x: F.silu(x)[:, COLUMNS.to(x.device)],
    "single values": lambda x: F.silu(x)[ROWS[:, None].to(x.device), COLUMNS.to(x.device)],
    "what a mask selects": lambda x: F.silu(x).repeat(2, 1)[MASK.to(x.device)],
    "selected": lambda x: F.silu(x).index_select(1, COLUMNS.to(x.device)),
    "gathered": lambda x: F.silu(x).gather(1, COLUMNS.expand(8, 64).to(x.device)),
    "rows of rows": lambda x: F.silu(F.silu(x)[ROWS.to(x.device)])[ROWS.to(x.device)],
    "behind nothing": lambda x: torch.cat((x.new_empty(0), F.silu(x))),
    "before nothing": lambda x: torch.cat((F.silu(x), x.new_empty(8, 0)), -1),
    "behind nothing of one dimension": lambda x: torch.cat(
        (x.new_empty(8, 0), F.silu(x)[:0, 0], F.silu(x)), 1
    ),
    "repeats": lambda x: x[:, :16].unsqueeze(1).expand(8, 4, 16).reshape(8, 64),
    "repeats in new dimensions": lambda x: x[0].expand(2, 4, 64).contiguous().view(8, 64),
    "repeats of repeats": lambda x: x[:4, :16, None].expand(2, 4, 16, 4).reshape(8, 64),
    "repeats side by side": lambda x: x[:4, :16].repeat(2, 4),
    "repeats of all": lambda x: x[0].repeat(8, 1).view(8, 64),
    "deviation": deviation,
    # As torch's own functions in C++ multiply by a number: attention, for its scale.
    "scaled": lambda x: torch.ops.aten.mul.Scalar(F.silu(x), 0.3),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_its_gradients_are_the_same_and_it_moves_less(make_engine, name, dtype, way):
    engine, layer = make_engine(), between(FUNCTIONS[name])
    plain = train(None, way, layer, lambda: weights(dtype))
    ours = train(engine, way, layer, lambda: weights(dtype))
    assert all(map(torch.equal, ours, plain)) and len(ours) == len(plain) == 9
    counted = engine.statistics
    if name == "what a mask selects" and ours[0].device.type != "cpu":
        assert counted.replayed_bytes == 0
        return
    assert counted.replayed_bytes >= ONE * dtype.itemsize and counted.num_replays
    off = make_engine(replay="off")
    train(off, way, layer, lambda: weights(dtype))
    assert counted.offloaded_bytes < off.statistics.offloaded_bytes


@pytest.mark.parametrize("way", WAYS)
def test_of_what_is_repeated_one_is_saved(make_engine, way):
    layer, engine, off = between(FUNCTIONS["repeats"]), make_engine(), make_engine(replay="off")
    for one in (engine, off):
        train(one, way, layer, weights)
    spared = off.statistics.offloaded_bytes - engine.statistics.offloaded_bytes
    assert spared == ONE * 4 * 3 // 4


@pytest.mark.parametrize("way", WAYS)
def test_what_was_made_twice_is_saved_once(make_engine, way):
    """The result of the norm is computed again too."""
    layer, engine, off = between(deviation), make_engine(), make_engine(replay="off")
    for one in (engine, off):
        train(one, way, layer, weights)
    spared = off.statistics.offloaded_bytes - engine.statistics.offloaded_bytes
    assert spared == 2 * ONE * 4


def repeated(h: Tensor) -> tuple[Tensor, Tensor]:
    """Repeats of what lies otherwise in memory, and that."""
    turned = h.t()
    return turned.expand(2, 21, 5).contiguous(), turned


def widened(h: Tensor) -> tuple[Tensor, Tensor]:
    """A wider copy of a part, and that."""
    part = h[:, :13]
    return part.double(), part


@pytest.mark.parametrize("parts", [repeated, widened])
def test_what_was_made_of_a_target_does_not_say_how_it_lay(make_engine, parts):
    def layer(x: Tensor, first: Tensor) -> Tensor:
        made, source = parts(x @ first)
        return made.sin().sum().float() + torch.sigmoid(source).sin().sum()

    engine = make_engine()
    assert_no_layout_is_guessed(engine, layer, 21)
    assert engine.statistics.replayed_bytes


def changes_after(num_calls: int, before: Any, after: Any) -> Callable[[], Any]:
    """Gives one thing for some calls, then another: for longer than recipes are compared."""
    given: list[None] = []

    def next_one() -> Any:
        given.append(None)
        return before if len(given) <= num_calls else after

    return next_one


@pytest.mark.parametrize("way", WAYS)
def test_what_differs_in_a_constant_is_not_the_same(make_engine, way):
    def gradients(engine: OffloadEngine | None) -> list[Tensor]:
        factor = changes_after(3, 1, 2)

        def layer(x: Tensor) -> Tensor:
            mean = x.mean(-1, keepdim=True)
            other = torch.sub(x, mean, alpha=factor())
            return torch.sub(x, mean).pow(2) * other

        return train(engine, way, between(layer), weights, num_steps=5)

    assert all(map(torch.equal, gradients(make_engine()), gradients(None)))


@pytest.mark.parametrize("way", WAYS)
def test_what_differs_in_a_tensor_without_gradient_is_not_the_same(make_engine, way):
    def gradients(engine: OffloadEngine | None) -> list[Tensor]:
        shift = changes_after(3, torch.ones(64), 2 * torch.ones(64))

        def layer(x: Tensor) -> Tensor:
            return torch.sub(x, torch.ones(64)).pow(2) * torch.sub(x, shift())

        return train(engine, way, between(layer), weights, num_steps=5)

    assert all(map(torch.equal, gradients(make_engine()), gradients(None)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("which", ["scalar", "factor"])
def test_what_differs_in_a_scalar_that_no_node_shows_is_not_the_same(make_engine, which, way):
    def gradients(engine: OffloadEngine | None) -> list[Tensor]:
        scalar = changes_after(3, 1.0, 0.5)
        other = {
            "scalar": lambda x: scalar() - x,
            "factor": lambda x: torch.rsub(x, 1.0, alpha=scalar()),
        }

        def layer(x: Tensor) -> Tensor:
            return (1.0 - x) * other[which](x)

        return train(engine, way, between(layer), weights, num_steps=5)

    assert all(map(torch.equal, gradients(make_engine()), gradients(None)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("probability", [0.3, 1.0])
def test_dropout_may_stop_training_unseen(make_engine, probability, way):
    """torch's own layers do not call it then, but others may."""

    def gradients(engine: OffloadEngine | None) -> list[Tensor]:
        trains = changes_after(3, True, False)

        def layer(x: Tensor) -> Tensor:
            return torch.native_dropout(F.silu(x), probability, trains())[0]

        return train(engine, way, between(layer), weights, num_steps=5)

    plain = gradients(None)
    if plain[0].device.type == "cpu":  # an accelerator's host would wait for each comparison
        assert all(map(torch.equal, gradients(make_engine()), plain))


@pytest.mark.parametrize("way", WAYS)
def test_what_is_appended_later_is_not_taken_for_nothing(make_engine, way):
    def gradients(engine: OffloadEngine | None) -> list[Tensor]:
        num_rows = changes_after(3, 8, 4)

        def layer(x: Tensor) -> Tensor:
            return torch.cat((torch.ones(8 - len(x), 64), F.silu(x)))

        def make() -> list[Tensor]:
            return [leaf(num_rows(), 48), leaf(48, 64), leaf(64, 32)]

        return train(engine, way, between(layer), make, num_steps=5)

    assert all(map(torch.equal, gradients(make_engine()), gradients(None)))


@pytest.mark.parametrize("way", WAYS)
def test_other_rows_are_chosen_in_each_pass(make_engine, way):
    def gradients(engine: OffloadEngine | None) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)

        def layer(x: Tensor) -> Tensor:
            return F.silu(x)[torch.randint(8, (8,), generator=generator)]

        return train(engine, way, between(layer), weights, num_steps=6)

    engine = make_engine()
    assert all(map(torch.equal, gradients(engine), gradients(None)))
    assert engine.statistics.replayed_bytes >= 4 * ONE


@pytest.mark.parametrize("way", WAYS)
def test_in_batches_of_other_lengths_few_recipes_are_compared(make_engine, monkeypatch, way):
    compared: list[int] = []
    gives = Program.gives

    def counted(self: Program, operands: Any, target: Tensor) -> bool:
        compared.append(len(target))
        return gives(self, operands, target)

    monkeypatch.setattr(Program, "gives", counted)

    def gradients(engine: OffloadEngine | None) -> list[Tensor]:
        rows = iter(range(4, 100))

        def make() -> list[Tensor]:
            return [leaf(next(rows), 48), leaf(48, 64), leaf(64, 32)]

        layer = between(lambda x: torch.exp(F.silu(x)))
        return train(engine, way, layer, make, num_steps=20)

    engine = make_engine()
    engine.hooks.recipes._programs = CheckedPrograms(trusts_kinds=True)  # as on an accelerator
    assert all(map(torch.equal, gradients(engine), gradients(None)))
    assert engine.statistics.replayed_bytes >= 23 * 64 * 4
    assert sorted(set(compared)) == list(range(4, 12))  # rows of the first eight


@pytest.mark.parametrize("way", WAYS)
def test_in_other_lengths_what_is_written_over_unseen_is_noticed(make_engine, way):
    """`silu` saves its input alone, and a script begins to write to its result."""
    engine = make_engine()
    engine.hooks.recipes._programs = CheckedPrograms(trusts_kinds=True)  # as on an accelerator
    for num_rows in range(4, 24):

        def layer(x: Tensor, first: Tensor, second: Tensor, *, writes: bool) -> Tensor:
            hidden = F.silu(x @ first)
            hidden.data.mul_(2 if writes else 1)
            return hidden @ second

        writes = functools.partial(layer, writes=num_rows > 20)
        with engine.step(), forward_pass(engine):
            inputs = [leaf(num_rows, 48), leaf(48, 64), leaf(64, 32)]
            result = run(engine, way, writes, *inputs)
            settle(engine)
            if num_rows <= 20:
                result.sum().backward()
                continue
            with pytest.raises(ChangedInPlaceError, match="behind autograd's back"):
                result.sum().backward()


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_were_changed_meanwhile_raise(make_engine, way):
    engine = make_engine()
    for _ in range(3):
        rows = ROWS.clone()
        layer = between(lambda x, rows=rows: F.silu(x)[rows])  # type: ignore[misc]
        with engine.step(), forward_pass(engine):
            result = run(engine, way, layer, *weights())
            rows.zero_()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                result.sum().backward()


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_others_hold_are_not_taken_for_none(make_engine, way):
    """Hooks of others have what the index saved, so it is not known which rows these were."""

    def rows_of(x: Tensor) -> Tensor:
        hidden = F.silu(x)
        with torch.autograd.graph.saved_tensors_hooks(lambda one: (one,), lambda held: held[0]):
            return hidden[ROWS.to(x.device)]

    engine = make_engine()
    layer = between(rows_of)
    assert all(
        map(torch.equal, train(engine, way, layer, weights), train(None, way, layer, weights))
    )
    assert engine.statistics.replayed_bytes == 0


def test_how_much_a_mask_selects_is_not_asked_of_an_accelerator():
    """The host would wait for it."""
    rows = torch.zeros(8, 64, device="meta")
    assert index(rows, ROWS.to("meta")).shape == (8, 64)
    with pytest.raises(OffloadError, match="known to the device alone"):
        index(rows, torch.ones(8, dtype=torch.bool, device="meta"))


class Experts(nn.Module):
    """Each token goes to two of four experts, as mixtures of experts of transformers compute it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.router = nn.Linear(64, 4)
        self.up = nn.Parameter(torch.randn(4, 64, 96) / 8)
        self.down = nn.Parameter(torch.randn(4, 96, 64) / 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x)
        chances, experts = self.router(tokens).softmax(-1).topk(2)
        order = experts.flatten().argsort(stable=True)
        routed = tokens[order // 2]
        parts = routed.split(experts.flatten().bincount(minlength=4).tolist())
        out = torch.cat([F.silu(one @ self.up[n]) @ self.down[n] for n, one in enumerate(parts)])
        weighted = out * chances.flatten()[order, None]
        return x + torch.zeros_like(x).index_add(0, order // 2, weighted)


def test_tokens_of_experts_are_chosen_again(tmp_path):
    def gradients(replay: str | None) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        model, found, moved_bytes = nn.Sequential(Experts(), Experts()), [], 0
        with contextlib.ExitStack() as stack:
            if replay is not None:
                handle = offload_activations(model, tmp_path, replay=replay, min_bytes=64)
                stack.enter_context(handle)
            for _ in range(5):
                model(torch.randn(32, 64)).square().mean().backward()
                found += [one.grad.clone() for one in model.parameters()]  # type: ignore[union-attr]
            if replay is not None:
                assert handle.engine is not None
                moved_bytes = handle.engine.statistics.offloaded_bytes
        return found, moved_bytes

    (plain, _), (ours, moved), (off, moved_without) = map(gradients, (None, "on", "off"))
    assert all(map(torch.equal, ours, plain)) and all(map(torch.equal, off, plain))
    # Two times what two experts get of each token, and what these make wider, is computed again.
    assert moved <= moved_without - 2 * 4 * 64 * (64 + 96)
