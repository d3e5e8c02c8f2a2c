# SPDX-License-Identifier: Apache-2.0
"""Runs the tests in several processes, each of which gets another part whenever it has ended one.

    python -m tests.side_by_side [FLAGS OF PYTEST]

There is one process more than there are cores: many tests wait, for a disk or for a thread. A
process keeps its imports from part to part, and begins with other parts than its neighbours do.
What a part wrote is printed when it has ended. Flags that name files or folders run in one process.
Exit code: 0 if all tests passed, 5 if none was selected, 1 otherwise.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A folder, and first letters of its files' names behind `test_`. What imports the same stands
# together.
PARTS = (
    *("integrations/a-b", "integrations/c", "integrations/d-r", "integrations/s"),
    *("integrations/t-z", "megatron/a-b", "megatron/c-l", "megatron/m-o", "megatron/p-s"),
    *("megatron/t-z", "frozen/a-z", "autograd/a-z", "unit/a-h", "unit/i-p", "unit/q-z"),
    *("behaviour/a-k", "behaviour/l-o", "behaviour/p-z", "lag/a-z"),
)
# The test accelerator, once loaded, is torch's for the rest of a process.
ENDS_ITS_PROCESS = "lag/a-z"
NONE_SELECTED = 5
_POLL_S = 0.1
_END_S = 30.0


def files_of(part: str) -> list[str]:
    """Paths of a part's test files, from the root of the checkout on."""
    folder, _, letters = part.partition("/")
    found = sorted((ROOT / "tests" / folder).glob(f"test_[{letters}]*.py"))
    return [str(one.relative_to(ROOT)) for one in found]


def order_of(number: int, num_processes: int) -> list[str]:
    """In which order a process asks for parts that no other has had.

    The last one begins with the last part, whose tests wait more than others do.
    """
    first = len(PARTS) * number // (num_processes - 1)
    if number == num_processes - 1:
        first = len(PARTS) - 1
    return [*PARTS[first:], *PARTS[:first]]


class Process:
    """One that runs parts, `_work`.

    Args:
        folder: for what they write.
        flags: of pytest.
    """

    def __init__(self, folder: Path, flags: Sequence[str]) -> None:
        self._folder = folder
        command = [sys.executable, "-m", "tests.side_by_side", "--parts-in", str(folder), *flags]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, text=True)
        self._is_idle = True

    def run(self, part: str) -> tuple[int, str]:
        """Pytest's exit code, or that of a process that has died, and what it wrote."""
        here = self._folder / part.replace("/", " ")
        here.mkdir()
        (here / "output").touch()
        self._is_idle = False
        assert self._process.stdin is not None
        self._process.stdin.write(f"{part}\n")
        self._process.stdin.flush()
        while not (has_died := self._process.poll() is not None):
            if (here / "status").exists():
                break
            time.sleep(_POLL_S)
        output = (here / "output").read_text(errors="replace")
        if (here / "status").exists():
            self._is_idle = True
            return int((here / "status").read_text()), output
        assert has_died
        code = self._process.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        last = output.rstrip().rpartition("\n")[2]
        return code or 1, f"{output}\nERROR tests/{part}: the process ended with {how}: {last}\n"

    def is_running(self) -> bool:
        """Whether it can run another part."""
        return self._process.poll() is None

    def end(self) -> None:
        """Lets it end, with what it does then; in the middle of a part it is killed."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S if self._is_idle else 0)
        self._process.kill()
        self._process.wait()


def _work(folder: Path, flags: Sequence[str]) -> None:
    """In such a process: runs each part that is a line of standard input."""
    with os.fdopen(os.dup(0)) as lines:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the tests' own
        for line in lines:
            part = line.strip()
            here = folder / part.replace("/", " ")
            descriptor = os.open(here / "output", os.O_WRONLY | os.O_APPEND)
            for number in (1, 2):
                os.dup2(descriptor, number)
            os.close(descriptor)
            status = pytest.main([*flags, *files_of(part)])
            sys.stdout.flush()
            sys.stderr.flush()
            (here / "status.new").write_text(str(int(status)))
            (here / "status.new").rename(here / "status")


class Run:
    """All parts in several processes.

    Args:
        folder: for what they write.
        flags: of pytest; with -x nothing begins behind a part that has failed.
    """

    def __init__(self, folder: Path, flags: Sequence[str]) -> None:
        self._folder, self._flags = folder, flags
        self._lock = threading.Lock()
        self._begun: set[str] = set()
        self._statuses: list[int] = []
        self._processes: list[Process] = []
        self._has_ended = False

    def __call__(self) -> int:
        """Runs them; the exit code."""
        num_processes = len(os.sched_getaffinity(0)) + 1
        orders = [order_of(number, num_processes) for number in range(num_processes)]
        threads = [threading.Thread(target=self._run_all, args=(one,)) for one in orders]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            with self._lock:
                self._has_ended = True
            for process in self._processes:
                process.end()
            for thread in threads:
                thread.join()
        if len(self._statuses) < len(PARTS):  # -x, or a thread of ours ended in an error
            return 1
        if set(self._statuses) == {NONE_SELECTED}:
            return NONE_SELECTED
        return 0 if set(self._statuses) <= {0, NONE_SELECTED} else 1

    def _run_all(self, order: Sequence[str]) -> None:
        process: Process | None = None
        for part in order:
            with self._lock:
                if part in self._begun or self._has_ended:
                    continue
                self._begun.add(part)
                if process is None or not process.is_running():
                    process = Process(self._folder, self._flags)
                    self._processes.append(process)
            status, output = process.run(part)
            with self._lock:
                print(f"\n-- tests/{part}", output, sep="\n", end="", flush=True)
                self._statuses.append(status)
                if status not in (0, NONE_SELECTED) and "-x" in self._flags:
                    self._has_ended = True
            if part == ENDS_ITS_PROCESS:
                process.end()


def main(flags: Sequence[str]) -> int:
    if flags[:1] == ["--parts-in"]:
        _work(Path(flags[1]), flags[2:])
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # its processes end with it
    if any(not one.startswith("-") and (ROOT / one.partition("::")[0]).exists() for one in flags):
        return int(pytest.main(list(flags)))
    with tempfile.TemporaryDirectory(prefix="side-by-side-") as folder:
        return Run(Path(folder), flags)()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
