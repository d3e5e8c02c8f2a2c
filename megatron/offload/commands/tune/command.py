# SPDX-License-Identifier: Apache-2.0
"""`megatron-offload tune`, from flags to what is printed and written: `run`. The CLI calls it.

It says what it will measure, measures, fits, prints the candidates, and with --check runs the best
and its neighbours.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron.offload.commands.training_runs.machine import in_a_line, machine_facts
from megatron.offload.commands.training_runs.run import RunError
from megatron.offload.commands.training_runs.trainer import CHECKOUT
from megatron.offload.commands.tune.arguments import Request, request_of, step_size_of
from megatron.offload.commands.tune.candidates import (
    Candidate,
    Limits,
    best_of,
    candidates_of,
    neighbours_of,
)
from megatron.offload.commands.tune.fit import Fit
from megatron.offload.commands.tune.limits import limits_of
from megatron.offload.commands.tune.runs import Duration, Runs
from megatron.offload.commands.tune.setting import Setting
from megatron.offload.commands.tune.step_model import NOISE, Measurement, StepModel
from megatron.offload.commands.tune.text import (
    candidates_table,
    checked_table,
    duration_text,
    limits_text,
    measured_table,
    settings_text,
)
from megatron.offload.commands.tune.training_command import CommandTrainer
from megatron.offload.device.cuda import has_cuda
from megatron.offload.placement.atomic_file import check_place, write_atomically
from megatron.offload.sizes import format_size

_MOST_ROWS = 12

Checked = list[tuple[Candidate, Measurement]]


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
    if request.command.left_out:
        print(f"left out of what is measured: {shlex.join(request.command.left_out)}")
    measured = tuning.measure(request.to_measure)
    model = StepModel(
        measured,
        num_layers=request.command.num_layers,
        host_budget_bytes=limits.host_bytes,
    )
    tokens_per_sample = measured[0].tokens / (
        measured[0].setting.samples * request.data_parallel_size
    )
    candidates = candidates_of(
        step_size_of(args, request, tokens_per_sample).settings(request.units),
        model,
        limits,
        margin=args.memory_margin,
        tokens_per_sample=tokens_per_sample * request.data_parallel_size,
    )
    best = best_of(candidates)
    print(f"\n{measured_table(measured, model)}\n")
    print(candidates_table(candidates, best, most_rows=_MOST_ROWS))
    checked: Checked = []
    chosen = best
    if best is not None and args.check:
        checked = tuning.check([best, *neighbours_of(best, candidates)])
        chosen = choice_of(checked, limits)
        print(f"\n{checked_table(checked, chosen.setting)}")
    if args.json is not None:
        conditions = {"command": shlex.join(command), "machine": machine}
        text = as_json(conditions, limits, measured, model, candidates, chosen, checked)
        write_atomically(args.json, text)
    if chosen is None:
        raise RunError(_nothing_fits(candidates, limits))
    flags = shlex.join(chosen.setting.flags(request.data_parallel_size))
    print(f"\n{flags}")
    if args.output is not None:
        write_atomically(args.output, flags + "\n")
    broken = [one for one, found in checked if found.device_bytes > limits.device_bytes]
    for one in broken:
        print(
            f"{one.setting.name} took more than {format_size(limits.device_bytes)} of device "
            "memory; give a larger --memory-margin, or measure larger --micro-batch-sizes"
        )
    return 1 if broken else 0


def choice_of(checked: Checked, limits: Limits) -> Candidate:
    """The fastest one as measured of those that kept to the memory budget; the first if none did.

    Within `NOISE` of the fastest the first one of the list, which the predictions prefer.
    """
    fit = [(one, found) for one, found in checked if found.device_bytes <= limits.device_bytes]
    if not fit:
        return checked[0][0]
    fastest = max(one.tokens / found.step_s for one, found in fit)
    return next(one for one, found in fit if one.tokens / found.step_s >= fastest * (1.0 - NOISE))


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
            processes=args.processes,
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
        return self._run(settings, "fit")

    def check(self, candidates: list[Candidate]) -> Checked:
        """Runs candidates as they are."""
        settings = [one.setting for one in candidates]
        print(f"\nchecking {len(settings)} settings:\n{settings_text(settings)}", flush=True)
        self._say_duration(settings, "this takes")
        return list(zip(candidates, self._run(settings, "check"), strict=True))

    def _run(self, settings: list[Setting], phase: str) -> list[Measurement]:
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

    def _say_duration(self, settings: list[Setting], what: str) -> None:
        assert self._first is not None
        setting, duration = self._first
        seconds = duration.of_others(settings, setting, self._request.how_long)
        tqdm.write(f"{what} {duration_text(seconds)}")


def _place(request: Request) -> Path:
    directories = request.command.offload.directories
    return directories[0] if directories else request.output.parent


def _nothing_fits(candidates: Sequence[Candidate], limits: Limits) -> str:
    """The candidate that takes the least, and what to do."""
    if not candidates:
        return (
            "there is nothing to choose from: layer-major steps need two micro-batches; add off to "
            "--units, or allow more tokens in a step"
        )
    least = min(candidates, key=lambda one: (len(one.over), one.promised_device_bytes))
    advice = {
        "device memory": "raise --device-memory-budget, or move more with --activation-offload ssd",
        "host memory": "raise --activation-offload-host-budget, or use tiered",
        "SSD": "make room on --activation-offload-dir, or allow fewer tokens in a step",
    }
    takes = {
        "device memory": least.promised_device_bytes,
        "host memory": least.predicted.host_bytes,
        "SSD": least.predicted.ssd_bytes,
    }
    parts = ", ".join(f"{format_size(takes[name])} of {name}" for name in least.over)
    return (
        f"no candidate keeps to the limits ({limits_text(limits)}): {least.setting.name}, which "
        f"takes the least, needs {parts}; {'; '.join(advice[name] for name in least.over)}"
    )


def as_json(
    conditions: dict[str, Any],
    limits: Limits,
    measured: Sequence[Measurement],
    model: StepModel,
    candidates: Sequence[Candidate],
    chosen: Candidate | None,
    checked: Checked,
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
        "checked": [
            {**_candidate(one), "measured": dataclasses.asdict(found)} for one, found in checked
        ],
    }
    # Paths relative to the checkout, so that a committed file names no machine's folders.
    return (json.dumps(values, indent=1) + "\n").replace(f"{CHECKOUT}/", "")


def _candidate(one: Candidate) -> dict[str, Any]:
    return {**dataclasses.asdict(one), "tokens_per_s": one.tokens_per_s}


def _fit(one: Fit) -> dict[str, Any]:
    return {"coefficients": dict(one.coefficients)}
