# SPDX-License-Identifier: Apache-2.0
"""The thread that starts transfers: order, errors, its end."""

from __future__ import annotations

import gc
import logging
import threading
import weakref

import pytest

from megatron.offload.storage.starter import Starter


@pytest.fixture
def starter():
    starter = Starter("starter under test")
    yield starter
    starter.close()


def test_work_is_done_in_order_and_in_another_thread(starter):
    done = []
    for index in range(100):
        starter.submit(lambda i=index: done.append((i, threading.current_thread().name)))
    starter.drain()
    assert done == [(index, "starter under test") for index in range(100)]


def test_an_error_is_said_once_and_the_next_work_is_done(starter, caplog):
    def fail(error):
        raise error

    done = []
    with caplog.at_level(logging.WARNING):
        for error in (ValueError("odd"), ValueError("odd again"), SystemExit("killed")):
            starter.submit(lambda e=error: fail(e))
        starter.submit(lambda: done.append(True))
        starter.drain()
    assert done == [True]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "ValueError('odd')" in messages[0] and "SystemExit('killed')" in messages[1]


def test_a_starter_that_waits_keeps_nothing_alive(starter):
    class Memory:
        pass

    memory = Memory()
    reference = weakref.ref(memory)
    starter.submit(lambda memory=memory: None)
    del memory
    starter.drain()
    gc.collect()
    assert reference() is None


def test_closing_does_what_was_submitted_first():
    starter, done = Starter("closed"), []
    starter.submit(lambda: done.append(True))
    starter.close()
    assert done == [True] and not starter._thread.is_alive()
    starter.drain()  # returns at once
