# SPDX-License-Identifier: Apache-2.0
"""Activations come back in the order in which backward needs them, a bounded window ahead."""

from __future__ import annotations

import pytest
import torch

from megatron.offload import Scope
from megatron.offload.activations.saved.record import SavedStorage, State
from megatron.offload.activations.saved.save_order import SaveOrder
from megatron.offload.activations.transfer.prefetcher import Prefetcher
from megatron.offload.tiers.budget import ByteBudget
from tests.support.models import settle


def save_on(engine, sizes):
    with engine.forward(Scope()) as save_order:
        packed = [engine.hooks.pack(torch.full((size,), float(size))) for size in sizes]
        settle(engine)
    return save_order, packed


def order_of(sizes):
    save_order = SaveOrder()
    records = [SavedStorage(torch.UntypedStorage(size), Scope(), 0) for size in sizes]
    for record in records:
        save_order.append(record)
    return save_order, records


def on_their_way(engine, packed):
    engine.dispatcher.drain()
    return [index for index, view in enumerate(packed) if view.saved.state is not State.ON_TIER]


@pytest.fixture(autouse=True)
def no_stalls(monkeypatch):
    """Waits on a busy machine must not change the window under test."""
    monkeypatch.setattr("megatron.offload.activations.transfer.reader._NOTICEABLE_S", float("inf"))


def test_the_window_opens_at_the_first_use_and_moves_in_reverse_order(engine):
    with engine.step():
        save_order, packed = save_on(engine, [1024] * 6)
        assert on_their_way(engine, packed) == []
        with engine.backward(save_order):
            assert on_their_way(engine, packed) == [5]
            for used in (5, 4, 3):
                engine.hooks.unpack(packed.pop())
                assert on_their_way(engine, packed) == [used - 1]
            while packed:
                engine.hooks.unpack(packed.pop())
    assert engine.statistics.read_bytes == 6 * 4096


def test_the_first_use_opens_the_window(engine):
    with engine.step():
        save_order, packed = save_on(engine, [3072] + [1024] * 5)  # as large as three of the others
        with engine.backward(save_order):
            assert on_their_way(engine, packed) == [5]
            for ahead in ([2, 3, 4], [2, 3], [1, 2]):  # more when half of the window was used
                view = packed.pop()  # alive until the next: it is its use that makes room
                engine.hooks.unpack(view)
                assert on_their_way(engine, packed) == ahead
        del packed


@pytest.mark.parametrize(("inflight_bytes", "ahead_bytes"), [(1 << 20, 16384), (8192, 8192)])
def test_the_window_holds_one_of_the_largest_within_the_inflight_budget(
    make_engine, inflight_bytes, ahead_bytes
):
    engine = make_engine(io="buffered", inflight_bytes=inflight_bytes)
    with engine.step():
        save_order, packed = save_on(engine, [4096] + [1024] * 12)  # the largest has 16384 bytes
        with engine.backward(save_order):
            engine.dispatcher.drain()  # it has heard of the pass before the first use
            engine.hooks.unpack(packed.pop())
            ahead = [packed[index].saved.num_bytes for index in on_their_way(engine, packed)]
            assert sum(ahead) == ahead_bytes
        del packed


def test_by_default_one_storage_is_read_ahead_however_large_they_are(make_engine, monkeypatch):
    monkeypatch.setattr("megatron.offload.activations.engine.DEFAULT_INFLIGHT_BYTES", 10_000)
    engine = make_engine(io="buffered")
    with engine.step():
        save_order, packed = save_on(engine, [2048] * 4)  # 8192 bytes each
        with engine.backward(save_order):
            engine.dispatcher.drain()
            engine.hooks.unpack(packed.pop())
            assert on_their_way(engine, packed) == [2]
        assert engine.inflight_bytes == 2 * 8192
        del packed


@pytest.mark.parametrize(("settings", "ahead"), [({}, [3]), ({"chunked_loss": "auto"}, [2, 3])])
def test_a_chunked_loss_leaves_room_to_read_ahead_at_once(make_engine, settings, ahead):
    engine = make_engine(io="buffered", **settings)
    with engine.step():
        save_order, packed = save_on(engine, [2048, 2048, 1024, 1024])
        with engine.backward(save_order):
            assert on_their_way(engine, packed) == ahead
        del packed


def test_a_storage_saved_twice_is_brought_back_for_its_last_save(engine):
    with engine.step():
        with engine.forward(Scope()) as save_order:
            shared = torch.ones(1024)
            first = [engine.hooks.pack(shared), engine.hooks.pack(torch.zeros(1024))]
            again = engine.hooks.pack(shared)
            del shared
            settle(engine)
        with engine.backward(save_order):
            assert again.saved is first[0].saved
            assert on_their_way(engine, first) == [0]
            for view, value in ((again, 1.0), (first[1], 0.0), (first[0], 1.0)):
                assert torch.equal(engine.hooks.unpack(view), torch.full((1024,), value))
        del view, again, first
    assert engine.statistics.read_bytes == 2 * 4096
    assert engine.statistics.deduplicated_bytes == 4096


