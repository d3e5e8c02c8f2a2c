#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Models of transformers with `offload_activations`, beside none and what else users can pick.

    tools/bench/models.py --json models.json                  # GPT-2 and Llama; about 40 minutes
    tools/bench/models.py --models llama --ways none,offload,checkpointing --turns 4
    tools/bench/models.py --models llama --ways none,offload,checkpointing,auto --budgets 700MiB
    tools/bench/models.py --compiled --json compiled.json     # by inductor, four models

Each way of training is a process of its own; they take turns, two steps each, so that a machine
that is slower for a while is so for all. The second one counts: after a pause an allocator has
given back what the next step uses. All of a round are in memory side by side: the first has our
ways and checkpointing, the second what else there is, each with `none`. On a CPU `none` runs with
two allocators, that of the C library and that of offload: time is compared with the faster `none`
of the same turn, memory with the smaller one. Memory is the growth of the resident set over the
state before a step's forward pass.
`identical`: losses of all steps, gradients of the first four and the weights after them have the
same bits as those of `none`.

none              everything stays in memory
offload           offload_activations(model, DIR)
checkpointing     model.gradient_checkpointing_enable(), transformers' own
auto              offload_activations(model, DIR, mode="auto", memory_budget_bytes=...), --budgets
eager             with --compiled: offload of the model as it is, of other bits
chunked           offload_activations(model, mode="off", chunked_loss="auto"): not identical
chunked_offload   offload_activations(model, DIR, chunked_loss="auto"), nor is this
save_on_cpu       torch.autograd.graph.save_on_cpu()
save_on_pinned    the same with pin_memory=True, for CUDA
trl               trl.models.activation_offloading.OffloadActivations
torchtune         torchtune.training.OffloadActivations
axolotl_disk      Axolotl's Disco: each layer recomputed, its input a file on the disk

The last two are looked for in --peers, a folder with unpacked wheels of axolotl, torchtune and a
torchao that it can import. What does not run on this machine is listed with its error.

With --compiled all ways but `eager` train the model as torch.compile makes it, under torch's
deterministic algorithms; `offload` is offload_activations(model, DIR, inside_graphs=True).

Exit code: 0 as promised (peak at most 33 % of none's, compiled 40 %, step at most 1.05 of it, same
bits), 1 not, 2 it could not be measured.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
    paired_ratio,
    settled_steps,
)
from megatron.offload.commands.training_runs.trainer import Trainer, Training
from megatron.offload.device.cuda import has_cuda
from megatron.offload.sizes import format_size, parse_size

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("gpt2", "llama")
COMPILED_MODELS = ("llama", "gpt2", "bert", "mixtral")
WAYS = ("none", "offload", "checkpointing", "auto")
CHUNKED = ("chunked", "chunked_offload")  # another order of sums: never identical
EAGER = "eager"  # beside compiled ones; nor is this
OURS = (*WAYS, *CHUNKED, EAGER)
PEERS = ("save_on_cpu", "save_on_pinned", "trl", "torchtune", "axolotl_disk")
_BOTH_ALLOCATORS = ("none",)
_FIELDS = ("loss", "gradients", "weights")
_SETTLED = 2  # first steps that do not count
_STEPS_A_TURN = 2
_MOST_STEPS_OF_AUTO = 40
MOST_PEAK_RATIO, MOST_COMPILED_PEAK_RATIO, MOST_TIME_RATIO = 0.33, 0.40, 1.05


@dataclass(frozen=True)
class Way(Variant):
    """A way to train, with its allocator; `auto` with its budget."""

    budget_bytes: int | None = None

    @property
    def name(self) -> str:
        """In tables and in file names."""
        budget = f"-{self.budget_bytes >> 20}MiB" if self.budget_bytes is not None else ""
        return f"{self.placement}{budget}@{self.allocator}"

    def flags(self) -> list[str]:
        """Of `train_model.py`."""
        budget = ["--budget", str(self.budget_bytes)] if self.budget_bytes is not None else []
        return ["--way", self.placement, *budget]


