#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks and measures activation offload on a machine with a CUDA GPU.

    gpu_check.py --quick                               everything, sized for about 3 minutes
    gpu_check.py --json gpu.json --markdown gpu.md     everything, sized for about 20
    gpu_check.py --only ordering --stress-seconds 600
    gpu_check.py --only overlap --trace trace.json     look at it with https://ui.perfetto.dev
    gpu_check.py --only compare --sizes 8192x6x2048x4,4096x8x8192x1

Sections, each in a process of its own, each with lines that say pass, FAIL or skip:

  ordering   every byte that comes back is compared, while all streams lag behind at random
  parity     losses and gradients of GPT, BERT and T5 with offload off and on, bit for bit
  memory     the peak falls below a bound derived term by term; host memory stays in its budget
  overlap    how much of the copy time is hidden under kernels, and how much is a stall
  bandwidth  copies (pinned or not), host memory, SSD and GPUDirect, in one direction and in both
  compare    step time and peak of keep, recomputation, torch's save_on_cpu, host, ssd and tiered

It needs torch and this checkout, and megatron-core for parity and compare; no network. What kvikio
would do is skipped without it. Results are written after every section, so that a run that is cut
short leaves what it has found. --dry-run-cpu tries the script out without a GPU, at sizes that
measure nothing.

Exit code: 0 nothing failed, 1 something did, 2 it could not be run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT / "tools", ROOT):  # nothing has to be installed
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import torch  # noqa: E402
from gpu_sections.machine import machine_facts, summary_lines  # noqa: E402
from gpu_sections.progress import Progress  # noqa: E402
from gpu_sections.result import Section, load, save  # noqa: E402
from gpu_sections.settings import SECTIONS, Settings, Size  # noqa: E402

from megatron.offload.device.allocator import allocator_environment  # noqa: E402

NO_GPU = "needs a CUDA GPU; on a CPU use tools/compare_placements.py"
SIZES = "4096x16x2048x4,8192x6x2048x4,12288x3x1024x8"
QUICK_SIZES = "4096x8x2048x4"
CPU_SIZES = "64x2x32x2"
_LOG_LINES = 12  # of a section that died


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = _Parser(
        prog="gpu_check.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what is done")
    what.add_argument(
        "--only", type=_names, default=SECTIONS, metavar="NAME,...", help=f"of {','.join(SECTIONS)}"
    )
    what.add_argument("--quick", action="store_true", help="fewer models, sizes, rounds, seconds")
    what.add_argument(
        "--dry-run-cpu", action="store_true", help="on the CPU, at sizes that measure nothing"
    )
    what.add_argument(
        "--stress-seconds", type=_seconds, help="of ordering; default: 60, quick 15, CPU 2"
    )
    what.add_argument(
        "--sizes",
        type=_sizes,
        metavar="HxLxSxB,...",
        help="of compare: hidden x layers x sequence length x micro-batch size; "
        f"default, for GPUs of 80 GB and more: {SIZES}; quick: {QUICK_SIZES}",
    )
    what.add_argument("--rounds", type=_count, help="of compare; default: 3, quick 2, CPU 1")
    what.add_argument("--steps", type=_count, help="of compare in a round; default: 4, quick 2")
    what.add_argument("--seed", type=int, default=1, help="of everything random; default: 1")
    where = parser.add_argument_group("where")
    where.add_argument(
        "--device",
        type=int,
        metavar="N",
        help="default: the last GPU, where code that takes the first one for granted fails",
    )
    where.add_argument(
        "--directory",
        type=Path,
        default=ROOT / "runs/offload",
        help="on the SSD, made if it is missing; nothing stays in it",
    )
    where.add_argument(
        "--limit-seconds", type=_seconds, default=900.0, help="for a section; default: 900"
    )
    output = parser.add_argument_group("results")
    output.add_argument("--json", type=Path, metavar="FILE", help="everything, machine included")
    output.add_argument("--markdown", type=Path, metavar="FILE", help="tables for docs/results/")
    output.add_argument("--trace", type=Path, metavar="FILE", help="Chrome trace of overlap, host")
    for name in ("--worker", "--result"):  # how the command calls itself
        parser.add_argument(name, help=argparse.SUPPRESS)
    return parser


