#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Makes single errors in copies of the package and runs the test that must find each.

    python tests/mutations.py [--only WORDS] [--lag] [--jobs N] [--json FILE]

The errors stand in `tests/mutation_tables`. First all of their tests run on an unchanged copy. Then
each error gets a copy of its own, and its test has to fail there. Exit code 1 if one survives, or
if a table is out of date. A process imports torch once; each test runs in a fork of it.

With --lag the tests run on the test accelerator, as with `tests/run.sh --lag`: those of
tests/behaviour and tests/autograd. Errors in what only a CPU runs are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    # Not this directory: its folder `megatron` must not become part of the package of that name.
    sys.path[0] = str(ROOT)

from tests.mutation_tables import PACKAGE, Mutation, all_mutations  # noqa: E402

COPIED = (PACKAGE, "tests", "tools", "pyproject.toml")  # tests import from tools
PRELOADED = (
    "hypothesis.strategies",
    "numpy",
    "pytest",
    "pytest_timeout",
    "torch.multiprocessing.reductions",
    "torch.profiler",
    "torch.utils._python_dispatch",
    "xxhash",
)
ALLOWED_S = 90.0  # for one test; it then counts as hanging
HANG_S = 8.0  # the same, for a test that is to hang; counts from its beginning
NO_TEST_RAN = ("ImportError", "IndentationError", "ModuleNotFoundError", "NameError", "SyntaxError")

ON_LAG = ("behaviour/", "autograd/")  # tests that know nothing of a device
NOT_ON_LAG = ("InPlace.", "_InPlaceView.")  # functions that only a CPU runs

CAUGHT, SURVIVED, NOT_RUN = "caught", "SURVIVED", "not run"
NOT_SAID = "hangs, which the table does not say"


@dataclass
class Outcome:
    """How a test ended."""

    passed: bool = True
    skipped: str = ""  # the reason
    error: str = ""  # the type of the first exception
    words: str = ""  # of that exception


@dataclass
class Result:
    """What became of one mutation."""

    mutation: Mutation
    verdict: str
    seconds: float
    how: str

    def __str__(self) -> str:
        return f"{self.verdict:8} {self.seconds:5.1f} s  {self.mutation}"


# -- In a forked process ------------------------------------------------------------------------


class Reporter:
    """A pytest plugin that notes what each test came to."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.outcomes: dict[str, Outcome] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._file.with_suffix(".begun").touch()

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        outcome = self.outcomes.setdefault(item.nodeid, Outcome())
        if call.excinfo is not None and not outcome.error:
            outcome.error = call.excinfo.typename
            outcome.words = (str(call.excinfo.value).splitlines() or [""])[0][:200]

    def pytest_runtest_logreport(self, report: Any) -> None:
        outcome = self.outcomes.setdefault(report.nodeid, Outcome())
        if report.skipped:
            outcome.skipped = str(report.longrepr[2] if report.longrepr else "")
        outcome.passed &= not report.failed


def run_tests(copy: Path, tests: Iterable[str], file: Path, plugins: Sequence[str]) -> None:
    """Runs tests of a copy and writes their outcomes to a file."""
    os.chdir(copy)
    sys.path[:] = [str(copy), *(entry for entry in sys.path if entry != str(ROOT))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    assert "megatron" not in sys.modules
    import hypothesis
    import pytest

    # The same examples each time, and the first that fails is enough.
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile(
        "mutations", phases=phases, derandomize=True, database=None, deadline=None
    )
    hypothesis.settings.load_profile("mutations")
    reporter = Reporter(file)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # some take longer to import than a test
    code = pytest.main(
        [
            *(f"{copy}/tests/{test}" for test in tests),
            *("-q", "-p", "pytest_timeout", "-p", "no:cacheprovider", "-p", "no:faulthandler"),
            *(option for name in plugins for option in ("-p", name)),
            f"--rootdir={copy}",
            f"--basetemp={copy / 'tmp'}",
            f"--config-file={copy / 'pyproject.toml'}",
        ],
        plugins=[reporter],
    )
    package = sys.modules.get("megatron.offload")
    assert package is None or Path(str(package.__file__)).is_relative_to(copy), package
    outcomes = {name: asdict(outcome) for name, outcome in reporter.outcomes.items()}
    file.write_text(json.dumps({"code": int(code), "outcomes": outcomes}))


@dataclass
class Fork:
    """A forked process that runs tests."""

    pid: int
    file: Path
    began: float

    @classmethod
    def start(
        cls, copy: Path, tests: Sequence[str], file: Path, plugins: Sequence[str] = ()
    ) -> Fork:
        """Its output goes beside the file with the outcomes."""
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return cls(pid, file, time.monotonic())
        code = 1
        try:
            os.setsid()  # so that what it starts can be ended with it
            log = os.open(file.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            run_tests(copy, tests, file, plugins)
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # threads that a test left behind may never end

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def kill(self) -> None:
        """Ends it and what it has started."""
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.began

    @property
    def test_seconds(self) -> float:
        """Since its test began; 0 before."""
        with contextlib.suppress(FileNotFoundError):
            return max(time.time() - self.file.with_suffix(".begun").stat().st_mtime, 0.0)
        return 0.0

    @property
    def log(self) -> str:
        """What it has printed."""
        return self.file.with_suffix(".log").read_text(errors="replace")

    def read(self) -> tuple[int, dict[str, Outcome]]:
        """Pytest's exit code, and the outcomes by the tests' names."""
        told = json.loads(self.file.read_text())
        return told["code"], {name: Outcome(**fields) for name, fields in told["outcomes"].items()}


# -- The copies ---------------------------------------------------------------------------------


def copy_checkout(target: Path) -> None:
    """The package and the tests as they are now."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy2(ROOT / name, target / name)