def test_the_window_grows_by_what_a_stall_would_have_read_and_shrinks_again():
    save_order, largest = order_of([1000])
    prefetcher = Prefetcher(lambda record, deadline: None, budget=ByteBudget(10**6))
    prefetcher.start(save_order)
    prefetcher.waited(1.0, 500.0)  # for the first storage no window would have helped
    assert prefetcher.window_bytes == 0
    prefetcher.used(largest[0])
    assert prefetcher.window_bytes == 1000
    prefetcher.waited(0.5, 500.0)
    assert prefetcher.window_bytes == pytest.approx(1250, abs=1)
    prefetcher.waited(100.0, 500.0)  # once: it doubles at most
    assert prefetcher.window_bytes == pytest.approx(2500, abs=1)
    for _ in range(30):
        prefetcher.start(save_order)
        prefetcher.stop()
    prefetcher.start(save_order)
    prefetcher.used(largest[0])
    assert prefetcher.window_bytes == pytest.approx(1000, abs=1)


def test_a_wait_between_two_backward_passes_does_not_widen_the_window():
    """Forward reads what recipes are compared with, and no read-ahead is for that."""
    save_order, _ = order_of([1000])
    prefetcher = Prefetcher(lambda record, deadline: True, budget=ByteBudget(10**6))
    prefetcher.start(save_order, opens_at_once=True)
    prefetcher.stop()
    prefetcher.waited(1.0, 500.0)
    prefetcher.start(save_order, opens_at_once=True)
    assert prefetcher.window_bytes == 1000


def test_short_stalls_do_not_widen_the_window(monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr("time.perf_counter", lambda: now_s)
    save_order, _ = order_of([1000])
    prefetcher = Prefetcher(lambda record, deadline: True, budget=ByteBudget(10**6))
    for seconds in (5.0, 2.0):
        prefetcher.start(save_order, opens_at_once=True)
        now_s += seconds
        prefetcher.stop()
        now_s += 100.0
    prefetcher.start(save_order, opens_at_once=True)
    prefetcher.waited(0.015, 5e4)  # a hundredth of a pass is 0.02 s
    assert prefetcher.window_bytes == 1000
    prefetcher.waited(0.015, 5e4)  # of which 0.005 s are left
    assert prefetcher.window_bytes == pytest.approx(1000 + 500)
    prefetcher.waited(0.01, 5e4)
    assert prefetcher.window_bytes == pytest.approx(1000 + 1000)


def test_a_pass_that_was_prepared_is_not_begun_a_second_time():
    save_order, _ = order_of([1000])
    prefetcher = Prefetcher(lambda record, deadline: True, budget=ByteBudget(10**6))
    prefetcher.start(save_order, opens_at_once=True)
    assert prefetcher.window_bytes == 1000
    prefetcher.waited(1.0, 500.0)
    prefetcher.start(save_order)
    assert prefetcher.window_bytes == pytest.approx(1500, abs=1)


def test_saves_of_a_graph_are_in_the_order_in_which_backward_uses_them():
    save_order, records = order_of([13, 3])
    uses = [(7, 0), (7, 4), (7, 2), (7, 5), (8, 1), (8, 0), (8, 1)]  # the last is another call
    for size, (graph, use) in zip([10, 11, 12, 2, 14, 15, 16], uses, strict=True):
        records.append(SavedStorage(torch.UntypedStorage(size), Scope(), 0))
        save_order.append(records[-1])
        save_order.arrange(1, graph, use)
    found, largest = [], []
    while (record := save_order.last()) is not None:
        largest.append(save_order.largest_bytes)
        found.append(record.num_bytes)
        save_order.drop_last()
    assert found == [16, 15, 14, 10, 12, 11, 2, 3, 13]
    assert largest == [16, 15, 14, 13, 13, 13, 13, 13, 13]


def test_saves_of_an_operation_stay_together_and_what_is_between_divides():
    _, records = order_of([1, 2, 3, 4, 5])
    save_order = SaveOrder()
    save_order.append(records[0])
    save_order.append(records[1])
    save_order.arrange(2, 7, 1)
    save_order.append(records[2])
    save_order.arrange(1, 7, 3)
    save_order.append(records[3])  # of no graph
    save_order.append(records[4])
    save_order.arrange(1, 7, 5)
    found = []
    while (record := save_order.last()) is not None:
        found.append(record.num_bytes)
        save_order.drop_last()
    assert found == [5, 4, 2, 1, 3]
