# SPDX-License-Identifier: Apache-2.0
"""Who measures the peak of a step changes nothing in what a trainer reads from torch's counters.

On an allocator that only counts, behind torch's own functions (`FakeCuda`).
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from megatron.offload.device import cuda as cuda_module
from megatron.offload.device.open import open_device
from megatron.offload.machine.shared_peak import SharedCounters
from megatron.offload.stats.memory import PeakMemory
from tests.support.fake_cuda import FakeCuda


@pytest.fixture
def counters(fake_cuda: FakeCuda) -> SharedCounters:
    return SharedCounters(torch.cuda)


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


def test_a_trainer_reads_the_peak_of_the_run(fake_cuda: FakeCuda, counters: SharedCounters) -> None:
    fake_cuda.take(10)
    fake_cuda.use(500)
    reader = counters.reader(0)
    for num_bytes in (100, 300, 200):
        reader.reset()
        fake_cuda.use(num_bytes)
        assert reader.peak_bytes() == 10 + num_bytes
        assert trainers_figures() == (510, 510, 510)
    fake_cuda.use(600)
    assert trainers_figures() == (610, 610, 610) and reader.peak_bytes() == 610
    assert torch.cuda.memory_allocated() == 10


def test_a_trainer_that_resets_the_counters_gets_what_it_asked_for(
    fake_cuda: FakeCuda, counters: SharedCounters
) -> None:
    reader = counters.reader(0)
    fake_cuda.use(500)
    reader.reset()
    fake_cuda.use(300)
    torch.cuda.reset_peak_memory_stats()
    assert trainers_figures() == (0, 0, 0) and reader.peak_bytes() == 300
    fake_cuda.use(200)
    assert trainers_figures() == (200, 200, 200) and reader.peak_bytes() == 300
    reader.reset()
    torch.cuda.reset_peak_memory_stats("cuda:0")
    assert trainers_figures() == (0, 0, 0) and reader.peak_bytes() == 0


def test_two_readers_do_not_see_each_other(fake_cuda: FakeCuda, counters: SharedCounters) -> None:
    one, other = counters.reader(0), counters.reader(0)
    fake_cuda.use(500)
    other.reset()
    fake_cuda.use(100)
    assert (one.peak_bytes(), other.peak_bytes()) == (500, 100)
    one.reset()
    assert (one.peak_bytes(), other.peak_bytes()) == (0, 100)


def test_each_gpu_has_its_own(fake_cuda: FakeCuda, counters: SharedCounters) -> None:
    readers = [counters.reader(0), counters.reader(1)]
    fake_cuda.use(500, gpu=0)
    fake_cuda.use(200, gpu=1)
    readers[0].reset()
    torch.cuda.reset_peak_memory_stats(torch.device("cuda", 1))
    assert [one.peak_bytes() for one in readers] == [0, 200]
    assert [torch.cuda.max_memory_allocated(gpu) for gpu in range(2)] == [500, 0]


@pytest.mark.skipif(
    not hasattr(torch.accelerator, "reset_peak_memory_stats"), reason="this torch has none of these"
)
def test_generic_counters_are_shared_too(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    reader = SharedCounters(torch.cuda).reader(0)
    fake_cuda.use(500)
    assert torch.accelerator.max_memory_allocated() == 500
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == 0 and reader.peak_bytes() == 500
    fake_cuda.use(200)
    reader.reset()
    assert torch.accelerator.max_memory_allocated() == 200 and reader.peak_bytes() == 0
    assert torch.accelerator.memory_stats()["num_ooms"] == 3


def test_a_reader_that_is_gone_is_forgotten(fake_cuda: FakeCuda, counters: SharedCounters) -> None:
    reader = weakref.ref(counters.reader(0))
    gc.collect()
    fake_cuda.use(100)
    torch.cuda.reset_peak_memory_stats()
    assert reader() is None


def test_before_cuda_starts_there_is_nothing(
    monkeypatch: pytest.MonkeyPatch, fake_cuda: FakeCuda
) -> None:
    monkeypatch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", lambda device=None: {})
    counters = SharedCounters(torch.cuda)
    assert counters.reader(0).peak_bytes() == 0 and torch.cuda.max_memory_allocated() == 0


def test_measured_steps_leave_the_trainers_figures_alone(
    fake_cuda: FakeCuda, counters: SharedCounters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_module, "shared_counters", lambda module: counters)
    device = open_device("cuda:0")
    fake_cuda.take(50)
    planners, trainers = PeakMemory(device), PeakMemory(device)
    peaks = []
    for num_bytes in (400, 100, 300):
        trainers.begin_step()
        planners.begin_step()
        fake_cuda.use(num_bytes)
        peaks.append((planners.end_step(), trainers.end_step()))
    assert peaks == [(400, 400), (100, 100), (300, 300)]
    assert trainers_figures() == (450, 450, 450)
