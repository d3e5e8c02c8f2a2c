# SPDX-License-Identifier: Apache-2.0
"""Files that others may read at any moment: `write_atomically`, `sync_files`, `check_place`."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Writes the file, in folders made for it; a reader finds all of it or none. Raises OSError.

    That holds after a power failure too: the disk has the text before the file has its name. Until
    it is whole it has a name that cannot be guessed, and is no file that was there before: in a
    folder that others may write to, that could be a link to any file. What fails leaves nothing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}")
    number = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(number, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
            file.flush()
            os.fsync(number)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def sync_files(folder: Path) -> None:
    """Returns once the disk has the files of a folder, and their names. Raises OSError."""
    for path in (*folder.iterdir(), folder):
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def check_place(path: Path) -> None:
    """Raises OSError if there is no place for such a file; its folders need not be there yet."""
    directory = path.parent
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory")
    if not directory.is_dir():
        raise NotADirectoryError(f"{directory} is a file")
    if not os.access(directory, os.W_OK):
        raise PermissionError(f"{directory} cannot be written to")
