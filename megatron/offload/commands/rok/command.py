# SPDX-License-Identifier: Apache-2.0
"""`megatron-offload rok`, from flags to what is printed and written: `run`. The CLI calls it."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron.offload.commands.launch_command import not_looked_at
from megatron.offload.commands.rok.measurements import as_csv, measured_points, predicted_frontier
from megatron.offload.commands.rok.picture import draw
from megatron.offload.commands.rok.result import Result
from megatron.offload.commands.rok.runner import CurveRunner
from megatron.offload.commands.rok.strategy import Strategy
from megatron.offload.commands.rok.text import measurements_table, verdict_table
from megatron.offload.commands.rok.training_command import MeasuredCommand
from megatron.offload.commands.rok.verdict import verdicts_of
from megatron.offload.commands.training_runs.machine import in_a_line, machine_facts
from megatron.offload.commands.training_runs.run import Run, first_difference
from megatron.offload.commands.training_runs.script import ScriptTrainer
from megatron.offload.commands.training_runs.trainer import Trainer, training_flags
from megatron.offload.device.cuda import has_cuda
from megatron.offload.sizes import parse_rate

NAME = "rok"  # of all files


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Measures, prints the tables, writes the files; the exit code.

    Args:
        args: checked, see `arguments`.
        command: as it was typed, for the record.

    Raises:
        ConfigurationError: the file to draw again is none.
        RunError: a training failed.
        OSError: a file cannot be read or written.
    """
    if args.redraw is not None:
        result = Result.load(args.redraw)
        _show(result)
        draw(result, _pictures(args.redraw.parent))
        return 0
    result = _measured(args, command)
    _show(result)
    print(f"wrote {', '.join(str(path) for path in sorted(args.output.glob(f'{NAME}.*')))}")
    return 0 if result.passes or not args.check else 1


def _measured(args: argparse.Namespace, command: Sequence[str]) -> Result:
    args.output.mkdir(parents=True, exist_ok=True)
    args.activation_offload_dir.mkdir(parents=True, exist_ok=True)
    limit: list[str] = []
    if args.activation_offload_write_limit is not None:
        rate = str(round(parse_rate(args.activation_offload_write_limit)))
        limit = ["--activation-offload-write-limit", rate]
    if args.script is not None:
        flags = shlex.split(args.script_args)
        trainer: Trainer = ScriptTrainer(
            args.script, flags, args.activation_offload_dir, offload_flags=limit
        )
    elif args.training is not None:
        training: MeasuredCommand = args.training
        flags = [*training.flags, *limit]
        trainer = Trainer(
            training.script, flags, args.activation_offload_dir, launch=training.start
        )
        if training.left_out:
            print(f"left out of what is measured: {shlex.join(training.left_out)}")
        if training.passed_on:
            print(not_looked_at(training.passed_on, passed_on=True))
    else:
        flags = [*training_flags(args), *limit]
        trainer = Trainer(args.trainer, flags, args.activation_offload_dir)
    conditions = {
        "command": shlex.join(command),
        "trainer_flags": flags,
        "skip_steps": args.skip_steps,
        "noise": args.noise,
        "machine": machine_facts(args.activation_offload_dir),
        "load": os.getloadavg(),  # before it began: a busy machine measures itself
    }
    found = Result(_title(args), conditions, [])
    with _Progress(args.rounds) as progress:
        runner = CurveRunner(
            args,
            trainer,
            both_allocators=not has_cuda(),
            watch=progress.watch,
            watch_turn=progress.watch_turn,
        )
        progress.expect(runner.most_trainings)
        for _ in runner.rounds():
            progress.expect(len(runner.strategies))
            found = _result(args, found, runner)
            _write(args.output, found)
    frontier = predicted_frontier(runner.profiles, found.measured)
    found = dataclasses.replace(found, frontier=frontier)
    _write(args.output, found)
    draw(found, _pictures(args.output))
    return found


