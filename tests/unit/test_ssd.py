# SPDX-License-Identifier: Apache-2.0
"""The SSD tier and its drives: what a transfer works on lives, and all that is taken goes back."""

from __future__ import annotations

import errno
import logging
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload.errors import ConfigurationError
from megatron.offload.sizes import MIB
from megatron.offload.tiers.budget import SpaceBudget
from megatron.offload.tiers.direct_io import Alignment
from megatron.offload.tiers.drive import Drive, Extent, Health
from megatron.offload.tiers.file import UnlinkedFile
from megatron.offload.tiers.io_threads import IoThreads
from megatron.offload.tiers.ssd import SsdBlock, SsdTier
from megatron.offload.tiers.staging import PIECE_BYTES
from tests.conftest import Gate, gate_before
from tests.support.simulated_device import SimulatedDevice
from tests.support.waiting import SOON_S, wait_until

pytestmark = pytest.mark.timeout(60)

Tiers = Callable[..., SsdTier]
PAGE = 4096


@pytest.fixture
def make_tier(make_tier: Tiers) -> Tiers:
    """Tiers with buffered I/O."""
    return lambda num_drives=1, **more: make_tier(num_drives, **{"io": "buffered", **more})


@pytest.fixture
def read_gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Every read waits at this gate, in its I/O thread; then it takes what the file has."""
    with gate_before("read", monkeypatch) as gate:
        yield gate


def storage_of(num_bytes: int, value: int) -> torch.UntypedStorage:
    return torch.full((num_bytes,), value, dtype=torch.uint8).untyped_storage()


def values_of(storage: torch.UntypedStorage) -> set[int]:
    return set(torch.empty(0, dtype=torch.uint8).set_(storage).unique().tolist())


def written(tier: SsdTier, storage: torch.UntypedStorage) -> SsdBlock:
    started = tier.begin_write(storage)
    assert started is not None
    started[1].wait()
    return started[0]


# -- What a transfer works on lives -------------------------------------------------------------


def test_a_running_write_keeps_its_source_when_nobody_else_does(
    make_tier: Tiers, write_gate: Gate
) -> None:
    tier, source = make_tier(), storage_of(PAGE, 1)
    weak = source._weak_ref()
    started = tier.begin_write(source)
    write_gate.wait_for_arrival()
    del source, started
    assert not torch.UntypedStorage._expired(weak)
    write_gate.open.set()
    wait_until(lambda: torch.UntypedStorage._expired(weak), "a write that ended keeps its source")
    torch.UntypedStorage._free_weak_ref(weak)


def test_a_running_read_keeps_its_target_and_its_space_when_nobody_else_does(
    make_tier: Tiers, read_gate: Gate
) -> None:
    tier = make_tier()
    block = written(tier, storage_of(PAGE, 1))
    target, transfer = tier.begin_read(block)
    read_gate.wait_for_arrival()
    weak = target._weak_ref()
    del target, block
    assert not torch.UntypedStorage._expired(weak)
    assert tier.used_bytes == PAGE
    kept = written(tier, storage_of(PAGE, 2))
    assert kept.extents[0].offset != 0, "the space that is being read was given away"
    read_gate.open.set()
    transfer.wait()
    del transfer
    wait_until(lambda: torch.UntypedStorage._expired(weak), "a read that ended keeps its target")
    torch.UntypedStorage._free_weak_ref(weak)
    wait_until(lambda: tier.used_bytes == PAGE, "a read that ended keeps its space")


def test_a_running_write_keeps_its_space_when_nobody_else_does(
    make_tier: Tiers, write_gate: Gate
) -> None:
    tier = make_tier()
    started = tier.begin_write(storage_of(PAGE, 1))
    write_gate.wait_for_arrival()
    del started
    assert tier.used_bytes == PAGE
    write_gate.open.set()
    wait_until(lambda: tier.used_bytes == 0, "a write that ended keeps its space")


@pytest.mark.parametrize("is_staged", [False, True])
def test_closing_waits_for_a_running_write_before_file_and_memory_go(
    make_tier: Tiers, write_gate: Gate, is_staged: bool
) -> None:
    tier = make_tier(**({"device": SimulatedDevice()} if is_staged else {}))
    _, transfer = tier.begin_write(storage_of(PAGE, 1)) or (None, None)
    assert transfer is not None
    write_gate.wait_for_arrival()
    closing = threading.Thread(target=tier.close, daemon=True)
    closing.start()
    closing.join(timeout=0.1)
    assert closing.is_alive()
    write_gate.open.set()
    closing.join(timeout=SOON_S)
    transfer.wait()
    assert not tier.degraded and tier.statistics.writes.total_bytes == PAGE


# -- What is taken goes back --------------------------------------------------------------------


def test_space_freed_by_hand_is_not_freed_again_when_its_block_dies(make_tier: Tiers) -> None:
    tier = make_tier()
    first = written(tier, storage_of(PAGE, 1))
    tier.free(first)
    second = written(tier, storage_of(PAGE, 2))
    assert second.extents[0].offset == 0
    tier.free(first)
    del first
    third = written(tier, storage_of(PAGE, 3))
    assert third.extents[0].offset != 0
    for value, block in ((2, second), (3, third)):
        target, transfer = tier.begin_read(block)
        transfer.wait()
        assert values_of(target) == {value}


def test_space_of_a_block_that_nobody_refers_to_is_used_again(make_tier: Tiers) -> None:
    tier = make_tier()
    offsets = set()
    for value in range(5):
        offsets.add(written(tier, storage_of(PAGE, value)).extents[0].offset)
    assert offsets == {0} and tier.used_bytes == 0


def test_parts_on_other_drives_go_back_when_one_refuses(
    make_tier: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(3)
    allocated: list[Drive] = []
    allocate = Drive.allocate

    def refusing(self: Drive, num_bytes: int) -> Extent | None:
        allocated.append(self)
        return None if self is tier.drives[2] else allocate(self, num_bytes)

    monkeypatch.setattr(Drive, "allocate", refusing)
    block = written(tier, storage_of(12 * MIB, 1))
    assert tier.drives[2] in allocated, "it was not asked"
    assert tier.used_bytes == 12 * MIB
    del block
    assert tier.used_bytes == 0


@pytest.mark.parametrize("end", ["done", "failed", "cancelled"])
def test_however_a_write_ends_its_bytes_are_no_longer_queued(
    make_tier: Tiers, write_gate: Gate, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    tier = make_tier(num_threads=1)
    if end == "failed":
        monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    first = tier.begin_write(storage_of(PAGE, 1))
    write_gate.wait_for_arrival()
    second = tier.begin_write(storage_of(2 * PAGE, 1))
    assert first is not None and second is not None
    (drive,) = tier.drives
    assert drive.queued_bytes >= 2 * PAGE
    if end == "cancelled":
        assert second[1].cancel()
    write_gate.open.set()
    wait_until(lambda: first[1].done() and drive.queued_bytes == 0, "bytes are left in the queue")
    assert (first[1].exception() is not None) is (end == "failed")


def test_a_closed_tier_takes_nothing(make_tier: Tiers) -> None:
    tier = make_tier(reserve_bytes=MIB)
    tier.close()
    with pytest.raises(RuntimeError, match="closed"):
        tier.begin_write(storage_of(PAGE, 1))


class SecondDrive:
    """Holds the transfers of one drive back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.passed: list[object] = []  # the files whose transfers were carried out
        self._monkeypatch = monkeypatch

    def hold(self, direction: str, held: object) -> None:
        """Reads, or writes, of this file wait from now on."""
        move = getattr(UnlinkedFile, direction)

        def gated(file: UnlinkedFile, body: memoryview, offset: int) -> None:
            if file is held:
                assert self.open.wait(timeout=SOON_S)
            move(file, body, offset)
            self.passed.append(file)

        self._monkeypatch.setattr(UnlinkedFile, direction, gated)


