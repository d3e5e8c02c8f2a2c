#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An optimizer's states on the SSD, beside memory, a serial way and what else there is.

    tools/bench/states.py --json states.json               # about 40 minutes on 2 cores
    tools/bench/states.py --shapes 512x24 --ways memory,ssd --turns 1

GPTs of hidden size x layers (GPT-2 of transformers, without dropout), fp32, activations on the SSD
in all ways; AdamW with torch's fused kernel, gradients that stay allocated, clipping. A step has
2048 tokens, or 16384 in 8 micro-batches. Each way is a process of its own; they take turns, a few
steps each: one in which memory is measured, then those whose times count. All of a round are in
memory side by side: first ours, then each of the others with `memory`.

memory      the optimizer as torch has it
ssd         offload_optimizer(optimizer, DIR)
host        offload_optimizer(optimizer): the states are in host memory, so nothing is saved here
serial      the same buckets as ssd: read one, step, write it, wait, read the next; no window
deepspeed   ZeRO 3 with offload_optimizer: nvme, reads and writes in pipelines
torchao     CPUOffloadOptimizer

What does not run on this machine is listed with its error. DeepSpeed needs libaio's header and
library; CFLAGS and LDFLAGS say where they are. Other kernels, other bits: the last two are not
compared.

Resident bytes per parameter: what weights, gradients and states keep in memory over a step. Of
`memory` it is known: 16. Whatever else its resident set holds (activations that are not away yet,
the allocator's, the interpreter's) the other ways hold too, so theirs is 16 less what their peak is
below that of `memory`: of forward and backward or of the optimizer's part, whichever is less below.
What the allocator keeps for reuse is given back before each part, as far as it does that. `peak` is
that of whole steps over the resident set before the model was made, all of it.
Times are compared within a turn, with `memory`'s at the same step; medians.
`identical`: losses, gradient norms and weights of all steps, and the optimizer's state_dict after
the second one, have the same bits as those of `memory`.

