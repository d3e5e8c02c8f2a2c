# SPDX-License-Identifier: Apache-2.0
"""I/O threads and transfers: order, pace, errors, death of a thread, and what they keep alive."""

from __future__ import annotations

import concurrent.futures
import ctypes
import logging
import threading
import time
import weakref

import pytest

from megatron.offload.tiers.budget import RateLimit
from megatron.offload.tiers.io_threads import IoThreads, Piece
from megatron.offload.tiers.transfer import Transfer, when_all
from tests.support.waiting import SOON_S, wait_until


@pytest.fixture
def one_thread():
    threads = IoThreads(1, "test")
    yield threads
    threads.close()


def test_reads_go_before_writes_and_each_kind_in_order(one_thread):
    gate, done = threading.Event(), []
    one_thread.submit_read(gate.wait)

    def note(name):
        return lambda: done.append(name)

    transfers = [
        one_thread.submit_write([Piece(1, note("write 1"))]),
        one_thread.submit_read(note("read 1")),
        one_thread.submit_write([Piece(1, note("write 2"))]),
        one_thread.submit_read(note("read 2")),
    ]
    gate.set()
    for transfer in transfers:
        transfer.wait()
    assert done == ["read 1", "read 2", "write 1", "write 2"]


def test_the_read_that_is_needed_first_goes_first(one_thread):
    gate, done = threading.Event(), []
    one_thread.submit_read(gate.wait)
    transfers = [
        one_thread.submit_read(lambda d=deadline: done.append(d), deadline)
        for deadline in (3.0, 1.0, float("-inf"), 2.0)
    ]
    gate.set()
    for transfer in transfers:
        transfer.wait()
    assert done == [float("-inf"), 1.0, 2.0, 3.0]


def test_a_write_limit_holds_writes_up_and_lets_reads_through():
    limit = RateLimit(bytes_per_s=1000)
    threads = IoThreads(2, "test", limit)
    done = []
    first = threads.submit_write([Piece(10**9, lambda: done.append("write 1"))])  # pays for 11 days
    first.wait()
    second = threads.submit_write([Piece(1, lambda: done.append("write 2"))])
    threads.submit_read(lambda: done.append("read")).wait()
    assert done == ["write 1", "read"] and limit.delay_s() > 10**5
    limit.charge(-(10**9))
    threads.submit_read(lambda: None).wait()  # wakes a thread, which looks at the clock again
    second.wait()
    threads.close()


@pytest.mark.parametrize("verb", ["cancel", "abandon"])
def test_a_write_that_nobody_wants_does_not_wait_for_the_limit(verb):
    limit = RateLimit(bytes_per_s=1000)
    threads = IoThreads(1, "test", limit)
    threads.submit_write([Piece(10**9, lambda: None)]).wait()  # pays for 11 days
    unwanted = threads.submit_write([Piece(10**9, lambda: None)])
    getattr(unwanted, verb)()
    threads.submit_read(lambda: None).wait()  # wakes the thread
    wait_until(unwanted.cancelled, "it waits for days")
    assert limit.delay_s() < 1.1 * 10**6
    threads.close()


def test_a_write_limit_is_kept_on_average():
    limit = RateLimit(bytes_per_s=10_000_000)
    threads = IoThreads(4, "test", limit)
    began = time.monotonic()
    for transfer in [threads.submit_write([Piece(500_000, lambda: None)]) for _ in range(11)]:
        transfer.wait()
    assert time.monotonic() - began >= 0.5  # the first starts at once, ten wait 50 ms each
    threads.close()


def test_an_error_surfaces_in_wait_and_the_thread_goes_on(one_thread):
    def fail():
        raise OSError(5, "no")

    with pytest.raises(OSError, match="no"):
        one_thread.submit_read(fail).wait()
    one_thread.submit_read(lambda: None).wait()


def test_a_cancelled_transfer_does_not_run(one_thread):
    gate, ran = threading.Event(), []
    one_thread.submit_read(gate.wait)
    queued = one_thread.submit_write([Piece(1, lambda: ran.append(1))])
    assert queued.cancel()
    gate.set()
    one_thread.submit_write([Piece(1, lambda: None)]).wait()
    assert not ran


