# SPDX-License-Identifier: Apache-2.0
"""Wrong waits, reuses and streams that the ordering stress has to find: `MISTAKES`, `made`.

`ordering_mistakes.tsv` has a row for each change to the package, as the tables of
`tests/mutation_tables` have: the mistake, the modes of the stress in which it shows (`_MODES`),
file, function, old text, new text. Several rows of one mistake are made together. Each is made in
the package's own lines, so that nothing else differs, and in this process: `made` compiles a
function anew and puts it in the place of the right one. A mistake that only makes training slow,
such as copies on the stream that computes, is none of these.
"""

from __future__ import annotations

import ast
import importlib
import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests.mutation_tables import PACKAGE, Mutation, rows_of

_ROOT = Path(__file__).resolve().parents[2]
_TABLE = Path(__file__).with_suffix(".tsv")
_COLUMNS = ["mistake", "modes", "file", "function", "old", "new"]
_DRIVE, _POOL = ("ssd", "tiered"), ("ssd, pinned", "tiered, pinned")
_WHOLE = ("host", *_POOL)  # storages that are copied in one piece
_MODES = {
    "in pieces": _DRIVE,
    "by the pool": _POOL,
    "whole": _WHOLE,
    "all": (*_WHOLE, *_DRIVE),
    "host memory": ("host", "tiered"),
    "boundary": ("boundary, ssd", "boundary, host"),
    "parameters": ("parameters, ssd", "parameters, host"),
    "states": ("states, ssd", "states, host"),
    "step on the host": ("states, step on the host",),
}

Change = tuple[str, str, str, str]  # file, function, old text, new text, as in `Mutation`


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        what: goes wrong, in words.
        modes: of the stress in which that shows; runs take them in turn. Where pieces are copied,
            I/O threads wait on the host, for one storage after the other, and hide some.
        changes: to the package's lines.
    """

    what: str
    modes: tuple[str, ...]
    changes: tuple[Change, ...]

    def mutations(self) -> list[Mutation]:
        """Its changes, each of which can be applied to a file's text."""
        return [
            Mutation(file, function, self.what, old, new, "", "")
            for file, function, old, new in self.changes
        ]


@contextmanager
def made(mistake: Mistake) -> Iterator[None]:
    """The package makes the mistake, in whatever is called from now on until the end."""
    with ExitStack() as undo:
        for mutation in mistake.mutations():
            module = importlib.import_module(f"{PACKAGE}/{mutation.file[:-3]}".replace("/", "."))
            name, _, method = mutation.function.partition(".")
            assert method, f"{mutation}: only methods can be exchanged"
            owner = getattr(module, name)
            wrong = _method(mutation.apply(source_of(mutation)), owner, method, vars(module))
            undo.enter_context(mock.patch.object(owner, method, wrong))
        yield


def source_of(mutation: Mutation) -> str:
    """The file that it changes."""
    return (_ROOT / PACKAGE / mutation.file).read_text()


def _method(source: str, owner: type, name: str, names: dict[str, Any]) -> Any:
    """A method as a file has it, for a class that is there already."""
    parts = next(
        node.body
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == owner.__name__
    )
    function = next(
        node for node in parts if isinstance(node, ast.FunctionDef) and node.name == name
    )
    # `super()` without arguments asks for a name that only stands in a class, or in a function.
    around = ast.parse(f"from __future__ import annotations\ndef make(__class__): return {name}")
    make = around.body[1]
    assert isinstance(make, ast.FunctionDef)
    make.body.insert(0, function)
    found: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(around), str(names["__file__"]), "exec"), names, found)
    return found["make"](owner)


def _mistakes() -> Iterator[Mistake]:
    """Those of the table; rows of one mistake follow each other."""
    rows = rows_of(_TABLE, _COLUMNS)
    for (what, modes), same in itertools.groupby(rows, key=lambda row: (row[0], row[1])):
        changes = tuple((file, function, old, new) for *_, file, function, old, new in same)
        yield Mistake(what, _MODES[modes], changes)


MISTAKES = tuple(_mistakes())
