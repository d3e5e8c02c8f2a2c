#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs one training with different placements of its activations and compares them.

    compare_placements.py --hidden-size 1024 --num-layers 8 --num-attention-heads 16 --json a.json

Each round runs every variant once, in an order that rotates from round to round. Losses, gradient
norms and the final weights are compared bit by bit over all runs. Time is compared within a round,
against the faster `off` of that round, and the median over the rounds is shown. On a CPU `off` and
`recompute` run both with the C library's default allocator and with the one that `ssd` uses (it
gives memory back to the system, which costs page faults). Memory is compared against the smaller
of the two `off` peaks, each the median over the rounds of the largest step, on the first rank.
With --processes 2 --extra-args "--pipeline-model-parallel-size 2 --global-batch-size 32" that is
the first of two pipeline stages.

Exit code: 0 all identical, 1 a run differs, 2 the comparison could not be made.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import torch
from comparison import (
    ComparisonError,
    Run,
    Variant,
    format_table,
    order_of_round,
    parse_placements,
    summarize,
)
from tqdm import tqdm

from megatron.offload.storage.allocator import allocator_environment

ROOT = Path(__file__).resolve().parent.parent

PLACEMENT_FLAGS: dict[str, list[str]] = {
    "off": ["--activation-offload", "off"],
    "recompute": [
        *("--activation-offload", "off"),
        *("--recompute-granularity", "full"),
        *("--recompute-method", "uniform"),
        *("--recompute-num-layers", "1"),
    ],
    "ssd": ["--activation-offload", "ssd"],
    "host": ["--activation-offload", "host"],
    "tiered": ["--activation-offload", "tiered"],
    # Everything is hooked and nothing moves: what the hooks cost.
    "keep": [
        *("--activation-offload", "ssd"),
        *("--activation-offload-min-bytes", "1TiB"),
        *("--activation-offload-inflight", "1TiB"),
    ],
}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line without an end is still being written."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def run_trainer(
    args: argparse.Namespace, variant: Variant, round_: int, bar: tqdm[NoReturn]
) -> Run:
    """Trains once in a process of its own.

    Raises:
        ComparisonError: The trainer failed or reported too few steps.
    """
    folder = args.work_dir / f"round{round_ + 1}-{variant.name}"
    folder.mkdir(parents=True)
    metrics, log = folder / "metrics.jsonl", folder / "output.log"
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.processes}"]
    command = [
        *(sys.executable, *(launch if args.processes > 1 else []), str(args.trainer)),
        *args.trainer_flags,
        *PLACEMENT_FLAGS[variant.placement],
        *("--activation-offload-dir", str(args.activation_offload_dir)),
        *("--metrics-file", str(metrics)),
    ]
    ours = allocator_environment()
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    if variant.allocator == "offload":
        environment |= ours
    bar.set_description(f"round {round_ + 1}/{args.rounds} {variant.name}")
    before = bar.n
    with log.open("wb") as output:
        output.write((shlex.join(command) + "\n").encode())
        output.flush()
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.5)
                bar.update(before + len(read_metrics(metrics)) - bar.n)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    steps = read_metrics(metrics)
    if process.returncode != 0 or len(steps) != args.train_iters:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise ComparisonError(
            f"{variant.name} in round {round_ + 1} ended with exit code {process.returncode} after "
            f"{len(steps)} of {args.train_iters} steps; the end of {log}:\n{tail}"
        )
    return Run(variant, round_, steps)


def prepare_data(args: argparse.Namespace) -> list[str]:
    """The trainer's data flags; builds the quickstart's corpus if it is wanted and absent."""
    if args.mock_data:
        return ["--mock-data", "--vocab-size", str(args.vocab_size)]
    if args.data_path:
        tokenizer = ["--tokenizer-model", args.tokenizer_model] if args.tokenizer_model else []
        return ["--data-path", *args.data_path, *tokenizer]
    name = "stdlib" if args.vocab_size == 8192 else f"stdlib-{args.vocab_size}"
    folder = ROOT / "data" / name
    if not (folder / "corpus_text_document.idx").exists():
        command = [sys.executable, str(ROOT / "tools/preprocess_data.py"), "--stdlib"]
        command += ["--append-eod", "--vocab-size", str(args.vocab_size)]
        done = subprocess.run([*command, "--output-prefix", str(folder / "corpus")], check=False)
        if done.returncode != 0:
            raise ComparisonError("the quickstart's corpus could not be built")
    return [
        *("--data-path", str(folder / "corpus_text_document")),
        *("--tokenizer-model", str(folder / "tokenizer.json")),
    ]


def _filesystem_of(path: Path) -> str:
    """Type and device of the file system that holds a path, from the kernel's mount table."""
    target = path.resolve()
    best, found = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        device, mount, kind = line.split()[:3]
        if target.is_relative_to(mount) and len(mount) >= len(best):
            best, found = mount, f"{kind} on {device}"
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed as a package"


def machine_facts(offload_dir: Path) -> dict[str, Any]:
    """What the figures depend on."""
    cpu = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron_core": _version("megatron-core"),
        "offload_filesystem": _filesystem_of(offload_dir),
    }


