# SPDX-License-Identifier: Apache-2.0
"""Files that are there whole or not at all, also where others may write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.offload.activations.placement import atomic_file
from megatron.offload.activations.placement.atomic_file import (
    sync_files,
    write_atomically,
)


def test_a_file_is_replaced_whole_in_folders_made_for_it(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "plan.json"
    mask = os.umask(0o027)
    try:
        for text in ("first", "second, longer\n"):
            write_atomically(path, text)
            assert path.read_text() == text
    finally:
        os.umask(mask)
    assert os.listdir(path.parent) == ["plan.json"]
    assert path.stat().st_mode & 0o777 == 0o640


def test_what_others_put_there_before_is_never_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others who may write to the folder guess the name, and make it a link."""
    victim, path = tmp_path / "victim", tmp_path / "shared" / "plan.json"
    victim.write_text("precious")
    path.parent.mkdir()
    for name in (f"plan.json.{os.getpid()}", "plan.partial"):
        os.symlink(victim, path.parent / name)
    write_atomically(path, "text")
    assert victim.read_text() == "precious" and path.read_text() == "text"
    # Whatever the name is: one that is there is not opened.
    monkeypatch.setattr(atomic_file.secrets, "token_hex", lambda _: "known")
    os.symlink(victim, path.parent / ".plan.json.known")
    with pytest.raises(FileExistsError):
        write_atomically(path, "other")
    assert victim.read_text() == "precious" and path.read_text() == "text"


def test_what_fails_leaves_the_former_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    write_atomically(path, "former")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert os.listdir(tmp_path) == ["plan.json"] and path.read_text() == "former"


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Inode and size of each file, as it is when `fsync` is called for it."""
    found: list[tuple[int, int]] = []

    def fsync(number: int) -> None:
        status = os.fstat(number)
        found.append((status.st_ino, status.st_size))

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def test_the_disk_has_a_text_before_its_file_has_the_name(
    tmp_path: Path, synced: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_replace: list[list[tuple[int, int]]] = []
    replace = Path.replace

    def noting(self: Path, target: Path) -> Path:
        at_replace.append(list(synced))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", noting)
    write_atomically(tmp_path / "plan.json", "text")
    assert at_replace == [[((tmp_path / "plan.json").stat().st_ino, 4)]]


def test_all_files_of_a_folder_are_synced_and_then_their_names(
    tmp_path: Path, synced: list[tuple[int, int]]
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    sync_files(tmp_path)
    inodes = [inode for inode, _ in synced]
    assert sorted(inodes[:-1]) == sorted(one.stat().st_ino for one in tmp_path.iterdir())
    assert inodes[-1] == tmp_path.stat().st_ino
