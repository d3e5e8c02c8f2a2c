# SPDX-License-Identifier: Apache-2.0
"""A saved leaf that requires a gradient is held by more than the graph: it stays, or is emptied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.offload import OffloadEngine, Placement, Scope
from megatron.offload.activations.placement.policy import FixedPolicy
from megatron.offload.activations.saved.record import State
from tests.support.models import settle


class Copying(torch.autograd.Function):
    """Runs again in backward, from a detached copy of its input, as Megatron's checkpoint does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        copy = x.detach()
        copy.requires_grad = x.requires_grad
        ctx.save_for_backward(copy)
        with torch.no_grad():
            return x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (copy,) = ctx.saved_tensors
        assert copy.requires_grad and copy.is_leaf
        with torch.enable_grad():
            again = copy.detach().requires_grad_()
            again.tanh().backward(gradient)
        assert again.grad is not None
        return again.grad


def train(
    engine: OffloadEngine, x: torch.Tensor, seen: list[bool], *, uses: int = 1
) -> torch.Tensor:
    """The gradient of x; whether what was saved is in memory, between the passes and after."""
    with engine.step():
        with engine.forward(Scope()) as save_order:
            hidden = x * 2
            saved = StorageWeakRef(hidden.untyped_storage())
            y = Copying.apply(hidden)
            del hidden
            engine.capture(Scope(0, 0, "decoder.1"), [y], [x])
            settle(engine)
            seen.append(not saved.expired())
        with engine.backward(save_order):
            for use in range(uses):
                y.sum().backward(retain_graph=use + 1 < uses)
        del y
        seen.append(not saved.expired())
    assert x.grad is not None
    return x.grad


def expected(x: torch.Tensor) -> torch.Tensor:
    copy = x.detach().requires_grad_()
    (copy * 2).tanh().sum().backward()
    assert copy.grad is not None
    return copy.grad


def test_a_leaf_stays_because_moving_it_frees_nothing(engine: OffloadEngine) -> None:
    stayed: list[int] = []

    class Observer:
        def moves(self, scope: Scope, num_bytes: int) -> None:
            raise AssertionError("it moves")

        def stayed(self, scope: Scope, storage: torch.UntypedStorage) -> None:
            stayed.append(storage.nbytes())

    engine.observe(Observer())
    x, seen = torch.randn(1000, requires_grad=True), []  # type: ignore[var-annotated]
    assert torch.equal(train(engine, x, seen), expected(x))
    assert seen == [True, False] and stayed == [4000]
    assert engine.statistics.offloaded_storages == 0


@pytest.mark.parametrize("uses", [1, 2])
def test_a_copy_of_a_functions_own_moves_and_its_memory_is_freed(
    engine: OffloadEngine, uses: int
) -> None:
    engine.copying_nodes.add(Copying._backward_cls)  # type: ignore[attr-defined]
    x, seen = torch.randn(1000, requires_grad=True), []  # type: ignore[var-annotated]
    gradient = train(engine, x, seen, uses=uses)
    assert torch.equal(gradient, uses * expected(x))
    assert seen == [False, False]
    statistics = engine.statistics
    assert statistics.offloaded_bytes == 4000 and statistics.forwarded_bytes == 0
    assert statistics.read_bytes >= 4000


def test_a_copy_that_no_tier_takes_keeps_its_bytes(
    engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its storage as a whole would move; the policy says otherwise of the part that is needed."""
    engine.copying_nodes.add(Copying._backward_cls)  # type: ignore[attr-defined]
    whole = torch.randn(3000, requires_grad=True)
    monkeypatch.setattr(
        FixedPolicy,
        "place",
        lambda _, scope, num_bytes: Placement.SSD if num_bytes > 5000 else Placement.KEEP,
    )
    with engine.step():
        with engine.forward(Scope()) as save_order:
            hidden = (whole * 2)[:1000]
            y = Copying.apply(hidden)
            engine.capture(Scope(0, 0, "decoder.1"), [y], [whole])
            settle(engine)
        with engine.backward(save_order):
            y.sum().backward()
    assert engine.statistics.offloaded_storages == 0
    assert whole.grad is not None and torch.equal(whole.grad, expected_part(whole))


def expected_part(whole: torch.Tensor) -> torch.Tensor:
    copy = whole.detach().requires_grad_()
    (copy * 2)[:1000].tanh().sum().backward()
    assert copy.grad is not None
    return copy.grad


def test_what_a_tier_has_is_on_it_and_nowhere_else(engine: OffloadEngine) -> None:
    engine.copying_nodes.add(Copying._backward_cls)  # type: ignore[attr-defined]
    x = torch.randn(1000, requires_grad=True)
    with engine.step(), engine.forward(Scope()) as save_order:
        y = Copying.apply(x * 2)
        engine.capture(Scope(0, 0, "decoder.1"), [y], [x])
        settle(engine)
        record = save_order.last()
        assert record is not None and record.state is State.ON_TIER
        assert record.cancel_write() is None