@dataclass
class Comparison:
    """What the trainings of one model showed.

    Attributes:
        runs: of each way that runs here.
        errors: why another does not, or has not settled, by its name.
        same: ways that promise the bits of `none`.
    """

    same: Sequence[str] = WAYS
    runs: list[Run] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    def of(self, placement: str) -> list[Run]:
        """The runs of one way, with all of its allocators and budgets."""
        return [run for run in self.runs if run.variant.placement == placement]

    def is_identical(self, run: Run) -> bool:
        """Whether a run has the bits of `none`, as far as both went."""
        reference = self.of("none")[0]
        return first_difference(reference, run, same_length=False, fields=_FIELDS) is None

    def peak_bytes(self, runs: Sequence[Run]) -> float:
        """The smallest of the runs' largest peaks."""
        return min(run.peak_bytes(_SETTLED) for run in runs)

    def peak_ratio(self, runs: Sequence[Run]) -> float:
        """Of the smaller `none`."""
        return self.peak_bytes(runs) / self.peak_bytes(self.of("none"))

    def time_ratio(self, runs: Sequence[Run]) -> float:
        """Of the faster `none` in the same turn; of several runs the fastest counts."""
        ratios = [paired_ratio([run], self.of("none"), _SETTLED) for run in runs]
        return min(ratio for ratio in ratios if ratio is not None)

    def as_json(self) -> dict[str, Any]:
        """The figures that a program looks at, and those of every way."""
        found: dict[str, Any] = {
            "identical": all(
                self.is_identical(run) for run in self.runs if run.variant.placement in self.same
            ),
            "ways": {self._name_of(run): self._figures(run) for run in self.runs},
            "errors": self.errors,
        }
        for name, placement in (("", "offload"), ("checkpointing_", "checkpointing")):
            runs = self.of(placement)
            if runs:
                found[f"{name}peak_ratio"] = self.peak_ratio(runs)
                found[f"{name}{'step_' if not name else ''}time_ratio"] = self.time_ratio(runs)
        return found

    def _name_of(self, run: Run) -> str:
        return run.variant.name + (", second round" if run.round and run in self.of("none") else "")

    def _figures(self, run: Run) -> dict[str, Any]:
        assert isinstance(run.variant, Way)
        return {
            "identical": self.is_identical(run),
            "step_s": run.step_time_s(_SETTLED),
            "time_ratio": self.time_ratio([run]),
            "peak_bytes": run.peak_bytes(_SETTLED),
            "peak_ratio": self.peak_ratio([run]),
            "budget_bytes": run.variant.budget_bytes,
            "written_bytes": run.offload_median("written_bytes", _SETTLED),
            "stall_s": run.offload_median("stall_s", _SETTLED),
            "steps": len(run.steps),
        }

    def table(self) -> str:
        """A row for each way that ran, and a line for each that did not."""
        rows = [
            (
                name,
                "identical" if one["identical"] else "DIFFERENT",
                f"{one['step_s']:.3f}",
                f"{one['time_ratio']:.3f}",
                format_size(one["peak_bytes"]),
                f"{one['peak_ratio']:.3f}",
                format_size(one["written_bytes"]),
                f"{one['stall_s']:.3f}",
            )
            for name, one in self.as_json()["ways"].items()
        ]
        header = ("way", "bits", "step s", "/ none", "peak", "/ none", "written/step", "stall s")
        lines = [tabulate(rows, headers=header, disable_numparse=True)]
        lines += [f"{name} was not measured: {error}" for name, error in self.errors.items()]
        return "\n".join(lines)


class Comparer:
    """Trains one model in all ways, two steps each in turn.

    Args:
        args: see `make_parser`.
        model: one of `MODELS`.
        folder: for all output.
    """

    def __init__(self, args: argparse.Namespace, model: str, folder: Path) -> None:
        flags = ["--model", model, "--layers", str(args.layers), "--hidden", str(args.hidden)]
        flags += ["--sequence", str(args.sequence), "--batch", str(args.batch)]
        flags += ["--vocabulary", str(args.vocabulary), "--dtype", args.dtype]
        if args.compiled is not None:
            flags += ["--compiled", args.compiled]
        if args.peers is not None:
            flags += ["--peers", str(args.peers.resolve())]
        self._trainer = Trainer(ROOT / "tools/bench/train_model.py", flags, args.directory)
        self._turns: int = args.turns
        self._folder = folder
        # Compiled, what is checkpointed is another graph, of other kernels.
        self._same = WAYS if args.compiled is None else WAYS[:2]
        self._rounds = [
            [
                Way(way, allocator, budget)
                for way in args.ways
                if way in names
                for allocator in _allocators_of(way)
                for budget in (args.budgets if way == "auto" else [None])
            ]
            for names in (OURS, ("none", *PEERS))
            if {*names, "none"} & {*args.ways} - {"none"}
        ]

    def run(self, bar: tqdm[Any]) -> Comparison:
        """Runs all rounds.

        Raises:
            RunError: `none` or one of our own ways failed.
        """
        found = Comparison(self._same)
        for number, ways in enumerate(self._rounds):
            self._run_round(number, ways, found, bar)
        return found

    def _run_round(
        self, number: int, ways: Sequence[Way], found: Comparison, bar: tqdm[Any]
    ) -> None:
        """Settles each training, then has all of them take turns."""
        with contextlib.ExitStack() as ends:
            waiting: dict[Way, Training] = {}
            for way in ways:
                bar.set_description(f"{self._folder.name} {way.name}")
                folder = self._folder / f"round{number + 1}-{way.name}"
                training = self._trainer.start(
                    way.name, way.flags(), way.allocator, folder, in_turns=True
                )
                ends.callback(training.end)
                try:
                    training.run(enough=self._has_settled)
                except RunError as error:
                    if way.placement in OURS:
                        raise
                    found.errors[way.placement] = str(error).splitlines()[-1]
                else:
                    waiting[way] = training
                bar.update()
            first_turns = {way: len(one.steps) for way, one in waiting.items()}
            for turn in range(self._turns):
                for way in order_of_round(list(waiting), turn):
                    for _ in range(_STEPS_A_TURN):
                        waiting[way].step()
                bar.set_description(f"{self._folder.name} turn {turn + 1}")
                bar.update()
            for way, one in waiting.items():
                run = Run(way, number, one.steps, first_turns[way], _STEPS_A_TURN)
                if run.settled_steps(_SETTLED):
                    found.runs.append(run)
                else:  # `auto`, which still plans
                    plans = one.steps[-1]["offload"]["plans"]
                    found.errors[way.name] = (
                        f"{plans} plans in {len(one.steps)} steps; the last one's peak is "
                        f"{format_size(one.steps[-1]['peak_activation_bytes_rank0'])}"
                    )

    def _has_settled(self, steps: list[dict[str, Any]]) -> bool:
        """`auto` first makes and follows its last plan."""
        is_auto = bool(steps) and "plans" in steps[-1].get("offload", {})
        wanted = 10 if is_auto else 2
        return len(settled_steps(steps, _SETTLED)) >= wanted or len(steps) > _MOST_STEPS_OF_AUTO

    @property
    def num_updates(self) -> int:
        """Of the bar, in all."""
        return sum(len(ways) + self._turns for ways in self._rounds)


