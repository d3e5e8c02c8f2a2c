#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares what `megatron-offload tune` chooses with the best of all candidates, all measured.

    tools/check/tune.py --json docs/results/tune.json
    tools/check/tune.py --from docs/results/tune.json --again --json docs/results/tune.json
    tools/check/tune.py --from docs/results/tune.json

For each of three model sizes the short trainings of `tune` are measured and then, in trainings of
their own, every candidate: all of a size take turns, a step each. So one measurement serves every
memory budget: the budgets are those between what the least and the most of the candidates take, and
none. `tune`'s search plays against it: what it asks to be measured it is told from there. --again
adds a second measurement of every candidate, of which the search sees nothing: it judges. Without
one the first judges itself.

For each budget the choice is compared with the fastest candidate that keeps to it: `sure` are those
that do so in all measurements with --memory-margin to spare, `any` those that do so for the judge.
A promise is broken if a candidate that the search took for one that keeps to the budget took more
than it for the judge. --from judges what was measured before, by this checkout.

Exit code: 0 if every choice reaches 95 % of the best sure one and no promise was broken, 1 if not,
2 if a training failed.
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
from megatron.offload.commands.tune.candidates import MEMORY_MARGIN, Limits, Space, StepSize
from megatron.offload.commands.tune.runs import HowLong, Runs
from megatron.offload.commands.tune.search import search
from megatron.offload.commands.tune.setting import Setting, settings_to_measure
from megatron.offload.commands.tune.step_model import Measurement, StepModel
from megatron.offload.commands.tune.training_command import CommandTrainer, TrainingCommand
from megatron.offload.documents import load_json
from megatron.offload.sizes import format_size

LEAST_SHARE = 0.95  # of the best candidate's tokens a second
_SAMPLES = 16  # of a step


@dataclass(frozen=True)
class Model:
    """A model whose step is tuned."""

    name: str
    layers: int
    hidden: int
    sequence: int

    def flags(self, directory: Path) -> list[str]:
        """Of the trainer; in flight is what `tune` allows with budgets of 400 to 800 MiB."""
        return shlex.split(
            f"--num-layers {self.layers} --hidden-size {self.hidden} --num-attention-heads "
            f"{self.hidden // 64} --seq-length {self.sequence} --vocab-size 1024 --mock-data "
            f"--activation-offload ssd --activation-offload-min-bytes 64KiB --cpu-threads 1 "
            f"--activation-offload-inflight 8MiB "
            f"--activation-offload-dir {shlex.quote(str(directory))}"
        )


MODELS = (
    Model("small", 4, 128, 128),
    Model("medium", 6, 256, 128),
    Model("large", 8, 320, 128),
)


