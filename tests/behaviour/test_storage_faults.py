# SPDX-License-Identifier: Apache-2.0
"""Invariant 6 on drives that fail: results stay bit-identical or training stops with a sentence.

The faults are the kernel's own where root may mount a file system, and come from a stand-in in any
case. A write fault never changes a result; a read fault or a flipped bit is never silent.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import OffloadEngine, StorageError
from megatron.offload.sizes import MIB
from megatron.offload.tiers.drive import Extent, Health
from megatron.offload.tiers.file import UnlinkedFile
from tests.support.models import Model, assert_same, model_and_input, run_step, settle, ssd
from tests.support.mounts import flip_a_bit, mounted_ext4
from tests.support.processes import finish, start_python

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("one_compute_thread")]

Engines = Callable[..., OffloadEngine]


@dataclass
class FailingDisk:
    """A directory whose drive takes no more writes after `fail`; what it has can still be read."""

    path: Path
    io: str
    fail: Callable[[], None]


def stand_in(path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> FailingDisk:
    """After `fail`, every write to files in `path` ends in this error number."""
    write, broken = UnlinkedFile.write, []

    def failing(self: UnlinkedFile, body: memoryview, offset: int) -> None:
        if broken and self.directory == path:
            raise OSError(number, os.strerror(number))
        write(self, body, offset)

    monkeypatch.setattr(UnlinkedFile, "write", failing)
    return FailingDisk(path, "buffered", lambda: broken.append(True))


@pytest.fixture(
    params=["broken device, direct", "broken device, buffered", "read-only ext4", "stand-in"]
)
def failing_disk(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FailingDisk]:
    """A device that fails (EIO), a file system that goes read-only (EROFS), a stand-in (EIO)."""
    if request.param == "stand-in":
        yield stand_in(tmp_path, errno.EIO, monkeypatch)
    elif request.param == "read-only ext4":
        with mounted_ext4(tmp_path, 48 * MIB) as disk:
            yield FailingDisk(disk.path, disk.io, disk.refuse_writes)
    else:
        # The inner device is a file of the outer file system: when that one goes read-only, the
        # device fails every write, below the inner file system.
        io = request.param.split(", ")[1]
        with mounted_ext4(tmp_path, 64 * MIB) as outer, mounted_ext4(outer.path, 48 * MIB) as inner:
            yield FailingDisk(inner.path, io, outer.refuse_writes)


def assert_failed(engine: OffloadEngine, caplog: pytest.LogCaptureFixture) -> None:
    """One warning; nothing is written any more, and nothing leaks."""
    (drive,) = ssd(engine).drives
    assert drive.health is Health.FAILED and ssd(engine).degraded
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert f"{drive.directory}: " in warnings[0] and "nothing is lost" in warnings[0]
    assert "check the disk" in warnings[0]
    assert engine.statistics.tier_used_bytes == 0


def test_writes_that_fail_between_steps_change_nothing(
    failing_disk: FailingDisk, make_engine: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = model_and_input()
    engine = make_engine(directories=(failing_disk.path,), io=failing_disk.io)
    run_step(model, x, engine)
    assert not ssd(engine).degraded
    failing_disk.fail()
    for factor in (2, 3):  # other bytes than the drive still has from the step before
        assert_same(run_step(model, x * factor, engine), run_step(model, x * factor))
        assert_failed(engine, caplog)
    assert engine.statistics.written_bytes == 0
    assert ssd(engine).statistics.failed_writes > 0


def test_writes_that_fail_in_mid_forward_change_nothing(
    failing_disk: FailingDisk, make_engine: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = model_and_input()
    engine = make_engine(directories=(failing_disk.path,), io=failing_disk.io)
    run_step(model, x, engine)  # the file has grown: only writes are left to fail
    x = 2 * x  # other bytes than the drive still has
    plain = run_step(model, x)

    def fail(*_: object) -> None:
        settle(engine)
        failing_disk.fail()

    hook = model.blocks[1].register_forward_hook(fail)
    assert_same(run_step(model, x, engine), plain)
    assert_failed(engine, caplog)
    assert engine.statistics.read_bytes > 0, "what was written before can still be read"
    hook.remove()
    assert_same(run_step(model, x, engine), plain)
    assert_failed(engine, caplog)


@pytest.fixture(params=["ext4", "stand-in"])
def two_disks(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[FailingDisk, Path]]:
    """A disk that will fail, and a directory on one that will not."""
    own, other = tmp_path / "failing", tmp_path / "sound"
    own.mkdir()
    other.mkdir()
    if request.param == "stand-in":
        yield stand_in(own, errno.EIO, monkeypatch), other
    else:
        with mounted_ext4(own, 64 * MIB) as failing, mounted_ext4(other, 96 * MIB) as sound:
            yield FailingDisk(failing.path, failing.io, failing.refuse_writes), sound.path


def wide_model_and_input() -> tuple[Model, torch.Tensor]:
    """Saves storages of more than 8 MiB. The first is striped over two drives in halves: nothing
    waits there yet, and neither is known to be slower."""
    return Model(hidden=128, num_layers=1), torch.randn(16, 260, 128)


@pytest.mark.usefixtures("equally_fast")
def test_when_one_of_two_disks_fails_the_other_goes_on(
    two_disks: tuple[FailingDisk, Path], make_engine: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    failing, sound = two_disks
    model, x = wide_model_and_input()
    engine = make_engine(directories=(failing.path, sound), min_bytes=8 * MIB)
    extents = note_extents(engine)
    run_step(model, x, engine)
    check_striped(extents[0])
    failing.fail()
    for factor in (2, 3):
        assert_same(run_step(model, factor * x, engine), run_step(model, factor * x))
    assert [drive.health for drive in ssd(engine).drives] == [Health.FAILED, Health.GOOD]
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
    assert engine.statistics.rejected_bytes == 0, "the other one takes it all"
    assert engine.statistics.written_bytes > 0.9 * engine.statistics.offloaded_bytes
    assert engine.statistics.tier_used_bytes == 0


def note_extents(engine: OffloadEngine) -> list[list[Extent]]:
    """From now on, where each storage is written, in order."""
    tier, noted = ssd(engine), []
    begin_write = tier.begin_write

    def noting(*args: Any) -> Any:
        started = begin_write(*args)
        if started is not None:
            noted.append(list(started[0].extents))
        return started

    tier.begin_write = noting  # type: ignore[method-assign]
    return noted


def check_striped(extents: list[Extent]) -> None:
    """One half on either drive."""
    first, second = extents
    assert first.drive is not second.drive
    assert abs(first.num_bytes - second.num_bytes) <= 4096


@dataclass
class UnreadableDisk:
    """A directory whose drive loses what it has."""

    path: Path
    lose: Callable[[Extent], None]  # at least what this extent holds
    complaint: str  # what the error says


@pytest.fixture(params=["device", "truncated file", "stand-in"])
def unreadable_disk(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[UnreadableDisk]:
    """A device that fails every read (EIO), a file that ends early, a stand-in (EIO)."""
    io_error = f"[Errno {errno.EIO}] {os.strerror(errno.EIO)} "

    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def truncate(extent: Extent) -> None:
        os.ftruncate(extent.drive.file.fd, extent.offset + extent.num_bytes // 2)

    if request.param == "device":
        with mounted_ext4(tmp_path, 48 * MIB) as disk:
            yield UnreadableDisk(disk.path, lambda _: disk.lose_contents(), io_error)
    elif request.param == "truncated file":
        yield UnreadableDisk(tmp_path, truncate, "[Errno 5] short read: got ")
    else:
        fail = monkeypatch.setattr
        yield UnreadableDisk(tmp_path, lambda _: fail(os, "preadv", refuse), io_error)


def test_what_cannot_be_read_stops_training_and_names_the_place(
    unreadable_disk: UnreadableDisk, make_engine: Engines
) -> None:
    model, x = model_and_input()
    directory = unreadable_disk.path
    engine = make_engine(directories=(directory,))
    extents = note_extents(engine)
    with pytest.raises(StorageError) as raised:
        run_step(model, x, engine, between=lambda: unreadable_disk.lose(extents[-1][0]))
    message = str(raised.value)
    assert message.startswith("activation offload: rank 0 could not read an activation of ")
    place = ("layer ", f"file in {directory}, offset ", "length ")
    for part in (*place, unreadable_disk.complaint, "resume from the last checkpoint"):
        assert part in message, message
    assert "\n" not in message


UNREADABLE = """
    import os, pathlib, sys
    import torch
    from megatron.offload import OffloadConfig, OffloadEngine
    from tests.support.models import Model, run_step, ssd

    directory = pathlib.Path(sys.argv[1])
    config = OffloadConfig(mode="ssd", directories=(directory,), min_bytes=1)
    engine = OffloadEngine(config, rank=3)
    truncate = lambda: os.ftruncate(ssd(engine).drives[0].file.fd, 0)
    run_step(Model(), torch.randn(3, 65, 32), engine, between=truncate)
    print("went on")