def settings_of(args: argparse.Namespace) -> Settings:
    """What the sections read."""
    cpu, quick = args.dry_run_cpu, args.quick
    last = torch.cuda.device_count() - 1
    index = last if args.device is None else args.device
    default_sizes = CPU_SIZES if cpu else QUICK_SIZES if quick else SIZES
    return Settings(
        device=torch.device("cpu") if cpu else torch.device("cuda", index),
        directory=args.directory,
        quick=quick,
        seed=args.seed,
        stress_s=args.stress_seconds or (2.0 if cpu else 15.0 if quick else 60.0),
        sizes=args.sizes or _sizes(default_sizes),
        rounds=args.rounds or (1 if cpu else 2 if quick else 3),
        num_steps=args.steps or (1 if cpu else 2 if quick else 4),
        limit_s=args.limit_seconds,
        trace=args.trace,
    )


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends with one sentence and exit code 2 where nothing could be done."""
    if not args.dry_run_cpu and not torch.cuda.is_available():
        parser.error(NO_GPU)
    if args.dry_run_cpu and torch.cuda.is_available():
        parser.error("--dry-run-cpu is for machines without a GPU; use --quick")
    if args.device is not None and not 0 <= args.device < torch.cuda.device_count():
        parser.error(f"--device {args.device}: there are {torch.cuda.device_count()} GPUs")
    for name in ("json", "markdown", "trace"):
        path = getattr(args, name)
        if path is not None and not path.resolve().parent.is_dir():
            parser.error(f"--{name}: no such folder: {path.resolve().parent}")
    try:
        args.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--directory {args.directory}: {error.strerror}")


def run_sections(args: argparse.Namespace, argv: list[str]) -> int:
    """Runs the sections in processes, prints and writes what they found; the exit code."""
    settings = settings_of(args)
    machine = machine_facts(settings.device, settings.directory)
    command = shlex.join(["tools/gpu_check.py", *argv]).replace(f"{ROOT}/", "")
    print("\n".join(summary_lines(machine)), flush=True)
    # On a CPU nothing that one section breaks would harm the next.
    groups = [list(args.only)] if args.dry_run_cpu else [[name] for name in args.only]
    found: list[Section] = []
    for names in groups:
        for section in run_group(names, settings, argv):
            found.append(section)
            print(f"\n{section.as_text()}", flush=True)
        write_results(args, command, machine, found)
    print("\n== overview")
    for section in found:
        print(f"{section.name:<10} {section.verdict}")
    return 1 if any(section.failed for section in found) else 0


def run_group(names: list[str], settings: Settings, argv: list[str]) -> list[Section]:
    """Runs sections in one process; what it left, however it ended."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, str(Path(__file__).resolve()), *argv]
        command += ["--worker", ",".join(names), "--result", str(result)]
        limit_s = settings.limit_s * len(names)
        process = subprocess.Popen(command, env=worker_environment(settings.on_gpu))
        try:
            process.wait(timeout=limit_s)
            reason = f"its process ended with exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            reason = f"it did not end within {limit_s:.0f} s (--limit-seconds)"
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log = result.with_suffix(".log")
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return completed(names, load(result), process.returncode == 0, reason, lines)


def completed(
    names: list[str], found: list[Section], ended_well: bool, reason: str, log: list[str]
) -> list[Section]:
    """All sections of a process; a failed line where it died, and empty ones for the rest."""
    known = {section.name: section for section in found}
    sections = [known.get(name, Section(name)) for name in names]
    if not ended_well:
        broken = next((s for s in reversed(sections) if s.name in known), sections[0])
        end = " / ".join(line.strip() for line in log[-_LOG_LINES:] if line.strip())
        broken.check("the section ran to its end", False, f"{reason}; its last words: {end}")
    for section in sections:
        if not section.checks:
            section.check("the section ran", False, "a section before it ended the process")
    return sections


def worker_environment(on_gpu: bool) -> dict[str, str]:
    """What has to be there before torch starts."""
    environment = {
        **os.environ,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # else cuBLAS does not repeat its results
        "TORCHDYNAMO_DISABLE": "1",  # megatron-core compiles small functions: no compiler is needed
    }
    return environment if on_gpu else environment | allocator_environment()


def work(args: argparse.Namespace) -> int:
    """In the section's own process: runs it, saves after every line, and never raises."""
    result = Path(args.result)
    # Everything that is printed goes to a file; only the progress bar stays on the terminal.
    screen = os.fdopen(os.dup(2), "w")
    with result.with_suffix(".log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    settings = settings_of(args)
    if settings.on_gpu:
        torch.cuda.set_device(settings.device)
    else:
        torch.set_num_threads(1)  # the models are too small to share
    sections: list[Section] = []
    for name in args.worker.split(","):
        section = Section(name)
        section.progress = Progress(name, screen)
        section.when_changed = lambda: save(sections, result)
        sections.append(section)
        warnings = _Warnings()
        logging.getLogger("megatron.offload").addHandler(warnings)
        began_s = time.monotonic()
        try:
            importlib.import_module(f"gpu_sections.{name}").run(settings, section)
        except Exception as error:
            traceback.print_exc()
            section.data["traceback"] = traceback.format_exc()
            section.check("no error", False, f"{type(error).__name__}: {error}")
        section.seconds = time.monotonic() - began_s
        section.data["warnings"] = warnings.messages
        section.progress.close()
        logging.getLogger("megatron.offload").removeHandler(warnings)
        save(sections, result)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


class _Warnings(logging.Handler):
    """Keeps what the package warns of: fallbacks, budgets that are used up."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message not in self.messages and len(self.messages) < 50:
            self.messages.append(message)


def write_results(
    args: argparse.Namespace, command: str, machine: dict[str, Any], found: list[Section]
) -> None:
    """Writes the files that were asked for, anew after every section."""
    if args.json:
        result = {
            "command": command,
            "machine": machine,
            "passed": not any(section.failed for section in found),
            "sections": {section.name: section.as_dict() for section in found},
        }
        # No folder of this machine in a file that may be committed.
        text = json.dumps(result, indent=1).replace(f"{ROOT}/", "")
        args.json.write_text(text + "\n")
    if args.markdown:
        parts = ["# GPU check", "\n".join(f"{line}  " for line in summary_lines(machine))]
        parts += [f"    {command}", *(section.as_markdown() for section in found)]
        args.markdown.write_text("\n\n".join(parts).replace(f"{ROOT}/", "") + "\n")


class _Parser(argparse.ArgumentParser):
    """Reports a bad flag in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [name for name in names if name not in SECTIONS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"unknown section {', '.join(unknown) or text!r}; choose from {', '.join(SECTIONS)}"
        )
    return tuple(name for name in SECTIONS if name in names)


def _sizes(text: str) -> tuple[Size, ...]:
    try:
        return tuple(Size.parse(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    count = int(text) if text.isdecimal() else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return count


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.worker:
        return work(args)
    check_arguments(parser, args)
    try:
        return run_sections(args, argv)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