@dataclass(frozen=True)
class Row:
    """One choice. Seconds and bytes are those of the judge.

    Attributes:
        share: of the best sure candidate's speed that the choice reaches; None: there is none.
        share_of_any: the same of the best that keeps to the budget.
        trainings: that the search asked for.
        broken: candidates that were promised and took more than the budget.
    """

    model: str
    budget_bytes: float
    chosen: str | None
    chosen_bytes: float
    best: str | None
    share: float | None
    best_of_any: str
    share_of_any: float
    trainings: int
    broken: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether it is close enough, and no promise was broken."""
        return (self.share is None or self.share >= LEAST_SHARE) and not self.broken


def candidates(model: Model) -> list[Setting]:
    """Every setting that a step of `_SAMPLES` may have."""
    return StepSize(_SAMPLES, _SAMPLES, _SAMPLES).settings((0, model.layers))


def measure(
    model: Model, phases: Sequence[str], seconds: float, directory: Path, output: Path
) -> dict[str, Any]:
    """Measures what `tune` measures, and every candidate.

    Args:
        phases: `fits`, `candidates`, or `again`, the candidates once more.

    Raises:
        RunError: a training failed.
    """
    flags = model.flags(directory)
    command = TrainingCommand.of([str(TRAINER), *flags])
    trainer = CommandTrainer(command.script, command.flags, directory)
    to_fit = settings_to_measure((1, 4), (2, 4), (0, model.layers))
    found = {}
    for phase in phases:
        runs = Runs(
            trainer,
            HowLong(2, 4, seconds),
            output / model.name / phase,
            data_parallel_size=1,
            mode="ssd",
            both_allocators=True,
            whole_memory=True,
        )
        settings = to_fit if phase == "fits" else candidates(model)
        bar = tqdm(settings, desc=f"{model.name}, {phase}", unit="training", disable=None)
        try:
            for one in bar:
                runs.settle(one)
            found[phase] = [asdict(one) for one in runs.take_turns().values()]
        finally:
            runs.end()
    return found


def judge(model: Model, measured: dict[str, Any], num_budgets: int) -> list[Row]:
    """What `tune` chooses for each budget, beside the best."""
    to_fit, seen, judges = (
        [Measurement(**{**one, "setting": Setting(**one["setting"])}) for one in measured[phase]]
        for phase in ("fits", "candidates", "again" if "again" in measured else "candidates")
    )
    least, most = (f(one.device_bytes for one in judges) for f in (min, max))
    parts = [(number + 0.5) / num_budgets for number in range(num_budgets)]
    budgets = [*(least + part * (most - least) for part in parts), math.inf]
    return [_judge(model, one, to_fit, seen, judges) for one in budgets]


def _judge(
    model: Model,
    budget: float,
    to_fit: Sequence[Measurement],
    seen: Sequence[Measurement],
    judges: Sequence[Measurement],
) -> Row:
    by_setting, truth = ({one.setting: one for one in found} for found in (seen, judges))
    asked: list[Setting] = []

    def look_up(settings: Sequence[Setting]) -> dict[Setting, Measurement | None]:
        asked.extend(settings)
        return {one: by_setting[one] for one in settings}

    chosen, found = search(
        Space(candidates(model), Limits(device_bytes=budget), MEMORY_MARGIN, model.sequence),
        to_fit,
        lambda known: StepModel(known, num_layers=model.layers),
        look_up,
    )
    fit = [one for one in judges if one.device_bytes <= budget]
    most = budget / (1.0 + MEMORY_MARGIN)
    over = {one.setting for one in [*to_fit, *seen, *judges] if one.device_bytes > most}
    sure = [one for one in judges if one.setting not in over]
    best = min(sure, key=lambda one: one.step_s, default=None)
    best_of_any = min(fit, key=lambda one: one.step_s)
    ours = None if chosen is None else truth[chosen.setting]
    return Row(
        model.name,
        budget,
        None if ours is None else ours.setting.name,
        0.0 if ours is None else ours.device_bytes,
        None if best is None else best.setting.name,
        None if best is None else 0.0 if ours is None else best.step_s / ours.step_s,
        best_of_any.setting.name,
        0.0 if ours is None else best_of_any.step_s / ours.step_s,
        len(asked),
        tuple(
            one.setting.name
            for one in found
            if one.measured and one.is_possible and truth[one.setting].device_bytes > budget
        ),
    )


def noise(measured: dict[str, Any]) -> float:
    """How much more one measurement of device memory was than the other of the same, at most."""
    pairs = zip(measured["candidates"], measured["again"], strict=True)
    ratios = [one["device_bytes"] / again["device_bytes"] for one, again in pairs]
    return max(max(one, 1.0 / one) for one in ratios) - 1.0


def table(rows: Sequence[Row]) -> str:
    """For people."""
    headers = (
        *("model", "budget", "chosen", "takes", "trainings"),
        *("best sure", "share", "best of any", "share", "broken"),
    )
    cells = [
        (
            one.model,
            "none" if one.budget_bytes == math.inf else format_size(one.budget_bytes),
            one.chosen or "nothing",
            format_size(one.chosen_bytes) if one.chosen else "-",
            str(one.trainings),
            one.best or "none",
            _share(one.share),
            one.best_of_any,
            _share(one.share_of_any),
            ", ".join(one.broken) or "-",
        )
        for one in rows
    ]
    return tabulate(cells, headers, tablefmt="plain", disable_numparse=True)


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.3f}{'' if share >= LEAST_SHARE else ' !'}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures or reads, judges, prints; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME", help="one of the models")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each training; default: 3")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="judge this again")
    parser.add_argument("--again", action="store_true", help="with --from: measure the judge")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything that was measured")
    parser.add_argument(
        "--budgets", type=int, default=6, metavar="N", help="of each model, and none; default: 6"
    )
    parser.add_argument("--directory", type=Path, default=Path("runs/offload"), help="on the SSD")
    args = parser.parse_args(argv)
    models = [one for one in MODELS if args.only in (None, one.name)]
    if not models:
        parser.error(f"--only {args.only}: {', '.join(one.name for one in MODELS)}")
    args.directory.mkdir(parents=True, exist_ok=True)
    phases = ["fits", "candidates"]
    found: dict[str, Any] = {"machine": machine_facts(args.directory), "measured": {}}
    if args.source is not None:
        found = load_json(args.source, "a result of this check", "give one of its --json")
        phases = ["again"] if args.again else []
        models = [one for one in models if one.name in found["measured"]]
    output = Path("runs") / f"tune-check-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        for one in models if phases else []:
            new = measure(one, phases, args.seconds, args.directory, output)
            found["measured"].setdefault(one.name, {}).update(new)
            if args.json is not None:  # minutes are not lost
                args.json.write_text(json.dumps(found, indent=1) + "\n")
    except RunError as error:
        print(f"tune.py: error: {error}", file=sys.stderr)
        return 2
    rows = [row for one in models for row in judge(one, found["measured"][one.name], args.budgets)]
    print(f"{in_a_line(found['machine'])}\n\n{table(rows)}\n")
    for one in models:
        measured = found["measured"][one.name]
        print(
            f"{one.name}: two measurements of a candidate's memory differ by up to "
            f"{noise(measured):.1%}"
            if "again" in measured
            else f"{one.name}: there is one measurement, which judges itself"
        )
    held = sum(one.holds for one in rows)
    known = [one.share for one in rows if one.share is not None]
    of_any = sum(one.share_of_any >= LEAST_SHARE for one in rows)
    print(
        f"{held} of {len(rows)} choices reach {LEAST_SHARE:.0%} of the best sure candidate without "
        f"a broken promise, {len(rows) - len(known)} of them because there is none; the least "
        f"reaches {min(known):.3f}. Of the best of any {of_any} reach {LEAST_SHARE:.0%}; trainings "
        f"at most: {max(one.trainings for one in rows)}"
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
