# SPDX-License-Identifier: Apache-2.0
"""`megatron-offload tune`, from flags to what is printed and written: `run`. The CLI calls it.

It says what it will measure, measures, fits, prints the candidates, and with a memory budget or
--check measures those of them that `search.py` asks for.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron.offload.activations.placement.atomic_file import check_place, write_atomically
from megatron.offload.commands.launch_command import not_looked_at
from megatron.offload.commands.training_runs.machine import in_a_line, machine_facts
from megatron.offload.commands.training_runs.run import RunError
from megatron.offload.commands.training_runs.trainer import CHECKOUT, CommandTrainer
from megatron.offload.commands.tune.arguments import Request, request_of, step_size_of
from megatron.offload.commands.tune.candidates import FAILED, Candidate, Limits, Space, best_of
from megatron.offload.commands.tune.fit import Fit
from megatron.offload.commands.tune.limits import limits_of
from megatron.offload.commands.tune.runs import Duration, Runs
from megatron.offload.commands.tune.search import MOST_TRAININGS, search
from megatron.offload.commands.tune.setting import Setting
from megatron.offload.commands.tune.step_model import Measurement, StepModel
from megatron.offload.commands.tune.text import (
    candidates_table,
    duration_text,
    limits_text,
    measured_table,
    settings_text,
    tried_table,
)
from megatron.offload.device.cuda import has_cuda
from megatron.offload.sizes import format_size

_MOST_ROWS = 12


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Measures, prints the tables, writes the files; the exit code.

    Args:
        args: see `arguments`.
        command: as it was typed, for the record.

    Raises:
        ConfigurationError: it cannot be done.
        RunError: a training failed, or nothing keeps to the limits.
        OSError: a file cannot be read or written.
    """
    request = request_of(args)
    for path in (args.output, args.json):
        if path is not None:
            check_place(path)  # before minutes of measuring
    limits = limits_of(request.command, args.processes)
    machine = machine_facts(_place(request))
    tuning = _Tuning(request, args, limits)
    print(in_a_line(machine))
    print(f"limits of a rank: {limits_text(limits)}")
    if request.command.added:
        print(f"added to what is measured and to the choice: {shlex.join(request.command.added)}")
    if request.command.left_out:
        print(f"left out of what is measured: {shlex.join(request.command.left_out)}")
    if request.command.passed_on:
        print(not_looked_at(request.command.passed_on, passed_on=True))
    measured = tuning.measure(request.to_measure)
    tokens_per_sample = measured[0].tokens / (
        measured[0].setting.samples * request.data_parallel_size
    )
    space = Space(
        step_size_of(args, request, tokens_per_sample).settings(request.units),
        limits,
        args.memory_margin,
        tokens_per_sample * request.data_parallel_size,
    )

    def model_of(known: Sequence[Measurement]) -> StepModel:
        return StepModel(
            known,
            num_layers=request.command.num_layers,
            num_stages=request.command.num_stages,
            host_budget_bytes=limits.host_bytes,
        )

    model = model_of(measured)
    predicted = space.candidates(model, {})
    measures = args.check or limits.device_bytes < math.inf
    print(f"\n{measured_table(measured, model)}\n")
    print(
        candidates_table(predicted, None if measures else best_of(predicted), most_rows=_MOST_ROWS)
    )
    chosen, found = search(space, measured, model_of, tuning.try_out, neighbours=args.check)
    known = {one.setting: one.measured for one in found if one.measured is not None}
    tried = [
        (one, known[one.setting])
        for one in sorted(predicted, key=lambda one: -one.tokens_per_s)
        if one.setting in known
    ]
    if measures:
        of_choice = None if chosen is None else chosen.setting
        print(f"\n{tried_table(tried, of_choice, space)}")
    if args.json is not None:
        conditions = {
            "command": shlex.join(command),
            "added": list(request.command.added),
            "machine": machine,
        }
        text = as_json(conditions, limits, measured, model, predicted, chosen, tried)
        write_atomically(args.json, text)
    if chosen is None:
        raise RunError(_nothing_fits(found, space))
    of_setting = chosen.setting.flags(request.data_parallel_size)
    flags = shlex.join([*of_setting, *request.command.added])
    print(f"\n{flags}")
    if args.output is not None:
        write_atomically(args.output, flags + "\n")
    return 0


