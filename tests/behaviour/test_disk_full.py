# SPDX-License-Identifier: Apache-2.0
"""Invariant 6 on a disk without room: training goes on, and so does what fits.

Each promise is kept on a tmpfs and an ext4 that are really full (root may mount them) and on a
stand-in for machines where nothing can be mounted.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron.offload import OffloadEngine
from megatron.offload.sizes import MIB
from megatron.offload.tiers.drive import Health
from tests.support.models import Model, assert_same, model_and_input, run_step, ssd
from tests.support.mounts import MountedDisk, mounted_ext4, small_tmpfs
from tests.support.processes import finish, start_python
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("one_compute_thread")]

STEP_BYTES = 15 * MIB  # what a step of `model_and_input` offloads, about


@dataclass
class StandInDisk:
    """A directory in which files may take `room_bytes` together and no more."""

    path: Path
    monkeypatch: pytest.MonkeyPatch
    room_bytes: int
    io: str = "buffered"

    def __post_init__(self) -> None:
        fallocate = os.posix_fallocate

        def limited(fd: int, offset: int, num_bytes: int) -> None:
            inside = os.readlink(f"/proc/self/fd/{fd}").startswith(str(self.path))
            if inside and offset + num_bytes > self.room_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fallocate(fd, offset, num_bytes)

        self.monkeypatch.setattr(os, "posix_fallocate", limited)

    def fill(self) -> None:
        """No file may grow any more."""
        self.room_bytes = 0


Disk = MountedDisk | StandInDisk


@contextlib.contextmanager
def disk_with_room(
    kind: str, room_bytes: int, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Disk]:
    """An empty disk on which files may take so much, about."""
    if kind == "stand-in":
        yield StandInDisk(directory, monkeypatch, room_bytes)
    elif kind == "ext4, direct I/O":
        with mounted_ext4(directory, room_bytes + 5 * MIB) as disk:
            yield disk
    else:
        with small_tmpfs(directory, room_bytes) as disk:
            yield disk


KINDS = ["tmpfs, buffered I/O", "ext4, direct I/O", "stand-in"]


@pytest.fixture(params=KINDS)
def small_disk(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Disk]:
    """Room for about half of what a step offloads."""
    with disk_with_room(request.param, 8 * MIB, tmp_path, monkeypatch) as disk:
        yield disk


@pytest.fixture(params=KINDS)
def ample_disk(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Disk]:
    """Room for more than a step offloads, of which a file takes 16 MiB at first."""
    with disk_with_room(request.param, 24 * MIB, tmp_path, monkeypatch) as disk:
        yield disk


def assert_full(engine: OffloadEngine, caplog: pytest.LogCaptureFixture) -> None:
    """Degraded and said so once; what the file has is used, and nothing leaks."""
    (drive,) = ssd(engine).drives
    assert drive.health is Health.FULL and ssd(engine).degraded
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert f"{drive.directory} is full" in warnings[0] and "nothing is lost" in warnings[0]
    assert engine.statistics.written_bytes > 0, "what fits is still offloaded"
    assert engine.statistics.rejected_bytes > 0
    assert engine.statistics.tier_used_bytes == 0


def test_a_disk_smaller_than_a_step_takes_what_fits(
    small_disk: Disk, make_engine: Callable[..., OffloadEngine], caplog: pytest.LogCaptureFixture
) -> None:
    model, x = model_and_input()
    plain = run_step(model, x)
    engine = make_engine(directories=(small_disk.path,), io=small_disk.io)
    for _ in range(3):
        assert_same(run_step(model, x, engine), plain)
        assert_full(engine, caplog)
        assert engine.statistics.written_bytes >= STEP_BYTES // 4


def test_other_files_may_fill_the_disk_between_steps(
    small_disk: Disk, make_engine: Callable[..., OffloadEngine], caplog: pytest.LogCaptureFixture
) -> None:
    model, x = model_and_input()
    plain, plain_part = run_step(model, x), run_step(model, x[:2])
    engine = make_engine(directories=(small_disk.path,), io=small_disk.io)
    assert_same(run_step(model, x[:2], engine), plain_part)
    assert engine.statistics.rejected_bytes == 0 and not ssd(engine).degraded
    part_bytes = engine.statistics.written_bytes
    small_disk.fill()
    for _ in range(2):
        assert_same(run_step(model, x, engine), plain)
        assert_full(engine, caplog)
    assert_same(run_step(model, x[:2], engine), plain_part)
    assert engine.statistics.written_bytes > 0.9 * part_bytes, "the file's room is used again"


def test_other_files_may_fill_the_disk_in_mid_forward(
    ample_disk: Disk, make_engine: Callable[..., OffloadEngine], caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = model_and_input()
    x = torch.randn(12, 128, 64)  # newer releases of PyTorch save less of each
    plain, plain_part = run_step(model, x), run_step(model, x[:8])
    engine = make_engine(directories=(ample_disk.path,), io=ample_disk.io)
    (drive,) = ssd(engine).drives

    def fill_once_the_file_has_room(*_: object) -> None:
        wait_until(lambda: drive.extents.size_bytes > 0, "nothing was written")
        ample_disk.fill()

    fill = model.blocks[1].register_forward_hook(fill_once_the_file_has_room)
    assert_same(run_step(model, x, engine), plain)
    assert_full(engine, caplog)
    fill.remove()
    assert_same(run_step(model, x, engine), plain)
    assert_full(engine, caplog)
    assert_same(run_step(model, x[:8], engine), plain_part)


@pytest.fixture(params=["ext4", "stand-in"])
def small_and_roomy(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Disk, Path]]:
    """A disk that will soon be full, and a directory on another one."""
    other = tmp_path / "roomy"
    other.mkdir()
    if request.param == "stand-in":
        own = tmp_path / "small"
        own.mkdir()
        yield StandInDisk(own, monkeypatch, 8 * MIB), other
    else:
        with mounted_ext4(tmp_path, 12 * MIB) as small, mounted_ext4(other, 160 * MIB) as roomy:
            yield small, roomy.path


@pytest.mark.usefixtures("equally_fast")
def test_when_one_of_two_disks_is_full_the_other_goes_on(
    small_and_roomy: tuple[Disk, Path],
    make_engine: Callable[..., OffloadEngine],
    caplog: pytest.LogCaptureFixture,
) -> None:
    small, roomy = small_and_roomy
    model, x = Model(hidden=128, num_layers=2), torch.randn(16, 300, 128)
    plain = run_step(model, x)
    engine = make_engine(directories=(small.path, roomy), io="auto")
    for _ in range(2):
        assert_same(run_step(model, x, engine), plain)
    first, second = ssd(engine).drives
    assert (first.health, second.health) == (Health.FULL, Health.GOOD)
    assert sum("is full" in message for message in caplog.messages) == 1
    assert first.statistics.writes.total_bytes > 0, "what fits is still written there"
    assert engine.statistics.rejected_bytes == 0, "the other one takes the rest"
    assert engine.statistics.tier_used_bytes == 0


FILE_SIZE_LIMIT = """
    import json, logging, pathlib, resource, sys
    import torch
    from megatron.offload import OffloadConfig, OffloadEngine
    from tests.support.models import Model, assert_same, run_step, ssd

    def limit(num_bytes):
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

    messages = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("megatron.offload").addHandler(handler)
    config = OffloadConfig(mode="ssd", directories=(pathlib.Path(sys.argv[1]),), min_bytes=1)
    model, x = Model(hidden=64), torch.randn(8, 128, 64)
    plain = run_step(model, x)
    told = []
    for limit_bytes in (8 << 20, 1 << 20):  # the file may not grow; not even what it has counts
        engine = OffloadEngine(config)
        if limit_bytes == 1 << 20:
            assert_same(run_step(model, x, engine), plain)
        limit(limit_bytes)
        for _ in range(2):
            assert_same(run_step(model, x, engine), plain)
        told.append({
            "health": ssd(engine).drives[0].health.value,
            "written": engine.statistics.written_bytes,
            "rejected": engine.statistics.rejected_bytes,
            "messages": messages.copy(),
        })
        messages.clear()
        limit(resource.RLIM_INFINITY)
        engine.close()
    print(json.dumps(told))
"""


@pytest.mark.slow
def test_a_file_size_limit_is_like_a_full_disk_and_kills_nobody(tmp_path: Path) -> None:
    code, output, errors = finish(start_python(FILE_SIZE_LIMIT, tmp_path))
    assert code == 0, errors  # SIGXFSZ would end in a negative one
    grown, lowered = json.loads(output)
    assert grown["written"] > 0 and grown["rejected"] > 0
    assert lowered["written"] <= MIB  # writes into what the file has already fail beyond it
    for told in (grown, lowered):
        assert told["health"] == "full"
        assert len(told["messages"]) == 1 and "File too large" in told["messages"][0]
