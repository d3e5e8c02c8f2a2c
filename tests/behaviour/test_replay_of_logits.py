# SPDX-License-Identifier: Apache-2.0
"""A loss in fp32 of bf16 logits: these are saved, and the log-softmax is computed again of them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.offload import offload_activations
from megatron.offload.activations.saved import recipe
from megatron.offload.activations.saved.available import AvailableTensors
from megatron.offload.activations.saved.norms import Norms
from megatron.offload.activations.saved.recipe import Layout, Program, Step
from megatron.offload.activations.saved.replay_operations import steps_of_a_row
from megatron.offload.activations.saved.replayable_nodes import operation_of
from megatron.offload.errors import ChangedInPlaceError

VOCABULARY, TOKENS, SIZE = 64, 24, 16
LOGITS = TOKENS * VOCABULARY  # values
Loss = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A body and an output layer, which hands on its logits as transformers' models do."""

    def __init__(self, loss: Loss, *, bias: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(2)))
        self.head = nn.Linear(SIZE, VOCABULARY, bias=bias)
        self.loss = loss
        self.hidden: StorageWeakRef | None = None  # of the last pass, which the head has saved

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.body(x)
        self.hidden = StorageWeakRef(hidden.untyped_storage())
        result: Tensor = self.loss(self.head(hidden), labels)
        return result


def wide(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().view(-1, VOCABULARY), labels.view(-1))


def wide_at_once(logits: Tensor, labels: Tensor) -> Tensor:
    found = F.log_softmax(logits, -1, dtype=torch.float32)
    return F.nll_loss(found.view(-1, VOCABULARY), labels.view(-1))