"""


@pytest.mark.slow
def test_what_cannot_be_read_ends_the_process_with_a_sentence(tmp_path: Path) -> None:
    code, output, errors = finish(start_python(UNREADABLE, tmp_path))
    assert code == 1 and output == ""
    sentence = errors.splitlines()[-1]
    assert "activation offload: rank 3 could not read an activation of " in sentence
    assert f"file in {tmp_path}, offset " in sentence and "short read: got 0 of" in sentence


POSITIONS = pytest.mark.parametrize("number", [0, 1], ids=["first drive", "second drive"])
ENDS = pytest.mark.parametrize("at", [0, -1], ids=["first byte", "last byte"])


@POSITIONS
@ENDS
@pytest.mark.parametrize("io", ["auto", "buffered"])
def test_a_flipped_bit_is_found_by_the_checksum_and_by_nothing_else(
    number: int, at: int, io: str, make_engine: Engines, tmp_path: Path
) -> None:
    pytest.importorskip("xxhash")
    model, x = wide_model_and_input()
    directories = (tmp_path / "first", tmp_path / "second")
    for directory in directories:
        directory.mkdir()
    settings = {"directories": directories, "io": io, "min_bytes": 8 * MIB}

    def flip(extents: list[Extent]) -> None:
        check_striped(extents)
        flip_a_bit(extents[number], at % extents[number].num_bytes)

    careful = make_engine(**settings, verify="checksum")
    extents = note_extents(careful)
    with pytest.raises(StorageError, match="checksum mismatch") as raised:
        run_step(model, x, careful, between=lambda: flip(extents[0]))
    assert f"({extents[0][number]})" in str(raised.value)
    assert str(directories[number]) in str(raised.value)
    trusting = make_engine(**settings, verify="off")
    extents = note_extents(trusting)
    run_step(model, x, trusting, between=lambda: flip(extents[0]))


@pytest.mark.parametrize("what", ["removed", "renamed"])
def test_the_directory_may_go_while_training_runs(
    what: str, make_engine: Engines, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = model_and_input()
    directory = tmp_path / "activations"
    directory.mkdir()
    engine = make_engine(directories=(directory,))

    def go() -> None:
        if what == "removed":
            directory.rmdir()
        else:
            directory.rename(tmp_path / "elsewhere")

    assert_same(run_step(model, x[:2], engine, between=go), run_step(model, x[:2]))
    assert not directory.exists()
    before = ssd(engine).drives[0].file.size_bytes
    ssd(engine).drives[0].reserve(32 * MIB)
    assert_same(run_step(model, x, engine), run_step(model, x))
    assert ssd(engine).drives[0].file.size_bytes == before + 32 * MIB
    assert engine.statistics.rejected_bytes == 0 and not caplog.records
