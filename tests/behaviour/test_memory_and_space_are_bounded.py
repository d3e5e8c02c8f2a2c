# SPDX-License-Identifier: Apache-2.0
"""Invariant 7: bytes in flight and SSD space stay within their budgets."""

from __future__ import annotations

import gc
import logging
import threading
import weakref

import pytest
import torch

from megatron.offload import OffloadEngine, Scope
from megatron.offload.activations.saved.record import SavedStorage, State
from megatron.offload.tiers import file as file_module
from tests.support.models import Model, assert_same, run_step, settle, ssd
from tests.support.simulated_device import SimulatedDevice
from tests.support.waiting import SOON_S, wait_until


def test_forward_waits_while_too_many_bytes_are_in_flight(make_engine, write_gate, monkeypatch):
    engine = make_engine(io="buffered", inflight_bytes=8192)
    acquire, waits = engine._inflight.acquire, threading.Event()

    def noted(holder, num_bytes):
        waits.set()
        acquire(holder, num_bytes)

    monkeypatch.setattr(engine._inflight, "acquire", noted)
    with engine.step():
        packed = [engine.hooks.pack(torch.randn(1024)) for _ in range(2)]
        third: list[object] = []
        thread = threading.Thread(target=lambda: third.append(engine.hooks.pack(torch.randn(1024))))
        thread.start()
        assert waits.wait(SOON_S)
        thread.join(timeout=0.2)
        assert thread.is_alive() and engine.writer.bytes_in_flight == 8192
        write_gate.open.set()
        thread.join(timeout=SOON_S)
        assert len(third) == 1
        settle(engine)
        del packed
        third.clear()
    assert engine.statistics.write_wait_s > 0.1
    assert engine.statistics.written_bytes == 3 * 4096


def test_a_layer_larger_than_the_inflight_budget_is_handed_over_in_parts(make_engine):
    engine = make_engine(io="buffered", inflight_bytes=10_000)
    x = torch.randn(1000, requires_grad=True)
    with engine.step():
        _, y = a_layer(x)
        engine.capture(Scope(), [y], [x])
        settle(engine)
    assert engine.statistics.written_bytes == 5 * 4000


def test_an_interrupted_wait_leaves_nothing_in_flight(make_engine, monkeypatch):
    engine = make_engine(io="buffered", inflight_bytes=10_000)
    x = torch.randn(1000, requires_grad=True)

    asked = []

    def ask_and_be_interrupted(record):
        asked.append(1)
        if len(asked) == 2:  # the first has its place among the bytes in flight
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(SavedStorage, "moves_a_copy", property(ask_and_be_interrupted))
    with engine.step():
        y = x.exp().flip(0).exp().flip(0).exp()
        with pytest.raises(KeyboardInterrupt):
            engine.capture(Scope(), [y], [x])
        settle(engine)
        assert engine.writer.bytes_in_flight == 0
    assert engine.statistics.written_bytes == 4000


def in_thread(call):
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def a_layer(x=None):
    """Five storages of 4000 bytes, saved at once, of which none can be computed again."""
    x = y = torch.randn(1000, requires_grad=True) if x is None else x
    for _ in range(5):
        y = y.flip(0).exp()
    return x, y


def test_by_default_a_layer_is_in_flight_as_a_whole_and_the_next_one_waits_for_it(
    make_engine, write_gate, monkeypatch
):
    monkeypatch.setattr("megatron.offload.activations.engine.DEFAULT_INFLIGHT_BYTES", 10_000)
    engine = make_engine(io="buffered")
    assert engine.inflight_bytes == 10_000
    with engine.step():
        layers = [a_layer() for _ in range(2)]
        engine.capture(Scope(), [layers[0][1]], [layers[0][0]])  # waits for nothing
        assert engine.writer.bytes_in_flight == engine.inflight_bytes == 5 * 4000
        thread = in_thread(lambda: engine.capture(Scope(), [layers[1][1]], [layers[1][0]]))
        thread.join(timeout=0.2)
        assert thread.is_alive() and engine.writer.bytes_in_flight == 5 * 4000
        write_gate.open.set()
        thread.join(timeout=SOON_S)
        settle(engine)
        with engine.forward(Scope()) as save_order:
            pass
        engine.prefetch(save_order)  # asks for less
    assert engine.inflight_bytes == 5 * 4000
    assert engine.statistics.written_bytes == 2 * 5 * 4000


