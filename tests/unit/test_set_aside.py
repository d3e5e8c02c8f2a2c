# SPDX-License-Identifier: Apache-2.0
"""Tensors that wait on a tier for their turn: which ones leave, and how they come back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.offload import OffloadEngine
from megatron.offload.activations.capture.tensor_swapper import TensorSwapper
from megatron.offload.activations.saved.record import State
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.activations.saved.view import SavedView
from megatron.offload.errors import ChangedInPlaceError
from megatron.offload.tiers.file import UnlinkedFile
from tests.conftest import Gate
from tests.support.models import settle

SCOPE = Scope(2, 3)
Engines = Callable[..., OffloadEngine]


@pytest.fixture
def engine(make_engine: Engines) -> OffloadEngine:
    return make_engine(boundary="ssd", min_bytes=1)


def aside(engine: OffloadEngine) -> TensorSwapper:
    assert engine.tensor_swapper is not None
    return engine.tensor_swapper


def made(size: int = 100) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor that operations have made, and the same bytes."""
    weight = torch.randn(size, size, requires_grad=True)
    tensor = weight * 2 + 1
    return tensor, tensor.detach().clone()


def test_by_default_nothing_is_set_aside(make_engine: Engines) -> None:
    assert make_engine().tensor_swapper is None


def test_an_emptied_tensor_is_full_of_nan_and_its_memory_is_free(engine: OffloadEngine) -> None:
    tensor, expected = made()
    node, version = tensor.grad_fn, tensor._version
    memory = StorageWeakRef(tensor.untyped_storage())
    emptied = aside(engine).empty(tensor, SCOPE)
    assert emptied is not None and aside(engine).is_empty(tensor)
    settle(engine)
    assert memory.expired()
    assert tensor.shape == expected.shape and bool(tensor.isnan().all())
    aside(engine).read_ahead(emptied)
    aside(engine).fill(emptied)
    assert torch.equal(tensor, expected) and not aside(engine).is_empty(tensor)
    assert (tensor.grad_fn, tensor._version) == (node, version)


def test_what_has_not_left_yet_is_not_read(engine: OffloadEngine, write_gate: Gate) -> None:
    tensor, expected = made()
    place = tensor.data_ptr()
    emptied = aside(engine).empty(tensor, SCOPE)
    assert emptied is not None
    write_gate.wait_for_arrival()
    emptied.memory = emptied.view.saved._memory  # as `read_ahead` while it is written
    write_gate.open.set()
    settle(engine)
    aside(engine).fill(emptied)
    assert tensor.data_ptr() == place and torch.equal(tensor, expected)
    assert engine.statistics.read_bytes == 0


def test_who_shares_a_storage_keeps_sharing_it(engine: OffloadEngine) -> None:
    """A view, a tensor with its own node, and one that autograd saved as an output."""
    for share in (lambda t: t.view(-1), lambda t: t.detach(), lambda t: t.transpose(0, 1)):
        tensor, expected = made()
        other = share(tensor)
        assert aside(engine).empty(tensor, SCOPE) is None
        assert aside(engine).empty(other, SCOPE) is None or other.grad_fn is None
        assert torch.equal(tensor, expected)
    saved = made()[0].exp()
    assert aside(engine).empty(saved, SCOPE) is None


def test_parameters_and_small_tensors_stay(make_engine: Engines) -> None:
    engine = make_engine(boundary="ssd", min_bytes=1 << 20)
    parameter = torch.nn.Parameter(torch.randn(1024, 1024))
    engine.exclude([parameter])
    held = parameter.untyped_storage()
    assert aside(engine).empty(parameter, SCOPE) is None
    assert aside(engine).put(parameter.detach(), SCOPE) is None
    assert held.nbytes() == 4 << 20
    assert aside(engine).empty(made()[0], SCOPE) is None
    assert aside(engine).put(torch.ones(1).expand(1 << 20), SCOPE) is None


def test_bytes_that_are_saved_as_well_move_once(engine: OffloadEngine) -> None:
    """Saved before by the operation that made it, and after by one that takes it."""
    with engine.step(), engine.forward(SCOPE):
        with engine.saved_tensors_hooks():
            tensor = made()[0].exp()  # saves its output
            expected = tensor.detach().clone()
        emptied = aside(engine).empty(tensor, SCOPE)
        assert emptied is not None
        settle(engine)
        held = aside(engine).fill(emptied)
        assert held is not None and engine.statistics.offloaded_bytes == tensor.nbytes
        with engine.saved_tensors_hooks():
            last = tensor.detach().requires_grad_().square()
        assert engine.statistics.offloaded_bytes == tensor.nbytes
        assert last.numel() and torch.equal(tensor, expected)


