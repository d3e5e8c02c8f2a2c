# SPDX-License-Identifier: Apache-2.0
"""Who measures the peak of a step changes nothing in what a trainer reads from torch's counters.

On an allocator that only counts, behind torch's own functions.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from megatron.offload.device import cuda as cuda_module
from megatron.offload.device.cuda import CudaDevice
from megatron.offload.device.cuda_peak import SharedCounters
from megatron.offload.stats.memory import PeakMemory


def number_of(device: Any) -> int:
    if isinstance(device, int):
        return device
    return 0 if device is None else int(torch.device(device).index)


class Allocator:
    """Two GPUs' counters, as torch has them."""

    def __init__(self) -> None:
        self.current, self.peak = [0, 0], [0, 0]

    def use(self, num_bytes: int, gpu: int = 0) -> None:
        """Takes memory and gives it back at once."""
        self.peak[gpu] = max(self.peak[gpu], self.current[gpu] + num_bytes)

    def take(self, num_bytes: int, gpu: int = 0) -> None:
        """Takes memory for good."""
        self.use(num_bytes, gpu)
        self.current[gpu] += num_bytes

    def memory_stats_as_nested_dict(self, device: Any = None) -> dict[str, Any]:
        gpu = number_of(device)
        figures = {"current": self.current[gpu], "peak": self.peak[gpu], "freed": 7}
        pools = {"all": figures, "large_pool": dict(figures)}
        return {"allocated_bytes": pools, "reserved_bytes": {"all": dict(figures)}, "num_ooms": 3}

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        gpu = number_of(device)
        self.peak[gpu] = self.current[gpu]


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    allocator = Allocator()
    for module in (torch.cuda, torch.cuda.memory):
        for name in ("memory_stats_as_nested_dict", "reset_peak_memory_stats"):
            monkeypatch.setattr(module, name, getattr(allocator, name))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return allocator


@pytest.fixture
def counters(allocator: Allocator) -> SharedCounters:
    return SharedCounters()


def trainers_figures() -> tuple[int, int, int]:
    """What Megatron-LM logs."""
    stats = torch.cuda.memory_stats()
    assert stats["num_ooms"] == 3 and stats["allocated_bytes.all.freed"] == 7
    assert torch.cuda.max_memory_allocated() == stats["allocated_bytes.all.peak"]
    return (
        torch.cuda.max_memory_allocated(),
        stats["allocated_bytes.large_pool.peak"],
        torch.cuda.max_memory_reserved(),
    )


def test_a_trainer_reads_the_peak_of_the_run(
    allocator: Allocator, counters: SharedCounters
) -> None:
    allocator.take(10)
    allocator.use(500)
    reader = counters.reader(0)
    for num_bytes in (100, 300, 200):
        reader.reset()
        allocator.use(num_bytes)
        assert reader.peak_bytes() == 10 + num_bytes
        assert trainers_figures() == (510, 510, 510)
    allocator.use(600)
    assert trainers_figures() == (610, 610, 610) and reader.peak_bytes() == 610
    assert torch.cuda.memory_allocated() == 10


def test_a_trainer_that_resets_the_counters_gets_what_it_asked_for(
    allocator: Allocator, counters: SharedCounters
) -> None:
    reader = counters.reader(0)
    allocator.use(500)
    reader.reset()
    allocator.use(300)
    torch.cuda.reset_peak_memory_stats()
    assert trainers_figures() == (0, 0, 0) and reader.peak_bytes() == 300
    allocator.use(200)
    assert trainers_figures() == (200, 200, 200) and reader.peak_bytes() == 300
    reader.reset()
    torch.cuda.reset_peak_memory_stats("cuda:0")
    assert trainers_figures() == (0, 0, 0) and reader.peak_bytes() == 0


def test_two_readers_do_not_see_each_other(allocator: Allocator, counters: SharedCounters) -> None:
    one, other = counters.reader(0), counters.reader(0)
    allocator.use(500)
    other.reset()
    allocator.use(100)
    assert (one.peak_bytes(), other.peak_bytes()) == (500, 100)
    one.reset()
    assert (one.peak_bytes(), other.peak_bytes()) == (0, 100)


def test_each_gpu_has_its_own(allocator: Allocator, counters: SharedCounters) -> None:
    readers = [counters.reader(0), counters.reader(1)]
    allocator.use(500, gpu=0)
    allocator.use(200, gpu=1)
    readers[0].reset()
    torch.cuda.reset_peak_memory_stats(torch.device("cuda", 1))
    assert [one.peak_bytes() for one in readers] == [0, 200]
    assert [torch.cuda.max_memory_allocated(gpu) for gpu in range(2)] == [500, 0]


def test_a_reader_that_is_gone_is_forgotten(allocator: Allocator, counters: SharedCounters) -> None:
    reader = counters.reader(0)
    assert len(counters._readers) == 1
    del reader
    gc.collect()
    allocator.use(100)
    torch.cuda.reset_peak_memory_stats()
    assert len(counters._readers) == 0


def test_before_cuda_starts_there_is_nothing(
    monkeypatch: pytest.MonkeyPatch, allocator: Allocator
) -> None:
    monkeypatch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", lambda device=None: {})
    counters = SharedCounters()
    assert counters.reader(0).peak_bytes() == 0 and torch.cuda.max_memory_allocated() == 0


def test_measured_steps_leave_the_trainers_figures_alone(
    allocator: Allocator, counters: SharedCounters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_module, "shared_counters", lambda: counters)
    device = object.__new__(CudaDevice)  # its streams would need a GPU
    device.device = torch.device("cuda", 0)
    allocator.take(50)
    planners, trainers = PeakMemory(device), PeakMemory(device)
    peaks = []
    for num_bytes in (400, 100, 300):
        trainers.begin_step()
        planners.begin_step()
        allocator.use(num_bytes)
        peaks.append((planners.end_step(), trainers.end_step()))
    assert peaks == [(400, 400), (100, 100), (300, 300)]
    assert trainers_figures() == (450, 450, 450)
