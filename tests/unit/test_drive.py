# SPDX-License-Identifier: Apache-2.0
"""A drive and its file: growth within bounds, health, the page cache, errors that arrive late."""

from __future__ import annotations

import collections
import ctypes
import errno
import fcntl
import gc
import itertools
import mmap
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatron.offload.errors import ConfigurationError
from megatron.offload.sizes import KIB, MIB
from megatron.offload.tiers import file as file_module
from megatron.offload.tiers.budget import SpaceBudget
from megatron.offload.tiers.direct_io import Alignment
from megatron.offload.tiers.drive import Drive, Extent, Health
from megatron.offload.tiers.file import UnlinkedFile
from megatron.offload.tiers.ssd import SsdBlock, SsdTier
from tests.support.mounts import mounted_ext4
from tests.support.waiting import SOON_S, wait_until

pytestmark = pytest.mark.timeout(60)

Tiers = Callable[..., SsdTier]


def storage(num_bytes: int, value: int = 7) -> torch.UntypedStorage:
    return torch.full((num_bytes,), value, dtype=torch.uint8).untyped_storage()


def write(tier: SsdTier, source: torch.UntypedStorage) -> SsdBlock | None:
    """Writes it and waits for the end."""
    started = tier.begin_write(source)
    if started is None:
        return None
    block, transfer = started
    transfer.wait()
    return block


def reads_as(tier: SsdTier, block: SsdBlock | None, value: int) -> bool:
    """Whether a block comes back with this value in every byte."""
    assert block is not None
    target, transfer = tier.begin_read(block)
    transfer.wait()
    read = torch.empty(0, dtype=torch.uint8).set_(target)
    return torch.equal(read, torch.full_like(read, value))


def test_a_budget_shared_by_two_drives_is_never_exceeded(make_tier: Tiers) -> None:
    budget_bytes = 24 * MIB + 5000  # not a multiple of anything
    tier = make_tier(2, budget_bytes=budget_bytes, io="buffered")
    chance = random.Random(4)
    kept = []
    refused = 0
    for _ in range(60):
        block = write(tier, storage(chance.randrange(1, 12 * MIB)))
        assert tier.capacity_bytes <= budget_bytes
        on_disk = sum(os.fstat(d.file.fd).st_blocks * 512 for d in tier.drives)
        assert on_disk <= budget_bytes + 2 * 64 * KIB, "the disk's own bookkeeping is small"
        refused += block is None
        kept.append(block)
        if len(kept) > 3 or block is None:
            del kept[chance.randrange(len(kept))]
    assert refused and tier.capacity_bytes > budget_bytes - 2 * 4096
    assert not tier.degraded, "a budget is no fault"
    del kept, block
    assert tier.used_bytes == 0


class Room:
    """A `DriveFile` on a disk with limited room that moves no bytes."""

    directory = Path("somewhere")
    kind = "no I/O"
    alignment = Alignment(memory=1, offset=1)

    def __init__(self, room_bytes: int, number: int = errno.ENOSPC) -> None:
        self.size_bytes = 0
        self.asked: list[int] = []
        self._room_bytes = room_bytes
        self._number = number

    def grow(self, num_bytes: int) -> None:
        self.asked.append(num_bytes)
        if self.size_bytes + num_bytes > self._room_bytes:
            raise OSError(self._number, os.strerror(self._number))
        self.size_bytes += num_bytes

    def write(self, body: memoryview, offset: int) -> None:
        pass

    def read(self, body: memoryview, offset: int) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def make_drive() -> Iterator[Callable[..., Drive]]:
    """Builds drives on `Room`s, with a space budget, and closes them after the test."""
    drives: list[Drive] = []

    def build(room: Room, budget_bytes: int | None = None) -> Drive:
        drives.append(Drive(room, space=SpaceBudget(budget_bytes), num_threads=1))
        return drives[-1]

    yield build
    for drive in drives:
        drive.close()


