#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A first half hour on a GPU in one command: what holds, how fast it is, beside what else there is.

    tools/gpu_day.py --out FOLDER                               # all parts, as far as the time goes
    tools/gpu_day.py --out FOLDER --parts facts,bits --limit 480
    tools/gpu_day.py --out FOLDER --parts stack,auto --earlier first/results.json
    tools/gpu_day.py --out FOLDER --report-only --earlier first/results.json second/results.json
    tools/gpu_day.py --out FOLDER --dry-run-cpu                 # every line but CUDA's, tiny

Nothing has to be installed beside PyTorch, transformers, scipy and numba: the wheels that
tools/gpu_wheels.sh downloads, unpacked on PYTHONPATH, are the rest. docs/gpu.md has the plan.

Each job is a process with a time limit of its own, and ends no other. results.json is written after
each; at the end results.md, rok.png, timeline.png and log.txt, with the last words of what failed,
stand beside it. What has not begun when the time is up is listed. With --earlier, what went well in
another call on such a GPU is taken from its results.json and not run again.

Exit code: 0 if all that ran went well, 1 if something did not, 2 if nothing could be done. What is
skipped says why and counts as well.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import shlex
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT / "tools", ROOT):  # nothing has to be installed
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import torch  # noqa: E402
from check.gpu_day import pictures, tables  # noqa: E402
from check.gpu_day.job import NOT_BEGUN, OK, SKIPPED, Job, Result, Runner  # noqa: E402
from check.gpu_day.parts import PARTS, jobs  # noqa: E402
from check.gpu_day.results import Day  # noqa: E402
from check.gpu_day.settings import Settings  # noqa: E402
from one_sentence import OneSentenceParser  # noqa: E402

from megatron.offload.commands.flag_values import size  # noqa: E402
from megatron.offload.sizes import MIB  # noqa: E402

