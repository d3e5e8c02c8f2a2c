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

`ssd-chunked` computes the loss over chunks of tokens, which is not bit-identical: its runs are
compared bit by bit with each other, and the table has the largest relative difference of a loss
from the others', which may be 1e-4. That is for fp32: in bf16 losses drift apart by more.

Exit code: 0 all identical, 1 a run differs, 2 the comparison could not be made.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch
from one_sentence import OneSentenceParser
from tabulate import tabulate
from tqdm import tqdm

from megatron.offload.commands.training_runs.machine import in_a_line, machine_facts
from megatron.offload.commands.training_runs.run import (
    Difference,
    Run,
    RunError,
    Variant,
    first_difference,
    order_of_round,
    paired_ratio,
)
from megatron.offload.commands.training_runs.start import Start
from megatron.offload.commands.training_runs.trainer import (
    PLACEMENT_FLAGS,
    WITHIN_ROUNDING,
    Trainer,
    add_training_arguments,
    allocators_of,
    training_flags,
)
from megatron.offload.machine.allocator import allocator_environment

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
_ROUNDING = 1e-4  # of a loss, relative: fp32's, grown over some steps of training
_DEFAULT = "off,recompute,recompute-ssd,ssd"


@dataclass(frozen=True)
class Row:
    """Medians of one variant over all rounds."""

    variant: Variant
    identical: bool  # to the reference
    repeatable: bool  # identical to each other
    loss_difference: float  # largest relative one from the reference's; 0 if identical
    step_time_s: float
    time_ratio: float | None  # to the faster off, paired by round
    peak_bytes: float
    peak_ratio: float | None  # to the smaller off
    written_bytes: float
    read_bytes: float
    stall_s: float


def parse_placements(text: str, both_allocators: bool) -> list[Variant]:
    """Variants from "off,recompute,ssd"; "off@default" names a single one.

    Raises:
        RunError: an unknown name.
    """
    variants: list[Variant] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        placement, _, allocator = name.partition("@")
        if placement not in PLACEMENT_FLAGS or allocator not in ("", "default", "offload"):
            raise RunError(
                f"unknown placement {name!r}; choose from {', '.join(PLACEMENT_FLAGS)}, "
                "optionally with @default or @offload"
            )
        allocators = [allocator] if allocator else allocators_of(placement, both=both_allocators)
        variants += [Variant(placement, each) for each in allocators]
    if not variants:
        raise RunError("--placements names no placement")
    return list(dict.fromkeys(variants))


def summarize(
    variants: Sequence[Variant], runs: Sequence[Run], skip: int
) -> tuple[list[Row], list[Difference]]:
    """The table's rows, and the first difference of each run that differs from the first run.

    The reference is the first `off` run, or the first run where `off` is not compared.
    """
    off = [run for run in runs if run.variant.placement == "off"]
    reference = (off or list(runs))[0]
    references = {  # of each variant
        variant: next(run for run in runs if run.variant == variant)
        if variant.placement in WITHIN_ROUNDING
        else reference
        for variant in variants
    }
    differences = [diff for run in runs if (diff := first_difference(references[run.variant], run))]
    for variant in variants:
        if _loss_difference(reference, references[variant]) > _ROUNDING:
            first = first_difference(reference, references[variant])
            differences += [first] if first is not None else []
    off_peaks = [
        median(run.peak_bytes(skip) for run in off if run.variant == variant)
        for variant in {run.variant for run in off}
    ]
    rows = []
    for variant in variants:
        own = [run for run in runs if run.variant == variant]
        peak = median(run.peak_bytes(skip) for run in own)
        rows.append(
            Row(
                variant=variant,
                identical=all(first_difference(reference, run) is None for run in own),
                repeatable=all(first_difference(own[0], run) is None for run in own),
                loss_difference=max(_loss_difference(reference, run) for run in own),
                step_time_s=median(run.step_time_s(skip) for run in own),
                time_ratio=paired_ratio(own, off, skip),
                peak_bytes=peak,
                peak_ratio=peak / min(off_peaks) if off_peaks and min(off_peaks) else None,
                written_bytes=median(run.offload_median("written_bytes", skip) for run in own),
                read_bytes=median(run.offload_median("read_bytes", skip) for run in own),
                stall_s=median(run.offload_median("stall_s", skip) for run in own),
            )
        )
    return rows, differences


