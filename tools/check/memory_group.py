# SPDX-License-Identifier: Apache-2.0
"""Processes that may take so much memory and no more: `run_in_group`, `PeakMemory`.

The checks that train a model in less memory than it takes begin each training here, in a process of
its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.offload.machine.memory_limit import own_memory_groups

ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 600.0
# A command, with the file of a group's members before it, that begins in the group.
_JOIN = ("sh", "-c", 'echo $$ > "$0" && exec "$@"')


class CheckError(Exception):
    """The check could not be made; the message says why."""


@dataclass(frozen=True)
class MemoryGroup:
    """A control group with a limit. Whose process id is written to `members` is in it."""

    path: Path
    is_v2: bool

    @property
    def members(self) -> Path:
        """Process ids, one a line."""
        return self.path / "cgroup.procs"

    @property
    def num_killed(self) -> int:
        """How many of its processes the system has ended because the memory was used up."""
        name = "memory.events" if self.is_v2 else "memory.oom_control"
        rows = (line.split() for line in (self.path / name).read_text().splitlines())
        return int(next((row[1] for row in rows if row[0] == "oom_kill"), "0"))


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """A new control group, made where this process may without changing any that is there.

    Raises:
        CheckError: none can be made here; says why.
    """
    above, is_v2 = _parent_group()
    group = MemoryGroup(above / f"offload-check-{os.getpid()}-{time.monotonic_ns()}", is_v2)
    try:
        group.path.mkdir()
    except OSError as error:
        raise CheckError(f"no control group can be made: {error}") from None
    try:
        _limit(group, limit_bytes)
        yield group
    finally:
        _remove(group.path)


def _parent_group() -> tuple[Path, bool]:
    """This process's group, whose limits then hold as well; of v2 one that passes limits on."""
    groups = own_memory_groups()
    of_v1 = [group for group, is_v2 in groups if not is_v2]
    if of_v1:
        return of_v1[0], False
    for group, _ in groups[:2]:  # its own may not have groups and processes both
        with contextlib.suppress(OSError):
            if "memory" in (group / "cgroup.subtree_control").read_text().split():
                return group, True
    raise CheckError("no control group can be made: none here passes limits of memory on")


def _limit(group: MemoryGroup, limit_bytes: int) -> None:
    memory = "memory.max" if group.is_v2 else "memory.limit_in_bytes"
    with_swap = "memory.swap.max" if group.is_v2 else "memory.memsw.limit_in_bytes"
    try:
        (group.path / memory).write_text(str(limit_bytes))
        with contextlib.suppress(OSError):  # a kernel that does not count swap
            (group.path / with_swap).write_text("0" if group.is_v2 else str(limit_bytes))
    except OSError as error:
        raise CheckError(f"the control group {group.path} takes no limit: {error}") from None


def _remove(group: Path) -> None:
    """Processes that have ended leave a group a moment later."""
    for _ in range(200):
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.05)


class PeakMemory:
    """Samples, from a thread of its own, how much memory is the process's own (RssAnon)."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ends.wait(0.002):
            lines = Path("/proc/self/status").read_text().splitlines()
            own = next(line for line in lines if line.startswith("RssAnon:"))
            self.peak_bytes = max(self.peak_bytes, int(own.split()[1]) * 1024)


def run_in_group(command: Sequence[str], limit_bytes: int | None) -> dict[str, Any] | None:
    """What a command prints last, as JSON; None: it was killed, because the memory was used up.

    Args:
        command: with its arguments.
        limit_bytes: of a control group for it; None: as much memory as there is.

    Raises:
        CheckError: it failed otherwise, or no such group can be made.
    """
    command = list(command)
    with contextlib.ExitStack() as stack:
        group = None
        if limit_bytes is not None:
            group = stack.enter_context(memory_group(limit_bytes))
            # Before Python begins: what a process has already, the group does not count.
            command = [*_JOIN, str(group.members), *command]
        search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        ended = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": search},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if group is not None and ended.returncode == -signal.SIGKILL and group.num_killed:
            return None
    if ended.returncode:
        raise CheckError(f"exit code {ended.returncode}: {ended.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found