def capture_by_operation(engine, scope):
    """A layer of which each operation is handed over before the next one runs."""
    value, nodes = torch.randn(1000, requires_grad=True), []
    for _ in range(5):
        result = value.flip(0).exp()
        engine.capture(scope, [result], [value], captured=nodes)
        value, nodes = result, [*nodes, result.grad_fn]
    return value


@pytest.mark.parametrize("layer", ["decoder.1", ""])
def test_by_default_two_layers_are_in_flight_where_compute_is_handed_over_ahead(
    offload_config, write_gate, monkeypatch, layer
):
    monkeypatch.setattr("megatron.offload.activations.engine.DEFAULT_INFLIGHT_BYTES", 10_000)
    engine = OffloadEngine(offload_config(io="buffered", pinned_bytes=0), SimulatedDevice())
    graphs, bounds = [], []

    def steps():
        for _ in range(2):
            with engine.step():
                for micro_batch in range(2):
                    scope = Scope(micro_batch=micro_batch, layer=layer and "decoder.1")
                    graphs.append(capture_by_operation(engine, scope))
                    bounds.append(engine.inflight_bytes)
                    if len(bounds) == 2:  # two layers were submitted, and no write has ended
                        write_gate.open.set()

    thread = in_thread(steps)
    try:
        if not layer:  # nobody says where a layer ends: one operation's bytes are the most
            thread.join(timeout=0.2)
            assert thread.is_alive()
            write_gate.open.set()
        thread.join(timeout=SOON_S)
        assert not thread.is_alive()
        # However many layers and steps there are.
        assert bounds == [2 * 5 * 4000 if layer else 10_000] * 4
    finally:
        write_gate.open.set()
        engine.close()


def test_calls_of_one_layer_are_not_one_large_layer(offload_config, monkeypatch):
    monkeypatch.setattr("megatron.offload.activations.engine.DEFAULT_INFLIGHT_BYTES", 10_000)
    engine = OffloadEngine(offload_config(io="buffered", pinned_bytes=0), SimulatedDevice())
    with engine.step():
        graphs = []
        for _ in range(12):
            with engine.within(Scope(layer="decoder.1")):
                graphs.append(capture_by_operation(engine, engine.scope))
        assert engine.inflight_bytes == 2 * 5 * 4000
    engine.close()


def test_a_bound_that_was_asked_for_holds_however_large_a_layer_is(make_engine, write_gate):
    engine = make_engine(io="buffered", inflight_bytes=10_000)
    with engine.step():
        x, y = a_layer()
        thread = in_thread(lambda: engine.capture(Scope(), [y], [x]))
        wait_until(lambda: engine.writer.bytes_in_flight == 8000, "it does not begin")
        thread.join(timeout=0.2)
        assert thread.is_alive() and engine.writer.bytes_in_flight == 8000
        write_gate.open.set()
        thread.join(timeout=SOON_S)
        settle(engine)
        with engine.forward(Scope()) as save_order:
            packed = engine.hooks.pack(torch.randn(10_000))
        with engine.backward(save_order):
            engine.hooks.unpack(packed)
    assert engine.inflight_bytes == 10_000


