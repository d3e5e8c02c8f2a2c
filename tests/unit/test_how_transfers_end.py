# SPDX-License-Identifier: Apache-2.0
"""Every transfer ends, whoever waits is told how, and nothing of it is kept: threads may die."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from megatron.offload.tiers.budget import RateLimit
from megatron.offload.tiers.io_threads import IoThreads, Piece
from megatron.offload.tiers.transfer import Transfer, when_all
from tests.support.waiting import SOON_S, wait_until


class Buffer:
    """Something that a transfer must not keep alive for longer than it needs it."""

    def __init__(self) -> None:
        self.started = threading.Event()

    def use(self) -> None:
        self.started.set()

    def fail(self) -> None:
        raise OSError(5, "no")

    def fail_twice(self) -> None:
        try:
            self.fail()
        except OSError as error:
            raise OSError(error.errno, "no, in other words") from None

    def spin(self) -> None:
        self.started.set()
        while True:
            time.sleep(0.001)


@pytest.fixture
def threads() -> Iterator[IoThreads]:
    """One thread, idle."""
    threads = IoThreads(1, "test")
    time.sleep(0.05)
    yield threads
    closing = threading.Thread(target=threads.close, daemon=True)
    closing.start()
    closing.join(timeout=SOON_S)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is in no cycle dies at once; what is in one stays."""
    gc.disable()
    yield
    gc.enable()


def kill(thread: threading.Thread) -> None:
    """Raises SystemExit in another thread, at its next instruction, and waits for its end."""
    assert thread.ident is not None
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
    )
    thread.join(timeout=SOON_S)
    assert not thread.is_alive()


# -- One transfer -------------------------------------------------------------------------------


def test_wait_returns_when_the_work_is_done() -> None:
    gate, done = threading.Event(), []

    def work() -> None:
        assert gate.wait(timeout=SOON_S)
        done.append(1)

    transfer = Transfer(work)
    threading.Thread(target=transfer.run, daemon=True).start()
    waiting = threading.Thread(target=lambda: (transfer.wait(), done.append(2)), daemon=True)
    waiting.start()
    waiting.join(timeout=0.1)
    assert waiting.is_alive() and not done
    gate.set()
    waiting.join(timeout=SOON_S)
    assert done == [1, 2]


@pytest.mark.parametrize("fails", [True, False])
def test_work_is_let_go_before_anybody_is_told(fails: bool) -> None:
    buffer = Buffer()
    weak = weakref.ref(buffer)
    transfer = Transfer(*((buffer.fail, buffer.use) if fails else (buffer.use,)))
    del buffer
    alive: list[bool] = []
    transfer.add_done_callback(lambda _: alive.append(weak() is not None))
    transfer.run()
    assert alive == [False]


def test_an_error_behind_an_error_keeps_nothing_alive(no_collector: None) -> None:
    buffer = Buffer()
    weak = weakref.ref(buffer)
    transfer = Transfer(buffer.fail_twice)
    del buffer
    transfer.run()
    assert isinstance(transfer.exception(), OSError) and weak() is None


def test_a_failed_transfer_dies_with_its_error(no_collector: None) -> None:
    transfer = Transfer(Buffer().fail)
    transfer.run()
    try:
        transfer.wait()
    except OSError:
        pass
    else:
        pytest.fail("the error was lost")
    weak = weakref.ref(transfer)
    del transfer
    assert weak() is None


def test_a_transfer_whose_thread_died_keeps_nothing_and_tells_it_once() -> None:
    buffer = Buffer()
    weak = weakref.ref(buffer)
    transfer = Transfer(buffer.use)
    del buffer
    transfer.begin()
    transfer.fail("first")
    assert weak() is None
    transfer.fail("second")
    with pytest.raises(OSError, match="first"):
        transfer.wait()
    transfer = Transfer(lambda: None)
    transfer.run()
    transfer.fail("late")
    transfer.wait()


def test_a_cancelled_transfer_gives_its_buffer_up_at_once() -> None:
    buffer = Buffer()
    weak = weakref.ref(buffer)
    transfer = Transfer(buffer.use)
    del buffer
    assert transfer.cancel() and weak() is None


def test_cancelling_a_gathered_transfer_cancels_all_that_are_queued() -> None:
    parts = [Transfer(lambda: None) for _ in range(3)]
    whole = when_all(parts)
    assert whole.cancel()
    assert whole.cancelled() and all(part.cancelled() for part in parts)


