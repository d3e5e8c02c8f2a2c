# SPDX-License-Identifier: Apache-2.0
"""The thread that starts transfers: order, errors, its end."""

from __future__ import annotations

import logging
import threading
import time
import weakref

import pytest

from megatron.offload.storage import starter as starter_module
from megatron.offload.storage.starter import Starter


@pytest.fixture
def starter():
    starter = Starter("starter under test")
    yield starter
    starter.close()


def test_work_is_done_in_order_and_in_another_thread(starter):
    done = []
    for index in range(0, 100, 2):
        starter.submit(
            lambda i=index: done.append((i, threading.current_thread())),
            lambda i=index + 1: done.append((i, threading.current_thread())),
        )
    starter.drain()
    assert done == [(index, starter._thread) for index in range(100)]
    assert starter._thread.name == "starter under test"
    assert starter._thread.daemon, "a process that forgets to close it ends all the same"


@pytest.mark.parametrize("call", ["drain", "close"])
def test_draining_and_closing_wait_for_what_was_submitted(starter, monkeypatch, call):
    monkeypatch.setattr(starter_module, "_LOOK_S", 0.001)
    hold = threading.Event()
    starter.submit(lambda: hold.wait(10))
    waiting = threading.Thread(target=getattr(starter, call), daemon=True)
    waiting.start()
    waiting.join(timeout=0.2)
    assert waiting.is_alive()
    hold.set()
    waiting.join(timeout=10)
    assert not waiting.is_alive()


def test_after_the_end_who_submits_does_the_work(starter):
    starter.close()
    done = []
    starter.submit(lambda: done.append(threading.current_thread()))
    assert done == [threading.current_thread()]


def test_an_error_is_said_once_and_the_next_work_is_done(starter, caplog):
    def fail(error):
        raise error

    done = []
    with caplog.at_level(logging.WARNING):
        for error in (ValueError("odd"), ValueError("odd again"), SystemExit("killed")):
            starter.submit(lambda e=error: fail(e), lambda: done.append(True))
        starter.submit(lambda: done.append(True))
        starter.drain()
    assert done == [True] * 4
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "ValueError('odd')" in messages[0] and "SystemExit('killed')" in messages[1]


class Memory:
    """Stands for what a piece of work holds."""


def wait_until_gone(reference):
    """The thread may still be about to let go."""
    deadline = time.monotonic() + 3
    while reference() is not None:
        assert time.monotonic() < deadline, "it is kept alive"
        time.sleep(0.001)


def test_a_starter_that_waits_keeps_nothing_alive(starter):
    memory, done = Memory(), threading.Event()
    reference = weakref.ref(memory)
    starter.submit(lambda memory=memory: done.set())  # no other work takes its place
    del memory
    assert done.wait(10)
    wait_until_gone(reference)


def test_an_error_that_was_said_keeps_nothing_alive(starter, caplog):
    def fail(memory):
        raise ValueError("odd")

    memory = Memory()
    reference = weakref.ref(memory)
    starter.submit(lambda memory=memory: fail(memory))
    del memory
    starter.drain()
    assert len(caplog.records) == 1
    wait_until_gone(reference)


def test_closing_does_what_was_submitted_first():
    starter, done = Starter("closed"), []
    starter.submit(lambda: done.append(True))
    starter.close()
    assert done == [True] and not starter._thread.is_alive()
    starter.drain()  # returns at once
