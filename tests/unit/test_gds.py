# SPDX-License-Identifier: Apache-2.0
"""The GDS tier, against stand-ins for kvikio and for a GPU.

"Device memory" is host memory here. What this shows is our side only: the order of calls, offsets,
what becomes of errors, what is refused and what is said of a machine. It does not show that kvikio,
cuFile or a GPU behave as the stand-ins do, nor anything about speed.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import sys
import threading
import types
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from megatron.offload.config import OffloadConfig
from megatron.offload.device.cpu import CpuDevice
from megatron.offload.errors import ConfigurationError
from megatron.offload.sizes import MIB
from megatron.offload.tiers import gds_status as status_part
from megatron.offload.tiers.gds import GdsTier
from megatron.offload.tiers.gds_status import gds_status
from tests.support.waiting import SOON_S


class Gpu(CpuDevice):
    """Its marks happen when the machine lets them."""

    device = torch.device("cuda", 0)
    is_host = False

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def record_event(self, stream: None = None) -> Event:
        self.machine.calls.append("mark")
        return Event(self.machine)

    def restored_is_free(self) -> Event:
        return self.record_event()

    def wait_for_event(self, event: Event) -> None:
        event.synchronize()


class Event:
    """Happens at once, unless the machine holds its kernels back."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def synchronize(self) -> None:
        self.machine.waiting.release()
        assert self.machine.kernels_done.wait(timeout=SOON_S)
        self.machine.calls.append("synchronize")
        if self.machine.cuda_error is not None:
            raise self.machine.cuda_error


class Future:
    def __init__(self, work) -> None:
        self.work = work

    def get(self) -> int:
        return self.work()


class CuFile:
    """Moves bytes with system calls, at most `longest_bytes` in each."""

    def __init__(self, machine: Machine, file: str, flags: str) -> None:
        assert flags == "r+", "other modes truncate or cannot do both"
        if machine.open_error is not None:
            raise machine.open_error
        self.machine = machine
        self.fd = os.open(file, os.O_RDWR)
        machine.files.append(self)

    def _memory(self, buffer, size, file_offset: int) -> ctypes.Array:
        interface = buffer.__cuda_array_interface__
        (address, readonly), (num_bytes,) = interface["data"], interface["shape"]
        assert size is None and interface["typestr"] == "|u1" and interface["strides"] is None
        assert not readonly and interface["version"] == 3
        self.machine.transfers.append((file_offset, num_bytes))
        num_bytes = min(num_bytes, self.machine.longest_bytes)
        return (ctypes.c_char * num_bytes).from_address(address)

    def pwrite(self, buffer, size=None, file_offset=0, task_size=None) -> Future:
        self.machine.calls.append("pwrite")
        memory = self._memory(buffer, size, file_offset)
        return Future(lambda: self.machine.check() and os.pwrite(self.fd, memory, file_offset))

    def pread(self, buffer, size=None, file_offset=0, task_size=None) -> Future:
        self.machine.calls.append("pread")
        memory = self._memory(buffer, size, file_offset)
        return Future(lambda: self.machine.check() and os.preadv(self.fd, [memory], file_offset))

    def close(self) -> None:
        os.close(self.fd)
        self.fd = -1