def keeps_promises(figures: dict[str, Any], most_peak_ratio: float = MOST_PEAK_RATIO) -> bool:
    """Whether a model's figures are those that the project promises."""
    return (
        figures["identical"]
        and not any(name.startswith(WAYS) for name in figures["errors"])
        and figures["peak_ratio"] <= most_peak_ratio
        and figures["step_time_ratio"] <= MOST_TIME_RATIO
    )


def _allocators_of(way: str) -> list[str]:
    if has_cuda():
        return ["default"]
    return ["default", "offload"] if way in _BOTH_ALLOCATORS else ["offload"]


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "default: %(default)s"
    all_models = f"default: {','.join(MODELS)}; compiled: {','.join(COMPILED_MODELS)}"
    parser.add_argument("--models", default="", help=all_models)
    parser.add_argument("--ways", default="", help="default: all but auto and chunked ones")
    parser.add_argument(
        "--compiled",
        nargs="?",
        const="inductor",
        metavar="BACKEND",
        help="models that torch.compile makes; default of it: inductor",
    )
    parser.add_argument("--dtype", default="float32", help=f"of the weights; {default}")
    parser.add_argument("--budgets", default="", help="of auto, sizes with commas between")
    parser.add_argument("--turns", type=int, default=8, help=f"steps that count; {default}")
    parser.add_argument("--layers", type=int, default=12, help=default)
    parser.add_argument("--hidden", type=int, default=768, help=default)
    parser.add_argument("--sequence", type=int, default=512, help=default)
    parser.add_argument("--batch", type=int, default=4, help=default)
    parser.add_argument("--vocabulary", type=int, default=8192, help=default)
    parser.add_argument("--directory", type=Path, default=ROOT / "runs/offload", help=default)
    parser.add_argument("--peers", type=Path, help="folder with unpacked wheels of peers")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    return parser


def main() -> int:
    """Runs the comparison; the exit code."""
    parser = make_parser()
    args = parser.parse_args()
    is_compiled = args.compiled is not None
    models, ways = MODELS, (*WAYS[:3], *PEERS)
    if is_compiled:
        models, ways = COMPILED_MODELS, (*WAYS[:3], EAGER)
    args.models = [one for one in args.models.split(",") if one] or list(models)
    args.ways = [one for one in args.ways.split(",") if one] or list(ways)
    args.budgets = [parse_size(one) for one in args.budgets.split(",") if one]
    unknown = {*args.models} - {*MODELS, *COMPILED_MODELS} | {*args.ways} - {*OURS, *PEERS}
    is_complete = {"none", "offload"} <= {*args.ways}
    if unknown or not is_complete or ("auto" in args.ways) != bool(args.budgets):
        parser.error(
            f"unknown: {', '.join(sorted(unknown))}"
            if unknown
            else "offload is compared with none: name both; auto goes with --budgets"
        )
    args.directory.mkdir(parents=True, exist_ok=True)
    work = ROOT / "runs" / f"models-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"
    comparers = {model: Comparer(args, model, work / model) for model in args.models}
    total = sum(one.num_updates for one in comparers.values())
    result: dict[str, Any] = {"machine": machine_facts(args.directory), "models": {}}
    command = shlex.join(["tools/bench/models.py", *sys.argv[1:]])
    result["command"] = command.replace(f"{ROOT}/", "")
    print(in_a_line(result["machine"]))
    try:
        with tqdm(total=total, unit="run", disable=None) as bar:
            for model, comparer in comparers.items():
                comparison = comparer.run(bar)
                result["models"][model] = comparison.as_json()
                bar.write(f"\n{model}\n{comparison.table()}")
                if args.json is not None:
                    args.json.write_text(json.dumps(result, indent=1) + "\n")
    except RunError as error:
        print(f"models: error: {error}", file=sys.stderr)
        return 2
    most = MOST_COMPILED_PEAK_RATIO if is_compiled else MOST_PEAK_RATIO
    return 0 if all(keeps_promises(one, most) for one in result["models"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
