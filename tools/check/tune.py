#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares what `megatron-offload tune` chooses with the best of all candidates, all measured.

    tools/check/tune.py --json docs/results/tune.json
    tools/check/tune.py --only small --seconds 2
    tools/check/tune.py --from docs/results/tune.json

For each of three model sizes the short trainings of `tune` are measured and then, in trainings of
their own, every candidate: all of a size take turns, a step each. So one measurement serves every
memory budget: the budgets are those between what the least and the most of the candidates take, and
none. For each of them `tune`'s choice is compared with the fastest candidate that kept to it.
--from judges what was measured before, by the fits and the choice of this checkout.

Exit code: 0 if every choice reaches 95 % of the best and no candidate that was promised took more
than its budget, 1 if not, 2 if a training failed.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

from megatron.offload.commands.training_runs.machine import in_a_line, machine_facts
from megatron.offload.commands.training_runs.run import RunError
from megatron.offload.commands.training_runs.trainer import TRAINER
from megatron.offload.commands.tune.candidates import Limits, StepSize, best_of, candidates_of
from megatron.offload.commands.tune.runs import HowLong, Runs
from megatron.offload.commands.tune.setting import Setting, settings_to_measure
from megatron.offload.commands.tune.step_model import Measurement, StepModel
from megatron.offload.commands.tune.training_command import CommandTrainer, TrainingCommand
from megatron.offload.sizes import format_size

LEAST_SHARE = 0.95  # of the best candidate's tokens a second
MARGIN = 0.05  # the default of --memory-margin
_NUM_BUDGETS = 6  # and none
_SAMPLES = 16  # of a step


@dataclass(frozen=True)
class Model:
    """A model whose step is tuned."""

    name: str
    layers: int
    hidden: int
    sequence: int

    def flags(self, directory: Path) -> list[str]:
        """Of the example trainer."""
        return shlex.split(
            f"--num-layers {self.layers} --hidden-size {self.hidden} --num-attention-heads "
            f"{self.hidden // 64} --seq-length {self.sequence} --vocab-size 1024 --mock-data "
            f"--activation-offload ssd --activation-offload-min-bytes 64KiB --cpu-threads 1 "
            f"--activation-offload-dir {shlex.quote(str(directory))}"
        )


MODELS = (
    Model("small", 4, 128, 128),
    Model("medium", 6, 256, 128),
    Model("large", 8, 320, 128),
)


@dataclass(frozen=True)
class Row:
    """One choice. Tokens a second and bytes, as measured."""

    model: str
    budget_bytes: float
    chosen: str | None
    chosen_tokens_per_s: float
    best: str
    best_tokens_per_s: float
    broken: tuple[str, ...]  # promised, and took more than the budget

    @property
    def share(self) -> float:
        """What the choice reaches of the best."""
        return self.chosen_tokens_per_s / self.best_tokens_per_s

    @property
    def holds(self) -> bool:
        """Whether it is close enough, and no promise was broken."""
        return self.share >= LEAST_SHARE and not self.broken


def candidates(model: Model) -> list[Setting]:
    """Every setting that a step of `_SAMPLES` may have."""
    return StepSize(_SAMPLES, _SAMPLES, _SAMPLES).settings((0, model.layers))


def measure(model: Model, seconds: float, directory: Path, output: Path) -> dict[str, Any]:
    """Measures what `tune` measures, and every candidate.

    Raises:
        RunError: a training failed.
    """
    flags = model.flags(directory)
    command = TrainingCommand.of([str(TRAINER), *flags])
    trainer = CommandTrainer(command.script, command.flags, directory)
    to_fit = settings_to_measure((1, 4), (2, 4), (0, model.layers))
    found = {}
    for phase, settings in (("fits", to_fit), ("candidates", candidates(model))):
        runs = Runs(
            trainer,
            HowLong(2, 4, seconds),
            output / model.name / phase,
            data_parallel_size=1,
            mode="ssd",
            both_allocators=True,
            whole_memory=True,
        )
        bar = tqdm(settings, desc=f"{model.name}, {phase}", unit="training", disable=None)
        try:
            for one in bar:
                runs.settle(one)
            found[phase] = [asdict(one) for one in runs.take_turns().values()]
        finally:
            runs.end()
    return found