# -- The threads --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["read", "write"])
def test_an_idle_thread_takes_what_is_queued(threads: IoThreads, kind: str) -> None:
    if kind == "read":
        transfer = threads.submit_read(lambda: None)
    else:
        transfer = threads.submit_write([Piece(1, lambda: None)])
    assert transfer.exception(timeout=SOON_S) is None


def test_an_idle_thread_keeps_no_transfer_alive(threads: IoThreads) -> None:
    transfer = threads.submit_read(lambda: None)
    transfer.result(timeout=SOON_S)
    weak = weakref.ref(transfer)
    del transfer
    wait_until(lambda: weak() is None, "an idle thread holds a transfer")


def test_a_cancelled_transfer_leaves_its_thread_alone(
    threads: IoThreads, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    (thread,) = threads._threads
    threads.submit_read(gate.wait)
    cancelled = threads.submit_read(lambda: None)
    assert cancelled.cancel()
    gate.set()
    threads.submit_read(lambda: None).result(timeout=SOON_S)
    assert threads._threads == [thread] and not caplog.records and cancelled.cancelled()


def test_a_write_that_nobody_wants_is_not_held_up_by_the_limit() -> None:
    limit = RateLimit(bytes_per_s=1)
    threads = IoThreads(1, "test", limit)
    threads.submit_write([Piece(10**6, lambda: None)]).result(timeout=SOON_S)
    unwanted = threads.submit_write([Piece(10**6, lambda: None)])
    unwanted.abandon()
    threads.submit_read(lambda: None).result(timeout=SOON_S)  # the thread looks again
    wait_until(unwanted.cancelled, "it waits for days")
    assert limit.delay_s() < 2 * 10**6 - 1000, "nothing was written, so there is nothing to pay"
    threads.close()


def test_closing_ends_idle_threads(threads: IoThreads) -> None:
    closing = threading.Thread(target=threads.close, daemon=True)
    closing.start()
    closing.join(timeout=SOON_S)
    assert not closing.is_alive()


def test_a_closed_queue_takes_nothing(threads: IoThreads) -> None:
    threads.close()
    with pytest.raises(RuntimeError, match="closed"):
        threads.submit_read(lambda: None)
    with pytest.raises(RuntimeError, match="closed"):
        threads.submit_write([Piece(1, lambda: None)])


# -- Threads that die ---------------------------------------------------------------------------


def test_whoever_waits_for_a_thread_that_died_is_told(threads: IoThreads) -> None:
    buffer = Buffer()
    held = threads.submit_read(buffer.spin)
    assert buffer.started.wait(timeout=SOON_S)
    kill(threads._threads[0])
    assert held.done()
    with pytest.raises(OSError, match="thread that carried it out died"):
        held.wait()


def test_a_thread_that_died_is_replaced_by_one(threads: IoThreads) -> None:
    buffer = Buffer()
    threads.submit_read(buffer.spin)
    assert buffer.started.wait(timeout=SOON_S)
    (thread,) = threads._threads
    kill(thread)
    assert threads.submit_read(lambda: None).exception(timeout=SOON_S) is None
    assert len(threads._threads) == 1 and threads._threads != [thread]


def test_without_any_thread_whoever_waits_is_told(
    threads: IoThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = Buffer()
    threads.submit_read(buffer.spin)
    queued = [threads.submit_write([Piece(1, lambda: None)]), threads.submit_read(lambda: None)]
    assert buffer.started.wait(timeout=SOON_S)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        kill(threads._threads[0])
    for transfer in queued:
        assert transfer.done()
        with pytest.raises(OSError, match="all I/O threads died"):
            transfer.wait()
    with pytest.raises(RuntimeError, match="all I/O threads died"):
        threads.submit_read(lambda: None)


def test_a_thread_that_died_keeps_nothing_alive(
    threads: IoThreads, caplog: pytest.LogCaptureFixture, no_collector: None
) -> None:
    buffer = Buffer()
    weak, started = weakref.ref(buffer), buffer.started
    held = threads.submit_read(buffer.spin)
    del buffer
    assert started.wait(timeout=SOON_S)
    kill(threads._threads[0])
    assert held.done() and caplog.records and weak() is None


def test_what_a_listener_raises_in_the_main_thread_comes_out_and_the_others_are_told() -> None:
    """A signal's handler may have raised it there: what listens has not heard, and asks again."""
    told = []

    def stop(_: Transfer) -> None:
        raise ArithmeticError

    transfer = Transfer()
    transfer.add_done_callback(stop)
    transfer.add_done_callback(told.append)
    with pytest.raises(ArithmeticError):
        transfer.end()
    assert told == [transfer] and transfer.done()
    with pytest.raises(ArithmeticError):
        transfer.add_done_callback(stop)
