# SPDX-License-Identifier: Apache-2.0
"""The file that activations live in: errors that come late, growth that fails, the end."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megatron.offload.tiers import file as file_module
from megatron.offload.tiers.file import UnlinkedFile

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