@pytest.fixture
def second_drive(make_tier: Tiers, monkeypatch: pytest.MonkeyPatch) -> Iterator[SecondDrive]:
    """Opened before tiers are closed."""
    second_drive = SecondDrive(monkeypatch)
    yield second_drive
    second_drive.open.set()


# -- Parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["write", "read"])
def test_a_striped_transfer_ends_with_its_last_part(
    make_tier: Tiers, second_drive: SecondDrive, direction: str
) -> None:
    tier, gate = make_tier(2), second_drive.open
    first, last = (drive.file for drive in tier.drives)
    storage = torch.arange(2 * MIB).untyped_storage()  # 16 MiB
    second_drive.hold(direction, last)
    started = tier.begin_write(storage)
    assert started is not None
    block, transfer = started
    assert [extent.drive.file for extent in block.extents] == [first, last]
    if direction == "read":
        transfer.wait()
        target, transfer = tier.begin_read(block)
    wait_until(lambda: second_drive.passed == [first], "the first part did not end")
    assert not transfer.done()
    gate.set()
    transfer.wait()
    if direction == "write":
        target, transfer = tier.begin_read(block)
        transfer.wait()
    is_same = torch.equal(torch.empty(0, dtype=torch.int64).set_(target), torch.arange(2 * MIB))
    assert is_same


