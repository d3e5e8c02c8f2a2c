# SPDX-License-Identifier: Apache-2.0
"""Python processes of a test: `start_python`, `finish`; `our_lines` of what a process wrote.

For what a test cannot do to its own process: kill it, limit it, let it end in an error. A script
sees this checkout and the tests' own helpers; whoever starts one also finishes it, with a timeout.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Lines that other libraries write where they are installed, each with the library that does.
_OF_OTHERS = re.compile(
    "|".join(
        (
            # nanobind, with which triton is bound to Python: what is alive when Python ends.
            r"nanobind: leaked \d+ (instances|keep_alive records|types|functions)!",
            r" - leaked (instance|type|function) .*",
            r" - \.\.\. skipped remainder",
            r"nanobind: this is likely caused by a reference counting issue in the binding code\.",
            r"See https://nanobind\.readthedocs\.io/en/latest/refleaks\.html",
        )
    )
)


def our_lines(text: str) -> str:
    """What a process wrote, without the lines of libraries that need not be there at all."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not _OF_OTHERS.fullmatch(line.rstrip("\n")))


def start_python(script: str, *arguments: object) -> subprocess.Popen[str]:
    """Starts an indented script; its arguments arrive as text in `sys.argv[1:]`."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 120.0) -> tuple[int, str, str]:
    """Waits for the process. Exit code (minus the signal that ended it), output, `our_lines`."""
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, output, our_lines(errors)