def wide_by_autocast(logits: Tensor, labels: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return narrow(logits, labels)


def narrow(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


def scaled_in_place(logits: Tensor, labels: Tensor) -> Tensor:
    """What the head has returned is something else when it is made wider."""
    return wide(logits.div_(3.0), labels)


def changed_since(logits: Tensor, labels: Tensor) -> Tensor:
    """Or when log-softmax has been computed of it."""
    found = logits.float()
    with torch.no_grad():
        logits.zero_()
    return wide(found, labels)


def train(
    loss: Loss, mode: str, directory: Path, *, bias: bool = False, keeps_graph: bool = False
) -> tuple[list[Tensor], dict[str, float]]:
    """Losses and gradients of three steps, and the counters of the last one."""
    torch.manual_seed(1)
    model = Model(loss, bias=bias).bfloat16()
    found: list[Tensor] = []
    with offload_activations(
        model, directory if mode == "ssd" else None, mode=mode, min_bytes=512
    ) as handle:
        for _ in range(3):
            x = torch.randn(2, TOKENS // 2, SIZE, dtype=torch.bfloat16)
            result = model(x, torch.randint(VOCABULARY, (2, TOKENS // 2)))
            if handle.engine is not None:
                handle.engine.wait_for_writes()
            for _ in range(1 + keeps_graph):
                result.backward(retain_graph=keeps_graph)
            found += [result.detach(), *(one.grad.clone() for one in model.parameters())]
            model.zero_grad()
        return found, dict(handle.statistics)


@pytest.mark.parametrize("keeps_graph", [False, True])
@pytest.mark.parametrize("mode", ["ssd", "host", "keep"])
@pytest.mark.parametrize("loss", [wide, wide_at_once, wide_by_autocast])
def test_half_the_bytes_are_saved(loss: Loss, mode: str, keeps_graph: bool, tmp_path: Path) -> None:
    plain, _ = train(loss, "off", tmp_path, keeps_graph=keeps_graph)
    ours, counted = train(loss, mode, tmp_path, keeps_graph=keeps_graph)
    assert len(ours) == len(plain) and all(map(torch.equal, ours, plain))
    assert counted["replayed_bytes"] == 4 * LOGITS
    saved = counted["kept_bytes" if mode == "keep" else "offloaded_bytes"]
    assert saved == 2 * LOGITS + 2 * 2 * TOKENS * SIZE  # and what the body's layers give
    assert counted["unreplayed_bytes"] == saved - 2 * LOGITS


def program(logits: Tensor, shape: tuple[int, ...], dim: int) -> Program:
    """As a recipe has it: a cast, a view, and the log-softmax."""
    cast, log_softmax = (operation_of(one) for one in nodes_of(dim))
    assert cast is not None and log_softmax is not None
    view = operation_of(logits.view(shape).grad_fn)
    assert view is not None
    steps = (
        Step(cast.operation, (~0,), (torch.float32,)),
        Step(view.operation, (0,), (shape,)),
        Step(log_softmax.operation, (1,), (dim, torch.float32)),
    )
    layout = Layout(shape, torch.empty(shape).stride(), torch.float32)
    return Program(steps, layout, steps_of_a_row(steps, layout))


def nodes_of(dim: int) -> tuple[Any, Any]:
    wider = torch.randn(2, 2, dtype=torch.bfloat16, requires_grad=True).float()
    return wider.grad_fn, F.log_softmax(wider, dim).grad_fn


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Of which a part are two rows."""
    monkeypatch.setattr(recipe, "_LEAST_PART", 2 * 4 * VOCABULARY)
    return torch.randn(5, 3, VOCABULARY, dtype=torch.bfloat16, requires_grad=True)


def test_each_row_is_compared_in_parts(logits: Tensor) -> None:
    found = program(logits, (15, VOCABULARY), -1)
    wanted = F.log_softmax(logits.detach().float().view(15, VOCABULARY), -1)
    assert found.of_a_row and torch.equal(found.run([logits.detach()]), wanted)
    assert found.gives([logits.detach()], wanted)
    for row in (0, 14):
        other = wanted.clone()
        other[row, 3] += 1
        assert not found.gives([logits.detach()], other)


@pytest.mark.parametrize(("shape", "dim"), [((5, 3 * VOCABULARY), 1), ((15, VOCABULARY), 0)])
def test_what_a_row_is_shows_in_the_result(
    logits: Tensor, shape: tuple[int, ...], dim: int
) -> None:
    found = program(logits.view(15, VOCABULARY) if dim == 0 else logits, shape, dim)
    wanted = F.log_softmax(logits.detach().float().view(shape), dim)
    assert bool(found.of_a_row) == (dim == 1)
    assert torch.equal(found.run([logits.detach()]), wanted)
    assert found.gives([logits.detach()], wanted)


def test_an_output_layer_may_have_a_bias(tmp_path: Path) -> None:
    plain, _ = train(wide, "off", tmp_path, bias=True)
    ours, counted = train(wide, "ssd", tmp_path, bias=True)
    assert len(ours) == len(plain) and all(map(torch.equal, ours, plain))
    assert counted["replayed_bytes"] == 4 * LOGITS


@pytest.mark.parametrize("loss", [narrow, scaled_in_place, changed_since])
def test_what_would_not_help_or_is_there_no_more_is_saved_as_it_is(
    loss: Loss, tmp_path: Path
) -> None:
    plain, _ = train(loss, "off", tmp_path)
    ours, counted = train(loss, "ssd", tmp_path)
    assert len(ours) == len(plain) and all(map(torch.equal, ours, plain))
    assert counted["replayed_bytes"] == 0


@pytest.mark.parametrize("keeps_graph", [False, True])
def test_logits_that_stay_go_once_they_have_been_used_for_the_last_time(
    keeps_graph: bool, tmp_path: Path
) -> None:
    is_alive = []

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        there = StorageWeakRef(logits.untyped_storage())
        found = F.log_softmax(logits.float(), -1)
        found.register_hook(lambda _: is_alive.append(not there.expired()))  # computed by now
        return F.nll_loss(found.view(-1, VOCABULARY), labels.view(-1))

    train(loss, "keep", tmp_path, keeps_graph=keeps_graph)
    assert is_alive == ([True, True] if keeps_graph else [False]) * 3


class ReadTwice(torch.autograd.Function):
    """Its backward asks for what it has saved more than once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        first = ctx.saved_tensors[0].clone()
        return gradient * (first + ctx.saved_tensors[0])


@pytest.mark.parametrize("mode", ["ssd", "keep"])
def test_what_is_read_twice_is_there_twice(mode: str, tmp_path: Path) -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return ReadTwice.apply(F.log_softmax(logits.float(), -1))  # type: ignore[no-any-return]

    plain, _ = train(loss, "off", tmp_path)
    ours, counted = train(loss, mode, tmp_path)
    assert len(ours) == len(plain) and all(map(torch.equal, ours, plain))
    assert counted["replayed_bytes"] == 4 * LOGITS


@pytest.mark.parametrize("mode", ["ssd", "keep"])
def test_logits_that_are_written_to_behind_autograds_back_raise(mode: str, tmp_path: Path) -> None:
    """A kernel that puts gradients in their place does so; autograd alone does not need them."""

    class Kept(nn.Linear):
        last: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x)
            return self.last

    model = Model(wide).bfloat16()
    model.head = Kept(SIZE, VOCABULARY, bias=False, dtype=torch.bfloat16)
    directory = tmp_path if mode == "ssd" else None
    with offload_activations(model, directory, mode=mode, min_bytes=512):
        for writes in (False, True):
            x = torch.randn(2, TOKENS // 2, SIZE, dtype=torch.bfloat16)
            result = model(x, torch.randint(VOCABULARY, (2, TOKENS // 2)))
            assert isinstance(model.head, Kept)
            if not writes:
                result.backward()
                continue
            model.head.last.data[-1, -1, 3] += 8  # one of its values
            with pytest.raises(ChangedInPlaceError, match="behind autograd's back"):
                result.backward()


def test_a_graph_that_is_dropped_dies_with_its_forward_pass(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Model(wide).bfloat16()
    with offload_activations(model, mode="keep", min_bytes=512):
        x = torch.randn(2, TOKENS // 2, SIZE, dtype=torch.bfloat16)
        result = model(x, torch.randint(VOCABULARY, (2, TOKENS // 2)))
        assert model.hidden is not None and not model.hidden.expired()
        del result
        gc.collect()
        assert model.hidden.expired()


def test_what_is_computed_of_operands_that_are_saved_is_not_looked_for() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    found = AvailableTensors(torch.device("cpu"), lambda _: x, Norms(), lambda _: False)
    product, silu = x @ x, F.silu(x @ x)
    view = (x @ x).view(16)
    for one in (product, silu, view):
        found.note_returned(one)
    assert found.returned((product.grad_fn, 0)) is product
    assert found.returned((silu.grad_fn, 0)) is None
    assert found.returned((view.grad_fn, 0)) is view
    with torch.no_grad():
        product.add_(1)
    assert found.returned((product.grad_fn, 0)) is None
    found.leave()
    assert found.returned((view.grad_fn, 0)) is None