def mutated_copy(unchanged: Path, target: Path, mutation: Mutation) -> None:
    """A copy with one error. Compiled files of all others are valid in it: times are kept."""
    shutil.copytree(unchanged, target, ignore=shutil.ignore_patterns("tmp", ".hypothesis"))
    path = target / PACKAGE / mutation.file
    path.write_text(mutation.apply(path.read_text()))
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


# -- What is run --------------------------------------------------------------------------------


def baseline(
    unchanged: Path,
    mutations: Sequence[Mutation],
    directory: Path,
    num_jobs: int,
    plugins: Sequence[str] = (),
) -> dict[str, str]:
    """Runs every named test once, without an error. By test, why it was skipped, or nothing."""
    wanted = sorted({mutation.test for mutation in mutations})
    forks = []
    for number in range(num_jobs):
        if part := wanted[number::num_jobs]:
            # Pytest empties its folder for temporary files: each process has a copy of its own.
            copy = directory / f"baseline-{number}" if number else unchanged
            if number:
                shutil.copytree(unchanged, copy)
            forks.append(Fork.start(copy, part, directory / f"baseline-{number}.json", plugins))
    outcomes: dict[str, Outcome] = {}
    for fork in forks:
        os.waitpid(fork.pid, 0)
        if not fork.file.exists():
            raise RuntimeError(f"the tests did not run:\n{fork.log}")
        code, found = fork.read()
        if code not in (0, 1):
            raise RuntimeError(f"a named test is not there:\n{fork.log}")
        outcomes |= {name.removeprefix("tests/"): outcome for name, outcome in found.items()}
        if failed := [name for name, outcome in found.items() if not outcome.passed]:
            raise RuntimeError(f"without any error these fail: {failed}\n{fork.log}")
    return {test: why_skipped(test, outcomes) for test in wanted}


def why_skipped(test: str, outcomes: dict[str, Outcome]) -> str:
    """The reason if a test was skipped with all its parameters, else nothing."""
    own = [o.skipped for name, o in outcomes.items() if name == test or name.startswith(f"{test}[")]
    if not own:
        raise RuntimeError(f"no test is called {test}")
    return own[0] if all(own) else ""


def verdict_of(fork: Fork, mutation: Mutation, code: int) -> tuple[str, str]:
    """What a process that has ended says of its mutation."""
    if code < 0:
        return CAUGHT, f"ended by {signal.Signals(-code).name}"
    if code or not fork.file.exists():
        return SURVIVED, f"the test did not run:\n{fork.log}"
    pytest_code, outcomes = fork.read()
    failed = [outcome for outcome in outcomes.values() if not outcome.passed]
    if pytest_code not in (0, 1) or any(outcome.error in NO_TEST_RAN for outcome in failed):
        return SURVIVED, f"the test did not run:\n{fork.log}"
    if not failed:
        return SURVIVED, "it hangs no more" if mutation.hangs else "the test passes"
    if failed[0].words.startswith("Timeout (") and not mutation.hangs:  # pytest-timeout's words
        return SURVIVED, NOT_SAID
    return CAUGHT, f"{failed[0].error}: {failed[0].words}"