def _loss_difference(reference: Run, run: Run) -> float:
    """The largest relative difference of a loss."""
    pairs = zip(reference.steps, run.steps, strict=False)
    found = [abs(b["loss"] / a["loss"] - 1) for a, b in pairs if b["loss"] != a["loss"]]
    return max((math.inf if math.isnan(one) else one for one in found), default=0.0)


def format_table(rows: Sequence[Row]) -> str:
    """The rows as the table that is printed."""

    def ratio(value: float | None) -> str:
        return "" if value is None else f"{value:.3f}"

    def bits(row: Row) -> str:
        if row.identical:
            return "identical"
        if row.variant.placement not in WITHIN_ROUNDING or not row.repeatable:
            return "DIFFERENT"
        if row.loss_difference > _ROUNDING:
            return "DIFFERENT"
        if row.loss_difference == 0:
            return "loss identical"
        return f"loss to {row.loss_difference:.1e}"

    return tabulate(
        [
            (
                row.variant.placement,
                row.variant.allocator,
                bits(row),
                f"{row.step_time_s:.3f}",
                ratio(row.time_ratio),
                f"{row.peak_bytes / MIB:,.1f}",
                ratio(row.peak_ratio),
                f"{row.written_bytes / MIB:,.1f}",
                f"{row.read_bytes / MIB:,.1f}",
                f"{row.stall_s:.3f}",
            )
            for row in rows
        ],
        headers=(
            "placement",
            "allocator",
            "loss, grad norm",
            "step s",
            "/ off",
            "peak MiB",
            "/ off",
            "written MiB/step",
            "read MiB/step",
            "stall s/step",
        ),
        disable_numparse=True,
        colalign=("left", "left", "left", *["right"] * 7),
    )


def row_to_json(row: Row) -> dict[str, Any]:
    """A row for the file, with the flags that its variant adds to those of all trainings."""
    values = asdict(row)
    values["variant"]["flags"] = PLACEMENT_FLAGS[row.variant.placement]
    return values


def run_trainer(
    args: argparse.Namespace, trainer: Trainer, variant: Variant, round_: int, bar: tqdm[NoReturn]
) -> Run:
    """Trains once in a process of its own.

    Raises:
        RunError: the trainer failed or reported too few steps.
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


def make_parser() -> argparse.ArgumentParser:
    """The command line; the model's flags are named as the trainer names them."""
    parser = OneSentenceParser("compare_placements.py", __doc__)
    model = add_training_arguments(parser, num_layers=12, seq_length=512, vocab_size=8192)
    model.add_argument("--micro-batch-size", type=int, default=4)
    model.add_argument("--train-iters", type=int, default=8)
    model.add_argument("--mock-data", action="store_true", help="no corpus at all")
    model.add_argument(
        "--processes", type=int, default=1, help="more than 1: torchrun; the first rank is measured"
    )
    compare = parser.add_argument_group("comparison")
    compare.add_argument(
        "--placements",
        default=_DEFAULT,
        help=f"of {', '.join(PLACEMENT_FLAGS)}; default: {_DEFAULT}",
    )
    compare.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: cuda where there is one",
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
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device; use --device cpu")
    if not args.trainer.is_file():
        parser.error(f"trainer not found: {args.trainer}")
    if args.work_dir is None:
        args.work_dir = ROOT / f"runs/compare-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"
    if args.work_dir.exists() and any(args.work_dir.iterdir()):
        parser.error(f"--work-dir {args.work_dir} is not empty")


def compare(args: argparse.Namespace, command: list[str]) -> int:
    """Runs everything, prints the table; returns 1 if any run differs, else 0."""
    variants = parse_placements(args.placements, both_allocators=args.device == "cpu")
    if args.device == "cpu" and torch.cuda.is_available():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the trainer takes a GPU where there is one
    args.activation_offload_dir.mkdir(parents=True, exist_ok=True)
    flags = [
        *("--micro-batch-size", str(args.micro_batch_size), "--train-iters", str(args.train_iters)),
        *training_flags(args),
    ]
    trainer = Trainer(args.trainer, flags, args.activation_offload_dir, Start(args.processes))
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
            "summary": [row_to_json(row) for row in rows],
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
