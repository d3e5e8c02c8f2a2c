# SPDX-License-Identifier: Apache-2.0
"""What a section found: `Section` with its `Check`s and `Table`s, and how they are printed.

A section fills one in while it runs and saves it after every entry, so that what was found before a
crash is not lost, and gpu_check.py can print a check as soon as it is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

from megatron.offload.activations.placement.atomic_file import write_atomically

_WORDS = {True: "pass", False: "FAIL", None: "skip"}


@dataclass(frozen=True)
class Check:
    """One line. `passed` is None where it could not be tried."""

    name: str
    passed: bool | None
    detail: str

    def __str__(self) -> str:
        return f"{_WORDS[self.passed]}  {self.name}: {self.detail}"


@dataclass(frozen=True)
class Table:
    """Cells as they are printed; the first column is text."""

    title: str
    headers: list[str]
    rows: list[list[str]]

    def as_text(self, style: str = "simple") -> str:
        """Title and cells, in one of tabulate's styles."""
        align = ("left", *["right"] * (len(self.headers) - 1))
        cells = tabulate(
            self.rows, self.headers, tablefmt=style, colalign=align, disable_numparse=True
        )
        return f"{self.title}:\n\n{cells}"


@dataclass
class Section:
    """What one section found: lines, tables, numbers.

    Args:
        name: of the section.
        data: measured values as plain numbers, for JSON.
    """

    name: str
    checks: list[Check] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.when_changed: Callable[[], None] = lambda: None

    def check(self, name: str, passed: bool, detail: str) -> bool:
        """Adds a line for what was tried; returns `passed`."""
        self.checks.append(Check(name, bool(passed), detail))
        self.when_changed()
        return passed

    def skip(self, name: str, reason: str) -> None:
        """Adds a line for what could not be tried."""
        self.checks.append(Check(name, None, reason))
        self.when_changed()

    def table(self, title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Adds a table, or replaces the one of the same title."""
        self.tables = [table for table in self.tables if table.title != title]
        self.tables.append(Table(title, list(headers), [list(row) for row in rows]))
        self.when_changed()

    @property
    def failed(self) -> bool:
        """Whether a check did not pass, or nothing was found at all."""
        return not self.checks or any(check.passed is False for check in self.checks)

    @property
    def verdict(self) -> str:
        """The section in one line, for the overview."""
        count = [sum(c.passed is kind for c in self.checks) for kind in (True, False, None)]
        word = _WORDS[False if self.failed else True if count[0] else None]
        return f"{word}  {count[0]} passed, {count[1]} failed, {count[2]} skipped"

    def as_markdown(self) -> str:
        """The section's tables and lines, for a document."""
        parts = [f"## {self.name}", *(table.as_text("github") for table in self.tables)]
        parts.append("\n".join(f"- {check}" for check in self.checks) or "- nothing was found")
        return "\n\n".join(parts)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Section:
        """A section from plain values, the inverse of `dataclasses.asdict`."""
        checks = [Check(**check) for check in values["checks"]]
        tables = [Table(**table) for table in values["tables"]]
        return cls(values["name"], checks, tables, values["data"], values["seconds"])


def save(sections: Sequence[Section], path: Path) -> None:
    """Writes them all; whoever reads meanwhile sees the former state or this one."""
    write_atomically(path, json.dumps([asdict(section) for section in sections]))


def load(path: Path) -> list[Section]:
    """What `save` wrote last; nothing if it never did."""
    if not path.exists():
        return []
    return [Section.from_dict(values) for values in json.loads(path.read_text())]
