#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks activation offload on a machine with a CUDA GPU: right bytes, right bits, less memory.

    tools/gpu_check.py --quick                               sized for about 3 minutes
    tools/gpu_check.py --json gpu.json --markdown gpu.md     sized for about 10
    tools/gpu_check.py --only ordering --stress-seconds 600

Sections, each in a process of its own, each with lines that say pass, FAIL or skip. Skipped is what
the machine lacks, with the reason; what cannot run for another reason fails:

  ordering            every byte that comes back is compared, while all streams lag behind at random
  two_gpus            work on one GPU touches no other; engines of two GPUs in one process, in turn
  side_streams        layers that compute on streams of their own, and overlapped shared experts
  parity              losses and gradients of GPT, BERT and T5, offload off and on, bit for bit
  transformer_engine  the same with Transformer Engine's layers and grouped experts, bf16 and FP8
  states              AdamW's states on drives and on the host, steps on both sides, bit for bit
  parameters          parameters of layers on drives and on the host, bit for bit
  codecs              numbers in few bits are the same as on the host, and how fast
  memory              the peak falls below a bound derived term by term; host memory in its budget

It needs torch and this checkout, and megatron-core for parity and side_streams; no network. Results
are written after every section, so that a run that is cut short leaves what it has found.
--dry-run-cpu tries the script out without a GPU, at sizes that prove nothing. What has been proven
in which way so far is in docs/gpu.md.

How fast it is say others: tools/compare_placements.py (step time and peak of a training),
megatron-offload bench --device cuda (the tiers), tools/bench/hooks.py --device cuda (the hooks).

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
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT / "tools", ROOT):  # nothing has to be installed
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import torch  # noqa: E402
from check.gpu.result import Section, load, save  # noqa: E402
from check.gpu.settings import SECTIONS, Settings  # noqa: E402
from one_sentence import OneSentenceParser  # noqa: E402

from megatron.offload.commands.doctor.gpu import find_cuda  # noqa: E402
from megatron.offload.commands.training_runs.machine import (  # noqa: E402
    in_a_line,
    machine_facts,
)
from megatron.offload.machine.allocator import allocator_environment  # noqa: E402
from megatron.offload.tiers.gds_status import gds_status  # noqa: E402

NO_GPU = "needs a CUDA GPU; on a CPU use tools/compare_placements.py"
_LOG_LINES = 12  # of a section that died
_POLL_S = 0.2
ALL = ",".join(SECTIONS)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = OneSentenceParser("gpu_check.py", __doc__)
    what = parser.add_argument_group("what is done")
    what.add_argument(
        "--only",
        type=_names,
        default=tuple(SECTIONS),
        metavar="NAME,...",
        help=f"of {ALL}",
    )
    what.add_argument("--quick", action="store_true", help="fewer models, smaller ones, less time")
    what.add_argument(
        "--dry-run-cpu", action="store_true", help="on the CPU, at sizes that prove nothing"
    )
    what.add_argument(
        "--stress-seconds", type=_seconds, help="of ordering; default: 60, quick 15, CPU 2"
    )
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
    for name in ("--worker", "--result"):  # how the command calls itself
        parser.add_argument(name, help=argparse.SUPPRESS)
    return parser


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings that the sections read, from the flags."""
    cpu = args.dry_run_cpu
    index = torch.cuda.device_count() - 1 if args.device is None else args.device
    return Settings(
        device=torch.device("cpu") if cpu else torch.device("cuda", index),
        directory=args.directory,
        quick=args.quick,
        seed=args.seed,
        stress_s=args.stress_seconds or (2.0 if cpu else 15.0 if args.quick else 60.0),
    )


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends with one sentence and exit code 2 where nothing could be done."""
    if not args.dry_run_cpu and not torch.cuda.is_available():
        parser.error(NO_GPU)
    if args.dry_run_cpu and torch.cuda.is_available():
        parser.error("--dry-run-cpu is for machines without a GPU; use --quick")
    if args.device is not None and not 0 <= args.device < torch.cuda.device_count():
        parser.error(f"--device {args.device}: there are {torch.cuda.device_count()} GPUs")
    for name in ("json", "markdown"):
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
    machine = _machine(settings)
    command = shlex.join(["tools/gpu_check.py", *argv]).replace(f"{ROOT}/", "")
    print(in_a_line(machine), announcement(args.only, settings), sep="\n", flush=True)
    # On a CPU nothing that one section breaks would harm the next.
    groups = [list(args.only)] if args.dry_run_cpu else [[name] for name in args.only]
    found: list[Section] = []
    for names in groups:
        sections = _run_group(names, settings, args.limit_seconds, argv)
        found += sections
        for section in sections:
            for table in section.tables:
                print(f"\n{section.name}: {table.as_text()}", flush=True)
        write_results(args, command, machine, found)
    print("\n== overview")
    for section in found:
        print(f"{section.name:<18} {section.verdict} in {section.seconds:.0f} s")
    return 1 if any(section.failed for section in found) else 0


