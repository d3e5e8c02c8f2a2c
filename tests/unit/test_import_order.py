# SPDX-License-Identifier: Apache-2.0
"""Imports go one way: in the order of rooms that docs/architecture.md gives, and in no circle.

And no file of the package is longer than a reader takes in at once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "megatron.offload"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
MOST_LINES = 450


class Import(NamedTuple):
    """One file of the package imports another. Paths are relative to the package."""

    file: str
    line: int
    imported: str


def rooms_of(page: str) -> list[str]:
    """The rooms from top to bottom: the first column of the table under `The order of rooms`.

    A room is a file (`config.py`) or a folder with all in it (`activations/saved/`).
    """
    section = page.partition("\n## The order of rooms\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([\w/.]+)` \|", section, re.MULTILINE)


def room_of(file: str, rooms: Sequence[str]) -> str | None:
    """The innermost room that holds a file; None: no room does."""
    holding = [r for r in rooms if file == r or (r.endswith("/") and file.startswith(r))]
    return max(holding, key=len, default=None)


def imports_of(package: Path, name: str) -> list[Import]:
    """All imports among the files of a package, but those for type checkers alone.

    Args:
        package: its folder.
        name: the package's full name.
    """
    files = {str(path.relative_to(package)): path for path in sorted(package.rglob("*.py"))}
    found = []
    for file, path in files.items():
        place = [name, *Path(file).parent.parts]  # what a relative import begins at
        for line, module in _imported_modules(ast.parse(path.read_text()), place):
            if (target := _file_of(module, name, files)) is not None:
                found.append(Import(file, line, target))
    return found


def _imported_modules(tree: ast.AST, place: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Line and full name of whatever is imported, in functions too."""
    if isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.unparse(tree.test):
        for node in tree.orelse:
            yield from _imported_modules(node, place)
        return
    if isinstance(tree, ast.Import):
        yield from ((tree.lineno, alias.name) for alias in tree.names)
    elif isinstance(tree, ast.ImportFrom):
        base = list(place[: len(place) - tree.level + 1]) if tree.level else []
        base += (tree.module or "").split(".") if tree.module else []
        yield from ((tree.lineno, ".".join([*base, alias.name])) for alias in tree.names)
    elif isinstance(tree, ast.Call) and ast.unparse(tree.func).endswith("import_module"):
        names = [one.value for one in tree.args if isinstance(one, ast.Constant)]
        yield from ((tree.lineno, one) for one in names if isinstance(one, str))
    for node in ast.iter_child_nodes(tree):
        yield from _imported_modules(node, place)


def _file_of(module: str, name: str, files: Mapping[str, Path]) -> str | None:
    """The file behind `package.module` or `package.module.name`; None: of another package."""
    if module != name and not module.startswith(f"{name}."):
        return None
    parts = module.split(".")[len(name.split(".")) :]
    for length in (len(parts), len(parts) - 1):  # the last part may be a name in the file
        if length >= 0:
            path = "/".join(parts[:length])
            for file in (f"{path}.py", f"{path}/__init__.py".lstrip("/")):
                if file in files:
                    return file
    raise AssertionError(f"{module} is imported and is no file of {name}")


def upward(imports: Sequence[Import], rooms: Sequence[str]) -> list[str]:
    """A sentence for each import that runs from a room to one below it."""
    place = {room: number for number, room in enumerate(rooms)}
    lines = []
    for one in imports:
        here, there = room_of(one.file, rooms), room_of(one.imported, rooms)
        if here is not None and there is not None and place[there] > place[here]:
            lines.append(
                f"{one.file}:{one.line} ({here}) imports {one.imported}, which is below it "
                f"({there})"
            )
    return lines


def circle_in(imports: Sequence[Import]) -> list[str]:
    """Files that import each other in a circle, the first of them once more at the end; or none."""
    targets: dict[str, list[str]] = {}
    for one in imports:
        targets.setdefault(one.file, []).append(one.imported)
    done: set[str] = set()

    def walk(file: str, path: list[str]) -> list[str]:
        if file in path:
            return [*path[path.index(file) :], file]
        if file in done:
            return []
        for target in targets.get(file, []):
            if circle := walk(target, [*path, file]):
                return circle
        done.add(file)
        return []

    return next((circle for file in targets if (circle := walk(file, []))), [])


ROOMS = rooms_of(ARCHITECTURE.read_text())
IMPORTS = imports_of(ROOT / "megatron" / "offload", PACKAGE)