@pytest.mark.parametrize("end", ["done", "failed", "refused", "not started", "used", "dropped"])
def test_however_a_write_ends_its_bytes_are_no_longer_in_flight(
    make_engine, write_gate, monkeypatch, end
):
    engine = make_engine(io="buffered", threads=1)
    if end == "failed":
        monkeypatch.setattr(file_module.os, "pwritev", lambda *_: 0)
    elif end == "refused":
        monkeypatch.setattr(ssd(engine), "begin_write", lambda *_: None)
    elif end == "not started":
        monkeypatch.setattr(ssd(engine), "begin_write", lambda *_: 1 / 0)
    hold = threading.Event()
    engine.dispatcher.submit(lambda: hold.wait(10))
    with engine.step():
        packed = [engine.hooks.pack(torch.full((1024,), 1.0)) for _ in range(2)]
        assert engine.writer.bytes_in_flight == 8192
        if end == "used":
            engine.hooks.unpack(packed[1])
        elif end == "dropped":
            packed.pop()
        hold.set()
        engine.dispatcher.drain()  # both have begun before one has failed
        write_gate.open.set()
        settle(engine)
        in_the_end = State.ON_TIER if end in ("done", "used", "dropped") else State.IN_MEMORY
        assert packed[0].saved.state is in_the_end
        for view in packed:
            assert torch.equal(engine.hooks.unpack(view), torch.full((1024,), 1.0))
        del packed, view
    num_kept = 2 if end in ("refused", "not started") else 0
    assert engine.statistics.rejected_bytes == num_kept * 4096
    assert engine.statistics.offloaded_storages == 2 - num_kept
    assert engine.statistics.offloaded_bytes == (2 - num_kept) * 4096
    assert engine.statistics.written_bytes == {"done": 8192, "used": 4096, "dropped": 4096}.get(
        end, 0
    )
    assert engine.statistics.tier_used_bytes == 0


def test_what_no_tier_took_is_counted_step_by_step(engine, monkeypatch):
    monkeypatch.setattr(ssd(engine), "begin_write", lambda *_: None)
    for _ in range(2):
        with engine.step():
            packed = engine.hooks.pack(torch.randn(1024))
            settle(engine)
            del packed
        assert engine.statistics.rejected_bytes == 4096
        assert engine.statistics.offloaded_bytes == engine.statistics.offloaded_storages == 0


def test_a_write_that_cannot_start_keeps_no_other_of_its_layer_back(engine, monkeypatch):
    begin_write, begun = ssd(engine).begin_write, []

    def fail_once(source, after):
        begun.append(source.nbytes())
        if len(begun) == 2:
            raise MemoryError
        return begin_write(source, after)

    monkeypatch.setattr(ssd(engine), "begin_write", fail_once)
    x = torch.randn(1000, requires_grad=True)
    with engine.step(), engine.forward(Scope()):
        y = x.exp().flip(0).exp()[:900].flip(0).exp()
        engine.capture(Scope(), [y], [x])
        settle(engine)
    assert begun == [4000, 4000, 3600]
    assert engine.statistics.rejected_bytes == 4000
    assert engine.statistics.written_bytes == 4000 + 3600


def test_a_write_that_could_not_start_keeps_nothing_alive(engine, monkeypatch):
    monkeypatch.setattr(ssd(engine), "begin_write", lambda *_: 1 / 0)
    with engine.step():
        packed = engine.hooks.pack(torch.randn(1000))
        reference = weakref.ref(packed.saved)
        gc.disable()
        try:
            settle(engine)
            del packed
            assert reference() is None
        finally:
            gc.enable()


def test_a_storage_larger_than_the_inflight_budget_still_goes(make_engine):
    engine = make_engine(io="buffered", inflight_bytes=4096)
    with engine.step():
        tensor = torch.randn(10_000)
        packed = engine.hooks.pack(tensor)
        settle(engine)
        assert torch.equal(engine.hooks.unpack(packed), tensor)


def test_over_the_ssd_budget_activations_stay_in_memory(make_engine, caplog):
    model, x = Model(), torch.randn(3, 17, 32)
    plain = run_step(model, x)
    engine = make_engine(io="buffered", ssd_budget_bytes=65536)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_same(run_step(model, x, engine), plain)
    assert ssd(engine).capacity_bytes == 65536
    assert engine.statistics.rejected_bytes > 0 and engine.statistics.written_bytes > 0
    assert sum("ssd-budget is used up" in message for message in caplog.messages) == 1
    assert not ssd(engine).degraded


def test_the_file_stops_growing_after_the_first_step(make_engine):
    model, x = Model(), torch.randn(3, 17, 32)
    engine = make_engine(io="buffered", ssd_budget_bytes=64 << 20)
    run_step(model, x, engine)
    size = ssd(engine).capacity_bytes
    high_water = ssd(engine).drives[0].extents
    for _ in range(3):
        run_step(model, x, engine)
        assert ssd(engine).capacity_bytes == size
        assert engine.statistics.tier_used_bytes == 0
        assert high_water.largest_free_bytes == size, "the space fell into pieces"
