# SPDX-License-Identifier: Apache-2.0
"""What compute waits for is counted; what it and the read-ahead both want is read once."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref

import pytest
import torch

from megatron.offload import ChangedInPlaceError, Scope, StorageError
from megatron.offload.activations.saved.record import SavedStorage, State
from megatron.offload.activations.saved.view import SavedView
from megatron.offload.activations.transfer import reader as reader_module
from megatron.offload.device.cpu import CpuDevice
from megatron.offload.tiers.budget import ByteBudget
from megatron.offload.tiers.file import UnlinkedFile
from megatron.offload.tiers.transfer import Transfer
from tests.support.models import settle, ssd
from tests.support.waiting import wait_until


@pytest.fixture
def waits(engine, monkeypatch):
    """What the prefetcher is told of waits: seconds and bandwidth."""
    told = []
    monkeypatch.setattr(engine.reader.prefetcher, "waited", lambda *wait: told.append(wait))
    return told


@pytest.fixture
def ranges(engine, monkeypatch):
    """The ranges that profiles would show."""
    names = []

    def annotate(_, name):
        names.append(name)
        return contextlib.nullcontext()

    monkeypatch.setattr(CpuDevice, "annotate", annotate)
    return names


def dispatcher_thread(engine):
    found = []
    engine.dispatcher.submit(lambda: found.append(threading.current_thread()))
    engine.dispatcher.drain()
    return found[0]


def saved(engine, values):
    """Packed storages that only the tier has, and their save order."""
    with engine.forward(Scope()) as save_order:
        packed = [engine.hooks.pack(torch.full((1024,), float(value))) for value in values]
        settle(engine)
    return save_order, packed


@pytest.mark.parametrize("is_noticeable", [True, False])
def test_a_read_that_is_waited_for_is_a_stall(engine, monkeypatch, waits, ranges, is_noticeable):
    read, wait = UnlinkedFile.read, SavedStorage.wait_for_read
    compute_waits = threading.Event()

    def gated_read(*arguments):
        assert compute_waits.wait(10)
        read(*arguments)

    def noted_wait(record):
        time.sleep(0.01)
        compute_waits.set()
        wait(record)

    monkeypatch.setattr(reader_module, "_NOTICEABLE_S", 0.001 if is_noticeable else float("inf"))
    monkeypatch.setattr(UnlinkedFile, "read", gated_read)
    monkeypatch.setattr(SavedStorage, "wait_for_read", noted_wait)
    with engine.step():
        _, (packed,) = saved(engine, [3.0])
        assert torch.equal(engine.hooks.unpack(packed), torch.full((1024,), 3.0))
    assert engine.statistics.stall_s > 0.01
    assert ranges == ["activation offload: wait for a read"]
    assert len(waits) == is_noticeable
    for seconds, bytes_per_s in waits:
        assert seconds >= engine.statistics.stall_s and bytes_per_s > 0


def test_a_read_that_has_arrived_is_no_stall(engine, waits, ranges):
    with engine.step():
        save_order, (packed,) = saved(engine, [3.0])
        with engine.backward(save_order):
            engine.dispatcher.drain()
            packed.saved.wait_for_read()
            assert packed.saved.state in (State.READING, State.RESTORED)
            assert torch.equal(engine.hooks.unpack(packed), torch.full((1024,), 3.0))
    assert engine.statistics.read_bytes == 4096 and engine.statistics.forwarded_bytes == 0
    assert engine.statistics.stall_s == 0 and not waits and not ranges


def test_a_read_that_has_arrived_is_no_stall_before_its_tensors_are_built(engine, waits, ranges):
    may_build = threading.Event()
    with engine.step():
        save_order, (packed,) = saved(engine, [3.0])
        engine.dispatcher.submit(lambda: may_build.wait(10))  # it neither reads ahead nor builds
        with engine.backward(save_order):
            engine.reader.begin_read(packed.saved, 0.0)
            packed.saved.wait_for_read()
            assert not packed.built and packed.saved.has_arrived
            try:
                assert torch.equal(engine.hooks.unpack(packed), torch.full((1024,), 3.0))
            finally:
                may_build.set()
    assert engine.statistics.stall_s == 0 and not waits and not ranges


def test_memory_that_a_read_brought_back_is_not_counted_as_forwarded(engine):
    with engine.step():
        tensor = torch.ones(1024)
        views = [engine.hooks.pack(tensor) for _ in range(2)]
        del tensor
        settle(engine)
        for view in views:  # the second finds it restored
            assert torch.equal(engine.hooks.unpack(view), torch.ones(1024))
            engine.dispatcher.drain()
            views[1].built = None  # as if it were not made ready
    assert engine.statistics.read_bytes == 4096 and engine.statistics.forwarded_bytes == 0


def test_what_compute_and_the_read_ahead_want_at_once_is_read_once(engine, monkeypatch):
    begin_read, together = ssd(engine).begin_read, threading.Barrier(2)

    def meet(*arguments):
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(timeout=0.2)  # for another thread that reads the same
        return begin_read(*arguments)

    monkeypatch.setattr(ssd(engine), "begin_read", meet)
    with engine.step():
        save_order, (packed,) = saved(engine, [3.0])
        with engine.backward(save_order):
            assert torch.equal(engine.hooks.unpack(packed), torch.full((1024,), 3.0))
            engine.dispatcher.drain()
    assert engine.statistics.read_bytes == 4096


def test_only_who_starts_a_read_says_so(engine):
    with engine.step():
        _, (packed,) = saved(engine, [3.0])
        begun = [engine.reader.begin_read(packed.saved, 0.0) for _ in range(2)]
        assert begun == [True, False]
        assert torch.equal(engine.hooks.unpack(packed), torch.full((1024,), 3.0))


def test_what_was_read_ahead_is_handed_out_ready_made(engine, monkeypatch):
    threads, rebuild = [], SavedView.rebuild

    def noted(view, memory):
        threads.append(threading.current_thread())
        return rebuild(view, memory)

    monkeypatch.setattr(SavedView, "rebuild", noted)
    with engine.step():
        save_order, (packed,) = saved(engine, [3.0])
        with engine.backward(save_order):
            wait_until(lambda: packed.built, "the read did not arrive")
            tensor = engine.hooks.unpack(packed)
            assert torch.equal(tensor, torch.full((1024,), 3.0)) and not packed.built
            again = engine.hooks.unpack(packed)  # of a graph that is retained
            assert torch.equal(again, tensor) and again is not tensor
    assert threads == [dispatcher_thread(engine), threading.current_thread()]


def test_the_use_of_what_is_ready_is_a_use(engine):
    with engine.step():
        save_order, (packed,) = saved(engine, [3.0])
        with engine.backward(save_order):
            wait_until(lambda: packed.built, "the read did not arrive")
            engine.hooks.unpack(packed)
            engine.dispatcher.drain()
            assert packed.is_used and packed.saved.state is State.ON_TIER


def test_a_use_is_told_once_its_memory_is_held(engine, monkeypatch):
    wait, end_use, calls = engine.reader.wait_for_read, engine.reader.end_use, []
    monkeypatch.setattr(
        engine.reader, "wait_for_read", lambda record: (calls.append("back"), wait(record))[1]
    )
    monkeypatch.setattr(
        engine.reader, "end_use", lambda view: (calls.append("used"), end_use(view))[1]
    )
    with engine.step():
        _, (packed,) = saved(engine, [3.0])
        assert torch.equal(engine.hooks.unpack(packed), torch.full((1024,), 3.0))
    assert calls == ["back", "used"]


def test_what_is_ready_but_was_modified_is_not_handed_out(engine):
    with engine.step():
        tensor = torch.full((1024,), 3.0)
        with engine.forward(Scope()) as save_order:
            packed = engine.hooks.pack(tensor.detach())
            settle(engine)
        changed = packed._witness.detach()  # shares the version counter, as any view of it
        del tensor
        with engine.backward(save_order):
            wait_until(lambda: packed.built, "the read did not arrive")
            changed.add_(1)
            with pytest.raises(ChangedInPlaceError):
                engine.hooks.unpack(packed)


def test_bytes_that_others_used_and_let_go_meanwhile_are_read_again(engine, monkeypatch):
    end_read, ends = SavedStorage.end_read, []

    def come_late(record):
        if not ends:
            end_read(record)
            record.view_used(packed)
            assert record.state is State.ON_TIER
        ends.append(end_read(record))
        return ends[-1]

    with engine.step():
        _, (packed,) = saved(engine, [3.0])
        monkeypatch.setattr(SavedStorage, "end_read", come_late)
        assert torch.equal(engine.hooks.unpack(packed), torch.full((1024,), 3.0))
    assert len(ends) == 2 and ends[0] is None
    assert engine.statistics.read_bytes == 2 * 4096


def test_a_read_ahead_that_failed_makes_nothing_ready(engine, monkeypatch):
    gate, ended = threading.Event(), threading.Event()

    def fail(*_):
        assert gate.wait(10)
        raise OSError(5, "no")

    with engine.step():
        save_order, (packed,) = saved(engine, [3.0])
        monkeypatch.setattr(UnlinkedFile, "read", fail)
        with engine.backward(save_order):
            engine.dispatcher.drain()
            packed.saved._pending.add_done_callback(lambda _: ended.set())  # after the engine's own
            gate.set()
            assert ended.wait(10)
            engine.dispatcher.drain()
            assert packed.saved.state is State.READING and not packed.built
            with pytest.raises(StorageError, match="Errno 5"):
                engine.hooks.unpack(packed)


def test_a_read_that_was_cancelled_makes_nothing_ready(engine, monkeypatch, caplog):
    submitted, transfer = [], Transfer()
    with engine.step():
        _, (packed,) = saved(engine, [3.0])
        memory = torch.UntypedStorage(4096)
        monkeypatch.setattr(ssd(engine), "begin_read", lambda block, deadline: (memory, transfer))
        engine.reader.begin_read(packed.saved, 0.0)
        monkeypatch.setattr(engine.dispatcher, "submit", submitted.append)
        assert transfer.cancel()
        monkeypatch.undo()
        del packed
    assert not submitted and not caplog.records, "an error is logged by whoever cancelled"


def test_a_record_that_died_meanwhile_is_not_made_ready(engine, monkeypatch, caplog):
    arrived, gate, ended = (threading.Event() for _ in range(3))
    read = UnlinkedFile.read

    def held(*arguments):
        arrived.set()
        assert gate.wait(10)
        read(*arguments)

    with engine.step():
        save_order, packed = saved(engine, [3.0])
        monkeypatch.setattr(UnlinkedFile, "read", held)
        with engine.backward(save_order):
            engine.dispatcher.drain()
            assert arrived.wait(10)
            packed[0].saved._pending.add_done_callback(lambda _: ended.set())
            weak = weakref.ref(packed[0].saved)
            del packed
            assert weak() is None, "a read holds no record"
            gate.set()
            assert ended.wait(10)
    assert not caplog.records


def test_the_dispatchers_thread_alone_moves_the_read_ahead(engine, monkeypatch):
    threads = {}

    def noting(name, call):
        def noted(*arguments):
            threads.setdefault(name, set()).add(threading.current_thread())
            return call(*arguments)

        return noted

    for name in ("start", "advance", "waited", "stop"):
        call = getattr(engine.reader.prefetcher, name)
        monkeypatch.setattr(engine.reader.prefetcher, name, noting(name, call))
    monkeypatch.setattr(SavedStorage, "has_arrived", False)
    monkeypatch.setattr(reader_module, "_NOTICEABLE_S", -1.0)
    with engine.step():
        save_order, packed = saved(engine, [3.0, 4.0])
        engine.hooks.unpack(packed.pop())  # waits
        with engine.backward(save_order):
            engine.hooks.unpack(packed.pop())
    assert len(threads) == 4
    assert set.union(*threads.values()) == {dispatcher_thread(engine)}


def test_a_step_ends_when_no_thread_holds_what_it_wrote(engine, monkeypatch):
    release, released = ByteBudget.release, []

    def linger(budget, holder):
        release(budget, holder)
        if threading.current_thread() is not threading.main_thread():
            released.append(type(holder))
            assert gate.wait(10)

    gate = threading.Event()
    monkeypatch.setattr(ByteBudget, "release", linger)
    try:
        with engine.step():
            _, packed = saved(engine, [3.0])
            wait_until(lambda: released, "nothing was released")
            del packed
        assert engine.statistics.tier_used_bytes == 0
    finally:
        gate.set()


def test_what_compute_has_used_meanwhile_is_not_read_ahead_any_more(engine):
    with engine.step():
        packed = engine.hooks.pack(torch.randn(1000))
        settle(engine)
        assert engine.hooks.unpack(packed).numel() == 1000
        assert not engine.reader.begin_read(packed.saved, 1.0)  # the dispatcher was about to
        assert engine.hooks.unpack(packed).numel() == 1000  # compute may always
    assert engine.statistics.read_bytes == 2 * 4000