class Buffer:
    """Something that a transfer must not keep alive for longer than it needs it."""

    def __init__(self, fails=False):
        self.fails = fails

    def use(self):
        if self.fails:
            raise OSError(5, "no")


@pytest.mark.parametrize("fails", [True, False])
def test_finished_work_keeps_nothing_alive(one_thread, fails):
    buffer = Buffer(fails)
    weak = weakref.ref(buffer)
    transfer = one_thread.submit_write([Piece(1, buffer.use), Piece(1, buffer.use)])
    del buffer
    assert isinstance(transfer.exception(timeout=SOON_S), OSError) is fails
    assert weak() is None


def test_a_cancelled_transfer_gives_its_buffer_up_while_it_is_still_queued(one_thread):
    gate = threading.Event()
    one_thread.submit_read(gate.wait)
    buffer = Buffer()
    weak = weakref.ref(buffer)
    queued = one_thread.submit_write([Piece(1, buffer.use)])
    del buffer
    assert queued.cancel() and weak() is None
    gate.set()


def kill(thread):
    """Raises SystemExit in another thread, at its next instruction."""
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
    )


def test_a_dying_thread_fails_its_transfer_and_is_replaced(one_thread, caplog):
    started, done = threading.Event(), []

    def spin():
        started.set()
        while True:
            time.sleep(0.001)

    held = one_thread.submit_read(spin)
    waiting = one_thread.submit_write([Piece(1, lambda: done.append(1))])
    assert started.wait(timeout=SOON_S)
    with caplog.at_level(logging.WARNING):
        kill(one_thread._threads[0])
        with pytest.raises(OSError, match="thread that carried it out died"):
            held.result(timeout=SOON_S)
    waiting.result(timeout=SOON_S)
    assert done == [1]
    assert sum("an I/O thread died" in message for message in caplog.messages) == 1


def test_if_no_thread_can_be_started_waiting_ends_in_an_error(one_thread, monkeypatch):
    started = threading.Event()

    def spin():
        started.set()
        while True:
            time.sleep(0.001)

    one_thread.submit_read(spin)
    waiting = one_thread.submit_write([Piece(1, lambda: None)])
    assert started.wait(timeout=SOON_S)

    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    kill(one_thread._threads[0])
    with pytest.raises(OSError, match="all I/O threads died"):
        waiting.result(timeout=SOON_S)
    with pytest.raises(RuntimeError, match="all I/O threads died"):
        one_thread.submit_read(lambda: None)


def test_close_cancels_what_is_queued_and_waits_for_what_runs():
    threads = IoThreads(1, "test")
    gate, started, done = threading.Event(), threading.Event(), []

    def run():
        started.set()
        gate.wait()
        done.append("running")

    threads.submit_read(run)
    queued = threads.submit_write([Piece(1, lambda: done.append("queued"))])
    assert started.wait(timeout=SOON_S)
    threading.Timer(0.05, gate.set).start()
    threads.close()
    assert done == ["running"] and queued.cancelled()


def test_joined_transfers_are_done_together():
    parts = [Transfer(lambda: None) for _ in range(3)]
    whole = when_all(parts)
    for part in parts:
        assert not whole.done()
        part.run()
    whole.wait()


def test_joined_transfers_fail_if_one_does_and_only_when_all_have_ended():
    def fail():
        raise OSError(5, "one of them")

    parts = [Transfer(fail), Transfer(lambda: None)]
    whole = when_all(parts)
    parts[0].run()
    assert not whole.done()
    parts[1].run()
    with pytest.raises(OSError, match="one of them"):
        whole.wait()


def test_joined_transfers_are_cancelled_or_abandoned_together():
    parts = [Transfer(lambda: None) for _ in range(2)]
    whole = when_all(parts)
    parts[0].run()
    assert not whole.cancel()  # one part has run already
    assert whole.done()
    with pytest.raises(concurrent.futures.CancelledError):
        whole.wait()
    parts = [Transfer(lambda: None) for _ in range(2)]
    when_all(parts).abandon()
    for part in parts:
        part.run()
        assert part.cancelled()
