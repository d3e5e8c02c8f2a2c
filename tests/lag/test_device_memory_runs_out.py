# SPDX-License-Identifier: Apache-2.0
"""Device memory runs out while bytes come back: what was read ahead makes room, else torch says so.

Trainers look for torch's error, to try a smaller batch; an error of a disk would be none of theirs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import OffloadConfig, OffloadEngine, Scope
from megatron.offload.activations.transfer.reader import Reader
from megatron.offload.device import open as open_module
from megatron.offload.device.accelerator import AcceleratorDevice
from megatron.offload.device.room import Room
from megatron.offload.moving.only_copy import OnlyCopy
from megatron.offload.parameters.gradients import Gradients
from megatron.offload.sizes import MIB
from megatron.offload.states.window import Window
from megatron.offload.tiers.transfer import Transfer
from tests.lag import test_gradients_on_an_accelerator as of_gradients
from tests.lag import test_parameters_on_an_accelerator as of_parameters
from tests.lag.test_parameters_on_an_accelerator import DEVICE, assert_equal
from tests.support.lag.module import LagModule

pytestmark = pytest.mark.usefixtures("accelerator")

SIZE = 8 * MIB
EVERYTHING = ("activations", "parameters", "states")


@pytest.fixture(autouse=True)
def device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has not warned yet."""
    monkeypatch.setattr(open_module, "_opened", {})


@pytest.mark.parametrize("mode", ["host", "ssd"])
@pytest.mark.parametrize("built", [False, True], ids=["on its way", "its tensor is there"])
@pytest.mark.parametrize("held_s", [0.0, 0.3], ids=["at once", "held for a moment"])
def test_what_was_read_ahead_makes_room(
    lag: LagModule,
    tmp_path: Path,
    mode: str,
    built: bool,
    held_s: float,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Transfer.run
    holds: list[float] = []  # how long an I/O thread has what it has just read

    def run_and_hold(transfer: Transfer) -> bool:
        pieces = list(transfer._pieces)
        goes_on = run(transfer)
        if holds:
            time.sleep(holds.pop())
        del pieces
        return goes_on

    monkeypatch.setattr(Transfer, "run", run_and_hold)
    config = OffloadConfig(
        mode=mode, directories=(tmp_path,), min_bytes=1, host_budget=8 * SIZE, pinned_bytes=0
    )
    engine = OffloadEngine(config, DEVICE)
    values = [1, 2, 3]
    try:
        with engine.step():
            with engine.forward(Scope()) as save_order:
                packed = [
                    engine.hooks.pack(torch.full((SIZE,), value, dtype=torch.uint8, device=DEVICE))
                    for value in values
                ]
            assert engine.wait_for_writes(10)
            lag.synchronize(DEVICE)
            lag.empty_cache()
            lag.limit_memory(lag.memory_reserved(DEVICE) + SIZE + SIZE // 2, DEVICE)
            holds.append(held_s)
            engine.prefetch(save_order)  # the last one
            engine.dispatcher.drain()
            last = packed[-1].saved
            if built:
                last.wait_for_read()
                engine.dispatcher.drain()
            assert last.memory_bytes and lag.memory_allocated(DEVICE) >= SIZE
            for one, value in zip(packed, values, strict=True):  # the last one comes last
                tensor = engine.hooks.unpack(one)
                assert torch.all(tensor.cpu() == value)
                del tensor
                lag.synchronize(DEVICE)
        assert caplog.text.count("what was read ahead is given up") == 1
    finally:
        lag.limit_memory(1 << 62, DEVICE)
        engine.close()


def out_of_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError("lag out of memory. Tried to allocate 1.00 MiB.")


@pytest.mark.parametrize("stream", [*EVERYTHING, "gradients"])
def test_without_any_room_the_error_is_torchs(
    lag: LagModule,
    tmp_path: Path,
    stream: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From the first read on that compute needs."""
    reads = {
        "activations": (Reader, "_read"),
        "states": (OnlyCopy, "bring"),
        "parameters": (OnlyCopy, "bring"),
        "gradients": (OnlyCopy, "bring"),
    }
    owner, name = reads[stream]
    read: Callable[..., Any] = getattr(owner, name)

    def without_room(*arguments: Any) -> Any:
        monkeypatch.setattr(AcceleratorDevice, "new_restored", out_of_memory)
        monkeypatch.setattr(AcceleratorDevice, "alloc_storage", out_of_memory)
        return read(*arguments)

    monkeypatch.setattr(owner, name, without_room)
    # Nothing is read ahead: then compute asks for all of it.
    monkeypatch.setattr(Reader, "begin_prefetch", lambda *_: None)
    monkeypatch.setattr(Window, "read_ahead", lambda *_: None)
    monkeypatch.setattr(Gradients, "begin_reads", lambda *_: None)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        if stream == "gradients":
            of_gradients.train(lag, tmp_path, **of_parameters.MODES["ssd"])
        else:
            of_parameters.train(lag, tmp_path, stream)
    lag.reset()
    assert str(raised.value) == "lag out of memory. Tried to allocate 1.00 MiB."
    assert "check the disk" not in caplog.text and "trying once more" not in caplog.text


@pytest.mark.slow
def test_bits_are_the_same_where_memory_runs_out_now_and_then(
    lag: LagModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each second read that compute needs finds no memory at first."""
    of_thread = threading.local()
    num_reads = num_failed = 0
    plain_read = Room.read

    def read(room: Room, work: Callable[[], Any]) -> Any:
        nonlocal num_reads
        num_reads += 1
        of_thread.fails = num_reads % 2 == 0
        try:
            return plain_read(room, work)
        finally:
            of_thread.fails = False

    def fail_in(name: str) -> None:
        plain = getattr(AcceleratorDevice, name)

        def allocate(*arguments: Any) -> Any:
            nonlocal num_failed
            if getattr(of_thread, "fails", False):
                of_thread.fails = False
                num_failed += 1
                out_of_memory()
            return plain(*arguments)

        monkeypatch.setattr(AcceleratorDevice, name, allocate)

    expected = of_parameters.train(lag, tmp_path)
    expected_gradients = of_gradients.train(lag, None)
    monkeypatch.setattr(Room, "read", read)
    fail_in("new_restored")
    fail_in("alloc_storage")
    assert_equal(of_parameters.train(lag, tmp_path, *EVERYTHING), expected)
    moved = of_gradients.train(lag, tmp_path, **of_parameters.MODES["ssd"])
    assert_equal(moved, expected_gradients)
    assert num_failed > 10
