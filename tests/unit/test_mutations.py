# SPDX-License-Identifier: Apache-2.0
"""The tables of `tests/mutations.py` are up to date. None of the errors is made here."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation_tables import PACKAGE, Mutation, all_mutations, all_rows, places
from tests.mutation_tables.plain import plain
from tests.mutations import ROOT, out_of_date

TESTS = Path(__file__).resolve().parent.parent


@functools.cache
def functions_in(file: str) -> set[str]:
    """The names of the test functions of a file below `tests`."""
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def has_test(mutation: Mutation) -> bool:
    file, _, name = mutation.test.partition("::")
    return (TESTS / file).exists() and name.partition("[")[0] in functions_in(file)


@pytest.mark.slow
def test_every_mutation_can_be_made_at_exactly_one_place() -> None:
    assert out_of_date(all_mutations()) == []


def test_every_mutation_names_a_test_that_is_there() -> None:
    missing = [f"{mutation}: {mutation.test}" for mutation in all_mutations()]
    assert [line for line, m in zip(missing, all_mutations(), strict=True) if not has_test(m)] == []


@pytest.mark.slow
def test_every_mutation_names_parameters_that_its_test_has() -> None:
    """Pytest runs none of the tests that it is given if it does not find one."""
    files = sorted({m.test.partition("::")[0] for m in all_mutations()})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--slow", *files]
    told = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False).stdout
    names = {line.removeprefix("tests/") for line in told.splitlines() if "::" in line}
    names |= {name.partition("[")[0] for name in names}
    assert [f"{m}: {m.test}" for m in all_mutations() if m.test not in names] == []


def test_no_two_mutations_are_called_the_same_or_are_the_same() -> None:
    mutations = all_mutations()
    assert len({str(mutation) for mutation in mutations}) == len(mutations)
    changes = {(m.file, m.apply((ROOT / PACKAGE / m.file).read_text())) for m in mutations}
    assert len(changes) == len(mutations)


def test_what_is_left_out_is_of_a_function_that_is_there() -> None:
    gone = [
        r for r in all_rows() if r.function not in places((ROOT / PACKAGE / r.file).read_text())
    ]
    assert gone == []


REFORMATTED = [
    ("call(first, [second], *third)", "call(\n    first,  # why\n    [second],\n\n    *third,\n)"),
    ("x = one and two", "x = (\n    one  # why\n    and two\n)"),
    ("return one, two", "return (\n    one,\n    two,\n)"),
    ("return (one,)", "return (\n    one,\n)"),
    ("one[two,]", "one[\n    two,\n]"),
    ("x = (y for y in z)", "x = (\n    y\n    for y in z\n)"),
    ("with one as two, three: pass", "with (\n    one as two,\n    three,\n): pass"),
    ("assert one or two, three", "assert (\n    one\n    or two\n), three"),
    ("if one in (two or three): pass", "if one in (\n    two or three\n): pass"),
    ("x = one.two().three()", "x = (\n    one.two()\n    .three()\n)"),
    ('x = f"{one} # (two", {"three": 4}', 'x = (\n    f"{one} # (two",\n    {"three": 4},\n)'),
]


@pytest.mark.parametrize(("on_one_line", "broken"), REFORMATTED)
def test_rows_match_however_lines_are_broken(on_one_line: str, broken: str) -> None:
    for source in (on_one_line, broken):
        assert plain(source) == f"{on_one_line}\n"


@pytest.mark.slow
def test_on_one_line_the_package_is_the_same_program() -> None:
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        source = path.read_text()
        assert ast.dump(ast.parse(plain(source))) == ast.dump(ast.parse(source)), path
