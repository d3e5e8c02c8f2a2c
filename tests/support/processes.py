# SPDX-License-Identifier: Apache-2.0
"""Python processes of a test: `start_python`, `finish`.

For what a test cannot do to its own process: kill it, limit it, let it end in an error. A script
sees this checkout and the tests' own helpers; whoever starts one also finishes it, with a timeout.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def start_python(script: str, *arguments: object) -> subprocess.Popen[str]:
    """Starts an indented script; its arguments arrive as text in `sys.argv[1:]`."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 60.0) -> tuple[int, str, str]:
    """Waits for the process. Exit code (minus the signal that ended it), output, errors."""
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, output, errors
