# SPDX-License-Identifier: Apache-2.0
"""Single errors in the package, each with the test that must find it: `Mutation`, `all_mutations`.

`tests/mutations.py` makes them, one at a time, in a copy of the package. A table (`*.tsv`) has
those of a room, one a row: file, function, what goes wrong, old text, new text, how its test ends
(`fails` or `hangs`), test. The old text stands in the function exactly once, as `plain` has it:
each statement is on one line, however long, without comments. `\\n` begins a line, indented as if
the function began at the margin. Without a new text it is deleted, and lines that it is all of.

An error that no test could see, because another line makes up for it or because it changes nothing,
is `left out`, with the reason in place of the test.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.mutation_tables.plain import plain

PACKAGE = "megatron/offload"
COLUMNS = ["file", "function", "error", "old", "new", "ends", "test"]
FAILS, HANGS, LEFT_OUT = "fails", "hangs", "left out"
WHOLE_FILE = "-"  # in place of a function

_Place = tuple[int, int, int]  # where it begins and ends, and by how much it is indented


@dataclass(frozen=True)
class Mutation:
    """One error, made by exchanging a piece of a function or class.

    Args:
        file: where it is made, below the package.
        function: its qualified name, such as `Drive._write`.
        error: what goes wrong, in words.
        old: what the function has exactly once.
        new: what to put in its place.
        ends: how the test shows it: by failing or by never ending.
        test: as pytest names it, below `tests`.
    """

    file: str
    function: str
    error: str
    old: str
    new: str
    ends: str
    test: str

    def __str__(self) -> str:
        return f"{self.file}: {self.error}"

    @property
    def hangs(self) -> bool:
        return self.ends == HANGS

    def apply(self, source: str) -> str:
        """The file with the error, and otherwise `plain`.

        Raises:
            ValueError: the text is not there exactly once, so the table is out of date.
        """
        source = plain(source)
        found = [
            (source.index(old, start, end), old, indent)
            for start, end, indent in places(source).get(self.function, [])
            for old in [_indented(self.old, indent)]
            for _ in range(source.count(old, start, end))
        ]
        if len(found) != 1:
            raise ValueError(
                f"{self}: its text is in {self.function}, with each statement on one line and"
                f" without comments, {len(found)} times, not once"
            )
        start, old, indent = found[0]
        end = start + len(old)
        lines = source.rindex("\n", 0, start) + 1, source.index("\n", end) + 1
        if not self.new and source[slice(*lines)].strip() == old:
            start, end = lines
        return source[:start] + _indented(self.new, indent) + source[end:]


def all_mutations() -> list[Mutation]:
    """Those of all tables, without what is left out."""
    return [mutation for mutation in all_rows() if mutation.ends != LEFT_OUT]


def all_rows() -> list[Mutation]:
    """All rows of all tables."""
    tables = sorted(Path(__file__).parent.glob("*.tsv"))
    return [mutation for table in tables for mutation in _rows(table)]


def _rows(table: Path) -> Iterator[Mutation]:
    for fields in rows_of(table, COLUMNS):
        mutation = Mutation(*fields)
        assert mutation.ends in (FAILS, HANGS, LEFT_OUT), f"{mutation}: ends {mutation.ends!r}"
        yield mutation


def rows_of(table: Path, columns: list[str]) -> Iterator[list[str]]:
    """The fields of each row below a head with these columns, with their line breaks."""
    header, *lines = table.read_text().splitlines()
    assert header.split("\t") == columns, f"{table.name} begins with {header}"
    for line in lines:
        fields = [re.sub(r"\\(.)", _unescaped, field) for field in line.split("\t")]
        assert len(fields) == len(columns), f"{table.name}: a row has other columns: {line}"
        yield fields


def _unescaped(escape: re.Match[str]) -> str:
    return "\n" if escape[1] == "n" else escape[1]


def _indented(text: str, indent: int) -> str:
    """The text with its lines, but for the first and blank ones, moved to the right."""
    return re.sub(r"\n(?=[^\n])", "\n" + " " * indent, text)


@functools.lru_cache(maxsize=64)
def places(source: str) -> dict[str, list[_Place]]:
    """Where the functions and classes of a file are, by their qualified names."""
    lines = source.splitlines(keepends=True)
    begins = [0]
    for line in lines:
        begins.append(begins[-1] + len(line))
    found: dict[str, list[_Place]] = {WHOLE_FILE: [(0, len(source), 0)]}

    def walk(parent: ast.AST, prefix: str) -> None:
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = min([node, *node.decorator_list], key=lambda part: part.lineno)
                last = node.end_lineno or node.lineno
                place = (begins[first.lineno - 1], begins[last], node.col_offset)
                found.setdefault(prefix + node.name, []).append(place)
                walk(node, f"{prefix}{node.name}.")
            else:
                walk(node, prefix)

    walk(ast.parse(source), "")
    return found