def test_each_part_of_a_staged_read_is_copied_to_the_device_when_it_is_there(
    make_tier: Tiers, second_drive: SecondDrive
) -> None:
    device = SimulatedDevice()
    tier = make_tier(2, device=device)
    first, last = (drive.file for drive in tier.drives)
    source = storage_of(12 * MIB, 1)
    device.queued(source)
    started = tier.begin_write(source, device.record_event())
    assert started is not None
    started[1].wait()
    block = started[0]
    assert [extent.drive.file for extent in block.extents] == [first, last]
    num_copies = device.num_copies
    second_drive.hold("read", last)
    target, transfer = tier.begin_read(block)
    wait_until(lambda: device.num_copies == num_copies + 1, "the first part was not copied")
    assert second_drive.passed == [first] and not transfer.done()
    second_drive.open.set()
    transfer.wait()
    assert device.num_copies == num_copies + 2 and len(transfer.events or ()) == 2
    for event in transfer.events or ():
        device.wait_for_event(event)
    assert values_of(target) == {1}


def test_drives_that_ask_for_different_alignments_both_get_theirs(
    make_tier: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = iter([Alignment(1, 1), Alignment(512, 4 * PAGE)])
    opened = UnlinkedFile.__init__

    def aligned(self: UnlinkedFile, directory: Path, *options: Any) -> None:
        opened(self, directory, *options)
        self.alignment = next(asked)

    monkeypatch.setattr(UnlinkedFile, "__init__", aligned)
    written_at: list[tuple[int, int]] = []
    write = UnlinkedFile.write

    def noting(self: UnlinkedFile, body: memoryview, offset: int) -> None:
        address = torch.frombuffer(body, dtype=torch.uint8).data_ptr()
        written_at.append((address % 512, offset % (4 * PAGE)))
        write(self, body, offset)

    monkeypatch.setattr(UnlinkedFile, "write", noting)
    tier = make_tier(2)
    for num_bytes in (PAGE, 12 * MIB + 5, 5 * PAGE):
        block = written(tier, storage_of(num_bytes, 7))
        target, transfer = tier.begin_read(block)
        transfer.wait()
        assert values_of(target) == {7} and block.cut.body_bytes % (4 * PAGE) == 0
    assert {address for address, _ in written_at} == {0}


# -- One drive ----------------------------------------------------------------------------------


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Drive]:
    """With checksums, and a budget of two MiB."""
    drive = Drive(
        UnlinkedFile(tmp_path, "buffered"),
        space=SpaceBudget(2 * MIB),
        num_threads=1,
        checksum=zlib.crc32,
    )
    yield drive
    drive.close()


def test_an_extent_can_be_freed_while_another_thread_holds_the_lock(drive: Drive) -> None:
    """Finalizers do it, at any moment in any thread."""
    extent = drive.allocate(PAGE)
    assert extent is not None
    with drive._lock:
        freeing = threading.Thread(target=extent.free, daemon=True)
        freeing.start()
        freeing.join(timeout=SOON_S)
        assert not freeing.is_alive()
    assert drive.used_bytes == 0


def test_a_failed_drive_hands_out_no_extents(drive: Drive) -> None:
    drive.health = Health.FAILED
    assert drive.allocate(PAGE) is None and drive.file.size_bytes == 0


def test_after_a_failed_write_nothing_more_is_written(
    make_tier: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda *_: 0)
        with pytest.raises(OSError, match="the drive took 0 of 4096 bytes"):
            written(tier, storage_of(PAGE, 1))
    assert tier.degraded and tier.begin_write(storage_of(PAGE, 1)) is None


def test_space_that_is_reserved_counts(drive: Drive) -> None:
    drive.reserve(MIB)
    assert drive.file.size_bytes == MIB and drive._space.take(4 * MIB, PAGE) == MIB
    with pytest.raises(ConfigurationError, match="cannot hold the activations"):
        drive._space = SpaceBudget(None)
        drive.reserve(1 << 50)