def judge(model: Model, measured: dict[str, Any]) -> list[Row]:
    """What `tune` chooses for each budget, beside the best."""
    to_fit, every = (
        [Measurement(**{**one, "setting": Setting(**one["setting"])}) for one in measured[phase]]
        for phase in ("fits", "candidates")
    )
    by_setting = {one.setting: one for one in every}
    prediction = StepModel(to_fit, num_layers=model.layers, host_budget_bytes=math.inf)
    least, most = (f(one.device_bytes for one in every) for f in (min, max))
    parts = [(number + 0.5) / _NUM_BUDGETS for number in range(_NUM_BUDGETS)]
    rows = []
    for budget in [*(least + part * (most - least) for part in parts), math.inf]:
        choices = candidates_of(
            candidates(model),
            prediction,
            Limits(device_bytes=budget),
            margin=MARGIN,
            tokens_per_sample=model.sequence,
        )
        chosen = best_of(choices)
        fit = [one for one in every if one.device_bytes <= budget]
        best = min(fit, key=lambda one: one.step_s)
        tokens = _SAMPLES * model.sequence
        rows.append(
            Row(
                model.name,
                budget,
                None if chosen is None else chosen.setting.name,
                0.0 if chosen is None else tokens / by_setting[chosen.setting].step_s,
                best.setting.name,
                tokens / best.step_s,
                tuple(
                    one.setting.name
                    for one in choices
                    if one.is_promised and by_setting[one.setting].device_bytes > budget
                ),
            )
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    """For people."""
    headers = ("model", "budget", "chosen", "tokens/s", "best", "tokens/s", "share", "broken")
    cells = [
        (
            one.model,
            "none" if one.budget_bytes == math.inf else format_size(one.budget_bytes),
            one.chosen or "nothing",
            f"{one.chosen_tokens_per_s:,.0f}",
            one.best,
            f"{one.best_tokens_per_s:,.0f}",
            f"{one.share:.3f}{'' if one.share >= LEAST_SHARE else ' !'}",
            ", ".join(one.broken) or "-",
        )
        for one in rows
    ]
    return tabulate(cells, headers, tablefmt="plain", disable_numparse=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures or reads, judges, prints; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME", help="one of the models")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each training; default: 3")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="judge this again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything that was measured")
    parser.add_argument("--directory", type=Path, default=Path("runs/offload"), help="on the SSD")
    args = parser.parse_args(argv)
    models = [one for one in MODELS if args.only in (None, one.name)]
    if not models:
        parser.error(f"--only {args.only}: {', '.join(one.name for one in MODELS)}")
    if args.source is not None:
        found = json.loads(args.source.read_text())
        models = [one for one in models if one.name in found["measured"]]
    else:
        args.directory.mkdir(parents=True, exist_ok=True)
        output = Path("runs") / f"tune-check-{time.strftime('%Y%m%d-%H%M%S')}"
        found = {"machine": machine_facts(args.directory), "measured": {}}
        try:
            for one in models:
                one_found = measure(one, args.seconds, args.directory, output)
                found["measured"][one.name] = one_found
                if args.json is not None:  # minutes are not lost
                    args.json.write_text(json.dumps(found, indent=1) + "\n")
        except RunError as error:
            print(f"tune.py: error: {error}", file=sys.stderr)
            return 2
    rows = [row for one in models for row in judge(one, found["measured"][one.name])]
    print(f"{in_a_line(found['machine'])}\n\n{table(rows)}\n")
    held = sum(one.holds for one in rows)
    print(
        f"{held} of {len(rows)} choices reach {LEAST_SHARE:.0%} of the best measured candidate "
        f"without a broken promise; the least reaches {min(one.share for one in rows):.3f}"
    )
    if args.json is not None:
        found["rows"] = [
            {
                **asdict(one),
                "budget_bytes": None if one.budget_bytes == math.inf else one.budget_bytes,
            }
            for one in rows
        ]
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if held == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
