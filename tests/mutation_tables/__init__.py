# SPDX-License-Identifier: Apache-2.0
"""Single errors in the package, each with the test that must find it: `Mutation`, `all_mutations`.

`tests/mutations.py` makes them, one at a time, in a copy of the package. Each table has those of a
file or two. An error that no test could see, because another line makes up for it or because it
changes nothing, is left out, with the reason in its table.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

PACKAGE = "megatron/offload"


@dataclass(frozen=True)
class Mutation:
    """One error, made by exchanging whole lines.

    Args:
        file: where it is made, below the package.
        name: what goes wrong, in words.
        before: lines that the file has exactly once.
        after: what to put in their place.
        test: the test that must fail, as pytest names it, below `tests`.
        hangs: it fails by never ending.
    """

    file: str
    name: str
    before: str
    after: str
    test: str
    hangs: bool = False

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"

    def apply(self, source: str) -> str:
        """The file with the error.

        Raises:
            ValueError: the lines are not there exactly once, so the table is out of date.
        """
        before, after, source = f"\n{self.before}\n", f"\n{self.after}\n", f"\n{source}"
        if (count := source.count(before)) != 1:
            raise ValueError(f"{self}: its lines are in the file {count} times, not once")
        return source.replace(before, after if self.after else "\n")[1:]


Add = Callable[..., None]


def table_of(file: str, mutations: list[Mutation]) -> Add:
    """A function that adds mutations of one file; code starts on the line after the quotes."""

    def add(name: str, before: str, after: str, test: str, *, hangs: bool = False) -> None:
        code, error = (text.strip("\n").rstrip(" ").rstrip("\n") for text in (before, after))
        mutations.append(Mutation(file, name, code, error, test, hangs))

    return add


def all_mutations() -> list[Mutation]:
    """Those of all tables."""
    found: list[Mutation] = []
    for module in pkgutil.iter_modules(__path__):
        found += importlib.import_module(f"{__name__}.{module.name}").MUTATIONS
    return found
