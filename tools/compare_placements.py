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
import datetime
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import torch
from comparison import format_table, parse_placements, summarize
from tqdm import tqdm

from megatron.offload.commands.training_runs.machine import in_a_line, machine_facts
from megatron.offload.commands.training_runs.run import Run, RunError, Variant, order_of_round
from megatron.offload.commands.training_runs.trainer import (
    PLACEMENT_FLAGS,
    Trainer,
    add_training_arguments,
    training_flags,
)
from megatron.offload.device.allocator import allocator_environment

ROOT = Path(__file__).resolve().parent.parent


def run_trainer(
    args: argparse.Namespace, trainer: Trainer, variant: Variant, round_: int, bar: tqdm[NoReturn]
) -> Run:
    """Trains once in a process of its own.

    Raises:
        TrialError: The trainer failed or reported too few steps.
    """
    bar.set_description(f"round {round_ + 1}/{args.rounds} {variant.name}")
    before, name = bar.n, f"{variant.name} in round {round_ + 1}"
    steps = trainer.train(
        name,
        PLACEMENT_FLAGS[variant.placement],
        variant.allocator,
        args.work_dir / f"round{round_ + 1}-{variant.name}",
        on_steps=lambda number: bar.update(before + number - bar.n),
    )
    if len(steps) != args.train_iters:
        raise RunError(f"{name} reported {len(steps)} of {args.train_iters} steps")
    return Run(variant, round_, steps)


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
    model = add_training_arguments(parser, num_layers=12, seq_length=512, vocab_size=8192)
    model.add_argument("--micro-batch-size", type=int, default=4)
    model.add_argument("--train-iters", type=int, default=8)
    model.add_argument("--mock-data", action="store_true", help="no corpus at all")
    model.add_argument(
        "--processes", type=int, default=1, help="more than 1: torchrun; figures of the first rank"
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
    flags = [
        *("--micro-batch-size", str(args.micro_batch_size), "--train-iters", str(args.train_iters)),
        *training_flags(args),
    ]
    trainer = Trainer(args.trainer, flags, args.activation_offload_dir, args.processes)
    runs: list[Run] = []
    total = len(variants) * args.rounds * args.train_iters
    with tqdm(total=total, unit="step", dynamic_ncols=True, disable=None) as bar:
        for round_ in range(args.rounds):
            for variant in order_of_round(variants, round_):
                runs.append(run_trainer(args, trainer, variant, round_, bar))
    rows, differences = summarize(variants, runs, args.skip_steps)
    machine = machine_facts(args.activation_offload_dir)
    print(format_table(rows))
    print(
        f"{args.rounds} rounds of {args.train_iters} steps, the first {args.skip_steps} left out; "
        "time against the faster off of each round, memory against the smaller off"
    )
    print(in_a_line(machine))
    for difference in differences:
        print(difference)
    if args.json:
        result = {
            "command": shlex.join(command),
            "trainer_flags": flags,
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


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    check_arguments(parser, args)
    try:
        return compare(args, [parser.prog, *(sys.argv[1:] if argv is None else argv)])
    except RunError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
