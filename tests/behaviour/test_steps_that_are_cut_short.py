# SPDX-License-Identifier: Apache-2.0
"""Invariants 6 and 9: an exception in mid-step, or a dying I/O thread, leaves the engine usable."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from megatron.offload import OffloadEngine, Scope, StorageError
from megatron.offload.tiers.drive import Health
from megatron.offload.tiers.file import UnlinkedFile
from tests.conftest import Gate
from tests.support.models import Model, assert_same, run_step, settle, ssd
from tests.support.waiting import SOON_S, wait_until

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_compute_thread")]

Engines = Callable[..., OffloadEngine]


class Interrupted(Exception):
    """What a test raises in the middle of a step."""


def interrupt(*_: object) -> None:
    raise Interrupted


def assert_usable(engine: OffloadEngine, model: Model, x: torch.Tensor) -> None:
    """Nothing is taken any more, and the next step is as if nothing had happened."""
    settle(engine)
    # A thread may still be about to let go of what it worked on.
    wait_until(lambda: ssd(engine).used_bytes == 0, "space leaked")
    assert_same(run_step(model, x, engine), run_step(model, x))
    assert engine.statistics.written_bytes > 0 and engine.statistics.rejected_bytes == 0
    assert ssd(engine).used_bytes == 0 and not ssd(engine).degraded


@pytest.mark.parametrize("threads", [1, 4])
def test_an_exception_in_forward_while_writes_are_queued(
    threads: int, make_engine: Engines, write_gate: Gate
) -> None:
    model, x = Model(), torch.randn(3, 65, 32)
    engine = make_engine(io="buffered", threads=threads)
    hook = model.blocks[2].register_forward_hook(interrupt)
    with pytest.raises(Interrupted) as error:  # which holds the graph: its end cancels writes
        run_step(model, x, engine)
    hook.remove()
    write_gate.wait_for_arrival()
    del error
    assert engine.writer.bytes_in_flight > 0, "writes are still queued"
    write_gate.open.set()
    assert_usable(engine, model, x)


def step_at_once(model: Model, x: torch.Tensor, engine: OffloadEngine) -> None:
    """A step that does not wait for writes to end before its backward pass."""
    engine.exclude(model.parameters())
    with engine.step():
        with engine.forward(Scope()) as save_order:
            loss = model(x, engine).square().mean()
        with engine.backward(save_order):
            loss.backward()


@pytest.mark.parametrize("threads", [1, 4])
def test_an_exception_in_backward_while_writes_are_queued(
    threads: int, make_engine: Engines, write_gate: Gate
) -> None:
    model, x = Model(), torch.randn(3, 65, 32)
    engine = make_engine(io="buffered", threads=threads)

    def interrupt_once_a_write_runs(*_: object) -> None:
        write_gate.wait_for_arrival()
        raise Interrupted

    hook = model.blocks[1].register_forward_hook(
        lambda *a: a[-1].register_hook(interrupt_once_a_write_runs) and None
    )
    with pytest.raises(Interrupted):
        step_at_once(model, x, engine)
    hook.remove()
    write_gate.open.set()
    assert_usable(engine, model, x)


def test_an_exception_in_backward_while_reads_are_under_way(make_engine: Engines) -> None:
    model, x = Model(), torch.randn(3, 65, 32)
    engine = make_engine(io="buffered")
    hook = model.blocks[1].register_forward_hook(lambda *a: a[-1].register_hook(interrupt) and None)
    with pytest.raises(Interrupted):
        run_step(model, x, engine)
    hook.remove()
    assert engine.statistics.read_bytes > 0
    assert_usable(engine, model, x)


class Victim:
    """Holds the first thread that comes to a call of `UnlinkedFile`, until `kill` ends it."""

    def __init__(self, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
        original = getattr(UnlinkedFile, call)
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None
        self._held = threading.Event()

        def holding(file: UnlinkedFile, body: memoryview, offset: int) -> None:
            if self._turn.acquire(blocking=False):
                self._thread = threading.current_thread()
                self._held.set()
                while True:
                    time.sleep(0.001)
            original(file, body, offset)

        monkeypatch.setattr(UnlinkedFile, call, holding)

    def kill(self) -> None:
        """Raises SystemExit in the thread, at its next instruction, once it is held."""
        assert self._held.wait(timeout=SOON_S)
        assert self._thread is not None and self._thread.ident is not None
        assert ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._thread.ident), ctypes.py_object(SystemExit)
        )


@pytest.fixture(params=["write", "read"])
def victim(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """One I/O thread is killed in this call, from yet another thread."""
    killer = threading.Thread(target=Victim(request.param, monkeypatch).kill)
    killer.start()
    yield request.param
    killer.join(timeout=15)
    assert not killer.is_alive()


@pytest.mark.parametrize("threads", [1, 4])
def test_a_thread_that_dies_in_mid_transfer(
    threads: int, victim: str, make_engine: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = Model(), torch.randn(3, 65, 32)
    plain = run_step(model, x)
    engine = make_engine(io="buffered", threads=threads)
    if victim == "write":
        assert_same(run_step(model, x, engine), plain)
    else:
        with pytest.raises(StorageError, match="the I/O thread that carried it out died") as raised:
            run_step(model, x, engine)
        assert "rank 0" in str(raised.value) and "layer " in str(raised.value)
        del raised
    assert sum("an I/O thread died" in message for message in caplog.messages) == 1
    (drive,) = ssd(engine).drives
    assert_usable(engine, model, x)
    assert drive.health is Health.GOOD and len(drive._threads._threads) == threads