def test_what_came_back_is_not_kept_for_those_that_need_it_later(engine: OffloadEngine) -> None:
    with engine.step(), engine.forward(SCOPE):
        with engine.saved_tensors_hooks():
            tensor = made()[0].exp()
        emptied = aside(engine).empty(tensor, SCOPE)
        assert emptied is not None
        settle(engine)
        record = emptied.view.saved
        aside(engine).read_ahead(emptied)
        engine.dispatcher.drain()
        record.wait_for_read()
        engine.dispatcher.drain()  # builds what waits for backward
        aside(engine).fill(emptied)
        memory, total = StorageWeakRef(tensor.untyped_storage()), tensor.sum()
        del tensor, emptied
        assert memory.expired()
    total.backward()


def test_a_change_in_place_while_it_is_away_is_an_error(engine: OffloadEngine) -> None:
    tensor, _ = made()
    emptied = aside(engine).empty(tensor, SCOPE)
    assert emptied is not None
    torch.autograd.graph.increment_version(tensor)
    with pytest.raises(ChangedInPlaceError, match="chunk 2 micro-batch 3"):
        aside(engine).fill(emptied)


def test_a_gradient_comes_back(engine: OffloadEngine) -> None:
    for expected in (torch.randn(100, 100), torch.randn(100, 100).t()):
        gradient = expected.clone()
        memory = StorageWeakRef(gradient.untyped_storage())
        waiting = aside(engine).put(gradient, SCOPE)
        assert waiting is not None
        del gradient
        settle(engine)
        assert memory.expired()
        aside(engine).read_ahead(waiting)
        back = aside(engine).take(waiting)
        assert torch.equal(back, expected) and back.stride() == expected.stride()


def test_a_gradient_that_is_needed_before_it_is_written_is_not(engine: OffloadEngine) -> None:
    gradient = torch.randn(100, 100)
    waiting = aside(engine).put(gradient, SCOPE)
    assert waiting is not None
    aside(engine).read_ahead(waiting)
    assert aside(engine).take(waiting).data_ptr() == gradient.data_ptr()


def test_a_part_of_a_storage_stays(engine: OffloadEngine) -> None:
    whole = torch.randn(100, 100)
    assert aside(engine).put(whole[1:], SCOPE) is None
    assert aside(engine).put(whole, SCOPE) is not None


@contextlib.contextmanager
def held_writes(engine: OffloadEngine) -> Iterator[None]:
    """What is submitted meanwhile is not begun."""
    go_on = threading.Event()
    engine.dispatcher.submit(lambda: go_on.wait(10) and None)
    try:
        yield
    finally:
        go_on.set()


@pytest.mark.parametrize("ahead", [True, False])
def test_what_is_wanted_again_is_written_all_the_same(engine: OffloadEngine, ahead: bool) -> None:
    """The next layer is going to save it."""
    tensor, expected = made()
    with held_writes(engine):
        emptied = aside(engine).empty(tensor, SCOPE)
        assert emptied is not None
        if ahead:
            aside(engine).read_ahead(emptied)
        held = aside(engine).fill(emptied)
    assert held is not None and torch.equal(tensor, expected)
    settle(engine)
    assert held.saved.state is State.ON_TIER


def test_what_is_being_read_is_waited_for(
    engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, go_on = UnlinkedFile.read, threading.Event()

    def late(self: UnlinkedFile, body: memoryview, offset: int) -> None:
        assert go_on.wait(10)
        read(self, body, offset)

    tensor, expected = made()
    emptied = aside(engine).empty(tensor, SCOPE)
    assert emptied is not None
    settle(engine)
    monkeypatch.setattr(UnlinkedFile, "read", late)
    aside(engine).read_ahead(emptied)
    engine.dispatcher.drain()
    aside(engine).read_ahead(emptied)  # once more, by the turn after
    assert emptied.memory is None
    threading.Timer(0.01, go_on.set).start()
    aside(engine).fill(emptied)
    assert torch.equal(tensor, expected)


def test_what_is_built_late_is_not_of_memory_that_was_handed_over(
    engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dispatcher builds a tensor for backward while the pass goes on."""
    with engine.step(), engine.forward(SCOPE):
        with engine.saved_tensors_hooks():
            tensor = made()[0].exp()
        emptied = aside(engine).empty(tensor, SCOPE)
        assert emptied is not None
        settle(engine)
        rebuild, record = SavedView.rebuild, emptied.view.saved
        memory, transfer = record.block.tier.begin_read(record.block)
        record.begin_read(memory, transfer)
        transfer.wait()
        inside: list[bool] = []

        def handed_over_meanwhile(self: SavedView, restored: torch.UntypedStorage) -> torch.Tensor:
            built = rebuild(self, restored)
            if not inside:
                inside.append(True)
                record.hand_over(restored)
            return built

        monkeypatch.setattr(SavedView, "rebuild", handed_over_meanwhile)
        record.build_views(transfer)
        assert inside and not any(view.built for ref in record._views if (view := ref()))
