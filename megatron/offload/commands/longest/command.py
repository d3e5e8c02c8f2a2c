# SPDX-License-Identifier: Apache-2.0
"""`megatron-offload longest`, from flags to what is printed and written: `run`.

The CLI calls it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.offload.activations.placement.atomic_file import write_atomically
from megatron.offload.commands.longest.arguments import PLACEHOLDER
from megatron.offload.commands.longest.picture import draw
from megatron.offload.commands.longest.search import Found, Measured, check, search
from megatron.offload.commands.longest.text import UNITS, as_json, as_text
from megatron.offload.commands.longest.ways import WAYS
from megatron.offload.commands.training_runs.machine import machine_facts
from megatron.offload.commands.training_runs.run import RunError
from megatron.offload.commands.training_runs.script import ScriptTrainer, flags_of_script
from megatron.offload.config import OffloadConfig
from megatron.offload.device.cuda import has_cuda
from megatron.offload.planner.libraries import check_libraries
from megatron.offload.planner.projection.hardware import GpuSpec
from megatron.offload.sizes import format_size

_MOST_ERROR = 0.05
_PATIENCE_S = 3600.0  # for a step


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table, writes the files; the exit code.

    Args:
        args: checked, see `arguments`.

    Raises:
        RunError: the script does not come to the door, or its shortest run failed without offload.
        OSError: a file cannot be written.
    """
    shown = {"by": args.by, "budget_bytes": args.device_memory_budget}
    if args.hardware is not None:
        check_libraries("megatron-offload longest --hardware")
        from megatron.offload.commands.longest.projected import held_bytes, projected

        found = projected(args)
        gpu = GpuSpec.load(args.hardware).title
        held = "" if args.by == "layers" else f" ({format_size(held_bytes(args))})"
        print(f"Predicted for {gpu}, weights, gradients and states{held} included.")
        print(as_text(found, **shown, most=args.most))
        _write(args, found, facts={"hardware": args.hardware})
        return 0 if any(one.longest for one in found.values()) else 2
    found, facts = _measured(args)
    print(as_text(found, **shown, most=args.most))
    _write(args, found, facts)
    if not any(one.longest for one in found.values()):
        return 2
    has_failed = args.check and any(one.failure and one.longest for one in found.values())
    errors = [abs(one.error) for one in found.values() if one.error is not None]
    return int(has_failed or max(errors, default=0.0) > _MOST_ERROR)


def _write(args: argparse.Namespace, found: dict[str, Found], facts: dict[str, Any]) -> None:
    shown = {"by": args.by, "budget_bytes": args.device_memory_budget}
    if args.json is not None:
        write_atomically(args.json, as_json(found, **shown, facts=facts))
    if args.plot is not None:
        draw(found, args.plot, **shown)


def _measured(args: argparse.Namespace) -> tuple[dict[str, Found], dict[str, Any]]:
    """What each way comes to, by runs; the machine."""
    first = args.script_args.replace(PLACEHOLDER, str(args.first))
    config = OffloadConfig.from_flags(flags_of_script(args.script, first))
    found: dict[str, Found] = {}
    with tempfile.TemporaryDirectory(prefix="megatron-offload-") as folder:
        runs = _Runs(args, config.directories, Path(folder))
        for name in args.ways:
            found[name] = _of_way(args, runs, name)
    return found, machine_facts(config.directories[0]) if config.directories else {}


def _of_way(args: argparse.Namespace, runs: _Runs, name: str) -> Found:
    measured: list[Measured] = []

    def measure(number: int) -> Measured:
        one = runs.measure(name, number)
        measured.append(one)
        return one

    try:
        found = search(
            measure,
            first=args.first,
            multiple=args.multiple_of,
            most=args.most,
            budget_bytes=args.device_memory_budget,
        )
    except RunError as error:
        return Found(measured, 0, 0.0, failure=str(error).splitlines()[-1])
    if not args.check or not found.longest or found.longest == args.most:
        return found
    return check(found, measure, multiple=args.multiple_of, budget_bytes=args.device_memory_budget)


class _Runs:
    """Trains the script with one length and one way at a time."""

    def __init__(
        self, args: argparse.Namespace, directories: tuple[Path, ...], folder: Path
    ) -> None:
        self._args = args
        self._folder = folder
        offload = directories[0] if directories else folder
        self._trainer = ScriptTrainer(args.script, (), offload, patience_s=_PATIENCE_S)

    def measure(self, name: str, number: int) -> Measured:
        """Raises RunError: the training failed."""
        args, way = self._args, WAYS[name]
        what = f"{way.title}, {number:,} {UNITS[args.by]}"
        arguments = shlex.split(args.script_args.replace(PLACEHOLDER, str(number)))
        trainer = dataclasses.replace(self._trainer, flags=arguments)
        with _saying(what) as say:
            steps = trainer.train(
                what,
                way.flags,
                "default" if has_cuda() else "tight",
                self._folder / f"{name}-{number}",
                enough=lambda steps: len(steps) >= args.steps,
            )
            if not steps:
                raise RunError(f"{what}: the script ended before its first step had")
            peak_bytes = max(step["peak_device_bytes"] for step in steps)
            say(f"{peak_bytes / (1 << 20):,.0f} MiB, {steps[-1]['step_time_s']:.2f} s a step")
        return Measured(number, peak_bytes, steps[-1]["step_time_s"], steps[-1]["tokens_per_s"])


@contextlib.contextmanager
def _saying(what: str) -> Iterator[Callable[[str], None]]:
    """Says on a terminal what runs, and what it came to."""
    ends = False
    if sys.stderr.isatty():
        print(f"{what} ... ", end="", file=sys.stderr, flush=True)
        ends = True

    def say(found: str) -> None:
        nonlocal ends
        if ends:
            print(found, file=sys.stderr, flush=True)
        ends = False

    try:
        yield say
    finally:
        if ends:
            print("failed", file=sys.stderr, flush=True)