NO_GPU = "needs a CUDA GPU; --dry-run-cpu tries the script on the CPU"
_LEAST_S = 10.0  # left, and a job still begins
_AT_THE_END_S = 5.0  # for tables and pictures
_DRY_BUDGET_BYTES = 256 * MIB


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parts = "parts:\n" + "\n".join(f"  {name:<10}{what}" for name, (what, _) in PARTS.items())
    parser = OneSentenceParser("gpu_day.py", __doc__, epilog=parts)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for results")
    parser.add_argument(
        "--parts",
        type=_parts,
        default=list(PARTS),
        metavar="PART,...",
        help="in this order; default: all",
    )
    parser.add_argument(
        "--only",
        type=_texts,
        default=[""],
        metavar="TEXT,...",
        help="of these parts, jobs whose names contain one of the texts",
    )
    parser.add_argument(
        "--skip",
        type=_texts,
        default=[],
        metavar="TEXT,...",
        help="leaves out jobs whose names contain one of the texts",
    )
    parser.add_argument(
        "--limit", type=_seconds, default=560.0, metavar="S", help="of all; default: 560"
    )
    parser.add_argument(
        "--earlier",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="results.json of other calls on such a GPU",
    )
    parser.add_argument(
        "--report-only", action="store_true", help="runs nothing; tables and pictures of --earlier"
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(tempfile.gettempdir()) / "offload",
        help="on the drive, made if it is missing; nothing stays in it; default: %(default)s",
    )
    parser.add_argument(
        "--host-budget", type=size, default="48GiB", help="for activations; default: 48GiB"
    )
    parser.add_argument(
        "--states-budget", type=size, default="40GiB", help="for states; default: 40GiB"
    )
    parser.add_argument("--dry-run-cpu", action="store_true", help="on the CPU, tiny")
    return parser


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[Day]:
    """What other calls found. Where nothing can be done: one sentence and exit code 2."""
    if args.report_only and not args.earlier:
        parser.error("--report-only needs --earlier: there is nothing else to report")
    if not args.dry_run_cpu and not args.report_only and not torch.cuda.is_available():
        parser.error(NO_GPU)
    if args.dry_run_cpu and torch.cuda.is_available():
        parser.error("--dry-run-cpu is for machines without a GPU")
    for name in ("out", "directory"):
        path = getattr(args, name)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--{name} {path}: {error.strerror}")
    earlier = []
    for path in args.earlier:
        try:
            earlier.append(Day.load(path))
        except (OSError, ValueError) as error:
            parser.error(f"--earlier {path}: {error}")
    return earlier


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings that jobs read, from the flags."""
    if args.dry_run_cpu:
        device = torch.device("cpu")
        budgets = (_DRY_BUDGET_BYTES, _DRY_BUDGET_BYTES)
    else:
        device = torch.device("cuda", 0)
        budgets = (args.host_budget, args.states_budget)
    return Settings(device, args.directory.resolve(), args.dry_run_cpu, *budgets)


def set_environment(settings: Settings) -> None:
    """What has to be there before a job's process imports torch; it inherits all of it."""
    paths = [str(ROOT / "tools"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    wanted = {
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # else to ask for a GPU begins CUDA before the fork
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # else cuBLAS does not repeat its results
        "TOKENIZERS_PARALLELISM": "false",
        # A process that ends at once leaves a lock of tqdm's behind; it is cleared away at the end.
        "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker",
    }
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        wanted["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if settings.is_tiny:
        wanted["OMP_NUM_THREADS"] = "1"  # models too small to share
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def run(args: argparse.Namespace, earlier: list[Day], argv: list[str]) -> int:
    """Runs the jobs, prints and writes what they found; the exit code."""
    began_s = time.monotonic()
    settings = settings_of(args)
    set_environment(settings)
    day = Day(_command(argv), args.dry_run_cpu)
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(settings, Path(folder))
        try:
            machine = runner.prepare()
        except RuntimeError as error:
            return _stop(f"no process can use the device: {error}")
        day.note, day.device, day.machine = runner.note, machine["device"], machine["line"]
        if (complaint := _take_in(day, args.earlier, earlier)) is not None:
            return _stop(complaint)
        todo = [job for job in _wanted(args, settings) if not _is_known(day, job.name)]
        for job in todo:
            day.results[job.name] = Result(NOT_BEGUN, "the time was up")
        print(f"{day.machine}\n{day.note or 'jobs are forked'}; {len(todo)} to run", flush=True)

        def run_one(job: Job) -> None:
            left_s = args.limit - (time.monotonic() - began_s) - _AT_THE_END_S
            if left_s < _LEAST_S:
                return
            result = runner.run(job, left_s)
            with lock:
                day.results[job.name] = result
                day.save(args.out / "results.json", ROOT)
                now = f"[{time.monotonic() - began_s:5.0f} s]"
                print(f"{now} {job.name:<44} {tables.in_words(result)}", flush=True)

        lock = threading.Lock()
        for is_timed, group in itertools.groupby(todo, lambda job: job.is_timed):
            at_once = 1 if is_timed else settings.num_beside
            with ThreadPoolExecutor(at_once) as pool:
                list(pool.map(run_one, group))
    return _end(day, args.out)


def report(args: argparse.Namespace, earlier: list[Day], argv: list[str]) -> int:
    """Writes tables and pictures of what other calls found; the exit code."""
    first = earlier[0]
    day = Day(_command(argv), first.is_dry, first.device, first.machine, first.note)
    if (complaint := _take_in(day, args.earlier, earlier)) is not None:
        return _stop(complaint)
    return _end(day, args.out)


def _command(argv: list[str]) -> str:
    """What was called; of folders that lie outside of the project, their names."""
    inside = [one.replace(f"{ROOT}/", "") for one in argv]
    named = [Path(one).name if Path(one).is_absolute() else one for one in inside]
    return shlex.join(["tools/gpu_day.py", *named])


def _stop(complaint: str) -> int:
    print(f"gpu_day.py: error: {complaint}", file=sys.stderr)
    return 2


def _take_in(day: Day, paths: list[Path], earlier: list[Day]) -> str | None:
    """Takes in what other calls found; what is wrong with it, None: nothing."""
    for path, other in zip(paths, earlier, strict=True):
        try:
            day.take_in(other)
        except ValueError as error:
            return f"--earlier {path}: {error}"
    return None


def _wanted(args: argparse.Namespace, settings: Settings) -> list[Job]:
    return [
        job
        for job in jobs(args.parts, settings)
        if any(text in job.name for text in args.only)
        and not any(text in job.name for text in args.skip)
    ]


def _is_known(day: Day, name: str) -> bool:
    return name in day.results and day.results[name].status in (OK, SKIPPED)


def _end(day: Day, out: Path) -> int:
    """Writes all files, at most five and each far below 16 MiB; the exit code."""
    day.save(out / "results.json", ROOT)
    logs = [f"== {name}\n{r.log.strip()}\n" for name, r in day.results.items() if r.log.strip()]
    (out / "log.txt").write_text("\n".join(logs).replace(f"{ROOT}/", ""))
    is_written = True
    for name, make in {
        "results.md": lambda: (out / "results.md").write_text(tables.page(day)),
        "pictures": lambda: pictures.draw(day, out),
    }.items():
        try:
            make()
        except Exception as error:  # the results are there, and can be reported again
            traceback.print_exc()
            print(f"no {name}: {type(error).__name__}: {error}; see --report-only", flush=True)
            is_written = False
    print(tables.ends(day), flush=True)
    return 0 if day.is_good and is_written else 1


def _parts(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [name for name in names if name not in PARTS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"unknown part {', '.join(unknown) or text!r}; choose from {', '.join(PARTS)}"
        )
    return list(dict.fromkeys(names))


def _texts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser()
    args = parser.parse_args(argv)
    earlier = check_arguments(parser, args)
    try:
        return (report if args.report_only else run)(args, earlier, argv)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    logging.getLogger("megatron.offload").setLevel(logging.WARNING)
    sys.exit(main())
