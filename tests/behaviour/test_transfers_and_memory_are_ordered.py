# SPDX-License-Identifier: Apache-2.0
"""Invariant 5 on a CPU: nothing is reused or read while a transfer works on it; forwarding."""

from __future__ import annotations

import contextlib
import threading

import torch

from tests.support.models import settle
from tests.support.waiting import SOON_S


def test_space_of_a_dead_record_is_not_reused_while_its_write_runs(engine, write_gate):
    with engine.step():
        first = engine.hooks.pack(torch.full((1024,), 1.0))
        write_gate.wait_for_arrival()  # the write runs, in its thread
        first_offset = first.saved.block.extents[0].offset
        del first  # the graph is dropped
        second = engine.hooks.pack(torch.full((1024,), 2.0))
        engine.dispatcher.drain()
        assert second.saved.block.extents[0].offset != first_offset
        write_gate.open.set()
        settle(engine)
        assert torch.equal(engine.hooks.unpack(second), torch.full((1024,), 2.0))


def test_a_graph_dropped_without_backward_cancels_its_queued_writes(make_engine, write_gate):
    engine = make_engine(io="buffered", threads=1)
    with engine.step():
        packed = [engine.hooks.pack(torch.randn(1024)) for _ in range(5)]
        engine.dispatcher.drain()
        write_gate.wait_for_arrival()  # the first is being written, four wait behind it
        del packed
        write_gate.open.set()
        settle(engine)
    assert engine.statistics.written_bytes == 4096
    assert engine.statistics.tier_used_bytes == 0


def test_memory_of_a_running_write_stays_alive(engine, write_gate):
    with engine.step():
        tensor = torch.full((1024,), 3.0)
        weak = tensor.untyped_storage()._weak_ref()
        packed = engine.hooks.pack(tensor)
        write_gate.wait_for_arrival()
        del tensor
        assert not torch.UntypedStorage._expired(weak)
        write_gate.open.set()
        settle(engine)
        assert torch.UntypedStorage._expired(weak)
        assert torch.equal(engine.hooks.unpack(packed), torch.full((1024,), 3.0))
    torch.UntypedStorage._free_weak_ref(weak)


def test_forwarding_gives_the_memory_back_and_cancels_the_queued_write(make_engine, write_gate):
    engine = make_engine(io="buffered", threads=1)
    with engine.step():
        running, queued = (torch.randn(1024) for _ in range(2))
        packed = [engine.hooks.pack(tensor) for tensor in (running, queued)]
        engine.dispatcher.drain()
        write_gate.wait_for_arrival()  # the first is being written, the second waits behind it
        for tensor, view in zip((running, queued), packed, strict=True):
            restored = engine.hooks.unpack(view)
            assert restored.data_ptr() == tensor.data_ptr()
        write_gate.open.set()
        settle(engine)
    assert engine.statistics.forwarded_bytes == 2 * 4096
    assert engine.statistics.written_bytes == 4096
    assert engine.statistics.read_bytes == 0


def test_restored_memory_is_reused_only_after_its_last_tensor_is_gone(engine):
    with engine.step():
        packed = [engine.hooks.pack(torch.full((1024,), float(i))) for i in range(2)]
        settle(engine)
        first = engine.hooks.unpack(packed[0])
        address, view = first.data_ptr(), first[10:20]
        del first
        second = engine.hooks.unpack(packed[1])
        assert second.data_ptr() != address
        assert torch.equal(view, torch.zeros(10))
        del view
        assert torch.equal(engine.hooks.unpack(packed[0]), torch.zeros(1024))


def test_threads_that_need_one_storage_at_once_bring_it_back_one_by_one(engine, monkeypatch):
    wait_for_read, together, met = engine.reader.wait_for_read, threading.Barrier(2), []

    def meet(record):
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(timeout=0.2)  # for another thread that needs the same
            met.append(record)
        return wait_for_read(record)

    monkeypatch.setattr(engine.reader, "wait_for_read", meet)
    restored, errors = [], []

    def work(view):
        try:
            restored.append(engine.hooks.unpack(view))
        except Exception as error:
            errors.append(error)

    with engine.step():
        tensor = torch.randn(1024)
        expected = tensor.clone()
        views = [engine.hooks.pack(tensor) for _ in range(2)]
        del tensor
        settle(engine)
        threads = [threading.Thread(target=work, args=(view,)) for view in views]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=SOON_S)
    assert not met and not errors, errors
    assert len(restored) == 2 and all(torch.equal(tensor, expected) for tensor in restored)
    assert engine.statistics.read_bytes == expected.nbytes
