# SPDX-License-Identifier: Apache-2.0
"""Ranks without the imports: a process that has imported modules once, and forks for each rank.

Importing torch and a framework takes longer than all that a test then trains. `launch.Run` and
`run_ranks` start their ranks here, each with a server of its own. The server does nothing but
import: no thread (a forked copy would wait for it for ever), no process group, no CPU runtime. So
each rank is a process of its own in the state of a script that has just imported what it needs; of
what a new interpreter draws, only the hash seed is shared.
Nobody outlives pytest: the server ends with their connection, and the kernel then kills its ranks.

Run as a script, this file is the server; its arguments are CONNECTION SCRIPT MODULE...
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import itertools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Read while a process runs; any other variable may act at its start only.
_LATE = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_LATE |= {"PYTEST_CURRENT_TEST", "RANKS_MEET_AT"}
_ANSWER_S = 120.0  # the first answer comes after the imports
_POLL_S = 0.02
_PR_SET_PDEATHSIG = 1


class ForkedProcess:
    """A process of the server; to its user a `subprocess.Popen`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.request("poll", self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit code; raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal unless the process has ended."""
        # It stays a zombie until `poll` has its exit code: the pid cannot be someone else's.
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the process unless it has ended."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The client's side.

    Args:
        script: argv[0] during the imports; its directory is searched first.
        modules: What to import, in order.
        environment: Of the server.
    """

    def __init__(
        self, script: Path, modules: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self._environment, self._directory = dict(environment), os.getcwd()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, it is open as long as the server is
        self._serials = itertools.count()
        self._connection, theirs = multiprocessing.Pipe()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), str(script), *modules],
            # OpenBLAS starts its threads when numpy is imported, unless there is to be only one.
            env={**environment, "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for pytest, which then ends its ranks
        )
        theirs.close()
        self.pid = self._process.pid

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Whether a forked process is what one started here with this environment would be."""
        differing = dict(self._environment.items() ^ environment.items())
        # Another directory is another meaning of a relative PYTHONPATH.
        return differing.keys() <= _LATE and os.getcwd() == self._directory

    def start(
        self, argv: Sequence[str], environment: Mapping[str, str], output: Path, errors: Path
    ) -> ForkedProcess:
        """Runs the script argv[0]; both files must exist, and may be the same."""
        files = (str(output), str(errors))
        return ForkedProcess(self, self.request("start", (list(argv), dict(environment), files)))

    def request(self, kind: str, argument: Any) -> Any:
        """Asks the server; raises RuntimeError, with all that it wrote, if no answer comes."""
        serial = next(self._serials)
        with contextlib.suppress(EOFError, OSError):
            self._connection.send((serial, kind, argument))
            while self._connection.poll(_ANSWER_S):
                answered, answer = self._connection.recv()
                if answered == serial:  # not of a request that a timeout or Ctrl-C cut short
                    return answer
        self._log.seek(0)
        raise RuntimeError(f"no answer from the fork server:\n{self._log.read().decode()}")

    def close(self) -> None:
        """Kills the server, and with it whatever it started."""
        self._connection.close()
        self._process.kill()
        self._process.wait()
        self._log.close()


# ------------------------------------------------------------------ the server's side


def _serve(connection: Connection) -> tuple[Any, ...] | None:
    """Answers requests. Returns in each forked process what it is to run, None in the server."""
    while True:
        try:
            serial, kind, argument = connection.recv()
        except EOFError:
            return None
        if kind == "start":
            answer: int | None = os.fork()
            if answer == 0:
                connection.close()
                return argument
        else:
            ended, status = os.waitpid(argument, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        connection.send((serial, answer))


def _become(argv: list[str], environment: dict[str, str], files: tuple[str, str]) -> None:
    """Takes on everything that a process is started with."""
    os.setpgid(0, 0)
    for path, descriptor in zip(files, (1, 2), strict=True):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = argv
    sys.path[0] = str(Path(argv[0]).parent)
    if "numpy" in sys.modules:  # `random` draws a new seed after a fork, numpy does not
        sys.modules["numpy"].random.seed()


def _main(connection: str, script: str, *modules: str) -> None:
    server = os.getpid()
    sys.argv = [script]
    sys.path[0] = str(Path(script).parent)
    for module in modules:
        importlib.import_module(module)
    if len(threads := os.listdir("/proc/self/task")) > 1:
        sys.exit(f"imports must not start threads before a fork; there are {len(threads)}")
    # Collections would copy every page that the ranks share, most of all the one at their end.
    gc.freeze()
    launch = _serve(Connection(int(connection)))
    if launch is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # it died before it could take this process with it
        os._exit(1)
    _become(*launch)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code: Any = 0
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            raise
    _end(code)


def _end(code: int) -> None:
    """Ends as an interpreter does, but lets the kernel take its modules down.

    To take each object down by itself would copy every page that the ranks share.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    _main(*sys.argv[1:])