Exit code: 0 as promised (same bits, at most 8.5 bytes a parameter and the window, at most 1.05 of
memory's time at 16384 tokens), 1 not, 2 it could not be measured.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

from megatron.offload.commands.training_runs.machine import in_a_line, machine_facts
from megatron.offload.commands.training_runs.run import (
    Run,
    RunError,
    Variant,
    first_difference,
    order_of_round,
)
from megatron.offload.commands.training_runs.trainer import Trainer, Training
from megatron.offload.sizes import format_size, parse_size
from megatron.offload.states.config import StatesConfig

ROOT = Path(__file__).resolve().parents[2]
OURS = ("memory", "ssd", "host", "serial")
PEERS = ("deepspeed", "torchao")
TOKENS = 2048  # of a micro-batch
FIRST = (1, 1, 1)  # micro-batches of the steps before the first turn
SCHEDULE = (1, 1, 1, 8)  # of the steps of a turn; the first one is for memory
IN_MEMORY = 16  # bytes of each parameter: weight, gradient, two states, fp32
MOST_BYTES, MOST_TIME_RATIO = 8.5, 1.05
_FIELDS = ("loss", "grad_norm", "weights", "states")


@dataclass
class Comparison:
    """What the trainings of one shape showed.

    Attributes:
        window_bytes: that states may take.
        runs: of each way that runs here.
        errors: why another does not, by its name.
    """

    window_bytes: int
    runs: list[Run] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    def is_identical(self, run: Run) -> bool:
        """Whether a run has the bits of `memory`."""
        return first_difference(self._base(run), run, fields=_FIELDS) is None

    def resident_bytes(self, run: Run) -> float:
        """Of weights, gradients and states, over a step; for each parameter."""
        pairs = list(zip(_for_memory(run), _for_memory(self._base(run)), strict=True))
        return IN_MEMORY + max(
            median(
                (one[part] - one["base_bytes"] - of_base[part] + of_base["base_bytes"])
                / one["num_params"]
                for one, of_base in pairs
            )
            for part in ("layers_bytes", "optimizer_bytes")
        )

    def peak_bytes(self, run: Run) -> int:
        """Of whole steps, over the base."""
        return max(
            max(s["layers_bytes"], s["optimizer_bytes"]) - s["base_bytes"]
            for s in run.steps[len(FIRST) :]
        )

    def time_ratios(self, run: Run, num_micro_batches: int) -> list[float]:
        """Of steps with so many micro-batches, over that of `memory` at the same place."""
        return [
            one["step_time_s"] / of_base["step_time_s"]
            for one, of_base in zip(run.steps, self._base(run).steps, strict=True)
            if one["num_micro_batches"] == num_micro_batches and _is_timed(one)
        ]

    def as_json(self) -> dict[str, Any]:
        """The figures of every way."""
        return {
            "ways": {
                run.variant.placement + (f", round {run.round + 1}" if run.round else ""): (
                    self._figures(run)
                )
                for run in self.runs
            },
            "window_bytes": self.window_bytes,
            "errors": self.errors,
        }

    def _base(self, run: Run) -> Run:
        return next(
            one for one in self.runs if one.variant.placement == "memory" and one.round == run.round
        )

    def _figures(self, run: Run) -> dict[str, Any]:
        last, before = run.steps[-1], run.steps[-2]
        figures: dict[str, Any] = {
            "identical": self.is_identical(run) if run.variant.placement in OURS else None,
            "resident_bytes_per_parameter": self.resident_bytes(run),
            "peak_bytes": self.peak_bytes(run),
            "num_params": last["num_params"],
            "written_bytes": last.get("states_written", 0) - before.get("states_written", 0),
            "read_bytes": last.get("states_read", 0) - before.get("states_read", 0),
        }
        for number in sorted({*SCHEDULE}):
            timed = [s for s in run.steps if s["num_micro_batches"] == number and _is_timed(s)]
            figures[f"{number * TOKENS}_tokens"] = {
                "step_s": median(s["step_time_s"] for s in timed),
                "optimizer_s": median(s["optimizer_s"] for s in timed),
                "step_time_ratio": median(self.time_ratios(run, number)),
                "step_time_ratios": self.time_ratios(run, number),
            }
        return figures

    def table(self) -> str:
        """A row for each way that ran, and a line for each that did not."""
        rows = []
        for name, one in self.as_json()["ways"].items():
            small, large = (one[f"{number * TOKENS}_tokens"] for number in sorted({*SCHEDULE}))
            bits = {True: "identical", False: "DIFFERENT", None: "its own"}[one["identical"]]
            rows.append(
                (
                    *(name, bits, f"{one['resident_bytes_per_parameter']:.2f}"),
                    format_size(one["peak_bytes"]),
                    *(f"{small['step_s']:.2f}", f"{small['optimizer_s']:.2f}"),
                    *(f"{small['step_time_ratio']:.3f}", f"{large['step_s']:.2f}"),
                    *(f"{large['optimizer_s']:.2f}", f"{large['step_time_ratio']:.3f}"),
                    format_size(one["written_bytes"]),
                )
            )
        columns = ["way", "bits", "B/parameter", "peak"]
        for number in sorted({*SCHEDULE}):
            columns += [f"step s, {number * TOKENS} tokens", "optimizer s", "/ memory"]
        lines = [tabulate(rows, headers=[*columns, "written/step"], disable_numparse=True)]
        lines += [f"{name} was not measured: {error}" for name, error in self.errors.items()]
        return "\n".join(lines)


def _for_memory(run: Run) -> list[dict[str, Any]]:
    """Those steps of a run's turns in which memory was measured."""
    return [step for step in run.steps[len(FIRST) :] if step["is_for_memory"]]


def _is_timed(step: dict[str, Any]) -> bool:
    return step["step"] > len(FIRST) and not step["is_for_memory"]


class Comparer:
    """Trains one shape in all ways, a turn each.

    Args:
        args: see `make_parser`.
        shape: hidden size x layers.
        folder: for all output.
    """

    def __init__(self, args: argparse.Namespace, shape: str, folder: Path) -> None:
        hidden, layers = shape.split("x")
        flags = ["--hidden", hidden, "--layers", layers]
        flags += ["--first", _listed(FIRST), "--schedule", _listed(SCHEDULE)]
        for name in ("bucket", "window"):
            if getattr(args, name) is not None:
                flags += [f"--{name}", str(getattr(args, name))]
        script = ROOT / "tools/bench/train_states.py"
        self._trainer = Trainer(script, flags, args.directory)
        self._turns: int = args.turns
        self._folder = folder
        self._window_bytes = args.window or StatesConfig().window_bytes
        ours = [way for way in args.ways if way in OURS]
        self._rounds = [ours, *(["memory", way] for way in args.ways if way in PEERS)]

    def run(self, bar: tqdm[Any]) -> Comparison:
        """Runs all rounds.

        Raises:
            RunError: one of our own ways failed.
        """
        found = Comparison(self._window_bytes)
        for number, ways in enumerate(self._rounds):
            self._run_round(number, ways, found, bar)
        return found

    def _run_round(
        self, number: int, ways: Sequence[str], found: Comparison, bar: tqdm[Any]
    ) -> None:
        """Has each training take its first steps, then all of them turns."""
        with contextlib.ExitStack() as ends:
            trainings: dict[str, Training] = {}
            for way in reversed(ways):  # a peer that does not run here needs no `memory` beside it
                bar.set_description(f"{self._folder.name} {way}")
                folder = self._folder / f"round{number + 1}-{way}"
                training = self._trainer.start(
                    way, ["--way", way], "offload", folder, in_turns=True
                )
                # DeepSpeed leaves its files.
                ends.callback(shutil.rmtree, folder / "zero_stage_3", ignore_errors=True)
                ends.callback(training.end)
                try:
                    for _ in FIRST:
                        training.step()
                except RunError as error:
                    if way in OURS:
                        raise
                    found.errors[way] = str(error).splitlines()[-1]
                    bar.update(len(ways) * (1 + self._turns))
                    return
                trainings[way] = training
                bar.update()
            for turn in range(self._turns):
                for way in order_of_round(ways, turn):
                    bar.set_description(f"{self._folder.name} {way} turn {turn + 1}")
                    for _ in SCHEDULE:
                        trainings[way].step()
                    bar.update()
            for way in ways:
                found.runs.append(Run(Variant(way, "offload"), number, trainings[way].steps))

    @property
    def num_updates(self) -> int:
        """Of the bar, in all."""
        return sum(len(ways) * (1 + self._turns) for ways in self._rounds)


def summary_of(shapes: Sequence[Comparison]) -> dict[str, Any]:
    """The figures that a program looks at: the worst of all shapes."""
    every = [one.as_json()["ways"]["ssd"] for one in shapes]
    identical = all(one.is_identical(r) for one in shapes for r in one.runs if _is_ours(r))
    resident = "resident_bytes_per_parameter"
    summary = {"identical": identical, resident: max(one[resident] for one in every)}
    for number in sorted({*SCHEDULE}):
        name = f"{number * TOKENS}_tokens"
        summary[f"step_time_ratio_{name}"] = max(one[name]["step_time_ratio"] for one in every)
    return summary


def keeps_promises(shapes: Sequence[Comparison]) -> bool:
    """Whether the figures are those that the project promises."""
    summary = summary_of(shapes)
    return (
        summary["identical"]
        and summary[f"step_time_ratio_{max(SCHEDULE) * TOKENS}_tokens"] <= MOST_TIME_RATIO
        and all(
            one["resident_bytes_per_parameter"]
            <= MOST_BYTES + comparison.window_bytes / one["num_params"]
            for comparison in shapes
            for one in [comparison.as_json()["ways"]["ssd"]]
        )
    )


def _is_ours(run: Run) -> bool:
    return run.variant.placement in OURS


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "default: %(default)s"
    parser.add_argument("--shapes", default="1024x8,512x24", help=f"hidden x layers; {default}")
    parser.add_argument("--ways", default="memory,ssd,serial,deepspeed,torchao", help=default)
    parser.add_argument("--turns", type=int, default=2, help=default)
    parser.add_argument("--bucket", type=parse_size, help="default: the flag's")
    parser.add_argument("--window", type=parse_size, help="default: the flag's")
    parser.add_argument("--directory", type=Path, default=ROOT / "runs/offload", help=default)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    return parser


def main() -> int:
    """Runs the comparison; the exit code."""
    parser = make_parser()
    args = parser.parse_args()
    args.ways = [one for one in args.ways.split(",") if one]
    unknown = {*args.ways} - {*OURS, *PEERS}
    if unknown or not {"memory", "ssd"} <= {*args.ways}:
        parser.error(
            f"unknown: {', '.join(sorted(unknown))}"
            if unknown
            else "ssd is compared with memory: name both"
        )
    args.directory.mkdir(parents=True, exist_ok=True)
    work = ROOT / "runs" / f"states-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"
    comparers = {
        shape: Comparer(args, shape, work / shape) for shape in args.shapes.split(",") if shape
    }
    result: dict[str, Any] = {"machine": machine_facts(args.directory)}
    command = shlex.join(["tools/bench/states.py", *sys.argv[1:]])
    result |= {"command": command.replace(f"{ROOT}/", ""), "summary": {}, "shapes": {}}
    print(in_a_line(result["machine"]))
    done: list[Comparison] = []
    try:
        with tqdm(
            total=sum(one.num_updates for one in comparers.values()), unit="turn", disable=None
        ) as bar:
            for shape, comparer in comparers.items():
                done.append(comparer.run(bar))
                result["shapes"][shape] = done[-1].as_json()
                result["summary"] = summary_of(done)
                bar.write(f"\nhidden x layers {shape}\n{done[-1].table()}")
                if args.json is not None:
                    args.json.write_text(json.dumps(result, indent=1) + "\n")
    except RunError as error:
        print(f"states: error: {error}", file=sys.stderr)
        return 2
    print("\n" + json.dumps(result["summary"]))
    return 0 if keeps_promises(done) else 1


if __name__ == "__main__":
    sys.exit(main())
