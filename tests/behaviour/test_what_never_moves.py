# SPDX-License-Identifier: Apache-2.0
"""Invariant 3: parameters, buffers, inputs and tensors that outlive the step stay."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.offload import OffloadEngine, Scope
from megatron.offload.activations.saved.view import SavedView
from megatron.offload.integration.torch.report import report_of, warnings_of
from megatron.offload.layer_set import LayerSet
from tests.support.models import settle
from tests.support.simulated_device import SimulatedDevice
from tests.support.waiting import SOON_S


def saved_in_a_step(engine, forward, **capture):
    with engine.step():
        with engine.forward(Scope()) as save_order:
            inputs, outputs = forward()
            engine.capture(Scope(), outputs, inputs, **capture)
            settle(engine)
        with engine.backward(save_order):
            engine.dispatcher.drain()  # the read-ahead comes first
            sum(output.sum() for output in outputs).backward()
    return engine.statistics


def test_parameters_and_views_of_them_stay(engine):
    weight = torch.nn.Parameter(torch.randn(64, 64))
    engine.exclude([weight])
    x = torch.randn(8, 64, requires_grad=True)
    # Saves x (a leaf input) and a transposed view of the weight.
    statistics = saved_in_a_step(engine, lambda: ([x], [torch.nn.functional.linear(x, weight)]))
    assert statistics.offloaded_storages == 0


def test_an_input_that_wants_no_gradient_stays(engine):
    weight = torch.nn.Parameter(torch.randn(64, 64))
    engine.exclude([weight])
    x = torch.randn(8, 64)  # whoever made it still holds it
    statistics = saved_in_a_step(engine, lambda: ([x], [torch.nn.functional.linear(x, weight)]))
    assert statistics.offloaded_storages == 0


def test_parameters_in_one_flat_buffer_stay(engine):
    flat = torch.randn(2 * 64 * 64)
    weights = [torch.nn.Parameter(part.view(64, 64)) for part in flat.chunk(2)]
    engine.exclude(weights)
    x = torch.randn(8, 64, requires_grad=True)
    statistics = saved_in_a_step(engine, lambda: ([x], [x @ weights[0]]))
    assert statistics.offloaded_storages == 0


class OfRows(torch.autograd.Function):
    """Saves its inputs as rows, views that it makes itself, as Liger's kernels do."""

    @staticmethod
    def forward(ctx, one, other):
        one, other = one.view(-1, one.shape[-1]), other.view(-1, other.shape[-1])
        ctx.save_for_backward(one, other)
        return (one * other).view(2, -1, one.shape[-1])

    @staticmethod
    def backward(ctx, gradient):
        one, other = ctx.saved_tensors
        rows = gradient.view(one.shape)
        return (rows * other).view(gradient.shape), (rows * one).view(gradient.shape)


