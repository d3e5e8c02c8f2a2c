# SPDX-License-Identifier: Apache-2.0
"""The file that activations live in: errors that come late, growth that fails, the end."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from megatron.offload.errors import ConfigurationError
from megatron.offload.tiers import file as file_module
from megatron.offload.tiers.file import UnlinkedFile
from megatron.offload.tiers.purpose import ACTIVATIONS, PARAMETERS, STATES, Purpose

PAGE = 4096


def test_a_write_that_the_disk_refuses_later_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = UnlinkedFile(tmp_path, "buffered")
    file.grow(2 * PAGE)
    file.write(memoryview(bytes(PAGE)), 0)

    def refuse(fd: int, offset: int, num_bytes: int, flags: int) -> int:
        return errno.EIO if flags == file_module._START_AND_WAIT else 0

    monkeypatch.setattr(file_module, "_sync_file_range", refuse)
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output error") as raised:
            file.write(memoryview(bytes(PAGE)), PAGE)
        assert raised.value.errno == errno.EIO
    file.close()


def test_a_file_that_could_not_grow_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = UnlinkedFile(tmp_path)
    file.grow(PAGE)

    def fill_the_disk(fd: int, offset: int, num_bytes: int) -> None:
        os.ftruncate(fd, offset + num_bytes // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fill_the_disk)
    with pytest.raises(OSError, match="No space left"):
        file.grow(8 * PAGE)
    assert file.size_bytes == os.fstat(file.fd).st_size == PAGE
    file.close()


def test_a_closed_file_is_no_longer_its_number(tmp_path: Path) -> None:
    file = UnlinkedFile(tmp_path, "buffered")
    number = file.fd
    file.close()
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    assert other == number, "the system reuses the lowest number"
    with pytest.raises(OSError):
        file.write(memoryview(bytes(PAGE)), 0)
    assert os.fstat(other).st_size == 0
    os.close(other)


@pytest.mark.parametrize("io", ["buffered", "auto"])
def test_without_o_tmpfile_a_name_that_others_make_a_link_is_not_followed(
    io: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, directory = tmp_path / "victim", tmp_path / "shared"
    victim.write_text("precious")
    directory.mkdir()
    open_file, make = os.open, file_module.tempfile.mkstemp

    def refuse_tmpfile(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE")
        return open_file(path, flags, *rest, **more)

    def make_and_swap(**options: Any) -> tuple[int, str]:
        """What another process does that may rename in the directory."""
        fd, name = make(**options)
        os.rename(name, directory / "stolen")
        os.symlink(victim, name)
        return fd, name

    monkeypatch.setattr(os, "open", refuse_tmpfile)
    monkeypatch.setattr(file_module.tempfile, "mkstemp", make_and_swap)
    file = UnlinkedFile(directory, io)
    file.grow(PAGE)
    file.close()
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("purpose", [ACTIVATIONS, STATES, PARAMETERS])
def test_a_trial_write_that_fails_names_the_directory_and_whose_it_is(
    purpose: Purpose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", refuse)
    with pytest.raises(ConfigurationError) as refused:
        UnlinkedFile(tmp_path, "auto", purpose)
    assert str(refused.value) == (
        f"{purpose.prefix}a trial write in {tmp_path} failed: No space left on device; free some "
        f"space, or choose another disk with {purpose.flag('dir')}"
    )
