# SPDX-License-Identifier: Apache-2.0
"""A job: a function in a process of its own, with a time limit. `Job`, `Runner`, `Skip`.

gpu_day.py runs one after the other, and beside one another those that measure no time. Whatever
happens in a job stays there: it ends with a result, a reason why it was skipped, an error in one
line, or because its time was up.

Note [Why a server of forks]
To import torch, transformers and trl takes longer than most jobs. A process that has imported
them, and has computed nothing, makes a child for each job (the `forkserver` of `multiprocessing`).
CUDA must not have begun in it. A library that begins CUDA when it is imported would break every
child, so the first child tries; if it cannot, each job is a new interpreter, and a line says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from check.gpu_day.settings import Settings
from megatron.offload.activations.placement.atomic_file import write_atomically

OK, FAILED, SKIPPED, TIMED_OUT, NOT_BEGUN = "ok", "FAILED", "skipped", "TOO LONG", "not begun"
_PARENT_DIED = 1  # PR_SET_PDEATHSIG of prctl(2)
_LAST_WORDS = 20_000  # characters of a log that are kept
_GRACE_S = 5.0


class Skip(Exception):
    """What a job needs is not here; the message says what."""


@dataclass(frozen=True)
class Job:
    """What one process does.

    Attributes:
        name: `part/what`.
        function: `module:name`; it is called with settings, with a function that takes what has
            been found so far, and with `arguments`; returns plain values.
        limit_s: after which it is ended.
        is_timed: what it finds depends on what runs beside it.
    """

    name: str
    function: str
    limit_s: float
    arguments: dict[str, Any] = field(default_factory=dict)
    is_timed: bool = True

    @property
    def part(self) -> str:
        """Of which part it is."""
        return self.name.partition("/")[0]


_PRELOAD = "check.gpu_day.preload"
_START = Job("start", "check.gpu_day.machine:touch_device", 240.0)  # to import everything


@dataclass
class Result:
    """How a job ended.

    Attributes:
        status: one of the five words above.
        reason: in one line, unless it went well.
        found: plain values; of a job that failed what it had found until then.
        log: the end of what it printed, if it failed.
    """

    status: str
    reason: str = ""
    found: dict[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0
    log: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether it ran and did not go well."""
        return self.status in (FAILED, TIMED_OUT)


class Runner:
    """Runs jobs, each in a process. May be called by several threads at once.

    Args:
        settings: of all jobs.
        folder: for what processes leave; emptied by the caller.
    """

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([_PRELOAD])
        self._numbers = itertools.count()
        self.note = ""  # what a reader should know of how jobs were started

    def prepare(self) -> dict[str, Any]:
        """Imports everything once and has a child try the device. See Note [Why a server of forks].

        Returns:
            What it says of the machine.

        Raises:
            RuntimeError: no process can use the device.
        """
        first = self.run(_START)
        if first.status == OK:
            return first.found
        self._context = multiprocessing.get_context("spawn")
        self.note = f"each job imports everything anew: a forked process said {first.reason!r}"
        second = self.run(_START)
        if second.status != OK:
            raise RuntimeError(second.reason)
        return second.found

    def run(self, job: Job, left_s: float = float("inf")) -> Result:
        """Runs a job to its end, or to that of its time.

        Args:
            job: to run.
            left_s: it gets no more time than this.
        """
        began_s = time.monotonic()
        path = self._folder / f"{next(self._numbers)}.json"
        limit_s = min(job.limit_s, left_s)
        process = self._context.Process(target=_work, args=(job, self._settings, path))
        process.start()
        try:
            process.join(limit_s)
            is_late = process.is_alive()
        finally:
            _end_group(process)
        result = _read(path)
        result.wall_s = time.monotonic() - began_s
        if is_late:
            result.status, result.reason = TIMED_OUT, f"it did not end within {limit_s:.0f} s"
        elif process.exitcode != 0:
            result.status = FAILED
            result.reason = result.reason or f"its process ended with {process.exitcode}"
        if result.is_bad:
            with contextlib.suppress(OSError):
                text = path.with_suffix(".log").read_text(errors="replace")
                result.log = text[-_LAST_WORDS:]
        return result


def _read(path: Path) -> Result:
    try:
        return Result(**json.loads(path.read_text()))
    except OSError:  # it ended before it could write anything
        return Result(FAILED)


def _end_group(process: Any) -> None:
    """Ends a process and those that it has started."""
    if process.is_alive() and process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.join(_GRACE_S)
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():  # it has made no group yet
        process.kill()
    process.join(_GRACE_S)


# -- In the job's process -------------------------------------------------------------------------


def _work(job: Job, settings: Settings, path: Path) -> None:
    """Calls the function; writes how it ended."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGKILL)
    log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    result = Result(FAILED)
    _write(path, result)

    def note(found: dict[str, Any]) -> None:
        result.found = dict(found)
        _write(path, result)

    try:
        result.found = _function(job.function)(settings, note, **job.arguments)
        result.status, result.reason = OK, ""
    except Skip as skip:
        result.status, result.reason = SKIPPED, str(skip)
    except Exception as error:
        traceback.print_exc()
        first = (str(error).splitlines() or [""])[0]
        result.reason = f"{type(error).__name__}: {first[:300]}"
    _write(path, result)
    sys.stdout.flush()
    sys.stderr.flush()
    # What libraries do at their end (NCCL, threads that still write) is no part of the result.
    os._exit(0 if result.status in (OK, SKIPPED) else 1)


def _function(name: str) -> Callable[..., dict[str, Any]]:
    module, _, function = name.partition(":")
    found: Callable[..., dict[str, Any]] = getattr(importlib.import_module(module), function)
    return found


def _write(path: Path, result: Result) -> None:
    write_atomically(path, json.dumps(vars(result), default=str))
