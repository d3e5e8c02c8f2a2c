# SPDX-License-Identifier: Apache-2.0
"""What compute waits for is counted; what it and the read-ahead both want is read once."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch

from megatron.offload import ChangedInPlaceError, Scope
from megatron.offload import engine as engine_module
from megatron.offload.saved.record import SavedStorage, SavedView, State
from megatron.offload.storage.file import UnlinkedFile
from tests.models import settle, ssd


@pytest.fixture
def waits(engine, monkeypatch):
    """What the prefetcher is told of waits: seconds and bandwidth."""
    told = []
    monkeypatch.setattr(engine._prefetcher, "waited", lambda *wait: told.append(wait))
    return told


@pytest.fixture
def ranges(engine, monkeypatch):
    """The ranges that profiles would show."""
    names = []

    def annotate(name):
        names.append(name)
        return contextlib.nullcontext()

    monkeypatch.setattr(engine._device, "annotate", annotate)
    return names


def wait_until(holds):
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.001)


def saved(engine, values):
    """Packed storages that only the tier has, and their tape."""
    with engine.forward(Scope()) as tape:
        packed = [engine._hooks.pack(torch.full((1024,), float(value))) for value in values]
        settle(engine)
    return tape, packed


@pytest.mark.parametrize("is_noticeable", [True, False])
def test_a_read_that_is_waited_for_is_a_stall(engine, monkeypatch, waits, ranges, is_noticeable):
    read, wait = UnlinkedFile.read, SavedStorage.wait_until_arrived
    compute_waits = threading.Event()

    def gated_read(*arguments):
        assert compute_waits.wait(10)
        read(*arguments)

    def noted_wait(record):
        time.sleep(0.01)
        compute_waits.set()
        wait(record)

    monkeypatch.setattr(engine_module, "_NOTICEABLE_S", 0.001 if is_noticeable else float("inf"))
    monkeypatch.setattr(UnlinkedFile, "read", gated_read)
    monkeypatch.setattr(SavedStorage, "wait_until_arrived", noted_wait)
    with engine.step():
        _, (packed,) = saved(engine, [3.0])
        assert torch.equal(engine._hooks.unpack(packed), torch.full((1024,), 3.0))
    assert engine.statistics.stall_s > 0.01
    assert ranges == ["activation offload: wait for a read"]
    assert len(waits) == is_noticeable
    for seconds, bytes_per_s in waits:
        assert seconds == engine.statistics.stall_s and bytes_per_s > 0


def test_a_read_that_has_arrived_is_no_stall(engine, waits, ranges):
    with engine.step():
        tape, (packed,) = saved(engine, [3.0])
        with engine.backward(tape):
            engine._starter.drain()
            packed.saved.wait_until_arrived()
            assert packed.saved.state in (State.READING, State.RESTORED)
            assert torch.equal(engine._hooks.unpack(packed), torch.full((1024,), 3.0))
    assert engine.statistics.read_bytes == 4096 and engine.statistics.forwarded_bytes == 0
    assert engine.statistics.stall_s == 0 and not waits and not ranges


def test_memory_that_a_read_brought_back_is_not_counted_as_forwarded(engine):
    with engine.step():
        tensor = torch.ones(1024)
        views = [engine._hooks.pack(tensor) for _ in range(2)]
        del tensor
        settle(engine)
        for view in views:  # the second finds it restored
            assert torch.equal(engine._hooks.unpack(view), torch.ones(1024))
    assert engine.statistics.read_bytes == 4096 and engine.statistics.forwarded_bytes == 0


def test_what_compute_and_the_read_ahead_want_at_once_is_read_once(engine, monkeypatch):
    begin_read, together = ssd(engine).begin_read, threading.Barrier(2)

    def meet(*arguments):
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(timeout=0.2)  # for another thread that reads the same
        return begin_read(*arguments)

    monkeypatch.setattr(ssd(engine), "begin_read", meet)
    with engine.step():
        tape, (packed,) = saved(engine, [3.0])
        with engine.backward(tape):
            assert torch.equal(engine._hooks.unpack(packed), torch.full((1024,), 3.0))
            engine._starter.drain()
    assert engine.statistics.read_bytes == 4096


def test_only_who_starts_a_read_says_so(engine):
    with engine.step():
        _, (packed,) = saved(engine, [3.0])
        begun = [engine._begin_read(packed.saved, 0.0) for _ in range(2)]
        assert begun == [True, False]
        assert torch.equal(engine._hooks.unpack(packed), torch.full((1024,), 3.0))


def test_what_was_read_ahead_is_handed_out_ready_made(engine, monkeypatch):
    threads, rebuild = [], SavedView.rebuild

    def noted(view, memory):
        threads.append(threading.current_thread())
        return rebuild(view, memory)

    monkeypatch.setattr(SavedView, "rebuild", noted)
    with engine.step():
        tape, (packed,) = saved(engine, [3.0])
        with engine.backward(tape):
            wait_until(lambda: packed.ready)
            tensor = engine._hooks.unpack(packed)
            assert torch.equal(tensor, torch.full((1024,), 3.0)) and not packed.ready
            again = engine._hooks.unpack(packed)  # of a graph that is retained
            assert torch.equal(again, tensor) and again is not tensor
    assert threads[0] is not threading.current_thread()
    assert threads[1:] == [threading.current_thread()]


def test_what_is_ready_but_was_modified_is_not_handed_out(engine):
    with engine.step():
        tensor = torch.full((1024,), 3.0)
        with engine.forward(Scope()) as tape:
            packed = engine._hooks.pack(tensor.detach())
            settle(engine)
        changed = packed._witness.detach()  # shares the version counter, as any view of it
        del tensor
        with engine.backward(tape):
            wait_until(lambda: packed.ready)
            changed.add_(1)
            with pytest.raises(ChangedInPlaceError):
                engine._hooks.unpack(packed)
