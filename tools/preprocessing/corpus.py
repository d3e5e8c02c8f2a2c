# SPDX-License-Identifier: Apache-2.0
"""Where text comes from: `Corpus`, a list of files read as documents.

`preprocess_data.py` goes through a corpus twice, for the tokenizer and for the encoding. Nothing
here knows of tokens.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


class InputError(Exception):
    """Something that the user can put right; the message is the sentence to print."""


@dataclass(frozen=True)
class Document:
    """One document of one source file."""

    key: str
    text: str


@dataclass
class Corpus:
    """The source files and what is counted while reading them."""

    files: list[Path]
    json_keys: list[str]
    max_bytes: int | None
    num_bytes: int = 0
    num_not_utf8: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes that one pass reads at most, for progress and sampling."""
        total = sum(path.stat().st_size for path in self.files)
        return total if self.max_bytes is None else min(total, self.max_bytes)

    @property
    def keys(self) -> list[str]:
        """Keys that documents carry: one output pair is written for each."""
        keys = set(self.json_keys) if any(_is_jsonl(path) for path in self.files) else set()
        if any(not _is_jsonl(path) for path in self.files):
            keys.add("text")
        return sorted(keys)

    def documents(self) -> Iterator[Document]:
        """Every non-empty document, in sorted file order; restarts the counters.

        Raises:
            InputError: A jsonl line is not JSON or lacks a key.
        """
        self.num_bytes = self.num_not_utf8 = 0
        for document, size in self._read():
            if self.max_bytes is not None and self.num_bytes + size > self.max_bytes:
                return
            self.num_bytes += size
            if document.text:
                yield document

    def _read(self) -> Iterator[tuple[Document, int]]:
        """Documents and their sizes in bytes, in sorted file order."""
        for path in self.files:
            yield from self._jsonl_documents(path) if _is_jsonl(path) else self._document(path)

    def _document(self, path: Path) -> Iterator[tuple[Document, int]]:
        content = path.read_bytes()
        try:
            yield Document("text", content.decode("utf-8")), len(content)
        except UnicodeDecodeError:
            self.num_not_utf8 += 1

    def _jsonl_documents(self, path: Path) -> Iterator[tuple[Document, int]]:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as error:  # RecursionError: nested deeply
                    raise InputError(f"{path}, line {number}: not JSON ({error})") from None
                for key in self.json_keys:
                    text = record.get(key) if isinstance(record, dict) else None
                    if not isinstance(text, str):
                        raise InputError(
                            f"{path}, line {number}: no text under the key {key!r}; "
                            "name the right one with --json-keys"
                        )
                    yield Document(key, text), len(text.encode("utf-8", "surrogatepass"))


def _is_jsonl(path: Path) -> bool:
    return path.suffix in (".jsonl", ".json")


def find_files(args: argparse.Namespace) -> list[Path]:
    """Lists the source files that the flags name.

    Raises:
        InputError: A path does not exist or no file matches.
    """
    suffixes = tuple(part.strip() for part in args.suffix.split(",") if part.strip())
    excluded = set(args.exclude_dir)
    files: list[Path] = []
    for path in map(Path, args.input):
        if path.is_file():
            files.append(path)
        elif path.is_dir():
            found = [
                Path(folder) / name
                for folder, folders, names in _walk(path, excluded)
                for name in names
                if name.endswith(suffixes)
            ]
            files.extend(sorted(file for file in found if file.is_file()))
        else:
            raise InputError(f"input not found: {path}")
    if not files:
        raise InputError(
            f"empty corpus: no file ending in {args.suffix} under {' '.join(args.input)}; "
            "choose the endings with --suffix"
        )
    return files


def _walk(root: Path, excluded: set[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in excluded]
        yield folder, folders, names