def test_near_its_end_a_disk_is_asked_for_less_and_at_last_for_what_is_missing(
    make_drive: Callable[..., Drive],
) -> None:
    room = Room(300 * MIB)
    drive = make_drive(room)
    assert drive.allocate(100 * MIB) and drive.allocate(100 * MIB)
    assert room.asked == [256 * MIB]
    room.asked.clear()
    assert drive.allocate(100 * MIB), "56 MiB are free at the end, so 44 MiB are missing"
    assert room.asked == [256 * MIB, 128 * MIB, 64 * MIB, 44 * MIB]
    assert drive.health is Health.GOOD and room.size_bytes == 300 * MIB
    room.asked.clear()
    assert drive.allocate(4096) is None and drive.health is Health.FULL
    assert room.asked[0] < 44 * MIB and room.asked[-1] == 4096
    room.asked.clear()
    assert drive.allocate(4096) is None and not room.asked, "a full disk is not asked again"


def test_what_growth_did_not_use_goes_back_to_the_budget(make_drive: Callable[..., Drive]) -> None:
    drive = make_drive(Room(10 * MIB), budget_bytes=200 * MIB)
    extent = drive.allocate(9 * MIB)
    assert extent is not None
    assert drive._space.take(400 * MIB, 4096) == 191 * MIB


def test_a_full_drive_uses_what_its_file_has(make_drive: Callable[..., Drive]) -> None:
    drive = make_drive(Room(8 * MIB))
    first = drive.allocate(6 * MIB)
    assert first is not None and drive.allocate(6 * MIB) is None
    assert drive.health is Health.FULL
    second = drive.allocate(2 * MIB)
    assert second is not None and second.offset == 6 * MIB
    first.free()
    assert drive.used_bytes == 2 * MIB
    again = drive.allocate(6 * MIB)
    assert again is not None and again.offset == 0


@pytest.mark.parametrize(
    ("number", "health"),
    [
        (errno.ENOSPC, Health.FULL),
        (errno.EDQUOT, Health.FULL),
        (errno.EFBIG, Health.FULL),
        (errno.EIO, Health.FAILED),
        (errno.EROFS, Health.FAILED),
    ],
)
def test_only_a_lack_of_room_is_called_full(
    number: int,
    health: Health,
    make_drive: Callable[..., Drive],
    caplog: pytest.LogCaptureFixture,
) -> None:
    drive = make_drive(Room(0, number))
    assert drive.allocate(4096) is None and drive.allocate(4096) is None
    assert drive.health is health
    (message,) = caplog.messages
    assert os.strerror(number) in message and "nothing is lost" in message
    assert ("is full" in message) is (health is Health.FULL)


