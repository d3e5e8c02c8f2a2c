# SPDX-License-Identifier: Apache-2.0
"""The thread that starts transfers: order, errors, its end."""

from __future__ import annotations

import logging
import threading
import weakref

import pytest

from megatron.offload.activations.transfer.dispatcher import Dispatcher
from tests.support.waiting import SOON_S, wait_until


@pytest.fixture
def dispatcher():
    dispatcher = Dispatcher("dispatcher under test")
    yield dispatcher
    dispatcher.close()


def threads_of(name):
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_work_is_done_in_order_and_in_another_thread(dispatcher):
    done = []
    for index in range(0, 100, 2):
        dispatcher.submit(
            lambda i=index: done.append((i, threading.current_thread())),
            lambda i=index + 1: done.append((i, threading.current_thread())),
        )
    dispatcher.drain()
    (thread,) = threads_of("dispatcher under test")
    assert done == [(index, thread) for index in range(100)]
    assert thread.daemon, "a process that forgets to close it ends all the same"


@pytest.mark.parametrize("call", ["drain", "close"])
def test_draining_and_closing_wait_for_what_was_submitted(dispatcher, call):
    hold = threading.Event()
    dispatcher.submit(lambda: hold.wait(10))
    waiting = threading.Thread(target=getattr(dispatcher, call), daemon=True)
    waiting.start()
    waiting.join(timeout=0.2)  # it has looked by then whether the thread is still there
    assert waiting.is_alive()
    hold.set()
    waiting.join(timeout=SOON_S)
    assert not waiting.is_alive()


def test_after_the_end_who_submits_does_the_work(dispatcher):
    dispatcher.close()
    done = []
    dispatcher.submit(lambda: done.append(threading.current_thread()))
    assert done == [threading.current_thread()]


def test_an_error_is_said_once_and_the_next_work_is_done(dispatcher, caplog):
    def fail(error):
        raise error

    done = []
    with caplog.at_level(logging.WARNING):
        for error in (ValueError("odd"), ValueError("odd again"), SystemExit("killed")):
            dispatcher.submit(lambda e=error: fail(e), lambda: done.append(True))
        dispatcher.submit(lambda: done.append(True))
        dispatcher.drain()
    assert done == [True] * 4
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "ValueError('odd')" in messages[0] and "SystemExit('killed')" in messages[1]


class Memory:
    """Stands for what a piece of work holds."""


def wait_until_gone(reference):
    """The thread may still be about to let go."""
    wait_until(lambda: reference() is None, "it is kept alive")


def test_a_dispatcher_that_waits_keeps_nothing_alive(dispatcher):
    memory, done = Memory(), threading.Event()
    reference = weakref.ref(memory)
    dispatcher.submit(lambda memory=memory: done.set())  # no other work takes its place
    del memory
    assert done.wait(10)
    wait_until_gone(reference)


def test_an_error_that_was_said_keeps_nothing_alive(dispatcher, caplog):
    def fail(memory):
        raise ValueError("odd")

    memory = Memory()
    reference = weakref.ref(memory)
    dispatcher.submit(lambda memory=memory: fail(memory))
    del memory
    dispatcher.drain()
    assert len(caplog.records) == 1
    wait_until_gone(reference)


def test_closing_does_what_was_submitted_first():
    dispatcher, done = Dispatcher("closed"), []
    dispatcher.submit(lambda: done.append(True))
    dispatcher.close()
    assert done == [True] and threads_of("closed") == []
    dispatcher.drain()  # returns at once


def test_draining_in_its_own_thread_waits_for_nothing(dispatcher):
    drained = threading.Event()
    dispatcher.submit(lambda: (dispatcher.drain(), drained.set()))
    assert drained.wait(SOON_S)


def test_after_the_end_an_interrupt_reaches_who_submits_and_all_work_is_done(dispatcher):
    def interrupted():
        raise KeyboardInterrupt

    dispatcher.close()
    done = []
    with pytest.raises(KeyboardInterrupt):
        dispatcher.submit(interrupted, lambda: done.append(True))
    assert done == [True]


def test_after_the_end_a_tier_that_is_closed_is_no_error_for_who_submits(dispatcher):
    def refused():
        raise RuntimeError("the tier is closed")

    dispatcher.close()
    done = []
    dispatcher.submit(refused, lambda: done.append(True))
    assert done == [True]
