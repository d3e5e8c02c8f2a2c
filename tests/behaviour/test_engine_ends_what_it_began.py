# SPDX-License-Identifier: Apache-2.0
"""Invariant 9: whatever ends (a pass, a step, the engine), nothing of it goes on or is lost."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.offload import OffloadEngine, Scope, StorageError
from megatron.offload.activations.saved.record import State
from megatron.offload.activations.saved.view import SavedView
from megatron.offload.tiers import file as file_module
from tests.support.models import Double, settle, ssd
from tests.support.waiting import SOON_S, wait_until


def save_on(engine, count):
    with engine.forward(Scope()) as save_order:
        packed = [engine.hooks.pack(torch.full((1024,), float(value))) for value in range(count)]
        settle(engine)
    return save_order, packed


def test_what_is_still_queued_when_the_engine_is_closed_stays_in_memory(offload_config, write_gate):
    engine = OffloadEngine(offload_config(io="buffered", threads=1))
    with engine.step():
        packed = [engine.hooks.pack(torch.full((1024,), float(value))) for value in range(3)]
        write_gate.wait_for_arrival()  # the first is being written, two wait behind it
        closing = threading.Thread(target=engine.close, daemon=True)
        closing.start()
        while engine.writer.bytes_in_flight > 4096:
            assert closing.is_alive()
        write_gate.open.set()
        closing.join(timeout=SOON_S)
        assert not closing.is_alive()
        for value in (1, 2):
            view = packed[value]
            assert torch.equal(engine.hooks.unpack(view), torch.full((1024,), float(value)))


def test_a_view_taken_back_in_mid_write_can_be_asked_for_again_after_the_write(engine, write_gate):
    with engine.step():
        packed = engine.hooks.pack(torch.full((1024,), 3.0))
        write_gate.wait_for_arrival()
        assert torch.equal(engine.hooks.unpack(packed), torch.full((1024,), 3.0))
        write_gate.open.set()
        settle(engine)
        assert torch.equal(engine.hooks.unpack(packed), torch.full((1024,), 3.0))
    assert engine.statistics.read_bytes == 0 and ssd(engine).used_bytes == 0


def test_a_read_that_failed_once_is_tried_again(engine, monkeypatch):
    with engine.step():
        packed = engine.hooks.pack(torch.full((1024,), 3.0))
        settle(engine)
        with monkeypatch.context() as patch:
            patch.setattr(file_module.os, "preadv", lambda *_: 0)
            with pytest.raises(StorageError):
                engine.hooks.unpack(packed)
        assert torch.equal(engine.hooks.unpack(packed), torch.full((1024,), 3.0))


def test_any_error_of_a_read_names_the_place(engine, monkeypatch):
    def fail(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with engine.step():
        packed = engine.hooks.pack(torch.full((1024,), 3.0))
        settle(engine)
        monkeypatch.setattr(file_module.UnlinkedFile, "read", fail)
        with pytest.raises(StorageError, match=r"chunk 0 micro-batch 0.*illegal memory access"):
            engine.hooks.unpack(packed)


@pytest.mark.parametrize("end", ["backward", "error", "step"])
def test_after_a_backward_pass_or_a_step_nothing_more_is_read_ahead(engine, end):
    with engine.step():
        save_order, packed = save_on(engine, 4)
        if end == "backward":
            with engine.backward(save_order):
                pass
        elif end == "error":
            with pytest.raises(ArithmeticError), engine.backward(save_order):
                raise ArithmeticError
        else:
            engine.reader.prefetcher.start(
                save_order
            )  # as a schedule does that an error ends in mid-pass
        engine.dispatcher.drain()  # the first may have been read ahead before the end
        if end != "step":
            engine.hooks.unpack(packed.pop())
            engine.dispatcher.drain()
            assert all(view.saved.state is State.ON_TIER for view in packed)
    with engine.step():
        engine.hooks.unpack(packed.pop())
        engine.dispatcher.drain()
        assert all(view.saved.state is State.ON_TIER for view in packed)
        del packed


def test_the_read_ahead_takes_back_what_is_still_being_written(engine, write_gate):
    with engine.step():
        with engine.forward(Scope()) as save_order:
            packed = engine.hooks.pack(torch.full((1024,), 3.0))
        write_gate.wait_for_arrival()
        assert packed.saved.state is State.WRITING
        with engine.backward(save_order):
            engine.dispatcher.drain()
            assert packed.saved.state is State.IN_MEMORY
            write_gate.open.set()
            settle(engine)
            assert torch.equal(engine.hooks.unpack(packed), torch.full((1024,), 3.0))
    assert engine.statistics.read_bytes == 0


def test_a_closed_engine_leaves_no_thread_and_no_open_file(offload_config):
    before = set(threading.enumerate())
    engine = OffloadEngine(offload_config(mode="tiered", host_budget=1 << 20))
    own, fd = set(threading.enumerate()) - before, ssd(engine).drives[0].file.fd
    assert len(own) > 2 and os.fstat(fd).st_nlink == 0
    engine.close()
    assert not any(thread.is_alive() for thread in own)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_an_input_that_an_earlier_layer_made_moves(engine):
    x = torch.randn(1000, requires_grad=True)
    with engine.step(), engine.forward(Scope()):
        middle = x.neg()
        engine.capture(Scope(), [middle.sin()], [middle])  # saves its input
        settle(engine)
    assert engine.statistics.offloaded_storages == 1


def test_a_pass_that_ended_takes_its_save_order_and_its_scope_with_it(engine):
    x = torch.randn(1000, requires_grad=True)
    with engine.step():
        with engine.forward(Scope(micro_batch=1)) as outer:
            engine.capture(Scope(layer="3"), [x.exp()], [x])
            assert engine.scope == Scope(micro_batch=1)
            with engine.within(Scope(layer="4")):
                assert engine.scope == Scope(layer="4")
            assert engine.scope == Scope(micro_batch=1)
            with engine.forward(Scope(micro_batch=2)) as inner:
                assert engine.save_order is inner
            assert engine.save_order is outer and engine.scope == Scope(micro_batch=1)
        assert engine.save_order is None and engine.scope == Scope()


def test_the_read_that_compute_waits_for_overtakes_those_that_are_ahead(make_engine):
    engine = make_engine(io="buffered", threads=1)
    queue = ssd(engine).drives[0]._threads
    gate, waited_for, order = threading.Event(), threading.Event(), []
    with engine.step():
        save_order, packed = save_on(engine, 6)
        begin_read = ssd(engine).begin_read

        def noted(block, deadline=0.0):
            index = block.extents[0].offset // 4096
            target, transfer = begin_read(block, deadline)
            transfer.add_done_callback(lambda _: order.append(index))
            if index == 0:
                waited_for.set()
            return target, transfer

        ssd(engine).begin_read = noted
        queue.submit_read(gate.wait, float("-inf"))
        engine.prefetch(save_order, opens_at_once=True)
        with engine.backward(save_order):
            engine.dispatcher.drain()  # one is ahead
            waiting = threading.Thread(target=engine.hooks.unpack, args=(packed[0],), daemon=True)
            waiting.start()
            try:
                assert waited_for.wait(timeout=SOON_S), "the read was not queued"
            finally:
                gate.set()
            waiting.join(timeout=SOON_S)
            for view in (packed[5], packed[4]):
                engine.hooks.unpack(view)
        assert order[:2] == [0, 5]
        del view, packed


def test_what_outlived_a_step_and_then_died_is_forgotten(engine):
    for _ in range(3):
        excluded = torch.randn(1000)
        engine.exclude([excluded])
        table = torch.randn(1000)
        x = torch.randn(1000, requires_grad=True)
        with engine.step():
            with engine.forward(Scope()) as save_order:
                y = x.neg() * table
                engine.capture(Scope(), [y], [x])
                settle(engine)
            with engine.backward(save_order):
                y.sum().backward()
            del y
        assert engine.statistics.long_lived_bytes == 4000
        assert engine.cache.num_excluded == 2
        assert engine.cache.num_records == 0
        del excluded, table
    with engine.step():
        pass
    assert engine.cache.num_excluded == 0


def test_what_is_excluded_stays_so_over_steps(engine):
    excluded = torch.randn(1000)
    engine.exclude([excluded])
    for _ in range(3):
        with engine.step():
            assert not isinstance(engine.hooks.pack(excluded), SavedView)


def test_a_storage_whose_graph_outlives_the_step_is_not_moved_again(engine):
    tensor = torch.randn(1000)
    with engine.step():
        packed = engine.hooks.pack(tensor)
        settle(engine)
    with engine.step():
        again = engine.hooks.pack(tensor)
        assert again.saved is packed.saved
    assert engine.statistics.offloaded_storages == 0
    assert engine.statistics.deduplicated_bytes == 4000


def test_an_output_that_stays_is_freed_with_its_graph(make_engine):
    engine = make_engine(min_bytes=1 << 20)
    x = torch.randn(1000, requires_grad=True)
    with engine.step(), engine.saved_tensors_hooks():
        y = x.exp()  # saves its output
    output = StorageWeakRef(y.untyped_storage())
    del y
    assert output.expired()


def test_types_of_nodes_that_are_defined_in_forward_are_freed(engine):
    def node_type() -> weakref.ref:
        class Twice(Double):
            """Has a type of nodes of its own."""

        x = torch.randn(1000, requires_grad=True)
        y = Twice.apply(x * 1)
        engine.capture(Scope(), [y], [x])
        return weakref.ref(Twice)

    with engine.step():
        found = node_type()

    def is_freed() -> bool:
        gc.collect()  # does nothing while another thread collects
        return found() is None

    wait_until(is_freed, "the type is kept")
