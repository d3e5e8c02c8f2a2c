# SPDX-License-Identifier: Apache-2.0
"""Tiers that open only in part: what has opened by then is closed, and nothing of it stays."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.offload.activations.engine import OffloadEngine
from megatron.offload.activations.open import open_tiers
from megatron.offload.config import OffloadConfig
from megatron.offload.errors import ConfigurationError
from megatron.offload.sizes import MIB
from megatron.offload.tiers import io_threads as io_threads_module
from megatron.offload.tiers import ssd as ssd_module
from megatron.offload.tiers.file import UnlinkedFile
from megatron.offload.tiers.host import HostTier
from megatron.offload.tiers.ssd import SsdTier
from megatron.offload.tiers.staging import StagingPool
from tests.support.simulated_device import SimulatedDevice


def open_files() -> set[str]:
    """Descriptors of this process, and what they stand for."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:  # that of the listing itself
            continue
    return found


def own_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("activation-offload")}


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """No file and no thread of ours outlives a test."""
    files, threads = open_files(), own_threads()
    yield
    assert own_threads() == threads
    assert open_files() == files


def refuse_after(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system starts so many threads and no more."""
    start, started = threading.Thread.start, []

    def refusing(self: threading.Thread) -> None:
        started.append(self)
        if len(started) > number:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(io_threads_module.threading.Thread, "start", refusing)


def test_the_host_tier_is_closed_when_the_ssd_tier_does_not_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[HostTier] = []
    close = HostTier.close
    monkeypatch.setattr(HostTier, "close", lambda tier: (closed.append(tier), close(tier))[1])
    config = OffloadConfig(mode="tiered", directories=(tmp_path / "none",), host_budget=MIB)
    with pytest.raises(ConfigurationError, match="does not exist"):
        open_tiers(config, SimulatedDevice(), reserve_bytes=0, num_local_ranks=1)
    assert len(closed) == 1


def test_the_first_drive_is_closed_when_the_second_does_not_open(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        SsdTier([tmp_path, tmp_path / "none"], device=SimulatedDevice())


def test_drives_and_buffers_are_closed_when_there_are_no_staging_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> StagingPool:
        raise ConfigurationError("no address space")

    monkeypatch.setattr(ssd_module, "StagingPool", refuse)
    with pytest.raises(ConfigurationError, match="no address space"):
        SsdTier([tmp_path], device=SimulatedDevice())


@pytest.mark.parametrize("number", [0, 3])
def test_file_and_threads_end_when_the_system_starts_no_more_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    refuse_after(number, monkeypatch)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        SsdTier([tmp_path], num_threads=4)


@pytest.mark.parametrize("io", ["auto", "buffered"])
def test_a_file_is_closed_when_its_trial_write_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, io: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", refuse)
    with pytest.raises(ConfigurationError, match="a trial write in"):
        UnlinkedFile(tmp_path, io)


@pytest.mark.parametrize("setting", ["trace_file", "memory_report_file"])
def test_an_engine_is_closed_whose_files_cannot_be_written(setting: str, tmp_path: Path) -> None:
    config = OffloadConfig(
        mode="tiered",
        directories=(tmp_path,),
        host_budget=MIB,
        **{setting: tmp_path / "none" / "file"},  # type: ignore[arg-type]
    )
    with pytest.raises(ConfigurationError, match="cannot be written: No such file"):
        OffloadEngine(config)


@pytest.mark.parametrize("number", range(12))
def test_an_engine_is_closed_that_gets_too_few_threads(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_after(number, monkeypatch)
    config = OffloadConfig(mode="tiered", directories=(tmp_path,), host_budget=MIB, threads=4)
    try:
        OffloadEngine(config).close()
    except RuntimeError as error:
        assert "can't start new thread" in str(error)