@pytest.mark.parametrize("num_drives", [1, 2])
def test_refused_growth_keeps_nothing_alive(
    num_drives: int, make_tier: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(num_drives)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    source = storage(MIB)
    weak = source._weak_ref()
    gc.disable()
    try:
        assert tier.begin_write(source) is None
        del source
        assert torch.UntypedStorage._expired(weak)
    finally:
        gc.enable()
        torch.UntypedStorage._free_weak_ref(weak)


def test_a_drive_that_finds_no_room_in_its_file_is_the_last_to_be_asked(
    make_tier: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that copies on write may be full within a file that is allocated."""
    tier = make_tier(2)
    full_files: list[UnlinkedFile] = []  # the one that is written to first
    own_write = UnlinkedFile.write

    def refuse(file: UnlinkedFile, body: memoryview, offset: int) -> None:
        full_files[:] = full_files or [file]
        if file in full_files:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        own_write(file, body, offset)

    with monkeypatch.context() as patch:
        patch.setattr(UnlinkedFile, "write", refuse)
        with pytest.raises(OSError, match="No space left"):
            write(tier, storage(MIB))
        full, other = sorted(tier.drives, key=lambda drive: drive.file not in full_files)
        assert full.health is Health.FULL and full.lacks_room
        before = full.statistics.failed_writes
        blocks = [write(tier, storage(MIB, value)) for value in (1, 2)]
        assert {one.drive for block in blocks for one in block.extents} == {other}
        assert full.statistics.failed_writes == before
    other.health = Health.FAILED  # then it is asked, and has room again
    again = write(tier, storage(MIB, 3))
    assert {one.drive for one in again.extents} == {full} and not full.lacks_room
    for value, block in zip((1, 2, 3), [*blocks, again], strict=True):
        assert reads_as(tier, block, value)


def test_a_failed_drive_takes_no_more_and_serves_reads(
    make_tier: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier()
    (drive,) = tier.drives
    blocks = [write(tier, storage(MIB, value)) for value in (1, 2)]

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(UnlinkedFile, "write", refuse)
        with pytest.raises(OSError, match="Input/output error"):
            write(tier, storage(MIB))
    assert drive.health is Health.FAILED and tier.statistics.failed_writes == 1
    assert tier.begin_write(storage(MIB)) is None, "though writes would work again"
    for value, block in zip((1, 2), blocks, strict=True):
        assert reads_as(tier, block, value)
    del blocks, block

    def is_empty() -> bool:
        gc.collect()  # the error that was caught here refers to this frame, and this frame to it
        return tier.used_bytes == 0

    wait_until(is_empty, "a read that ended keeps its space")


def test_a_failed_read_keeps_nothing_alive(make_tier: Tiers) -> None:
    tier = make_tier(io="buffered")
    block = write(tier, storage(MIB))
    assert block is not None
    os.ftruncate(tier.drives[0].file.fd, 0)
    gc.disable()
    try:
        target, transfer = tier.begin_read(block)
        weak = target._weak_ref()
        with pytest.raises(OSError, match="short read") as raised:
            transfer.wait()
        assert str(block) in str(raised.value)
        reference = weakref.ref(transfer)
        del raised, transfer, target
        deadline = time.monotonic() + 10
        while reference() is not None or not torch.UntypedStorage._expired(weak):
            assert time.monotonic() < deadline, "somebody still holds it"
            time.sleep(0.001)
    finally:
        gc.enable()
        torch.UntypedStorage._free_weak_ref(weak)


def test_a_write_limit_is_shared_by_all_drives(make_tier: Tiers) -> None:
    bytes_per_s = 40 * MIB
    tier = make_tier(4, num_threads=1, write_bytes_per_s=bytes_per_s)
    began = time.monotonic()
    started = [tier.begin_write(storage(2 * MIB)) for _ in range(12)]
    for entry in started:
        assert entry is not None
        entry[1].wait()
    assert time.monotonic() - began >= 11 * 2 * MIB / bytes_per_s  # the last one need not be paid
    assert all(drive.statistics.writes.total_bytes for drive in tier.drives)


# -- The file ---------------------------------------------------------------------------------


def cached_bytes(fd: int) -> int:
    """How much of a file is in the page cache."""
    size = os.fstat(fd).st_size
    num_pages = size // mmap.PAGESIZE
    resident = (ctypes.c_ubyte * num_pages)()
    with mmap.mmap(fd, size) as mapping:
        memory = (ctypes.c_char * size).from_buffer(mapping)
        call = ctypes.CDLL(None, use_errno=True).mincore
        assert call(memory, ctypes.c_size_t(size), resident) == 0
        del memory
    return sum(byte & 1 for byte in resident) * mmap.PAGESIZE


def skip_unless_the_cache_can_be_emptied(directory: Path) -> None:
    with open(directory / "trial", "w+b") as trial:
        trial.write(bytes(MIB))
        trial.flush()
        os.fdatasync(trial.fileno())
        os.posix_fadvise(trial.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if cached_bytes(trial.fileno()):
            pytest.skip(f"{directory} is in memory: there is no page cache to empty")


@pytest.mark.parametrize("has_dontcache", [True, False])
def test_buffered_io_leaves_nothing_in_the_page_cache(
    has_dontcache: bool, make_tier: Tiers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_unless_the_cache_can_be_emptied(tmp_path)
    if not has_dontcache:
        monkeypatch.setattr(UnlinkedFile, "_works", lambda *_: False)
    tier = make_tier(io="buffered")
    file = tier.drives[0].file
    assert isinstance(file, UnlinkedFile)
    if has_dontcache and not file._flags:
        pytest.skip("this kernel or file system has no RWF_DONTCACHE")
    blocks = [write(tier, storage(8 * MIB, value)) for value in range(4)]
    assert cached_bytes(file.fd) == 0, "after writing"
    for value, block in enumerate(blocks):
        assert reads_as(tier, block, value)
        assert cached_bytes(file.fd) == 0, "after reading, also of what lies behind it"


def test_a_late_write_error_told_to_one_thread_counts_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = UnlinkedFile(tmp_path, "buffered")
    file.grow(16 * KIB)
    answers = itertools.chain([0, errno.EIO], itertools.repeat(0))  # the kernel says it once
    in_wait = threading.Semaphore(0)
    go_on = threading.Event()

    def sync(fd: int, offset: int, num_bytes: int, flags: int) -> int:
        if flags == file_module._START:
            return 0
        in_wait.release()
        assert go_on.wait(timeout=SOON_S)
        return next(answers)

    monkeypatch.setattr(file_module, "_sync_file_range", sync)
    outcomes: list[int | None] = []

    def move(offset: int) -> None:
        try:
            file.write(memoryview(bytes(4096)), offset)
            outcomes.append(None)
        except OSError as error:
            outcomes.append(error.errno)

    threads = [threading.Thread(target=move, args=(4096 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    assert in_wait.acquire(timeout=SOON_S)
    go_on.set()
    for thread in threads:
        thread.join(timeout=SOON_S)
    file.close()
    assert collections.Counter(outcomes) == {None: 1, errno.EIO: 3}


def test_a_file_that_would_not_fit_takes_nothing_before_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: asked.append(1))
    file = UnlinkedFile(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        file.grow(1 << 60)
    assert not asked and file.size_bytes == 0
    file.close()


def grow_and_use(directory: Path) -> None:
    """Direct I/O in a file that was grown, and the space that it takes."""
    tier = SsdTier([directory])
    (drive,) = tier.drives
    assert drive.file.kind == "direct I/O"
    drive.reserve(8 * MIB)
    assert os.fstat(drive.file.fd).st_blocks * 512 >= 8 * MIB, "the space is really taken"
    block = write(tier, storage(4 * MIB, 3))
    assert reads_as(tier, block, 3)
    with pytest.raises(ConfigurationError, match="free some space"):
        drive.reserve(1 << 50)
    assert drive.file.size_bytes == 8 * MIB
    tier.close()


def test_direct_io_works_on_a_file_system_without_fallocate(tmp_path: Path) -> None:
    with mounted_ext4(tmp_path, 64 * MIB, features="^extent,^64bit") as disk:
        grow_and_use(disk.path)


def test_where_the_c_library_cannot_stand_in_for_fallocate_a_buffered_descriptor_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fallocate = os.posix_fallocate

    def stand_in(fd: int, offset: int, num_bytes: int) -> None:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))  # it writes single bytes
        fallocate(fd, offset, num_bytes)

    try:
        UnlinkedFile(tmp_path, "direct").close()
    except ConfigurationError:
        pytest.skip("the temporary directory has no direct I/O")
    monkeypatch.setattr(os, "posix_fallocate", stand_in)
    grow_and_use(tmp_path)


def test_an_extent_says_where_it_is(make_drive: Callable[..., Drive]) -> None:
    drive = make_drive(Room(MIB))
    extent = drive.allocate(4096)
    assert isinstance(extent, Extent)
    assert str(extent) == "file in somewhere, offset 0, length 4096"


def test_a_drive_without_threads_takes_nothing_and_says_so(make_tier, caplog):
    tier = make_tier()
    (drive,) = tier.drives
    drive._threads.have_died = True
    assert tier.begin_write(torch.zeros(1 << 20).untyped_storage()) is None
    assert drive.health is Health.FAILED
    assert sum("all I/O threads died" in message for message in caplog.messages) == 1
