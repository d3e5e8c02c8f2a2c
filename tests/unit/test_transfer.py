# SPDX-License-Identifier: Apache-2.0
"""I/O threads: order, errors, and what an idle thread keeps alive."""

from __future__ import annotations

import threading
import weakref

import pytest

from megatron.offload.storage.transfer import IoThreads, Priority


@pytest.fixture
def one_thread():
    threads = IoThreads(1, "test")
    yield threads
    threads.close()


def test_reads_go_before_writes_and_each_kind_in_order(one_thread):
    gate, done = threading.Event(), []
    one_thread.submit(Priority.READ, gate.wait)
    transfers = [
        one_thread.submit(priority, lambda name=name: done.append(name))
        for name, priority in (
            ("write 1", Priority.WRITE),
            ("read 1", Priority.READ),
            ("write 2", Priority.WRITE),
            ("read 2", Priority.READ),
        )
    ]
    gate.set()
    for transfer in transfers:
        transfer.wait()
    assert done == ["read 1", "read 2", "write 1", "write 2"]


def test_an_error_surfaces_in_wait_and_the_thread_goes_on(one_thread):
    def fail():
        raise OSError(5, "no")

    with pytest.raises(OSError, match="no"):
        one_thread.submit(Priority.READ, fail).wait()
    one_thread.submit(Priority.READ, lambda: None).wait()


def test_a_cancelled_transfer_does_not_run(one_thread):
    gate, ran = threading.Event(), []
    one_thread.submit(Priority.READ, gate.wait)
    queued = one_thread.submit(Priority.WRITE, lambda: ran.append(1))
    assert queued.cancel()
    gate.set()
    one_thread.submit(Priority.WRITE, lambda: None).wait()
    assert not ran


@pytest.mark.parametrize("fails", [True, False])
def test_finished_work_keeps_nothing_alive(one_thread, fails):
    class Buffer:
        def use(self):
            if fails:
                raise OSError(5, "no")

    buffer = Buffer()
    weak = weakref.ref(buffer)
    transfer = one_thread.submit(Priority.WRITE, buffer.use)
    del buffer
    assert isinstance(transfer.exception(timeout=10), OSError) is fails
    assert weak() is None
