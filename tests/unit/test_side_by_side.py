# SPDX-License-Identifier: Apache-2.0
"""The tests' own runner: no file is left out, no failure is lost, a process that dies is told."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from tests import side_by_side
from tests.side_by_side import ENDS_ITS_PROCESS, NONE_SELECTED, PARTS, Process, Run
from tests.support.processes import ROOT


def test_each_file_is_in_one_part() -> None:
    found = [file for part in PARTS for file in side_by_side.files_of(part)]
    there = (ROOT / "tests").rglob("test_*.py")
    assert sorted(found) == sorted(str(one.relative_to(ROOT)) for one in there)


@pytest.mark.parametrize("num_processes", [2, 3, 9])
def test_each_process_comes_to_each_part_and_begins_with_another(num_processes: int) -> None:
    orders = [side_by_side.order_of(number, num_processes) for number in range(num_processes)]
    assert all(sorted(one) == sorted(PARTS) for one in orders)
    assert len({one[0] for one in orders}) == num_processes


def test_a_process_runs_part_after_part(tmp_path: Path) -> None:
    process = Process(tmp_path, ["-k", "no_test_is_called_so"])
    for part in ("unit/v", "unit/w"):
        status, output = process.run(part)
        assert status == NONE_SELECTED, output
        assert " deselected" in output
    assert process.is_running()
    process.end()
    assert process._process.returncode == 0  # not killed: pytest unlocks its folders at the end


@pytest.mark.parametrize(
    ("end", "how"), [("os._exit(3)", "exit code 3"), ("os.kill(os.getpid(), 9)", "signal 9")]
)
def test_a_process_that_dies_is_an_error_of_its_part(
    end: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dies.py").write_text(f"import os\nprint('last words', flush=True)\n{end}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    status, output = Process(tmp_path, ["-p", "dies"]).run("unit/v")
    assert status not in (0, NONE_SELECTED)
    assert output.splitlines()[-1] == (
        f"ERROR tests/unit/v: the process ended with {how}: last words"
    )


class Made(Process):
    """Runs nothing; its parts end as the test says."""

    ends: ClassVar[dict[str, int]] = {}
    num_made = 0

    def __init__(self, *_: object) -> None:
        type(self).num_made += 1
        self._runs = True

    def run(self, part: str) -> tuple[int, str]:
        return self.ends.get(part, 0), f"of {part}\n"

    def is_running(self) -> bool:
        return self._runs

    def end(self) -> None:
        self._runs = False


@pytest.mark.parametrize(
    ("ends", "flags", "expected"),
    [
        ({}, [], 0),
        ({PARTS[3]: NONE_SELECTED}, [], 0),
        (dict.fromkeys(PARTS, NONE_SELECTED), [], NONE_SELECTED),
        ({PARTS[3]: 1, PARTS[4]: NONE_SELECTED}, [], 1),
        ({PARTS[3]: -9}, [], 1),
        ({PARTS[3]: 2}, ["-x"], 1),
    ],
)
def test_a_run_has_the_output_of_each_part_and_fails_if_one_does(
    ends: dict[str, int],
    flags: list[str],
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(side_by_side, "Process", Made)
    monkeypatch.setattr(Made, "ends", ends)
    assert Run(tmp_path, flags)() == expected
    printed = capsys.readouterr().out.splitlines()
    told = [one.removeprefix("of ") for one in printed if one.startswith("of ")]
    assert len(set(told)) == len(told) and set(told) <= {*PARTS}
    assert len(told) == len(PARTS) or flags == ["-x"]


def test_nothing_runs_behind_the_test_accelerator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "Process", Made)
    monkeypatch.setattr(Made, "num_made", 0)
    run = Run(tmp_path, [])
    run._run_all([ENDS_ITS_PROCESS, PARTS[0], PARTS[1]])
    assert Made.num_made == 2
