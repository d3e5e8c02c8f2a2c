# SPDX-License-Identifier: Apache-2.0
"""tools/check/soak.py: tiny runs, and that it notices what it is there to notice."""

from __future__ import annotations

import errno
import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from check import soak as soaking

from megatron.offload.sizes import GIB, MIB
from megatron.offload.tiers.file import UnlinkedFile


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    """The soak runs torch on one thread."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def soak(tmp_path: Path, *more: str) -> int:
    """The tool's exit code after writing and reading a few MiB."""
    flags = ["--directory", str(tmp_path / "drive"), "--total", "64MiB", "--window", "16MiB"]
    flags += ["--storage-bytes", "1MiB", "--json", str(tmp_path / "soak.json"), *more]
    return soaking.main(flags)


@pytest.mark.parametrize(
    "flags", [[], ["--verify", "--inflight", "4MiB", "--margin", "10000"], ["--host-budget=8MiB"]]
)
def test_a_tiny_soak(tmp_path: Path, flags: list[str]) -> None:
    assert soak(tmp_path, *flags) == 0
    result = json.loads((tmp_path / "soak.json").read_text())
    assert result["passed"]
    assert result["written_bytes"] == result["read_bytes"] == 64 * MIB
    assert result["largest_free_bytes"] == result["file_bytes"] >= 16 * MIB


def test_soak_notices_one_wrong_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = UnlinkedFile.read

    def corrupt(self: UnlinkedFile, body: Any, offset: int) -> None:
        read(self, body, offset)
        body[len(body) // 2] ^= 1

    monkeypatch.setattr(UnlinkedFile, "read", corrupt)
    assert soak(tmp_path) == 1
    shown = capsys.readouterr().out
    assert "other bytes came back" in shown
    assert shown.endswith("FAIL\n")


def test_soak_reports_a_failed_transfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: UnlinkedFile, body: Any, offset: int) -> None:
        raise OSError(errno.EIO, "the drive is gone")

    monkeypatch.setattr(UnlinkedFile, "write", fail)
    assert soak(tmp_path) == 1
    assert "the drive is gone" in capsys.readouterr().out


def test_soak_fails_beyond_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = soaking.ResidentMemory
    for growth_bytes, exit_code in ((67 * MIB, 0), (68 * MIB, 1)):
        monkeypatch.setattr(watch, "growth_bytes", lambda _, n=growth_bytes: n)
        assert soak(tmp_path, "--inflight", "64MiB") == exit_code
    assert "memory grew by 68 MiB, expected at most 67.2 MiB" in capsys.readouterr().out


def test_memory_that_was_given_back_is_seen() -> None:
    memory = soaking.ResidentMemory()
    with mmap.mmap(-1, 64 * MIB) as block:  # an allocator may have as much to hand
        block.write(b"1" * (64 * MIB))
    assert memory.growth_bytes() >= 60 * MIB


def test_every_storage_differs() -> None:
    content = soaking.Content(MIB, seed=1)
    storages = [content.make(index) for index in range(3)]
    assert content.matches(2, storages[2])
    assert not any(content.matches(index, storages[2]) for index in (0, 1, 3))
    assert not soaking.Content(MIB, seed=2).matches(2, storages[2])


@pytest.mark.parametrize(
    "flags", [["--storage-bytes", "12"], ["--window", "1KiB"], ["--total", "much"]]
)
def test_soak_refuses_bad_flags(tmp_path: Path, flags: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        soak(tmp_path, *flags)
    assert stop.value.code == 2


def test_defaults_are_the_documented_ones() -> None:
    args = soaking.make_parser().parse_args([])
    assert (args.total, args.window, args.inflight) == (100 * 10**9, GIB, 512 * MIB)