class _Parser(argparse.ArgumentParser):
    """Reports a bad flag in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def make_parser() -> argparse.ArgumentParser:
    """The command line; the model's flags are named as the trainer names them."""
    parser = _Parser(
        prog="compare_placements.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    model = parser.add_argument_group("training")
    model.add_argument("--num-layers", type=int, default=12)
    model.add_argument("--hidden-size", type=int, default=512)
    model.add_argument("--num-attention-heads", type=int, default=8)
    model.add_argument("--seq-length", type=int, default=512)
    model.add_argument("--micro-batch-size", type=int, default=4)
    model.add_argument("--train-iters", type=int, default=8)
    model.add_argument("--vocab-size", type=int, default=8192, help="of the quickstart's corpus")
    model.add_argument("--data-path", nargs="+", help="default: the quickstart's corpus")
    model.add_argument("--tokenizer-model", help="tokenizer.json that belongs to --data-path")
    model.add_argument("--mock-data", action="store_true", help="no corpus at all")
    model.add_argument("--extra-args", default="", help="more flags for the trainer, in one string")
    model.add_argument(
        "--processes", type=int, default=1, help="more than 1: torchrun; figures of the first rank"
    )
    model.add_argument(
        "--trainer", type=Path, default=ROOT / "examples/pretrain_gpt.py", help="script to run"
    )
    compare = parser.add_argument_group("comparison")
    compare.add_argument(
        "--placements", default="off,recompute,ssd", help="default: off,recompute,ssd"
    )
    compare.add_argument("--rounds", type=int, default=3)
    compare.add_argument("--skip-steps", type=int, default=2, help="warm-up steps left out")
    compare.add_argument("--activation-offload-dir", type=Path, default=ROOT / "runs/offload")
    compare.add_argument("--work-dir", type=Path, help="outputs; default: runs/compare-TIME")
    compare.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    return parser


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends with one sentence and exit code 2 where the flags make no comparison."""
    if args.rounds < 1 or args.skip_steps < 0 or args.train_iters <= args.skip_steps:
        parser.error("--rounds must be at least 1 and --train-iters above --skip-steps")
    if args.json and not args.json.resolve().parent.is_dir():
        parser.error(f"--json: no such folder: {args.json.resolve().parent}")
    if not args.trainer.is_file():
        parser.error(f"trainer not found: {args.trainer}")
    if args.work_dir is None:
        args.work_dir = ROOT / f"runs/compare-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"
    if args.work_dir.exists() and any(args.work_dir.iterdir()):
        parser.error(f"--work-dir {args.work_dir} is not empty")


def compare(args: argparse.Namespace, command: list[str]) -> int:
    """Runs everything, prints the table; returns 1 if any run differs, else 0."""
    variants = parse_placements(args.placements, both_allocators=not torch.cuda.is_available())
    args.activation_offload_dir.mkdir(parents=True, exist_ok=True)
    shape = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size")
    args.trainer_flags = [
        *(part for name in shape for part in (_flag_of(name), str(getattr(args, name)))),
        *("--train-iters", str(args.train_iters), "--lr", "6e-4", "--lr-warmup-iters", "2"),
        *("--log-interval", "1", "--eval-iters", "0"),
        *("--attention-dropout", "0", "--hidden-dropout", "0"),
        *prepare_data(args),
        *shlex.split(args.extra_args),
    ]
    runs: list[Run] = []
    total = len(variants) * args.rounds * args.train_iters
    with tqdm(total=total, unit="step", dynamic_ncols=True, disable=None) as bar:
        for round_ in range(args.rounds):
            for variant in order_of_round(variants, round_):
                runs.append(run_trainer(args, variant, round_, bar))
    rows, differences = summarize(variants, runs, args.skip_steps)
    machine = machine_facts(args.activation_offload_dir)
    print(format_table(rows))
    print(
        f"{args.rounds} rounds of {args.train_iters} steps, the first {args.skip_steps} left out; "
        "time against the faster off of each round, memory against the smaller off"
    )
    print(
        f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / (1 << 30):.0f} GiB, {machine['offload_filesystem']}, "
        f"torch {machine['torch']}, megatron-core {machine['megatron_core']}"
    )
    for difference in differences:
        print(difference)
    if args.json:
        result = {
            "command": shlex.join(command),
            "trainer_flags": args.trainer_flags,
            "allocator_environment": allocator_environment(),
            "skip_steps": args.skip_steps,
            "machine": machine,
            "identical": not differences,
            "differences": [asdict(difference) for difference in differences],
            "summary": [asdict(row) for row in rows],
            "runs": [asdict(run) for run in runs],
        }
        # Paths relative to the checkout, so that a committed file names no machine's folders.
        args.json.write_text(json.dumps(result, indent=1).replace(f"{ROOT}/", "") + "\n")
    return 1 if differences else 0


def _flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    check_arguments(parser, args)
    try:
        return compare(args, [parser.prog, *(sys.argv[1:] if argv is None else argv)])
    except ComparisonError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
