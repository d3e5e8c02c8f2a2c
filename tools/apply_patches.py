#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Puts the calls to megatron-offload into the source of a megatron-core, or takes them out again.

    apply_patches.py --check  ~/Megatron-LM        says what is there; changes nothing
    apply_patches.py --apply  ~/Megatron-LM        all files or none; a second time does nothing
    apply_patches.py --revert ~/Megatron-LM        every byte as it was before

TARGET is a Megatron-LM checkout or a site-packages directory with megatron-core in it:
    python -c 'import megatron.core; print(megatron.core.__file__.rpartition("/megatron/")[0])'
A file must have the SHA-256 that patches/VERSION/sources.json names. With --force a file with local
changes will do, as long as the lines before and after each added one stand at the expected place.
Nothing of megatron-core is imported. Exit codes: 0 done, or nothing to do; 1 --check found that the
patches do not fit; 2 usage, or refused.
"""

from __future__ import annotations

import argparse
import enum
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PATCHES = Path(__file__).resolve().parent.parent / "patches"

_HUNK = re.compile(r"@@ -(\d+),0 \+\d+(?:,(\d+))? @@")


class Refused(Exception):
    """The target cannot be patched; the message is the sentence to print."""


@dataclass(frozen=True)
class Insertion:
    """Lines that a patch adds, and where."""

    after: int  # the number, from 1, of the line of the original file that they follow
    lines: list[bytes]
    neighbours: tuple[bytes, bytes]  # the original lines before and after them


class State(enum.Enum):
    """What a file of the target is; a known file is one that megatron-core has released."""

    ORIGINAL = "not patched"
    CHANGED = "not patched, with local changes"
    PATCHED = "patched"
    PATCHED_CHANGED = "patched, with local changes"
    UNKNOWN = "changed where the patch belongs"

    @property
    def is_patched(self) -> bool:
        """Whether a file has our lines in it."""
        return self in (State.PATCHED, State.PATCHED_CHANGED)

    @property
    def is_changed(self) -> bool:
        """Whether it takes `--force` to write it."""
        return self in (State.CHANGED, State.PATCHED_CHANGED)


@dataclass(frozen=True)
class Patch:
    """What a patch does to one file."""

    file: str  # relative to the target
    insertions: list[Insertion]
    hashes: list[str]  # SHA-256 of the known original files

    def applied(self, content: bytes) -> bytes:
        """An unpatched file's text with our lines added."""
        lines = content.split(b"\n")
        for insertion in reversed(self.insertions):
            lines[insertion.after : insertion.after] = insertion.lines
        return b"\n".join(lines)

    def reverted(self, content: bytes) -> bytes | None:
        """A patched file without our lines; None if one of them is not in its place."""
        lines = content.split(b"\n")
        for insertion in self.insertions:  # the lines of those before are gone by now
            end = insertion.after + len(insertion.lines)
            if lines[insertion.after : end] != insertion.lines:
                return None
            del lines[insertion.after : end]
        return b"\n".join(lines)

    def state(self, content: bytes) -> State:
        """What a file with this content is."""
        reverted = self.reverted(content)
        original = content if reverted is None else reverted
        if not self._has_neighbours(original):
            return State.UNKNOWN
        if hashlib.sha256(original).hexdigest() in self.hashes:
            return State.ORIGINAL if reverted is None else State.PATCHED
        return State.CHANGED if reverted is None else State.PATCHED_CHANGED

    def _has_neighbours(self, original: bytes) -> bool:
        lines = original.split(b"\n")
        return all(
            tuple(lines[insertion.after - 1 : insertion.after + 1]) == insertion.neighbours
            for insertion in self.insertions
        )


def read_patches(folder: Path) -> list[Patch]:
    """The patches of one version, by file name.

    Raises:
        ValueError: a patch does more than add lines, or `sources.json` does not belong to it.
    """
    sources = json.loads((folder / "sources.json").read_text())
    patches = [_read_patch(path, sources) for path in sorted(folder.glob("*.patch"))]
    if sorted(patch.file for patch in patches) != sorted(sources):
        raise ValueError(f"{folder}: sources.json names other files than the patches")
    return patches


def _read_patch(path: Path, sources: Mapping[str, dict[str, object]]) -> Patch:
    _, start, body = path.read_text().partition("--- a/")
    file, *lines = body.splitlines()
    if not start or not lines or lines.pop(0) != f"+++ b/{file}":
        raise ValueError(f"{path}: no header")
    hashes, neighbours = sources[file]["sha256"], sources[file]["neighbours"]
    assert isinstance(hashes, list) and isinstance(neighbours, dict)
    insertions = []
    while lines:
        hunk = _HUNK.match(header := lines.pop(0))
        if hunk is None:
            raise ValueError(f"{path}: expected a hunk that only adds lines, got {header!r}")
        length = int(hunk[2] or 1)
        added, lines = lines[:length], lines[length:]
        if len(added) < length or not all(line.startswith("+") for line in added):
            raise ValueError(f"{path}: {header!r} is not followed by {length} added lines")
        before, after = neighbours[hunk[1]]
        insertions.append(
            Insertion(
                after=int(hunk[1]),
                lines=[line[1:].encode() for line in added],
                neighbours=(before.encode(), after.encode()),
            )
        )
    return Patch(file, insertions, hashes)


