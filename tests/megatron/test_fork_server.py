# SPDX-License-Identifier: Apache-2.0
"""A forked process is what a new interpreter would have been, ends as it would, and never stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.fork_server import ForkServer
from tests.support.launch import Run, rank_environment, server
from tests.support.processes import ROOT, our_lines

PROBE = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "name": __name__, "file": __file__,
    "environment": dict(os.environ), "directory": os.getcwd(),
    "threads": len(os.listdir("/proc/self/task")), "descriptors": os.listdir("/proc/self/fd"),
    "main": sys.modules["__main__"].__file__,
}))
"""
STATE = """
import json, os, torch, numpy
from megatron.core import parallel_state
from megatron.offload.integration.megatron import cpu_runtime
print(json.dumps({
    "leader": os.getpgid(0) == os.getpid(), "draw": numpy.random.random(),
    "clean": [torch.distributed.is_initialized(), cpu_runtime.is_active(), "LEFT" in os.environ,
              torch.get_num_threads() == 7, hasattr(parallel_state, "left")],
}))
torch.set_num_threads(7)
parallel_state.left = os.environ["LEFT"] = "from another launch"
"""
KILLED_CLIENT = """
import os, sys
from pathlib import Path
from tests.support.fork_server import ForkServer
output, errors, script = map(Path, sys.argv[1:])
server = ForkServer(script, (), os.environ)
rank = server.start([str(script)], os.environ, output, errors)
print(server.pid, rank.pid, flush=True)
os.kill(os.getpid(), 9)
"""
STARTS_A_THREAD = (
    "import threading; threading.Thread(target=threading.Event().wait, args=(1,)).start()"
)


class Script:
    """A script with files for what it writes."""

    def __init__(self, directory: Path, source: str) -> None:
        self.argv = [str(directory / "script.py"), "--flag", "two words"]
        self.output, self.errors = directory / "out", directory / "err"
        Path(self.argv[0]).write_text(source)

    def run(self, fresh: bool) -> int:
        """Runs it in a new interpreter or a forked process; returns the exit code."""
        environment = rank_environment({"RANK": "3"})
        with self.output.open("wb") as output, self.errors.open("wb") as errors:
            if fresh:
                command = [sys.executable, *self.argv]
                return subprocess.call(command, env=environment, stdout=output, stderr=errors)
            process = server().start(self.argv, environment, self.output, self.errors)
            return process.wait(timeout=30)


def test_it_starts_like_a_new_interpreter(tmp_path: Path) -> None:
    script = Script(tmp_path, PROBE)
    facts = []
    for fresh in (True, False):
        assert script.run(fresh) == 0
        facts.append(json.loads(script.output.read_text()))
    paths = [fact.pop("path") for fact in facts]
    assert paths[1][: len(paths[0])] == paths[0]  # imports, setuptools for one, may append more
    assert facts[0] == facts[1]
    assert facts[1]["environment"]["RANK"] == "3"


def test_nothing_is_left_of_another_launch(tmp_path: Path) -> None:
    script = Script(tmp_path, STATE)
    facts = []
    for _ in range(2):
        assert script.run(fresh=False) == 0, script.errors.read_text()
        facts.append(json.loads(script.output.read_text()))
        assert facts[-1]["leader"] and not any(facts[-1]["clean"])
    assert facts[0]["draw"] != facts[1]["draw"]


@pytest.mark.parametrize(
    "source",
    [
        "print('well')",
        "import atexit; atexit.register(print, 'last')",
        "import sys; sys.exit(3)",
        "import sys; sys.exit('a sentence')",
        "raise ValueError('uncaught')",
        "import os; os._exit(4)",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.kill(os.getpid(), 15)",
        "import threading; threading.Thread(target=print, args=('joined',)).start()",
    ],
)
def test_it_ends_like_a_new_interpreter(tmp_path: Path, source: str) -> None:
    script = Script(tmp_path, source)
    ends = []
    for fresh in (True, False):
        code = script.run(fresh)
        # Tracebacks differ in the frames of the server.
        errors = our_lines(script.errors.read_text()).split("\n")[-2:]
        ends.append((code, script.output.read_text(), errors))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("name", ["LD_PRELOAD", "MALLOC_ARENA_MAX", "OMP_NUM_THREADS"])
def test_what_acts_at_the_start_of_a_process_gets_a_new_interpreter(name: str) -> None:
    assert server().suits(rank_environment({"RANK": "1"}))
    with Run("--no-such-flag", environment={name: ""}) as run:
        assert isinstance(run.processes[0], subprocess.Popen)


def test_another_directory_gets_a_new_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = server().suits(rank_environment({}))
    monkeypatch.chdir(tmp_path)
    assert before and not server().suits(rank_environment({}))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_nothing_outlives_a_client_that_was_killed(tmp_path: Path) -> None:
    script = Script(tmp_path, "import time; time.sleep(60)")
    for path in (script.output, script.errors):
        path.touch()
    command = [sys.executable, "-c", KILLED_CLIENT, *map(str, (script.output, script.errors))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    client = subprocess.run(
        [*command, script.argv[0]], env=environment, stdout=subprocess.PIPE, timeout=30
    )
    assert client.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in client.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(map(_runs, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        (STARTS_A_THREAD, "must not start threads"),
    ],
    ids=["import-fails", "import-starts-a-thread"],
)
def test_a_server_that_cannot_serve_says_why(tmp_path: Path, source: str, sentence: str) -> None:
    script = Script(tmp_path, "")
    (tmp_path / "preloaded.py").write_text(source)
    broken = ForkServer(Path(script.argv[0]), ("preloaded",), os.environ)
    try:
        with pytest.raises(RuntimeError, match=sentence):
            broken.start(script.argv, os.environ, script.output, script.errors)
    finally:
        broken.close()