@pytest.mark.parametrize("way", ["layer", "context"])
@pytest.mark.parametrize("of_leaves", [False, True])
def test_a_view_that_a_function_makes_of_its_input_is_no_leaf(engine, way, of_leaves):
    """But where the input is one, whose memory is held by it."""

    def gradients(moves: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        leaves = [torch.randn(2, 8, 64, requires_grad=True) for _ in range(2)]
        if not moves:
            OfRows.apply(*(one if of_leaves else one + 1 for one in leaves)).sum().backward()
            return [one.grad for one in leaves]
        with engine.step(), engine.forward(Scope()):
            if way == "context":
                with engine.saved_tensors_hooks():
                    result = OfRows.apply(*(one if of_leaves else one + 1 for one in leaves))
            else:
                result = OfRows.apply(*(one if of_leaves else one + 1 for one in leaves))
                engine.capture(Scope(), [result], leaves)
            settle(engine)
            result.sum().backward()
        return [one.grad for one in leaves]

    assert all(map(torch.equal, gradients(True), gradients(False)))
    assert engine.statistics.offloaded_storages == (0 if of_leaves else 2)


def test_buffers_stay(engine):
    buffer = torch.randn(1000)
    engine.exclude([buffer])
    x = torch.randn(1000, requires_grad=True)
    statistics = saved_in_a_step(engine, lambda: ([x], [x * buffer]))
    assert statistics.offloaded_storages == 0


def test_small_storages_stay(make_engine):
    engine = make_engine(min_bytes=4001)
    x = torch.randn(1000, requires_grad=True)
    assert saved_in_a_step(engine, lambda: ([x], [(x * 2).exp()])).offloaded_storages == 0
    x = torch.randn(1001, requires_grad=True)
    assert saved_in_a_step(engine, lambda: ([x], [(x * 2).exp()])).offloaded_storages == 1


def test_parameters_and_small_storages_stay_in_a_context_too(make_engine):
    engine = make_engine(min_bytes=4001)
    weight = torch.nn.Parameter(torch.randn(2000))
    engine.exclude([weight])
    x = torch.randn(1000, requires_grad=True)
    with engine.step():
        with engine.saved_tensors_hooks():
            y = (x * 2).exp().sum() + (weight * weight.detach()).sum()
        settle(engine)
        y.backward()
        step = engine.statistics
        assert step.offloaded_storages == step.deduplicated_bytes == 0
        assert step.forwarded_bytes == 0 and engine.cache.num_records == 0


def test_what_the_policy_keeps_stays_and_has_no_record(make_engine):
    engine = make_engine(offload_layers=LayerSet.parse("1"))
    x = torch.randn(1000, requires_grad=True)
    with engine.step(), engine.forward(Scope()):
        with engine.saved_tensors_hooks(), engine.within(Scope(layer="decoder.2")):
            y = (x * 2).exp()
        assert engine.cache.num_records == engine.statistics.offloaded_storages == 0
        assert engine.statistics.kept_bytes == y.nbytes
        with engine.saved_tensors_hooks(), engine.within(Scope(layer="decoder.1")):
            y = y.flip(0).exp()  # which is not computed again
        assert engine.cache.num_records == engine.statistics.offloaded_storages == 1
        settle(engine)
        y.sum().backward()
    assert torch.equal(x.grad, 2 * (2 * x).exp() * (2 * x).exp().exp())


def test_what_is_more_than_its_bytes_stays_and_is_counted_step_by_step(engine):
    x = torch.randn(1000, dtype=torch.complex64, requires_grad=True)
    for _ in range(2):  # a lazily conjugated view is saved, and what it views
        statistics = saved_in_a_step(engine, lambda: ([x], [((x * 1).conj() * (x * 1)).real]))
        assert statistics.unsupported == 1 and statistics.offloaded_storages == 1


def test_a_table_that_outlives_the_step_is_learned(engine):
    table = torch.randn(1000)
    x = torch.randn(1000, requires_grad=True)
    first = saved_in_a_step(engine, lambda: ([x], [x.exp() * table]))
    assert first.long_lived_bytes == 4000 and first.offloaded_storages == 2
    second = saved_in_a_step(engine, lambda: ([x], [x.exp() * table]))
    assert second.offloaded_storages == 1


@pytest.mark.parametrize("recomputes", [True, False])
def test_of_a_recomputed_layer_only_inputs_that_want_a_gradient_move(engine, recomputes):
    x, table = torch.randn(1000, requires_grad=True), torch.randn(1000)

    def forward():
        hidden = x * 2
        return [hidden], [checkpoint(torch.mul, hidden, table, use_reentrant=True)]

    statistics = saved_in_a_step(engine, forward, recomputes=recomputes)
    # It saves both. Other layers may share the table, so its memory would not become free.
    assert statistics.offloaded_storages == (1 if recomputes else 2)
    assert torch.equal(x.grad, 2 * table)


def in_one_buffer(num_tensors):
    """Tensors with a storage each, all of which lie in one buffer, as Transformer Engine makes."""
    buffer = bytearray(torch.randn(num_tensors * 1000).numpy().tobytes())
    return [
        torch.frombuffer(buffer, dtype=torch.float32, count=1000, offset=n * 4000)
        for n in range(num_tensors)
    ]


class Listener:
    """Hears what a step saved, as `Observer` has it."""

    def __init__(self):
        self.moved_bytes, self.stayed_bytes = [], []

    def moves(self, scope, num_bytes):
        self.moved_bytes.append(num_bytes)

    def stayed(self, scope, storage):
        self.stayed_bytes.append(storage.nbytes())


def multiplied(x):
    """Saves a result, and three tensors in one buffer, of one of them a small part."""
    first, second, third = in_one_buffer(3)
    return [x], [x.exp() * first * second, x[:100] * third[:100]]


@pytest.mark.parametrize("way", ["layer", "context"])
def test_what_no_allocator_would_get_back_stays_on_a_device_of_its_own(offload_config, way):
    engine = OffloadEngine(offload_config(), SimulatedDevice())
    engine.observe(listener := Listener())
    x = torch.randn(1000, requires_grad=True)
    try:
        for _ in range(2):
            if way == "layer":
                step = saved_in_a_step(engine, lambda: multiplied(x))
            else:
                with engine.step():
                    with engine.saved_tensors_hooks():
                        _, outputs = multiplied(x)
                    sum(output.sum() for output in outputs).backward()
                step = engine.statistics
            assert step.offloaded_storages == 1 and step.foreign_bytes == 2 * 4000 + 400
        assert listener.stayed_bytes == [4000] * 6 and listener.moved_bytes == [4000] * 2
        report = report_of(engine.config, [], [], engine, "", "")
        assert "left alone  8.203 KiB saved in memory that PyTorch's" in report
        engine.statistics.offloaded_storages = 0
        assert "all that was saved lies in" in next(warnings_of(engine.config, [], engine))
    finally:
        engine.close()


def test_a_device_in_host_memory_moves_what_no_allocator_would_get_back(engine):
    x = torch.randn(1000, requires_grad=True)
    step = saved_in_a_step(engine, lambda: multiplied(x))
    assert step.offloaded_storages == 4 and step.foreign_bytes == 0


def test_a_storage_that_is_still_alive_is_not_read(engine):
    table = torch.randn(1000)
    x = torch.randn(1000, requires_grad=True)
    statistics = saved_in_a_step(engine, lambda: ([x], [x.neg() * table]))
    assert statistics.offloaded_storages == 1 and statistics.read_bytes == 0


def test_tensors_that_cannot_move_exactly_pass_through(engine):
    class Marked(torch.Tensor):
        pass

    complex_view = torch.randn(1000, dtype=torch.complex64).conj()
    for tensor in (
        torch.randn(1000).as_subclass(Marked),
        complex_view,
        torch.randn(10, 10).to_sparse(),
        torch.empty(0),
        torch.empty(10, device="meta"),
    ):
        packed = engine.hooks.pack(tensor)
        assert not isinstance(packed, SavedView)
        assert engine.hooks.unpack(packed) is tensor


def test_what_a_write_that_was_given_up_still_holds_does_not_count_as_living_on(
    make_engine, write_gate
):
    engine = make_engine(io="buffered")
    x = torch.randn(1000, requires_grad=True)
    with engine.step():
        with engine.forward(Scope()) as save_order:
            y = x.exp()
            engine.capture(Scope(), [y], [x])
            assert write_gate.arrived.acquire(timeout=SOON_S)  # its thread has the memory
        with engine.backward(save_order):
            y.sum().backward()
        del y
    assert engine.statistics.long_lived_bytes == 0 == engine.cache.num_excluded
    write_gate.open.set()
    settle(engine)
    with engine.step():
        pass
    assert engine.statistics.long_lived_bytes == 0 == engine.cache.num_records