def run_all(
    mutations: Sequence[Mutation],
    unchanged: Path,
    directory: Path,
    num_jobs: int,
    plugins: Sequence[str] = (),
) -> Iterator[Result]:
    """Runs each mutation's test, a few at a time; yields results as they come."""
    waiting = list(enumerate(mutations))[::-1]
    running: list[tuple[Fork, Mutation, Path]] = []
    while waiting or running:
        while waiting and len(running) < num_jobs:
            number, mutation = waiting.pop()
            copy = directory / str(number)
            mutated_copy(unchanged, copy, mutation)
            fork = Fork.start(copy, [mutation.test], directory / f"{number}.json", plugins)
            running.append((fork, mutation, copy))
        time.sleep(0.01)
        for entry in list(running):
            fork, mutation, copy = entry
            code = fork.poll()
            if code is not None:
                verdict, how = verdict_of(fork, mutation, code)
            elif mutation.hangs and fork.test_seconds > HANG_S:
                fork.kill()
                verdict, how = CAUGHT, "hangs"
            elif fork.seconds > ALLOWED_S:
                fork.kill()
                verdict, how = SURVIVED, f"{NOT_SAID}\n{fork.log}"
            else:
                continue
            running.remove(entry)
            shutil.rmtree(copy)
            yield Result(mutation, verdict, fork.seconds, how)


def out_of_date(mutations: Sequence[Mutation]) -> list[str]:
    """What is wrong with the tables, in sentences."""
    wrong = []
    for mutation in mutations:
        try:
            changed = mutation.apply((ROOT / PACKAGE / mutation.file).read_text())
            compile(changed, mutation.file, "exec")
        except (OSError, SyntaxError, ValueError) as error:
            wrong.append(str(error) if isinstance(error, ValueError) else f"{mutation}: {error}")
    return wrong


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", metavar="WORDS", default="", help="those with these words in their row"
    )
    parser.add_argument("--lag", action="store_true", help="tests run on the test accelerator")
    parser.add_argument("--jobs", type=int, default=2, help="tests at the same time (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    return parser.parse_args()


def main() -> int:
    """See the top of the file."""
    arguments = parse_arguments()
    began = time.monotonic()
    mutations = [m for m in all_mutations() if arguments.only in "\t".join(astuple(m))]
    plugins: list[str] = []
    if arguments.lag:
        mutations = [
            m
            for m in mutations
            if m.test.startswith(ON_LAG) and not m.function.startswith(NOT_ON_LAG)
        ]
        plugins = ["tests.support.lag.plugin"]
    if not mutations:
        print(f"no mutation has the words {arguments.only!r}", file=sys.stderr)
        return 1
    if wrong := out_of_date(mutations):
        print(*wrong, "the tables are out of date", sep="\n", file=sys.stderr)
        return 1
    for name in PRELOADED:
        with contextlib.suppress(ImportError):  # tests that need it skip themselves
            importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    gc.freeze()  # pytest collects garbage in every fork: not what was there before
    with tempfile.TemporaryDirectory(prefix="mutations-") as temporary:
        directory = Path(temporary)
        unchanged = directory / "unchanged"
        copy_checkout(unchanged)
        try:
            skipped = baseline(unchanged, mutations, directory, arguments.jobs, plugins)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
        print(f"{len(skipped)} tests pass without an error ({time.monotonic() - began:.0f} s)")
        results = [Result(m, NOT_RUN, 0.0, skipped[m.test]) for m in mutations if skipped[m.test]]
        runnable = [mutation for mutation in mutations if not skipped[mutation.test]]
        for result in run_all(runnable, unchanged, directory, arguments.jobs, plugins):
            results.append(result)
            print(f"[{len(results):3}/{len(mutations)}] {result}", flush=True)
            if result.verdict == SURVIVED:
                print(f"      {result.mutation.test}: {result.how}", flush=True)
    return report(results, arguments.json, time.monotonic() - began)


def report(results: list[Result], file: Path | None, seconds: float) -> int:
    """Prints who survived, and the sums; the exit code."""
    by_verdict: dict[str, list[Result]] = {CAUGHT: [], SURVIVED: [], NOT_RUN: []}
    for result in results:
        by_verdict[result.verdict].append(result)
    print("", *by_verdict[SURVIVED], sep="\n")
    for reason in sorted({result.how for result in by_verdict[NOT_RUN]}):
        print(f"not run: {reason}")
    print(*(f"{len(those)} {verdict}" for verdict, those in by_verdict.items()), sep=", ", end=" ")
    print(f"in {seconds:.0f} s")
    if file is not None:
        rows = [
            {**asdict(r.mutation), "verdict": r.verdict, "how": r.how, "seconds": r.seconds}
            for r in results
        ]
        file.write_text(json.dumps(rows, indent=1))
    return 1 if by_verdict[SURVIVED] else 0


if __name__ == "__main__":
    sys.exit(main())