def announcement(names: Sequence[str], settings: Settings) -> str:
    """What will be shown and how long it takes: the first lines."""
    lines, total_s = [], 0.0
    for name in names:
        what, quick_s, full_s = SECTIONS[name]
        seconds = float(quick_s if settings.quick else full_s)
        if name == "ordering":
            seconds = settings.stress_s
        total_s += seconds
        lines.append(f"  {name:<18}  {what}")
    if not settings.on_gpu:
        return "\n".join(["a dry run on the CPU, which proves nothing about a GPU:", *lines])
    minutes = max(round(total_s / 60), 1)
    plural = "" if minutes == 1 else "s"
    head = f"on {settings.device}, sized for about {minutes} minute{plural}, will be shown:"
    return "\n".join([head, *lines])


def _machine(settings: Settings) -> dict[str, Any]:
    """What the results depend on, as plain values."""
    facts = machine_facts(settings.directory)
    if settings.on_gpu:
        found, properties = find_cuda(), torch.cuda.get_device_properties(settings.device)
        facts |= {
            "gpu_memory_bytes": properties.total_memory,
            "gpu_capability": f"{properties.major}.{properties.minor}",
            "num_gpus": torch.cuda.device_count(),
            "driver": found.driver,
            "cuda": found.runtime,
            "gpudirect": str(gds_status(has_gpu=True)),
        }
    return facts


def _run_group(
    names: list[str], settings: Settings, limit_s: float, argv: list[str]
) -> list[Section]:
    """Runs sections in one process, printing each line as it comes; what it left when it ended."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, str(Path(__file__).resolve()), *argv]
        command += ["--worker", ",".join(names), "--result", str(result)]
        limit_s *= len(names)
        deadline_s = time.monotonic() + limit_s
        print(f"\n== {', '.join(names)}", flush=True)
        num_printed = 0
        with result.with_suffix(".log").open("w") as log:
            process = subprocess.Popen(
                command, env=worker_environment(settings.on_gpu), stdout=log, stderr=log
            )
        try:
            while process.poll() is None and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
                num_printed = _print_checks(load(result), num_printed)
            reason = f"its process ended with exit code {process.returncode}"
            if process.poll() is None:
                reason = f"it did not end within {limit_s:g} s (--limit-seconds)"
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        lines = result.with_suffix(".log").read_text(errors="replace").splitlines()
        sections = completed(names, load(result), process.returncode == 0, reason, lines)
        _print_checks(sections, num_printed)
        return sections


def _print_checks(sections: Sequence[Section], num_printed: int) -> int:
    """Prints the lines that are new; how many there are now."""
    checks = [check for section in sections for check in section.checks]
    for check in checks[num_printed:]:
        print(check, flush=True)
    return len(checks)


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
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # nor would Transformer Engine's attention
        "TORCHDYNAMO_DISABLE": "1",  # megatron-core compiles small functions: no compiler is needed
    }
    return environment if on_gpu else environment | allocator_environment()


def work(args: argparse.Namespace) -> int:
    """In the sections' own process: runs them, saves after every line, and never raises."""
    settings = settings_of(args)
    if settings.on_gpu:
        torch.cuda.set_device(settings.device)
    else:
        torch.set_num_threads(1)  # the models are too small to share
    sections: list[Section] = []
    for name in args.worker.split(","):
        section = Section(name)
        section.when_changed = lambda: save(sections, Path(args.result))
        sections.append(section)
        warnings = _Warnings()
        logging.getLogger("megatron.offload").addHandler(warnings)
        began_s = time.monotonic()
        try:
            importlib.import_module(f"check.gpu.{name}").run(settings, section)
        except Exception as error:
            traceback.print_exc()
            section.data["traceback"] = traceback.format_exc()
            section.check("no error", False, f"{type(error).__name__}: {error}")
        section.seconds = time.monotonic() - began_s
        section.data["warnings"] = warnings.messages
        logging.getLogger("megatron.offload").removeHandler(warnings)
        section.when_changed()
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
            "sections": {section.name: asdict(section) for section in found},
        }
        # No folder of this machine in a file that may be committed.
        text = json.dumps(result, indent=1).replace(f"{ROOT}/", "")
        args.json.write_text(text + "\n")
    if args.markdown:
        parts = ["# GPU check", in_a_line(machine), f"    {command}"]
        parts += [section.as_markdown() for section in found]
        args.markdown.write_text("\n\n".join(parts).replace(f"{ROOT}/", "") + "\n")


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [name for name in names if name not in SECTIONS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"unknown section {', '.join(unknown) or text!r}; choose from {', '.join(SECTIONS)}"
        )
    return tuple(name for name in SECTIONS if name in names)


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