@dataclass
class Machine:
    """What the stand-ins do, and what was asked of them."""

    calls: list = field(default_factory=list)  # of the device, its marks and kvikio, in order
    transfers: list = field(default_factory=list)  # file offset and bytes asked for
    files: list = field(default_factory=list)
    settings: dict = field(default_factory=lambda: {"num_threads": 1, "auto_direct_io_read": False})
    prefers_compatibility: bool = False
    has_driver: bool | Exception = True
    longest_bytes: int = 1 << 40
    open_error: Exception | None = None
    io_error: Exception | None = None
    cuda_error: Exception | None = None
    kernels_done: threading.Event = field(default_factory=threading.Event)
    waiting: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def check(self) -> bool:
        if self.io_error is not None:
            raise self.io_error
        return True

    def set(self, name: str, value: object) -> None:
        self.settings[name]  # KeyError where this kvikio has no such setting
        self.settings[name] = value

    def driver_property(self, name: str) -> object:
        assert name == "is_gds_available"
        if isinstance(self.has_driver, Exception):
            raise self.has_driver
        return self.has_driver


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with a GPU and kvikio, as this process sees it; cuFile has no settings."""
    machine = Machine()
    machine.kernels_done.set()
    kvikio = types.ModuleType("kvikio")
    kvikio.__version__ = "26.2"
    kvikio.CuFile = lambda file, flags: CuFile(machine, file, flags)
    kvikio.defaults = types.ModuleType("kvikio.defaults")
    kvikio.defaults.get = machine.settings.__getitem__
    kvikio.defaults.set = machine.set
    kvikio.defaults.is_compat_mode_preferred = lambda: machine.prefers_compatibility
    kvikio.cufile_driver = types.ModuleType("kvikio.cufile_driver")
    kvikio.cufile_driver.get = machine.driver_property
    for module in (kvikio, kvikio.defaults, kvikio.cufile_driver):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv("KVIKIO_COMPAT_MODE", raising=False)
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(tmp_path / "cufile.json"))
    monkeypatch.setattr(status_part, "UDEV", tmp_path)
    monkeypatch.setattr(platform, "release", lambda: "6.8.0-generic")
    yield machine
    machine.kernels_done.set()


@pytest.fixture
def open_tier(machine, tmp_path):
    tiers = []

    def build(*directories: Path, **options: object) -> GdsTier:
        tier = GdsTier(directories or (tmp_path,), device=Gpu(machine), io="gds", **options)
        tiers.append(tier)
        return tier

    yield build
    for tier in tiers:
        tier.close()


def random_storage(num_bytes: int) -> torch.UntypedStorage:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).untyped_storage()


def bytes_of(storage: torch.UntypedStorage) -> bytes:
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


def begun(tier: GdsTier, source: torch.UntypedStorage):
    return tier.begin_write(source, tier._device.record_event())


def written(tier: GdsTier, source: torch.UntypedStorage):
    block, transfer = begun(tier, source)
    transfer.wait()
    return block


def read_back(tier: GdsTier, block) -> bytes:
    target, transfer = tier.begin_read(block)
    transfer.wait()
    return bytes_of(target)


# -- Bytes and offsets --------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 4097, MIB + 7])
def test_bytes_come_back_unchanged(open_tier, num_bytes):
    tier, source = open_tier(), random_storage(num_bytes)
    block = written(tier, source)
    assert read_back(tier, block) == bytes_of(source)
    assert tier.statistics.writes.total_bytes == num_bytes


def test_whole_storages_go_to_kvikio_at_aligned_offsets_without_overlap(open_tier, machine):
    tier = open_tier()
    blocks = [written(tier, random_storage(size)) for size in (10_000, 1, 4096)]
    assert machine.transfers == [(0, 10_000), (12288, 1), (16384, 4096)]
    assert all(block.cut.body_bytes == block.num_bytes for block in blocks)  # none on the host


def test_large_storages_are_striped_and_come_back(open_tier, machine, tmp_path):
    directories = [tmp_path / name for name in ("a", "b")]
    for directory in directories:
        directory.mkdir()
    tier, source = open_tier(*directories), random_storage(10 * MIB + 7)
    block = written(tier, source)
    assert len(block.extents) == len(machine.files) == 2
    assert read_back(tier, block) == bytes_of(source)


def test_short_transfers_are_continued_where_they_stopped(open_tier, machine):
    machine.longest_bytes = 4096
    tier, source = open_tier(), random_storage(10_000)
    block = written(tier, source)
    assert machine.transfers == [(0, 10_000), (4096, 5904), (8192, 1808)]
    assert read_back(tier, block) == bytes_of(source)
    assert machine.calls.count("synchronize") == 2  # once for each transfer


def test_the_file_has_no_name_and_its_space_is_freed_on_close(machine, tmp_path):
    tier = GdsTier([tmp_path], device=Gpu(machine), reserve_bytes=MIB)
    assert list(tmp_path.iterdir()) == []
    fd = machine.files[0].fd
    assert os.fstat(fd).st_nlink == 0 and os.fstat(fd).st_size == MIB
    owner = tier.drives[0].file._owner.fd
    assert os.path.samestat(os.fstat(fd), os.fstat(owner))
    tier.close()
    for closed in (fd, owner):
        with pytest.raises(OSError):
            os.fstat(closed)


# -- Order, see Note [Who waits for whom] in device.py----------------------------------------


def test_a_write_waits_for_the_kernels_queued_before_it_and_the_caller_does_not(open_tier, machine):
    tier, source = open_tier(), torch.zeros(4096, dtype=torch.uint8)
    machine.kernels_done.clear()
    block, transfer = begun(tier, source.untyped_storage())  # returns although kernels run
    assert machine.calls == ["mark"]
    assert machine.waiting.acquire(timeout=SOON_S)
    assert not transfer.done() and "pwrite" not in machine.calls
    source.fill_(5)  # the kernel that the write waits for
    machine.kernels_done.set()
    transfer.wait()
    assert machine.calls == ["mark", "synchronize", "pwrite"]
    assert read_back(tier, block) == b"\5" * 4096


def test_a_read_leaves_its_memory_to_the_former_user_until_that_one_is_done(open_tier, machine):
    tier = open_tier()
    block = written(tier, random_storage(4096))
    machine.calls.clear()
    machine.waiting = threading.Semaphore(0)
    machine.kernels_done.clear()
    target, transfer = tier.begin_read(block)
    assert machine.waiting.acquire(timeout=SOON_S)
    assert machine.calls == ["mark"]
    machine.kernels_done.set()
    transfer.wait()
    assert machine.calls == ["mark", "synchronize", "pread"]
    assert target.nbytes() == 4096 and transfer.events == [], "the bytes are there"


def test_memory_under_way_stays_alive(open_tier, machine):
    tier, source = open_tier(), random_storage(4096)
    weak = source._weak_ref()
    machine.kernels_done.clear()
    _, transfer = begun(tier, source)
    del source
    assert not torch.UntypedStorage._expired(weak)
    machine.kernels_done.set()
    transfer.wait()
    assert torch.UntypedStorage._expired(weak)
    torch.UntypedStorage._free_weak_ref(weak)


# -- Errors -------------------------------------------------------------------------------------


def test_a_failed_write_is_an_oserror_with_kvikios_words_and_ends_writing(
    open_tier, machine, caplog
):
    tier, source = open_tier(), random_storage(4096)
    block = written(tier, source)
    machine.io_error = RuntimeError("cuFile error: media")
    _, transfer = begun(tier, random_storage(4096))
    with caplog.at_level(logging.WARNING), pytest.raises(OSError, match="media") as raised:
        transfer.wait()
    assert raised.value.errno == errno.EIO
    assert tier.degraded and tier.statistics.failed_writes == 1 and len(caplog.records) == 1
    machine.io_error = None
    assert tier.begin_write(source) is None
    assert read_back(tier, block) == bytes_of(source)  # what is there can be read


def test_a_failed_read_names_the_place(open_tier, machine, tmp_path):
    tier = open_tier()
    block = written(tier, random_storage(4096))
    machine.io_error = RuntimeError("cuFile error: media")
    _, transfer = tier.begin_read(block)
    with pytest.raises(OSError, match="media") as raised:
        transfer.wait()
    assert raised.value.errno == errno.EIO and f"{tmp_path}, offset 0" in str(raised.value)


@pytest.mark.parametrize("direction", ["write", "read"])
def test_a_transfer_that_makes_no_progress_is_an_error(open_tier, machine, direction):
    tier = open_tier()
    block = written(tier, random_storage(4096))
    machine.longest_bytes = 0
    if direction == "write":
        _, transfer = begun(tier, random_storage(4096))
    else:
        _, transfer = tier.begin_read(block)
    with pytest.raises(OSError, match="0 of 4096 bytes"):
        transfer.wait()


def test_a_cuda_error_of_earlier_kernels_is_not_the_drives_and_nothing_is_written(
    open_tier, machine
):
    tier = open_tier()
    machine.cuda_error = RuntimeError("CUDA error: an illegal memory access was encountered")
    _, transfer = begun(tier, random_storage(4096))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        transfer.wait()
    assert "pwrite" not in machine.calls and not tier.degraded


# -- What is refused ----------------------------------------------------------------------------


def test_without_a_cuda_device_it_is_refused_and_kvikio_unsupported(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(ConfigurationError, match=r"needs a CUDA device.*; use .*offload-io auto"):
        GdsTier([tmp_path], device=CpuDevice())


def test_without_kvikio_it_is_refused(machine, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(ConfigurationError, match="not installed; pip install kvikio-cu13"):
        GdsTier([tmp_path], device=Gpu(machine))


@pytest.mark.parametrize("kind", [ImportError, OSError, RuntimeError])
def test_a_kvikio_that_cannot_be_loaded_is_refused_with_its_reason(
    machine, monkeypatch, tmp_path, kind
):
    def fail() -> bool:
        raise kind("libcuda.so.1: cannot open\nand more")

    monkeypatch.setattr(sys.modules["kvikio.defaults"], "is_compat_mode_preferred", fail)
    with pytest.raises(ConfigurationError, match=r"loaded \(libcuda.so.1: cannot open\); install"):
        GdsTier([tmp_path], device=Gpu(machine))


def test_a_kvikio_that_would_fill_the_page_cache_is_refused(machine, tmp_path):
    del machine.settings["auto_direct_io_read"]
    with pytest.raises(ConfigurationError, match=r"26\.2 would read through the page cache"):
        GdsTier([tmp_path], device=Gpu(machine))


def test_checksums_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="checksum"):
        OffloadConfig(mode="ssd", directories=(tmp_path,), io="gds", verify="checksum")


def test_a_file_that_kvikio_cannot_open_is_refused_and_closed(machine, tmp_path):
    open_files = os.listdir("/proc/self/fd")
    machine.open_error = RuntimeError("Unable to open file")
    with pytest.raises(ConfigurationError, match=r"cannot open a file in .*Unable to open file"):
        GdsTier([tmp_path], device=Gpu(machine))
    assert os.listdir("/proc/self/fd") == open_files


# -- What it says and sets ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "is_gpudirect", "words"),
    [
        ({}, True, "with GPUDirect (nvidia_fs)"),
        ({"prefers_compatibility": True}, False, "compatibility mode, through host memory"),
        ({"has_driver": False}, False, "nvidia_fs is not loaded; install"),
        (
            {"has_driver": RuntimeError("no driver")},
            False,
            "cuFile does not start (no driver); see",
        ),
    ],
)
def test_the_way_that_bytes_go_is_said_once_at_the_start(
    open_tier, machine, caplog, changes, is_gpudirect, words
):
    for name, value in changes.items():
        setattr(machine, name, value)
    status = gds_status(has_gpu=True)
    assert status.available and status.is_gpudirect is is_gpudirect
    assert words in str(status) and "\n" not in str(status)
    with caplog.at_level(logging.INFO, logger="megatron.offload.tiers.gds"):
        tier = open_tier()
    (line,) = [record for record in caplog.records if record.name.endswith("gds")]
    assert line.levelno == (logging.INFO if is_gpudirect else logging.WARNING)
    assert line.getMessage() == f"activation offload: {status}"
    assert ("host memory" in str(tier)) is not is_gpudirect


def test_compatibility_mode_has_a_reason_and_a_way_out(machine, monkeypatch, tmp_path):
    machine.prefers_compatibility = True
    assert "libcufile.so; install" in str(gds_status(has_gpu=True))
    monkeypatch.setattr(status_part, "UDEV", tmp_path / "udev")
    assert "udev is missing; in a container: docker run" in str(gds_status(has_gpu=True))
    monkeypatch.setattr(platform, "release", lambda: "5.15.0-microsoft-standard-WSL2")
    assert "WSL; use --activation-offload-io auto" in str(gds_status(has_gpu=True))
    monkeypatch.setenv("KVIKIO_COMPAT_MODE", "ON")
    assert "asks for it; unset KVIKIO_COMPAT_MODE" in str(gds_status(has_gpu=True))


def test_cufile_may_use_pci_peer_to_peer_instead_of_the_kernel_module(machine, tmp_path):
    machine.has_driver = False
    settings = tmp_path / "cufile.json"
    settings.write_text('{ // "use_pci_p2pdma": true\n "use_pci_p2pdma" : false }')
    status = gds_status(has_gpu=True)
    assert not status.is_gpudirect and f"nor use_pci_p2pdma set in {settings}" in status.line
    settings.write_text('{ // off\n "use_pci_p2pdma" : true }')
    status = gds_status(has_gpu=True)
    assert status.is_gpudirect and "peer-to-peer" in status.line
    assert status.facts == {
        "kvikio": "26.2",
        "compatibility_mode": False,
        "nvidia_fs": False,
        "settings": str(settings),
    }


def test_kvikio_gets_a_thread_for_each_io_thread_and_keeps_more(open_tier, machine):
    open_tier(num_threads=3)
    assert machine.settings == {"num_threads": 3, "auto_direct_io_read": True}
    machine.settings["num_threads"] = 16
    open_tier()
    assert machine.settings["num_threads"] == 16
