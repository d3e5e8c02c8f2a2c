# SPDX-License-Identifier: Apache-2.0
"""`tests/run.sh` runs each directory of tests once, and names files that there are."""

import re
import subprocess
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SCRIPT = (TESTS / "run.sh").read_text()


def found(pattern: str) -> str:
    match = re.search(pattern, SCRIPT, re.DOTALL | re.MULTILINE)
    assert match, pattern
    return match[1]


def said(script: str) -> list[str]:
    """The words that bash prints, in the directory of the project."""
    command = ["bash", "-c", script]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_each_directory_of_tests_is_in_one_process() -> None:
    processes = found(r"^(declare -A directories=\(.*?^\)\nin_turn=\(.*?\)$)")
    each = 'for name in ${in_turn[*]}; do echo "${directories[$name]}"; done'
    run = said(f"{processes}\n{each}") + found(r"^    tests_of ([a-z ]+) -- ").split()
    assert sorted(run) == sorted({path.parent.name for path in TESTS.glob("*/test_*.py")})


def test_what_runs_with_a_newer_torch_is_there() -> None:
    names = re.findall(r"tests/[^\s:]+\.py", found(r"^next_tests\(\) \{(.*?)^\}"))
    files = said("printf '%s\\n' " + " ".join(names))
    assert len(files) > 20
    assert [one for one in files if not (TESTS.parent / one).is_file()] == []