def _result(args: argparse.Namespace, before: Result, of: CurveRunner) -> Result:
    """What is known after a round."""
    strategies, skip = of.strategies, args.skip_steps
    measured = measured_points(strategies, of.runs, skip)
    verdicts = verdicts_of(strategies, of.runs, measured, of.failures, skip=skip, noise=args.noise)
    return dataclasses.replace(
        before,
        measured=measured,
        verdicts=verdicts,
        rule=of.rule,
        differences=list(_differences(of.runs)),
        runs=list(of.runs),
    )


def _differences(runs: Sequence[Run]) -> Iterator[str]:
    """From the first run with the same batch size, where one differs."""
    first: dict[int, Run] = {}
    for one in runs:
        assert isinstance(one.variant, Strategy)
        reference = first.setdefault(one.variant.micro_batch_size, one)
        fields = ("loss", "grad_norm")
        difference = first_difference(reference, one, same_length=False, fields=fields)
        if difference is not None:
            yield str(difference)


def _title(args: argparse.Namespace) -> str:
    limit = args.activation_offload_write_limit
    if args.script is not None:
        return f"{args.script.name}{f', writes limited to {limit}' if limit else ''}"
    if args.training is not None:
        described = ", ".join(filter(None, (args.training.script.name, args.training.model)))
        return f"{described}{f', writes limited to {limit}' if limit else ''}"
    return (
        f"GPT, {args.num_layers} layers, hidden size {args.hidden_size}, "
        f"sequence length {args.seq_length}{f', writes limited to {limit}' if limit else ''}"
    )


def _show(result: Result) -> None:
    print(f"\n{result.title}\n{in_a_line(result.conditions['machine'])}\n")
    print(measurements_table(result.measured))
    for size, number in result.rule.items():
        print(f"TBA's rule sends the first {number} layers to the SSD (micro-batch {size})")
    if result.verdicts:
        print(f"\n{verdict_table(result.verdicts)}")
    for difference in result.differences:
        print(difference)
    print()


def _write(folder: Path, result: Result) -> None:
    """All but the picture, which --redraw makes where a measurement was interrupted."""
    (folder / f"{NAME}.json").write_text(result.to_json())
    (folder / f"{NAME}.csv").write_text(as_csv(result.measured))


def _pictures(folder: Path) -> list[Path]:
    return [folder / f"{NAME}.png", folder / f"{NAME}.svg"]


class _Progress:
    """A bar on a terminal, a line for each training elsewhere."""

    def __init__(self, num_rounds: int) -> None:
        self._num_rounds = num_rounds
        self._bar: tqdm[Any] = tqdm(unit="training", dynamic_ncols=True, disable=None)
        self._current: tuple[Strategy, int] | None = None

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *more: object) -> None:
        if kind is None:
            self._bar.update()  # the last one has no next that would say so
        self._bar.close()

    def expect(self, per_round: int) -> None:
        """So many trainings in each round."""
        self._bar.total = per_round * self._num_rounds
        self._bar.refresh()

    def watch(self, strategy: Strategy, round_: int, num_steps: int) -> None:
        """See `Watcher`."""
        if self._current != (strategy, round_):
            if self._current is not None:
                self._bar.update()
            self._current = strategy, round_
            text = f"round {round_ + 1}/{self._num_rounds} {strategy.name}"
            self._bar.set_description(text)
            if self._bar.disable:
                print(text, file=sys.stderr, flush=True)
        self._bar.set_postfix_str(f"step {num_steps}")

    def watch_turn(self, round_: int, num_turns: int) -> None:
        """All trainings of a round have taken so many turns."""
        text = f"round {round_ + 1}/{self._num_rounds} all in turn"
        self._bar.set_description(text)
        self._bar.set_postfix_str(f"turn {num_turns}")
        if self._bar.disable and num_turns == 1:
            print(text, file=sys.stderr, flush=True)
