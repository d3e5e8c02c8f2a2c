# SPDX-License-Identifier: Apache-2.0
"""Each family in a process of its own: `run_families`.

This process has imported torch and transformers and forks, so that a family costs no start. What a
process has found comes through a pipe, cell by cell: a crash or a hang ends its family's process
alone, and the columns that are left are run by another one.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from check.family.catalogue import Family
from check.family.cells import Cell, Left, Outcome
from check.family.columns import Columns
from check.family.sample import NotBuiltError, Sample, find_sample, in_a_line

Found = Cell | Left
_fork = multiprocessing.get_context("fork")
_MOST_MEMORY_BYTES = 8 << 30  # of address space beyond what this process has
ONCE = {"auto"}  # it plans for seconds
_PREPARING = ""  # in the place of a column


@dataclass(frozen=True)
class Work:
    """What a process does.

    Attributes:
        family: that it trains.
        attention: `eager` or `sdpa`.
        columns: in their order.
        is_second: its columns in `ONCE` are run with sdpa, where its model has that.
    """

    family: Family
    attention: str
    columns: tuple[str, ...]
    is_second: bool = False

    def cell(self, column: str, outcome: Outcome, note: str) -> Cell:
        """What came of a column."""
        return Cell(self.family.name, self.family.kind, self.attention, column, outcome, note)

    def left(self, reason: str, *, is_random: bool = False) -> Left:
        """The family is not compared."""
        return Left(self.family.name, self.family.kind, self.attention, reason, is_random)


def run_here(work: Work, directory: Path, tell: Callable[[Found | str], None]) -> None:
    """Tries a family's columns in this process.

    Args:
        work: to be done.
        directory: for what moves.
        tell: gets the name of what begins, then what came of it.
    """
    tell(_PREPARING)
    try:
        sample = find_sample(work.family, work.attention)
    except NotBuiltError as error:
        tell(work.left(str(error)))
        return
    run_sample(sample, work, directory, tell)


def run_sample(
    sample: Sample, work: Work, directory: Path, tell: Callable[[Found | str], None]
) -> None:
    """The same of a sample that is there."""
    columns = Columns(sample, directory)
    difference = columns.difference_of_two_plain_trainings()
    if difference:
        tell(work.left(f"two plain trainings differ: {difference}", is_random=True))
        return
    has_sdpa = getattr(type(sample.pristine), "_supports_sdpa", False)
    for column in work.columns:
        if column in ONCE and work.is_second and has_sdpa:
            continue
        tell(column)
        began_s = time.perf_counter()
        outcome, note, moved = columns.run(column)
        seconds = round(time.perf_counter() - began_s, 2)
        tell(replace(work.cell(column, outcome, note), moved=moved, seconds=seconds))


def run_families(
    works: Iterable[Work],
    directory: Path,
    *,
    processes: int,
    timeout_s: float,
    tell: Callable[[Found], None],
    ended: Callable[[Work], None],
) -> None:
    """Runs all, some at a time.

    Args:
        works: each of another family, or of another attention.
        directory: for what moves; each process has a folder of its own in it.
        processes: at a time.
        timeout_s: that preparing or a column may take.
        tell: gets what was found.
        ended: hears of each that is through.
    """
    left = deque(works)
    running: list[_Process] = []
    try:
        while left or running:
            while left and len(running) < processes:
                running.append(_Process(left.popleft(), directory))
            for process in _first_to_say(running, timeout_s):
                again = process.hear(tell, timeout_s)
                if again is None:
                    continue
                running.remove(process)
                if again.columns:
                    left.appendleft(again)
                else:
                    ended(again)
    finally:
        for process in running:
            process.end()


def _first_to_say(running: Sequence[_Process], timeout_s: float) -> list[_Process]:
    """Those that have something to tell, or have said nothing for too long."""
    soonest_s = min(one.since_s for one in running) + timeout_s - time.monotonic()
    ready = wait([one.pipe for one in running], max(0.0, soonest_s) + 0.1)
    return [
        one for one in running if one.pipe in ready or time.monotonic() - one.since_s > timeout_s
    ]


class _Process:
    """One process, and what it does at the moment."""

    def __init__(self, work: Work, directory: Path) -> None:
        self.work = work
        self.since_s = time.monotonic()
        self._column = _PREPARING
        self._done: set[str] = set()
        self._is_through = False
        self._folder = Path(tempfile.mkdtemp(dir=directory))
        self.pipe, theirs = _fork.Pipe(duplex=False)
        self._process = _fork.Process(target=_child, args=(work, self._folder, theirs))
        self._process.start()
        theirs.close()

    def hear(self, tell: Callable[[Found], None], timeout_s: float) -> Work | None:
        """Takes what it says; once it has ended, what is left to be done."""
        if not self.pipe.poll():
            self.end()
            return self._stopped(tell, f"did not end within {timeout_s:g} s")
        try:
            said = self.pipe.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            self.end()
            if self._is_through:
                return replace(self.work, columns=())
            return self._stopped(tell, f"its process ended with exit code {code}")
        self.since_s = time.monotonic()
        if said is None:
            self._is_through = True
        elif isinstance(said, str):
            self._column = said
        else:
            if isinstance(said, Cell):
                self._done.add(said.column)
            tell(said)
        return None

    def end(self) -> None:
        """Whether it has ended or not."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self.pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _stopped(self, tell: Callable[[Found], None], how: str) -> Work:
        if self._column == _PREPARING:
            tell(self.work.left(f"preparing {how}" if how.startswith("did") else how))
            return replace(self.work, columns=())
        tell(self.work.cell(self._column, Outcome.CRASH, how))
        done = self._done | {self._column}
        return replace(self.work, columns=tuple(c for c in self.work.columns if c not in done))


def _child(work: Work, folder: Path, pipe: Connection) -> None:
    """The process: never returns to what forked it."""
    code = 1
    try:
        _bound_memory()
        run_here(work, folder, pipe.send)
        pipe.send(None)
        code = 0
    except BaseException as error:
        traceback.print_exc()
        pipe.send(work.left(f"the tool itself: {in_a_line(error)}"))
        pipe.send(None)
    finally:
        pipe.close()
        os._exit(code)


def _bound_memory() -> None:
    """A model that wants too much fails alone."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + _MOST_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