def test_what_the_disk_refused_or_nobody_could_use_goes_back_to_the_budget(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert drive.allocate(3 * MIB) is None, "more than the budget"

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(UnlinkedFile, "grow", refuse)
    assert drive.allocate(MIB) is None and drive.health is Health.FULL
    assert drive._space.take(4 * MIB, PAGE) == 2 * MIB


class InPieces:
    """A view of plain bytes through a buffer of one page that notes what becomes of each piece."""

    piece_bytes = PAGE

    def __init__(self, body: bytes) -> None:
        self.body = bytearray(body)
        self.ended: list[object] = []  # the first byte of each piece that the drive is done with

    def pieces_to_write(self, start: int, num_bytes: int) -> Iterator[memoryview]:
        for at in range(start, start + num_bytes, PAGE):
            buffer = bytearray(self.body[at : at + PAGE])
            yield memoryview(buffer)
            buffer[:] = bytes(PAGE)
            self.ended.append(self.body[at])

    def pieces_to_fill(self, start: int, num_bytes: int) -> Iterator[memoryview]:
        try:
            for at in range(start, start + num_bytes, PAGE):
                buffer = bytearray(PAGE)
                yield memoryview(buffer)
                self.body[at : at + PAGE] = buffer
                self.ended.append(buffer[0])
        finally:
            self.ended.append("closed")

    def check(self) -> None:
        raise AssertionError("nothing has failed")


def test_a_drive_moves_piece_by_piece_and_passes_on_what_is_right(drive: Drive) -> None:
    body = b"".join(bytes([value]) * PAGE for value in (1, 2, 3))
    extent, source = drive.allocate(3 * PAGE), InPieces(body)
    other = drive.allocate(PAGE)
    assert extent is not None and other is not None
    drive.begin_write(InPieces(bytes([9]) * PAGE), 0, other, None).wait()
    drive.begin_write(source, 0, extent, None).wait()
    assert source.ended == [1, 2, 3]
    target = InPieces(bytes(3 * PAGE))
    drive.begin_read(target, 0, extent, None, 0.0).wait()
    assert target.ended == [1, 2, 3, "closed"] and target.body == body
    assert drive.statistics.writes.total_bytes == 4 * PAGE
    assert drive.statistics.reads.total_bytes == 3 * PAGE
    os.pwrite(drive.file.fd, b"\7", extent.offset + PAGE + 17)  # type: ignore[attr-defined]
    again = InPieces(bytes(3 * PAGE))
    with pytest.raises(OSError, match="checksum mismatch") as raised:
        drive.begin_read(again, 0, extent, None, 0.0).wait()
    assert raised.value.errno == errno.EBADMSG
    assert again.ended == [1, "closed"] and again.body == body[:PAGE] + bytes(2 * PAGE)


def test_the_read_that_is_needed_first_goes_first(make_tier: Tiers) -> None:
    tier = make_tier(num_threads=1)
    blocks = [written(tier, storage_of(PAGE, value)) for value in range(3)]
    gate, order = threading.Event(), []
    threads: IoThreads = tier.drives[0]._threads
    threads.submit_read(gate.wait, float("-inf"))
    reads = [
        tier.begin_read(blocks[value], deadline)[1]
        for value, deadline in ((0, 3.0), (1, float("-inf")), (2, 2.0))
    ]
    for value, transfer in enumerate(reads):
        transfer.add_done_callback(lambda _, value=value: order.append(value))  # type: ignore[misc]
    gate.set()
    for transfer in reads:
        transfer.wait()
    wait_until(lambda: len(order) == 3, "a read did not end")
    assert order == [1, 2, 0]


@pytest.mark.parametrize(
    ("num_disks", "asked_for", "num_threads"),
    [(1, None, 4), (4, None, 16), (24, None, 32), (4, 2, 2)],
)
def test_threads_follow_the_disks_that_a_directory_is_on(
    make_tier: Tiers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_disks: int,
    asked_for: int | None,
    num_threads: int,
) -> None:
    monkeypatch.setattr("megatron.offload.tiers.ssd.num_disks", lambda _: num_disks)
    with caplog.at_level(logging.INFO):
        tier = make_tier(2, num_threads=asked_for, device=SimulatedDevice())
    for drive in tier.drives:
        assert len(drive._threads._threads) == num_threads
    assert tier._staging is not None
    more = min(num_threads, 4)  # that are copied from
    assert tier._staging.size_bytes == 2 * (num_threads + more) * PIECE_BYTES
    said = [message for message in caplog.messages if f"gets {num_threads} I/O threads" in message]
    assert len(said) == (2 if num_disks > 1 and asked_for is None else 0)
