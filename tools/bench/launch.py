#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What offload costs the thread that launches operations, in a training of short operations.

    tools/bench/launch.py --json launch.json          # about a minute on 2 cores
    tools/bench/launch.py --ways door --steps 200 --layers 8
    tools/bench/launch.py --ways door --model llama   # in bf16; of a layer 15 storages move
    tools/bench/launch.py --ways door --model llama --base ../before --rounds 5

Two ways to train, each in a process of its own:
- door: a small transformer in plain torch, or transformers' Llama (`--model`), through
  `offload_activations`. Two copies of it take turns, a step each, one of them without offload.
- megatron: the trainer's GPT on megatron-core, operation by operation.

Each step's activations are written before its backward pass begins, so that it has to read them
back. Time is taken on the way into our code and out of it, in the thread that launches, by part:
- layers: what integrations do around a layer and between its operations;
- walk: what an operation saved is found in autograd's graph; a context hears of it instead;
- pack: a saved tensor is told apart, placed, and replaced by our own;
- submit: it is handed over to the thread that starts transfers;
- unpack: it is handed back to backward;
- read_ahead: what was used is noted, so that the next is read.
Waits for a drive or for room are left out; waits for the interpreter, which our other threads hold
meanwhile, are part of it. What it takes to look at the clock is measured before, on functions that
do nothing, and left out. In every second step processor time is taken instead, which waits are no
part of. A sample is a layer in a step; all that it took is divided by the storages that moved.
`both ways` is pack, submit, unpack and read_ahead together.
`others`: processor time of all other threads, ours, for each storage; by thread for each layer, of
I/O threads without the calls in which the system moves the bytes, which stand beside it.

With `--base`, a checkout of another commit, rounds of both take turns, and what they took of the
processor is compared: for each round this one divided by the other, then the median.

Exit code: 0 as promised (25 us a storage both ways, the median of layers and steps), 1 not, 2 it
could not be measured.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tabulate import tabulate
from tqdm import tqdm

from megatron.offload import offload_activations
from megatron.offload.activations.engine import OffloadEngine
from megatron.offload.activations.saved.scope import layer_of
from megatron.offload.activations.stats.traffic import Traffic
from megatron.offload.commands.training_runs.machine import in_a_line, machine_facts
from megatron.offload.commands.training_runs.trainer import PLACEMENT_FLAGS
from megatron.offload.stats.statistics import StepStatistics

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(1, str(ROOT / "tools"))

from bench.launch_account import (  # noqa: E402
    Account,
    Layer,
    calibrated,
    others_seconds,
    watch,
    watch_megatron,
    watch_moving,
)
from bench.launch_models import Llama, Model  # noqa: E402

MOST_US = 25.0  # a storage
PARTS = ("layers", "walk", "pack", "submit", "unpack", "read_ahead")
BOTH_WAYS = PARTS[2:]  # pack and unpack together
WAYS = ("door", "megatron")
WARM_STEPS = 5
CLOCKS = (time.perf_counter_ns, time.thread_time_ns)  # on the wall, on the processor
_MIN_BYTES = 4096

Function = Callable[..., Any]


@dataclass
class Steps:
    """What a way of training has shown.

    Attributes:
        layers: of each step that counts, by name, in seconds on the wall.
        on_processor: of the steps in between, in processor seconds.
        counted: the engine's counters of these steps.
        seconds: of a step with offload, without waits for writes between forward and backward.
        seconds_without: of one without; empty: not measured.
        others_s: processor seconds of all other threads in all of these steps, by what they do.
    """

    layers: list[dict[str, Layer]] = field(default_factory=list)
    on_processor: list[dict[str, Layer]] = field(default_factory=list)
    counted: list[StepStatistics] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    seconds_without: list[float] = field(default_factory=list)
    others_s: collections.Counter[str] = field(default_factory=collections.Counter)

    def note(
        self, account: Account, counted: StepStatistics, others_s: collections.Counter[str]
    ) -> None:
        """A step has ended; not the first ones, which warm up."""
        of_this = self.layers if account.is_wall else self.on_processor
        of_this.append(account.take())
        self.counted.append(counted)
        self.others_s.update(others_s)