def find_version(target: Path) -> str:
    """The version of the megatron-core in a directory; nothing of it is imported."""
    path = target / "megatron" / "core" / "package_info.py"
    fields = dict(
        re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) = ['\"]?(\w*)", path.read_text(), re.M)
    )
    try:
        return "{MAJOR}.{MINOR}.{PATCH}{PRE_RELEASE}".format(**fields)
    except KeyError:
        raise Refused(
            f"{path} names no version; expected that of a megatron-core release"
        ) from None


def patches_for(target: Path) -> list[Patch]:
    """The patches for the megatron-core in a directory.

    Raises:
        Refused: there are none for its version.
    """
    version = find_version(target)
    known = sorted(path.parent.name for path in PATCHES.glob("*/sources.json"))
    if version not in known:
        raise Refused(
            f"{target} has megatron-core {version}; there are patches for {', '.join(known)}; "
            "check that version out or install it"
        )
    return read_patches(PATCHES / version)


def read_files(target: Path, patches: Sequence[Patch]) -> list[bytes]:
    """What the files of the patches hold.

    Raises:
        Refused: one of them cannot be read.
    """
    contents = []
    for patch in patches:
        try:
            contents.append((target / patch.file).read_bytes())
        except OSError as error:
            raise Refused(
                f"{patch.file} of {target} cannot be read ({error.strerror}); "
                "the patches need a complete megatron-core"
            ) from None
    return contents


def check(target: Path) -> None:
    """Prints the state of each file.

    Raises:
        Refused: the patches cannot be applied without `--force`, or at all.
    """
    patches = patches_for(target)
    states = [
        patch.state(content)
        for patch, content in zip(patches, read_files(target, patches), strict=True)
    ]
    for patch, state in zip(patches, states, strict=True):
        print(f"{patch.file}: {state.value}")
    for patch, state in zip(patches, states, strict=True):
        if state is State.UNKNOWN or state is State.CHANGED:
            raise Refused(_why_not(patch, state))


def change(target: Path, *, apply: bool, force: bool) -> None:
    """Applies or reverts the patches in all files, or in none.

    Raises:
        Refused: a file is not as expected; nothing was written.
    """
    patches = patches_for(target)
    new: dict[Path, tuple[bytes, bytes]] = {}
    for patch, content in zip(patches, read_files(target, patches), strict=True):
        state = patch.state(content)
        if state is State.UNKNOWN:
            raise Refused(_why_not(patch, state))
        if state.is_patched == apply:
            print(f"{patch.file}: {state.value} already")
            continue
        if state.is_changed and not force:
            raise Refused(_why_not(patch, state))
        result = patch.applied(content) if apply else patch.reverted(content)
        assert result is not None
        new[target / patch.file] = content, result
    try:
        replace_all(new)
    except OSError as error:
        raise Refused(
            f"{error.filename or target} could not be written ({error.strerror}); "
            "all files are as they were"
        ) from None
    for path in new:
        print(f"{path.relative_to(target)}: {'patched' if apply else 'as before the patch'}")


def _why_not(patch: Patch, state: State) -> str:
    if state is State.UNKNOWN:
        return (
            f"{patch.file} has other lines than the release where the patch belongs; expected the "
            "release's; add the patch's lines by hand (patches/README.md)"
        )
    return (
        f"{patch.file} has local changes; expected the file of the release; "
        "--force leaves them as they are and adds or removes only the lines of the patch"
    )


def replace_all(files: Mapping[Path, tuple[bytes, bytes]]) -> None:
    """Replaces the files' contents, given as (old, new), in all of them or in none.

    A process killed between two files leaves one changed; the same call again changes the rest.

    Raises:
        OSError: one could not be written; all have their old contents.
        Refused: one could not be written, and another could not be put back.
    """
    prepared: dict[Path, Path] = {}
    replaced: list[Path] = []
    try:
        for path, (_, content) in files.items():
            prepared[path] = _write_beside(path, content)
        for path, temporary in prepared.items():
            os.replace(temporary, path)
            replaced.append(path)
    except BaseException:
        for path in replaced:
            try:
                os.replace(_write_beside(path, files[path][0]), path)
            except OSError as error:
                raise Refused(
                    f"{path} is changed, another file is not, and it could not be put back "
                    f"({error.strerror}); make room or permit writing, and run the same again"
                ) from error
        raise
    finally:
        for temporary in prepared.values():
            temporary.unlink(missing_ok=True)


def _write_beside(path: Path, content: bytes) -> Path:
    """A new file in the same directory with this content and the permissions of `path`."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(path, name)
    except BaseException:
        os.unlink(name)
        raise
    return Path(name)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="apply_patches.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="say what is there; change nothing")
    action.add_argument("--apply", action="store_true", help="add the lines of the patches")
    action.add_argument("--revert", action="store_true", help="remove them again")
    parser.add_argument("--force", action="store_true", help="also in files with local changes")
    parser.add_argument("target", metavar="TARGET", type=Path, help="has megatron/core in it")
    options = parser.parse_args(arguments)
    if options.force and options.check:
        parser.error("--force goes with --apply or --revert; --check changes nothing")
    if not (options.target / "megatron" / "core" / "package_info.py").is_file():
        parser.error(
            f"{options.target} has no megatron/core/package_info.py; "
            "name a Megatron-LM checkout or a site-packages directory with megatron-core"
        )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what the command line says; returns the exit code."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        if options.check:
            check(options.target)
        else:
            change(options.target, apply=options.apply, force=options.force)
    except Refused as error:
        print(f"apply_patches: {error}", file=sys.stderr)
        return 1 if options.check else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
