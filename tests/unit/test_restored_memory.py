# SPDX-License-Identifier: Apache-2.0
"""Restored storages have a region of their own, whose memory comes and goes."""

from __future__ import annotations

import logging
import mmap
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.offload import OffloadConfig, OffloadEngine
from megatron.offload.device.cpu import CpuDevice
from megatron.offload.tiers import restored_memory
from megatron.offload.tiers.restored_memory import RestoredMemory
from tests.support.models import settle
from tests.support.processes import ROOT

MIB = 1 << 20


def filled(memory: RestoredMemory, num_bytes: int, value: int) -> torch.UntypedStorage:
    storage = memory.new_storage(num_bytes, 0, 512)
    assert storage is not None and storage.nbytes() == num_bytes
    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(value)
    return storage


def content(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def test_storages_that_live_at_the_same_time_never_meet() -> None:
    memory = RestoredMemory()
    live: dict[int, torch.UntypedStorage] = {}
    for number in range(200):
        live[number] = filled(memory, 1000 + 37 * number, number)
        if number % 3 == 2:
            del live[number - 1]
    for number, storage in live.items():
        assert (content(storage) == number).all()


def test_what_was_given_back_is_handed_out_again() -> None:
    memory = RestoredMemory()
    first, kept = filled(memory, MIB, 1), filled(memory, MIB, 2)
    address = first.data_ptr()
    del first
    assert filled(memory, MIB, 3).data_ptr() == address and (content(kept) == 2).all()


def test_no_signal_keeps_the_memory_of_a_freed_storage() -> None:
    """A handler that raises is called where a function of Python's begins: there is none."""
    storage = filled(RestoredMemory(), MIB, 1)
    events: list[str] = []
    sys.setprofile(lambda frame, event, _: events.append(f"{event} {frame.f_code.co_name}"))
    del storage
    sys.setprofile(None)
    assert not [event for event in events if event.startswith("call ")]


@pytest.mark.parametrize("head_bytes", [0, 1, 448, 511])
def test_the_body_is_aligned_whatever_the_head(head_bytes: int) -> None:
    storage = RestoredMemory().new_storage(10_000, head_bytes, 512)
    assert storage is not None and (storage.data_ptr() + head_bytes) % 512 == 0


def test_memory_goes_back_when_the_last_storage_is_free() -> None:
    memory, device = RestoredMemory(), CpuDevice()
    storages = [filled(memory, 32 * MIB, 1) for _ in range(2)]
    full = device.allocated_bytes()
    storages.pop()
    memory.trim()
    assert device.allocated_bytes() > full - 32 * MIB, "one is still there"
    storages.clear()
    memory.trim()
    assert device.allocated_bytes() < full - 48 * MIB


def test_an_optimizer_s_step_does_not_have_what_backward_has_read(
    offload_config: Callable[..., OffloadConfig],
) -> None:
    """The memory goes back with the step of the engine, not with the next forward pass."""
    engine, device = OffloadEngine(offload_config(io="buffered")), CpuDevice()
    with engine.step():
        packed = [engine.hooks.pack(torch.full((32 * MIB // 4,), float(n))) for n in range(2)]
        settle(engine)
        before = device.allocated_bytes()
        read = [engine.hooks.unpack(one) for one in packed]
        assert [one[-1].item() for one in read] == [0.0, 1.0]
        assert device.allocated_bytes() > before + 60 * MIB
        packed.clear()
        read.clear()
    assert engine.statistics.read_bytes == 64 * MIB
    assert device.allocated_bytes() < before + 4 * MIB
    engine.close()


def test_a_storage_outlives_the_region_s_owner() -> None:
    storage = filled(RestoredMemory(), MIB, 7)
    filled(RestoredMemory(), MIB, 8)
    assert (content(storage) == 7).all()


def test_storages_are_given_back_in_any_thread() -> None:
    memory = RestoredMemory()
    storages = [filled(memory, 4096, 1) for _ in range(50)]
    thread = threading.Thread(target=storages.clear)
    thread.start()
    thread.join()
    memory.trim()
    assert memory._extents.used_bytes == 0


def test_without_room_it_says_so() -> None:
    memory = RestoredMemory()
    memory._most_bytes = 8192
    first = memory.new_storage(4096, 0, 512)
    assert first is not None and memory.new_storage(8192, 0, 512) is None


# -- Where there can be no region ------------------------------------------------------------------


@pytest.fixture(params=["mmap", "-v", "-d", "overcommit"])
def reason(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the log says of a machine that gives no region."""
    if request.param == "mmap":
        own_mmap = mmap.mmap

        def refuse_much(fd: int, num_bytes: int, **options: int) -> mmap.mmap:
            if num_bytes > 1 << 30:
                raise OSError(12, "Cannot allocate memory")
            return own_mmap(fd, num_bytes, **options)

        monkeypatch.setattr(mmap, "mmap", refuse_much)
        return "Cannot allocate memory"
    if request.param == "overcommit":
        file = tmp_path / "overcommit_memory"
        file.write_text("2\n")
        monkeypatch.setattr(restored_memory, "_OVERCOMMIT", file)
        return "vm.overcommit_memory is 2"
    limited = {"-v": resource.RLIMIT_AS, "-d": resource.RLIMIT_DATA}[request.param]
    own = resource.getrlimit
    most = 1 << 60, resource.RLIM_INFINITY  # enough for the region: it is not tried
    monkeypatch.setattr(resource, "getrlimit", lambda one: most if one == limited else own(one))
    return f"`ulimit {request.param}` is set"


def test_without_a_region_what_is_read_back_comes_from_the_allocator(
    reason: str, offload_config: Callable[..., OffloadConfig], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        engine = OffloadEngine(offload_config(io="buffered"))
    told = [r.getMessage() for r in caplog.records if "restored memory" in r.getMessage()]
    assert len(told) == 1 and f": {reason}; what is read back" in told[0]
    assert RestoredMemory().new_storage(4096, 0, 512) is None
    with engine.step():
        packed = engine.hooks.pack(torch.full((1024,), 3.0))
        settle(engine)
        assert torch.equal(engine.hooks.unpack(packed), torch.full((1024,), 3.0))
    assert engine.statistics.read_bytes == 4096
    engine.close()


@pytest.mark.slow
def test_a_limit_on_addresses_is_left_to_the_rest_of_the_process() -> None:
    """With a real limit, a process has as many addresses with the region's owner as without."""
    code = (
        "import mmap, os, resource\n"
        "from megatron.offload.tiers.restored_memory import RestoredMemory\n"
        "most = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * mmap.PAGESIZE\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + most + (2 << 30),) * 2)\n"
        "memory = RestoredMemory()\n"
        "mmap.mmap(-1, most)\n"
    )
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