def train_door(args: argparse.Namespace) -> Steps:
    """Two copies of a model in turns, one of them with offload."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make = {"plain": Model, "llama": Llama}[args.model]
    plain, moved = make(args).to(args.device), make(args).to(args.device)
    x = make.inputs(args).to(args.device)
    account, steps = Account(*map(calibrated, CLOCKS)), Steps()
    with contextlib.ExitStack() as stack:
        watch(account, stack)
        watch_moving(stack)
        handle = stack.enter_context(
            offload_activations(
                moved,
                args.dir,
                mode=args.mode,
                min_bytes=_MIN_BYTES,
                replay=args.replay == "on",
            )
        )

        def wait_for_writes() -> None:
            assert handle.engine is not None
            handle.engine.wait_for_writes()

        for number in tqdm(range(WARM_STEPS + args.steps), unit="step", disable=None):
            before_s = others_seconds()
            with_s = step_seconds(moved, x, wait_for_writes)
            others_s = others_seconds()
            others_s.subtract(before_s)
            without_s = step_seconds(plain, x, lambda: None)
            assert handle.engine is not None
            if number < WARM_STEPS:
                account.take()
                continue
            steps.note(account, handle.engine.statistics, others_s)
            steps.seconds.append(with_s)
            steps.seconds_without.append(without_s)
    return steps


def step_seconds(model: Model, x: torch.Tensor, between: Callable[[], None]) -> float:
    """Of forward and backward; what is between them does not count."""
    began = time.perf_counter()
    loss = model(x).square().mean()
    forward_s = time.perf_counter() - began
    between()
    began = time.perf_counter()
    loss.backward()
    backward_s = time.perf_counter() - began
    model.zero_grad()
    return forward_s + backward_s


def train_megatron(args: argparse.Namespace) -> Steps:
    """The trainer's GPT."""
    from hooks import train  # beside this file

    torch.set_num_threads(1)
    account, steps = Account(*map(calibrated, CLOCKS)), Steps()
    backward, end_step = OffloadEngine.backward, Traffic.end_step

    @contextlib.contextmanager
    def backward_of_written(engine: OffloadEngine, *args: Any) -> Iterator[None]:
        engine.wait_for_writes()
        with backward(engine, *args):
            yield

    others_s: list[collections.Counter[str]] = []  # at the end of each step, so far

    def ended(traffic: Traffic, counted: StepStatistics) -> None:
        end_step(traffic, counted)
        others_s.append(others_seconds())
        if len(others_s) > WARM_STEPS:
            of_this = others_s[-1].copy()
            of_this.subtract(others_s[-2])
            steps.note(account, counted, of_this)
        else:
            account.take()

    flags = ["--train-iters", str(WARM_STEPS + args.steps), *PLACEMENT_FLAGS[args.mode]]
    flags += ["--activation-offload-dir", str(args.dir)]
    flags += ["--activation-offload-min-bytes", str(_MIN_BYTES)]
    flags += ["--num-layers", str(args.layers), "--hidden-size", str(args.hidden_size)]
    flags += ["--num-attention-heads", str(args.hidden_size // 16), "--vocab-size", "512"]
    flags += ["--seq-length", str(args.sequence), "--micro-batch-size", str(args.batch)]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(mock.patch.object(OffloadEngine, "backward", backward_of_written))
        stack.enter_context(mock.patch.object(Traffic, "end_step", ended))
        watch(account, stack)
        watch_moving(stack)
        watch_megatron(account, stack)
        records = train(flags, Path(folder) / "metrics.jsonl")
    steps.seconds = [record["step_time_s"] for record in records][WARM_STEPS - 1 :]
    return steps


def figures(steps: Steps) -> dict[str, Any]:
    """What is printed and written of a way, from all of its layers and steps."""
    layers, on_processor = (
        [
            layer
            for of_step in of_steps
            for name, layer in of_step.items()
            if layer_of(name) == name and layer.num_storages
        ]
        for of_steps in (steps.layers, steps.on_processor)
    )
    if not layers or not on_processor:
        raise SystemExit("launch: error: no layer has saved anything that moves in two steps")
    both = [*steps.layers, *steps.on_processor]
    num_storages = sum(one.num_storages for of_step in both for one in of_step.values())
    num_layers = len(layers) + len(on_processor)
    forwarded = sum(one.forwarded_bytes for one in steps.counted)
    offloaded = sum(one.offloaded_bytes for one in steps.counted)
    without = steps.seconds_without
    return {
        "steps": len(both),
        "samples": len(layers),
        "storages_per_layer": statistics.mean(one.num_storages for one in layers),
        "tensors_per_layer": statistics.mean(one.num_tensors for one in layers),
        "us_per_layer": by_part(layers, lambda _: 1),
        "us_per_storage": by_part(layers, lambda one: one.num_storages),
        "processor_us_per_layer": by_part(on_processor, lambda _: 1),
        "processor_us_per_storage": by_part(on_processor, lambda one: one.num_storages),
        "others_us_per_storage": 1e6 * sum(steps.others_s.values()) / num_storages,
        "others_us_per_layer": {
            name: 1e6 * seconds / num_layers for name, seconds in steps.others_s.items()
        },
        "forwarded_fraction": forwarded / offloaded,
        "step_s": statistics.median(steps.seconds),
        "step_s_without": statistics.median(without) if without else None,
        "stall_s": statistics.median(one.stall_s for one in steps.counted),
    }


def by_part(layers: list[Layer], divisor: Callable[[Layer], int]) -> dict[str, dict[str, float]]:
    """Microseconds of each part, and of some together, divided by a number of each layer."""
    summed = {**{part: (part,) for part in PARTS}, "both ways": BOTH_WAYS, "all": PARTS}
    return {
        name: spread(
            [sum(one.spent_ns[part] for part in parts) / 1e3 / divisor(one) for one in layers]
        )
        for name, parts in summed.items()
    }


def spread(samples: list[float]) -> dict[str, float]:
    """The median of samples, their quartiles and their mean."""
    first, median, third = statistics.quantiles(samples, n=4, method="inclusive")
    mean = statistics.mean(samples)
    return {"median": median, "first_quartile": first, "third_quartile": third, "mean": mean}


def table(ways: dict[str, dict[str, Any]]) -> str:
    """A row for each part of each way."""
    rows = []
    for way, found in ways.items():
        for part in (*PARTS, "both ways", "all"):
            storage = found["us_per_storage"][part]
            numbers = (
                found["us_per_layer"][part]["median"],
                storage["median"],
                storage["mean"],
                found["processor_us_per_storage"][part]["median"],
            )
            between = f"{storage['first_quartile']:.1f} to {storage['third_quartile']:.1f}"
            layer, median, mean, processor = (f"{one:.1f}" for one in numbers)
            rows.append((way, part, layer, median, between, mean, processor))
    headers = ("way", "part", "us a layer", "us a storage", "half of them", "mean", "processor")
    return str(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))


def sentences(way: str, found: dict[str, Any]) -> str:
    """What stands below the table."""
    text = (
        f"{way}: {found['storages_per_layer']:.1f} storages and {found['tensors_per_layer']:.1f} "
        f"tensors a layer, {found['forwarded_fraction']:.0%} of the bytes forwarded; others "
        f"{found['others_us_per_storage']:.0f} us a storage"
        + "".join(
            f", {name} {us:.0f} us a layer" for name, us in found["others_us_per_layer"].items()
        )
        + f"; a step {1e3 * found['step_s']:.1f} ms"
    )
    if found["step_s_without"] is not None:
        text += f", without offload {1e3 * found['step_s_without']:.1f} ms"
    return text + f"; it waits {1e3 * found['stall_s']:.1f} ms for reads"


def in_a_process(way: str, argv: list[str], checkout: Path = ROOT) -> dict[str, Any]:
    """One way in a process of its own: threads, allocators and hooks are not shared.

    Args:
        way: to train.
        argv: the command line.
        checkout: whose package is measured.
    """
    command = [sys.executable, __file__, *argv, "--way", way]
    search = os.pathsep.join(filter(None, (str(checkout.resolve()), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": search}
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        command += ["--json", result.name]
        done = subprocess.run(command, check=False, stdout=sys.stderr, env=env)
        if done.returncode:
            raise SystemExit(2)
        found: dict[str, Any] = json.loads(Path(result.name).read_text())
    return found


def spent_us(found: dict[str, Any]) -> dict[str, float]:
    """Processor microseconds a layer: of the thread that launches, and of others."""
    launching_us = found["processor_us_per_layer"]["all"]["median"]
    return {"launches": launching_us, **found["others_us_per_layer"]}


def against(base: Path, names: list[str], argv: list[str], rounds: int) -> dict[str, Any]:
    """Each way in turns with another checkout's package: what each took, and the ratios."""
    compared: dict[str, Any] = {}
    for way in names:
        pairs = []
        for number in range(rounds):
            order = (ROOT, base) if number % 2 else (base, ROOT)
            took = {checkout: spent_us(in_a_process(way, argv, checkout)) for checkout in order}
            pairs.append((took[ROOT], took[base]))
        compared[way] = {
            name: {
                "us_per_layer": statistics.median(ours[name] for ours, _ in pairs),
                "us_per_layer_of_base": statistics.median(others[name] for _, others in pairs),
                "ratio": statistics.median(ours[name] / others[name] for ours, others in pairs),
                "ratios": [ours[name] / others[name] for ours, others in pairs],
            }
            for name in pairs[0][0]
        }
    return compared


def table_of_ratios(compared: dict[str, Any]) -> str:
    """A row for each kind of thread in each way."""
    rows = [
        (
            way,
            name,
            f"{one['us_per_layer_of_base']:.0f}",
            f"{one['us_per_layer']:.0f}",
            f"{one['ratio']:.2f}",
            f"{min(one['ratios']):.2f} to {max(one['ratios']):.2f}",
        )
        for way, of_way in compared.items()
        for name, one in of_way.items()
    ]
    headers = ("way", "thread", "us a layer, base", "this", "ratio", "of the rounds")
    return str(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "default: %(default)s"
    parser.add_argument("--ways", default=",".join(WAYS), help=default)
    parser.add_argument(
        "--model", choices=("plain", "llama"), default="plain", help=f"of the door; {default}"
    )
    parser.add_argument("--steps", type=int, default=60, help=f"that count; {default}")
    parser.add_argument("--layers", type=int, default=4, help=default)
    parser.add_argument("--hidden-size", type=int, default=64, help=default)
    parser.add_argument("--sequence", type=int, default=32, help=default)
    parser.add_argument("--batch", type=int, default=2, help=default)
    parser.add_argument("--mode", choices=("ssd", "host"), default="ssd", help=default)
    parser.add_argument("--device", default="cpu", help=f"of the door's model; {default}")
    parser.add_argument(
        "--replay", choices=("on", "off"), default="on", help=f"of the door; {default}"
    )
    parser.add_argument("--dir", type=Path, default=ROOT / "runs/offload", help="on an SSD")
    parser.add_argument("--base", type=Path, help="a checkout to compare with")
    parser.add_argument("--rounds", type=int, default=5, help=f"with --base; {default}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measures all ways and prints them; the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser()
    args = parser.parse_args(argv)
    args.dir.mkdir(parents=True, exist_ok=True)
    if args.way:
        found = figures({"door": train_door, "megatron": train_megatron}[args.way](args))
        args.json.write_text(json.dumps(found))
        return 0
    names = args.ways.split(",")
    if unknown := set(names) - set(WAYS):
        parser.error(f"there is no way {', '.join(unknown)}; choose of {', '.join(WAYS)}")
    machine = machine_facts(args.dir)
    command = shlex.join(["tools/bench/launch.py", *argv]).replace(f"{ROOT}/", "")
    if args.base is not None:
        compared = against(args.base, names, argv, args.rounds)
        print(f"{in_a_line(machine)}\n\n{table_of_ratios(compared)}")
        if args.json is not None:
            result = {"command": command, "machine": machine, "compared": compared}
            args.json.write_text(json.dumps(result, indent=1) + "\n")
        return 0
    ways = {way: in_a_process(way, argv) for way in names}
    print(f"{in_a_line(machine)}\n\n{table(ways)}\n")
    for way, found in ways.items():
        print(sentences(way, found))
    if args.json is not None:
        result = {"command": command, "machine": machine, "ways": ways}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    kept = all(found["us_per_storage"]["both ways"]["median"] <= MOST_US for found in ways.values())
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