class _Tuning:
    """Runs the trainings of a request, and says what it does and how far it is."""

    def __init__(self, request: Request, args: argparse.Namespace, limits: Limits) -> None:
        self._request = request
        self._limits = limits
        self._turns = args.turns
        self._trainer = CommandTrainer(
            request.command.script,
            request.command.flags,
            _place(request),
            launch=request.command.start,
        )
        self._first: tuple[Setting, Duration] | None = None
        self._bar: tqdm[Any] = tqdm(disable=True)

    def measure(self, settings: list[Setting]) -> list[Measurement]:
        """Runs what the fits are made of."""
        how_long = self._request.how_long
        print(
            f"measuring {len(settings)} settings (micro-batches x micro-batch size), "
            f"{how_long.skip_steps} + {how_long.steps} steps each and at least "
            f"{how_long.seconds:g} s{', in turns' if self._turns else ''}:\n"
            f"{settings_text(settings)}",
            flush=True,
        )
        if self._limits.device_bytes < math.inf:
            print(f"and up to {MOST_TRAININGS} more, to be sure of the memory budget", flush=True)
        elif self._request.command.num_stages > 1:
            print(f"and up to {MOST_TRAININGS} more, to choose by what was measured", flush=True)
        return self._run(settings, "fit")

    def try_out(self, settings: Sequence[Setting]) -> Mapping[Setting, Measurement | None]:
        """Runs candidates as they are; None: its training failed.

        With a memory budget each runs by itself: that is what the budget is for.
        """
        print(f"\nmeasuring {len(settings)} more:\n{settings_text(settings)}", flush=True)
        self._say_duration(settings, "this takes")
        if self._limits.device_bytes == math.inf:
            return dict(zip(settings, self._run(settings, "more"), strict=True))
        self._turns = False
        found: dict[Setting, Measurement | None] = {}
        for one in settings:
            try:
                (found[one],) = self._run([one], "more")
            except RunError as error:  # it may have run out of memory
                tqdm.write(f"not chosen: {error}")
                found[one] = None
        return found

    def _run(self, settings: Sequence[Setting], phase: str) -> list[Measurement]:
        request = self._request
        runs = Runs(
            self._trainer,
            request.how_long,
            request.output / phase,
            data_parallel_size=request.data_parallel_size,
            mode=request.command.offload.mode,
            both_allocators=not has_cuda(),
            whole_memory=self._limits.device_bytes < math.inf,
            watch=self._watch,
        )
        found: dict[Setting, Measurement] = {}
        self._bar = tqdm(total=len(settings), unit="training", dynamic_ncols=True, disable=None)
        try:
            for one in settings:
                self._say(one.name)
                if self._turns:
                    runs.settle(one)
                else:
                    found[one] = runs.measure(one)
                self._bar.update()
                if self._first is None:  # the others' steps, by their tokens
                    self._first = runs.first
                    self._say_duration(settings[1:], "the other trainings take")
            if self._turns:
                self._say("all in turn")
                found = runs.take_turns()
        finally:
            runs.end()
            self._bar.close()
        return [found[one] for one in settings]

    def _say(self, what: str) -> None:
        self._bar.set_description(what)
        if self._bar.disable:
            print(what, file=sys.stderr, flush=True)

    def _watch(self, setting: Setting, num_steps: int) -> None:
        self._bar.set_postfix_str(f"step {num_steps}")

    def _say_duration(self, settings: Sequence[Setting], what: str) -> None:
        assert self._first is not None
        setting, duration = self._first
        seconds = duration.of_others(settings, setting, self._request.how_long)
        tqdm.write(f"{what} {duration_text(seconds)}")


def _place(request: Request) -> Path:
    directories = request.command.offload.directories
    return directories[0] if directories else request.output.parent


def _nothing_fits(candidates: Sequence[Candidate], space: Space) -> str:
    """The candidate that takes the least, and what to do."""
    if not candidates:
        return (
            "there is nothing to choose from: layer-major steps need two micro-batches; add off to "
            "--units, or allow more tokens in a step"
        )
    over = [one for one in candidates if one.over and FAILED not in one.over]
    if not over:
        return "the training of each candidate that was measured failed; the ends are above"
    least = min(over, key=lambda one: (len(one.over), one.device_bytes))
    advice = {
        "device memory": "raise --device-memory-budget, or move more with --activation-offload ssd",
        "host memory": "raise --activation-offload-host-budget, or use tiered",
        "SSD": "make room on --activation-offload-dir, or allow fewer tokens in a step",
    }
    takes = {
        "device memory": least.device_bytes * (1.0 + space.memory_margin),
        "host memory": least.predicted.host_bytes,
        "SSD": least.predicted.ssd_bytes,
    }
    parts = ", ".join(f"{format_size(takes[name])} of {name}" for name in least.over)
    return (
        f"no candidate keeps to the limits ({limits_text(space.limits)}): {least.setting.name}, "
        f"which takes the least, needs {parts}; {'; '.join(advice[name] for name in least.over)}"
    )


def as_json(
    conditions: dict[str, Any],
    limits: Limits,
    measured: Sequence[Measurement],
    model: StepModel,
    candidates: Sequence[Candidate],
    chosen: Candidate | None,
    tried: Sequence[tuple[Candidate, Measurement]],
) -> str:
    """All of it; bytes and seconds, null for a limit that there is not."""
    values = {
        "conditions": conditions,
        "limits": {
            name: None if value == math.inf else value
            for name, value in dataclasses.asdict(limits).items()
        },
        "measured": [dataclasses.asdict(one) for one in measured],
        "fits": {
            "device_bytes": _fit(model.device),
            **{
                name: {
                    "layer-major" if order else "micro-batch-major": _fit(one)
                    for order, one in fits.items()
                }
                for name, fits in (("step_s", model.seconds), ("moved_bytes", model.moved))
            },
        },
        "candidates": [_candidate(one) for one in candidates],
        "chosen": None if chosen is None else _candidate(chosen),
        "tried": [
            {**_candidate(one), "measured": dataclasses.asdict(found)} for one, found in tried
        ],
    }
    # Paths relative to the checkout, so that a committed file names no machine's folders.
    return (json.dumps(values, indent=1) + "\n").replace(f"{CHECKOUT}/", "")


def _candidate(one: Candidate) -> dict[str, Any]:
    return {**dataclasses.asdict(one), "tokens_per_s": one.tokens_per_s}


def _fit(one: Fit) -> dict[str, Any]:
    return {"coefficients": dict(one.coefficients)}
