# SPDX-License-Identifier: Apache-2.0
"""Marks are on what pytest collects: on a model's class, put before a test, they are lost."""

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def lost_marks(source: str) -> list[str]:
    """Names of classes that have a mark of pytest and hold no tests."""
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("Test")
        for decorator in node.decorator_list
        if ast.unparse(decorator).startswith("pytest.mark.")
    ]


def test_finds_a_mark_on_a_class_without_tests() -> None:
    assert lost_marks("@pytest.mark.slow\nclass Model:\n    pass") == ["Model"]
    assert not lost_marks("@pytest.mark.slow\nclass TestModel:\n    pass")


def test_every_mark_is_on_what_is_collected() -> None:
    sources = {path: path.read_text() for path in TESTS.rglob("*.py")}
    assert len(sources) > 100
    assert {str(path): lost for path, text in sources.items() if (lost := lost_marks(text))} == {}
