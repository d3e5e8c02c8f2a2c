# SPDX-License-Identifier: Apache-2.0
"""What runs did, from their `metrics.jsonl`: `compare_runs`, `compare_script`.

The command line calls them. Only the second one starts anything.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from megatron.offload.commands.training_runs.script import ScriptTrainer
from megatron.offload.commands.training_runs.trainer import METRICS, PLACEMENT_FLAGS
from megatron.offload.errors import ConfigurationError
from megatron.offload.sizes import format_size

_HEADER = ("run", "steps", "last loss", "losses", "s/step", "peak", "written/step", "stall/step")


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The steps of one run; none if it ended in its first.

    Raises:
        ConfigurationError: the file is not a metrics.jsonl.
    """
    try:
        steps = [json.loads(line) for line in path.read_text().splitlines()]
    except ValueError as error:
        raise ConfigurationError(f"{path} is not a metrics.jsonl: {error}") from None
    if not all(isinstance(step, dict) and "loss" in step for step in steps):
        raise ConfigurationError(f"{path} is not a metrics.jsonl: a line has no loss")
    return steps


def compare_runs(paths: Sequence[Path]) -> str:
    """A table with a row for each run, compared with the first that has a step."""
    runs = [read_steps(path) for path in paths]
    first = next((steps for steps in runs if steps), [])
    rows: list[tuple[str, ...]] = [_HEADER]
    for name, steps in zip(_names_of(paths), runs, strict=True):
        if not steps:
            rows.append((name, "0", *("-",) * (len(_HEADER) - 2)))
            continue
        steady = steps[1:] or steps
        rows.append(
            (
                name,
                str(len(steps)),
                "-" if steps[-1]["loss"] is None else f"{steps[-1]['loss']:.4f}",
                _same_losses(first, steps),
                f"{_median(steady, 'step_time_s'):.3f}",
                format_size(max(step["peak_activation_bytes"] for step in steady)),
                format_size(_median(steady, "written_bytes")),
                f"{_median(steady, 'stall_s'):.3f} s",
            )
        )
    return tabulate(rows, tablefmt="plain", disable_numparse=True)


def compare_script(script: Path, arguments: str, num_steps: int) -> str:
    """Runs a script without offload and as it is, and gives the table of both.

    Args:
        script: with `offload_activations` in it.
        arguments: of the script, in one string.
        num_steps: of each run.

    Raises:
        RunError: one of them failed.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-offload-") as folder:
        trainer = ScriptTrainer(script, shlex.split(arguments), Path(folder))
        for name, flags in (("off", PLACEMENT_FLAGS["off"]), ("offload", ())):
            print(f"{script.name}: {num_steps} steps, {name}", file=sys.stderr, flush=True)
            trainer.train(
                name,
                flags,
                "offload",
                Path(folder) / name,
                enough=lambda steps: len(steps) >= num_steps,
            )
        return compare_runs([Path(folder) / name / METRICS for name in ("off", "offload")])


def _names_of(paths: Sequence[Path]) -> list[str]:
    """The folders of runs, or their files where one folder has several."""
    folders = [path.parent for path in paths]
    return [(folders.count(path.parent) == 1 and path.parent.name) or path.name for path in paths]


def _median(steps: list[dict[str, Any]], name: str) -> float:
    """Of a step's own figures or of its offload figures; 0 where it has none."""
    values = (step.get(name, step.get("offload", {}).get(name, 0)) for step in steps)
    return float(statistics.median(values))


def _same_losses(first: list[dict[str, Any]], other: list[dict[str, Any]]) -> str:
    wanted = {step["step"]: step["loss"] for step in first}
    common = [step for step in other if step["step"] in wanted]
    if all(step["loss"] is None for step in first):
        return "unknown"
    if not common:
        return "no common step"
    for step in common:
        if step["loss"] != wanted[step["step"]]:
            return f"differ from step {step['step']}"
    return "identical"
