# SPDX-License-Identifier: Apache-2.0
"""A CPU as a device: its memory, and when it returns what its allocator keeps."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

from megatron.offload import OffloadConfig, OffloadEngine, Scope
from megatron.offload.device import cpu
from megatron.offload.device.cpu import CpuDevice
from megatron.offload.machine.allocator import MIMALLOC
from megatron.offload.sizes import MIB


class Clock:
    """Stands in for the module `time`."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(cpu, "time", clock)
    return clock


@pytest.fixture
def returned(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Has an entry for each time that memory was returned."""
    calls: list[None] = []
    monkeypatch.setattr(cpu, "return_freed_memory", lambda: calls.append(None))
    return calls


def test_each_phase_returns_memory_once_in_a_while(
    clock: Clock, returned: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "allocator_name", lambda: MIMALLOC)
    device = CpuDevice()
    for now_s, phase, number in (
        (0.0, "step", 1),
        (0.0, "backward", 2),  # has a time of its own
        (0.5, "step", 3),  # of the first two steps every phase
        (0.5, "backward", 4),
        (0.6, "backward", 5),
        (2.4, "step", 5),
        (2.5, "step", 6),
        (2.5, "backward", 6),
        (2.6, "backward", 7),
        (4.4, "step", 7),  # since the last time, not the first
    ):
        clock.now_s = now_s
        device.begin_phase(phase)
        assert len(returned) == number


def test_another_allocator_than_mimalloc_is_left_alone(
    clock: Clock, returned: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "allocator_name", lambda: "the C library's malloc")
    CpuDevice().begin_phase("step")
    assert not returned


def test_a_device_hears_of_each_phase_of_a_step(
    offload_config: Callable[..., OffloadConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(CpuDevice, "begin_phase", lambda _, name: heard.append(name))
    engine = OffloadEngine(offload_config())
    with engine.step():
        with engine.forward(Scope()) as save_order:
            engine.end_layers()
        with engine.backward(save_order):
            pass
    engine.close()
    assert heard == ["step", "loss", "backward"]


def test_a_cpu_queues_nothing_and_its_memory_is_the_processs() -> None:
    device = CpuDevice()
    with device.use_stream(device.current_stream()):
        assert device.record_event() is None
    assert device.is_host and not device.pins_host_memory
    device.return_freed_memory()  # what other tests left would be used again, and nothing grow
    before = device.allocated_bytes()
    peak, other = device.peak_reader(), CpuDevice().peak_reader()
    storage = device.new_restored(64 * MIB)
    ctypes.memset(storage.data_ptr(), 1, storage.nbytes())
    assert device.allocated_bytes() - before > 60 * MIB
    del storage
    device.return_freed_memory()
    assert device.allocated_bytes() - before < 16 * MIB
    assert peak.peak_bytes() - before > 60 * MIB
    peak.reset()
    assert peak.peak_bytes() - before < 16 * MIB
    assert other.peak_bytes() - before > 60 * MIB, "a reset of one reader is seen by another"
