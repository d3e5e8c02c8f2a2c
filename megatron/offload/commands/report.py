# SPDX-License-Identifier: Apache-2.0
"""What runs did, from their `metrics.jsonl`: `compare_runs`, `compare_script`, `compare_command`.

The command line calls them. The first one starts nothing.
"""

from __future__ import annotations

import math
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median

import msgspec
from tabulate import tabulate

from megatron.offload.commands.html_report import timelines, write_html
from megatron.offload.commands.launch_command import LEFT_OUT, LaunchCommand, our_flags, without
from megatron.offload.commands.training_runs.run import RunError
from megatron.offload.commands.training_runs.script import ScriptTrainer, check_script
from megatron.offload.commands.training_runs.trainer import (
    METRICS,
    PLACEMENT_FLAGS,
    CommandTrainer,
    Trainer,
)
from megatron.offload.documents import each_line, from_json
from megatron.offload.errors import ConfigurationError
from megatron.offload.sizes import format_size

_HEADER = ("run", "steps", "last loss", "losses", "s/step", "peak", "written/step", "stall/step")


@dataclass(frozen=True)
class Step:
    """A line of a metrics.jsonl, as far as the table is made of it. Bytes and seconds."""

    step: int
    loss: float | None  # NaN where a training diverged
    step_time_s: float
    peak_activation_bytes: float
    written_bytes: float = 0.0
    stall_s: float = 0.0
    read_bytes: float = 0.0
    peak_device_bytes: float = 0.0
    plans: int = 0  # of auto, so far
    predicted_step_s: float = 0.0  # by the last one; 0: there is none, or it says nothing
    predicted_peak_bytes: float = 0.0

    def __post_init__(self) -> None:
        for spec in fields(self):
            if spec.name not in ("step", "loss") and not 0 <= getattr(self, spec.name) < math.inf:
                raise ValueError(f"{spec.name} is {getattr(self, spec.name)}")


def read_steps(path: Path) -> list[Step]:
    """The steps of one run; none if it ended in its first.

    Raises:
        ConfigurationError: the file is not a metrics.jsonl.
        OSError: it cannot be read.
    """
    advice = "give one that metrics_file= or --metrics-file has had written"
    return each_line(path, "a metrics.jsonl", advice, _step)


def _step(line: bytes) -> Step:
    values = from_json(line)
    # A step's own figures, or those of offload.
    return msgspec.convert({**values.get("offload", {}), **values}, Step)


def compare_runs(paths: Sequence[Path], page: Path | None = None) -> str:
    """A table with a row for each run, compared with the first that has a step.

    Args:
        paths: of runs: their metrics.jsonl, or the folders that these are in.
        page: also written, as HTML with pictures over steps; None: not.
    """
    paths = [path / METRICS if path.is_dir() else path for path in paths]
    runs = [read_steps(path) for path in paths]
    rows = _rows(paths, runs)
    if page is not None:
        write_html(page, _names_of(paths), runs, rows, timelines(paths))
    return tabulate(rows, tablefmt="plain", disable_numparse=True)


def _rows(paths: Sequence[Path], runs: Sequence[Sequence[Step]]) -> list[tuple[str, ...]]:
    first = next((steps for steps in runs if steps), [])
    rows: list[tuple[str, ...]] = [_HEADER]
    for name, steps in zip(_names_of(paths), runs, strict=True):
        if not steps:
            rows.append((name, "0", *("-",) * (len(_HEADER) - 2)))
            continue
        steady = steps[1:] or steps
        losses = [step.loss for step in steps if step.loss is not None]  # trainers log some
        rows.append(
            (
                name,
                str(len(steps)),
                f"{losses[-1]:.4f}" if losses else "-",
                _same_losses(first, steps),
                f"{median(step.step_time_s for step in steady):.3f}",
                format_size(max(step.peak_activation_bytes for step in steady)),
                format_size(median(step.written_bytes for step in steady)),
                f"{median(step.stall_s for step in steady):.3f} s",
            )
        )
    return rows


def compare_script(script: Path, arguments: str, num_steps: int) -> str:
    """Runs a script without offload and as it is, and gives the table of both.

    Args:
        script: with `offload_activations` in it.
        arguments: of the script, in one string.
        num_steps: of each run.

    Raises:
        ConfigurationError: there is no such file.
        RunError: one of them failed, or called no `offload_activations`.
    """
    check_script(script)
    with tempfile.TemporaryDirectory(prefix="megatron-offload-") as folder:
        trainer = ScriptTrainer(script, shlex.split(arguments), Path(folder))
        for name, flags in (("off", PLACEMENT_FLAGS["off"]), ("offload", ())):
            _run(trainer, name, flags, Path(folder), num_steps)
            if not (Path(folder) / name / METRICS).is_file():
                raise RunError(
                    f"{script} ended and did not call offload_activations on its first rank; "
                    "report compares a script that does with itself"
                )
        return compare_runs([Path(folder) / name / METRICS for name in ("off", "offload")])


def compare_command(words: Sequence[str], num_steps: int) -> str:
    """Runs a training command without our flags and as it is, and gives the table of both.

    Args:
        words: of the command, torchrun and all; the script knows `--metrics-file`.
        num_steps: of each run.

    Raises:
        ConfigurationError: it cannot be started on this machine.
        RunError: one of the runs failed.
    """
    command = LaunchCommand.of(words)
    script, start = command.start("report")
    flags, left_out = without(command.flags, LEFT_OUT)
    plain, ours = without(flags, our_flags())
    if not ours:
        raise ConfigurationError(
            "the training command has no offload flag, so there is nothing to compare; add "
            "--activation-offload ssd --activation-offload-dir DIR"
        )
    if left_out:
        print(f"left out of what is run: {shlex.join(left_out)}", file=sys.stderr)
    common = ["--train-iters", str(num_steps), "--eval-iters", "0", "--log-interval", "1"]
    with tempfile.TemporaryDirectory(prefix="megatron-offload-") as folder:
        for name, own in (("off", plain), ("offload", flags)):
            trainer = CommandTrainer(script, own, Path(folder), launch=start)
            _run(trainer, name, common, Path(folder), num_steps)
        return compare_runs([Path(folder) / name / METRICS for name in ("off", "offload")])


def _run(trainer: Trainer, name: str, flags: Sequence[str], folder: Path, num_steps: int) -> None:
    print(f"{trainer.script.name}: {num_steps} steps, {name}", file=sys.stderr, flush=True)
    trainer.train(
        name, flags, "offload", folder / name, enough=lambda steps: len(steps) >= num_steps
    )


def _names_of(paths: Sequence[Path]) -> list[str]:
    """The folders of runs, or their files where one folder has several."""
    folders = [path.parent for path in paths]
    return [(folders.count(path.parent) == 1 and path.parent.name) or path.name for path in paths]


def _same_losses(first: Sequence[Step], other: Sequence[Step]) -> str:
    wanted = {step.step: step.loss for step in first}
    common = [step for step in other if step.step in wanted]
    if all(step.loss is None for step in first):
        return "unknown"
    if not common:
        return "no common step"
    for step in common:
        if repr(step.loss) != repr(wanted[step.step]):  # NaN is the same as NaN
            return f"differ from step {step.step}"
    return "identical"