def test_every_file_has_a_room_and_every_room_a_file() -> None:
    package = ROOT / "megatron" / "offload"
    files = [str(path.relative_to(package)) for path in package.rglob("*.py")]
    homeless = {file for file in files if room_of(file, ROOMS) is None}
    homeless -= {"activations/__init__.py", "planner/__init__.py"}  # hold rooms, and nothing else
    assert not homeless, f"in no room of {ARCHITECTURE.name}: {', '.join(sorted(homeless))}"
    rooms = {room_of(file, ROOMS) for file in files}
    assert rooms - {None} == set(ROOMS) and len(set(ROOMS)) == len(ROOMS) > 10


def test_no_import_runs_up() -> None:
    found = upward(IMPORTS, ROOMS)
    assert not found, "\n".join(["imports run against the order of rooms:", *found])


def test_no_imports_form_a_circle() -> None:
    circle = circle_in(IMPORTS)
    assert not circle, "files import each other: " + " -> ".join(circle)


def test_no_file_is_too_long_to_read() -> None:
    """One noun a file; a file that grows beyond this has two."""
    package = ROOT / "megatron" / "offload"
    lengths = {path: len(path.read_text().splitlines()) for path in package.rglob("*.py")}
    too_long = [f"{path} has {n} lines" for path, n in lengths.items() if n > MOST_LINES]
    assert len(lengths) > 200 and not too_long, "; ".join(too_long)


def test_the_imports_are_found() -> None:
    """That what is checked is not nothing."""
    assert len(IMPORTS) > 200
    edges = {(one.file, one.imported) for one in IMPORTS}
    assert ("activations/engine.py", "config.py") in edges
    assert ("cli.py", "commands/plan/command.py") in edges  # inside a function


# -- Of the checks themselves, on a package that is made up ----------------------------------------

PAGE = """# Architecture

## The order of rooms

| room | what |
|---|---|
| `config.py` | `not.py` |
| `low/` | |
| `high/first/` | |
| `high/` | |
| `top.py` | |

## Something else

| `other.py` | |
"""


def package_of(directory: Path, files: Mapping[str, str]) -> Path:
    """A package `made.up` with these files."""
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def problems(directory: Path, files: Mapping[str, str]) -> tuple[list[str], list[str]]:
    imports = imports_of(package_of(directory, files), "made.up")
    return upward(imports, rooms_of(PAGE)), circle_in(imports)


def test_rooms_are_read_from_the_table() -> None:
    rooms = rooms_of(PAGE)
    assert rooms == ["config.py", "low/", "high/first/", "high/", "top.py"]
    files = ("config.py", "low/deep/a.py", "high/first/a.py", "high/a.py", "else/config.py")
    assert [room_of(file, rooms) for file in files] == [*rooms[:4], None]


@pytest.mark.parametrize(
    "line",
    [
        "from made.up.top import Top",
        "from made.up import top",
        "import made.up.top as other",
        "def later():\n    from made.up.top import Top",
        "class A:\n    def b(self):\n        if self:\n            import made.up.top",
        "from ..top import Top",
        "from .. import top",
        "import importlib\nimportlib.import_module('made.up.top')",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import made.up.top",
    ],
)
def test_an_import_that_runs_up_is_shown(tmp_path: Path, line: str) -> None:
    found, circle = problems(tmp_path, {"config.py": "", "low/a.py": line, "top.py": "Top = 1"})
    assert not circle
    (sentence,) = found
    assert sentence.endswith("(low/) imports top.py, which is below it (top.py)")
    assert sentence.startswith("low/a.py:")


@pytest.mark.parametrize(
    "line",
    [
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from made.up.top import Top",
        "import typing\nif typing.TYPE_CHECKING:\n    import made.up.top",
        "from made.up.config import Config",
        "from made.up.low.b import B",
        "import made.upper.top",
        "import os.path",
    ],
)
def test_other_imports_are_not(tmp_path: Path, line: str) -> None:
    files = {"config.py": "Config = 1", "low/a.py": line, "low/b.py": "", "top.py": ""}
    assert problems(tmp_path, files) == ([], [])


def test_rooms_in_a_room_have_an_order_too(tmp_path: Path) -> None:
    files = {"high/first/a.py": "import made.up.high.b", "high/b.py": ""}
    (sentence,), circle = problems(tmp_path, files)
    assert "(high/first/) imports high/b.py" in sentence and not circle


def test_a_circle_is_shown(tmp_path: Path) -> None:
    files = {
        "low/a.py": "def f():\n    from made.up.low import b",
        "low/b.py": "from .c import C",
        "low/c.py": "import made.up.config, made.up.low.a\nC = 1",
        "config.py": "",
    }
    assert problems(tmp_path, files) == ([], ["low/a.py", "low/b.py", "low/c.py", "low/a.py"])


def test_an_import_of_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"made\.up\.gone\.\S+ is imported and is no file"):
        problems(tmp_path, {"config.py": "from made.up.gone.thing import Thing"})
