#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What capturing activations costs, apart from moving them.

    tools/bench/hooks.py --json hooks.json          # about 4 minutes on 2 cores
    tools/bench/hooks.py --steps 200 --train-iters 3

Five measurements:
- keep_overhead_fraction: the benchmark GPT (hidden 1024, 8 layers, megatron-core) trained with
  hooks on every layer and a policy that keeps everything. The time spent in the engine's own code
  in a step over the time of the step, the median of the steps. It is measured directly, because
  two runs of the same training differ by more than the hooks cost; --pairs N also times whole
  runs with and without, in turn.
- pack_unpack_us_median: microseconds that the computing thread spends in `pack` plus `unpack` for
  a tensor that is captured, moved and read ahead, its share of handing the layer over included:
  100 tensors in a row, so that it is the cost of this code alone.
- context_pack_unpack_us_median: the same in a context, as outside of Megatron: each operation saves
  one tensor of the least size that moves, and eight of them are handed over together.
- pack_unpack_us_median_in_training: the same in the training above with everything on the SSD,
  without the time spent waiting for the drive. Each `unpack` comes right after an operation that
  has replaced everything in the processor's caches, and whatever is called then takes many times
  as long as in a row; held to the same limit because that is what a CPU training pays.
- rss_growth_bytes_per_1000_steps, and the same for live Python objects: a small model, all of its
  activations through the SSD, from step 200 on.

With --device cuda the tensors are the GPU's; the limits stay the same.

Exit code: 0 as promised (0.5 %, 20 us both ways, no growth), 1 not, 2 it could not be measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from tabulate import tabulate
from tqdm import tqdm

from megatron.offload import OffloadConfig, OffloadEngine, Scope
from megatron.offload.activations.capture.hooks import SavedTensorHooks
from megatron.offload.activations.saved.record import State
from megatron.offload.activations.stats.traffic import Traffic
from megatron.offload.activations.transfer.writer import Writer
from megatron.offload.commands.training_runs.machine import machine_facts
from megatron.offload.commands.training_runs.trainer import PLACEMENT_FLAGS
from megatron.offload.sizes import format_size
from megatron.offload.stats.statistics import StepStatistics

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

MOST_OVERHEAD, MOST_PACK_UNPACK_US = 0.005, 20.0
# A page is the smallest step of resident memory; an allocator moves by a few hundred of them.
MOST_GROWTH_BYTES, MOST_NEW_OBJECTS = 4 << 20, 100
WARM_STEPS = 200
LOOP_LENGTH = 100
MODEL = [
    *("--hidden-size", "1024", "--num-layers", "8", "--num-attention-heads", "16"),
    *("--seq-length", "512", "--micro-batch-size", "4", "--mock-data", "--vocab-size", "8192"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--eval-iters", "0"),
    *("--lr", "6e-4", "--log-interval", "1"),
]


class Stopwatch:
    """Seconds spent inside functions that it wraps; nested calls count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that does the same and is timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - began

        return timed


def train(flags: list[str], metrics: Path) -> list[dict[str, Any]]:
    """Trains in this process; the steps after the first."""
    from trainer.gpt import GPT
    from trainer.training import pretrain

    pretrain(GPT(), [*MODEL, *flags, "--metrics-file", str(metrics)])
    return [json.loads(line) for line in metrics.read_text().splitlines()][1:]


def keep_overhead(args: argparse.Namespace, metrics: Path) -> float:
    """The engine's share of a step in which nothing moves."""
    watch, seconds = Stopwatch(), []
    for name in ("capture", "exclude"):
        setattr(OffloadEngine, name, watch.wrap(getattr(OffloadEngine, name)))
    SavedTensorHooks.unpack = watch.wrap(SavedTensorHooks.unpack)  # type: ignore[method-assign]
    end_step = Traffic.end_step

    def count(self: Traffic, step: StepStatistics) -> None:
        end_step(self, step)
        seconds.append(watch.seconds)
        watch.seconds = 0.0

    Traffic.end_step = count  # type: ignore[method-assign]
    flags = ["--train-iters", str(args.train_iters), *PLACEMENT_FLAGS["keep"]]
    steps = train([*flags, "--activation-offload-dir", str(args.dir)], metrics)
    return statistics.median(
        ours / step["step_time_s"] for ours, step in zip(seconds[1:], steps, strict=True)
    )


def pack_unpack_us(args: argparse.Namespace, *, in_context: bool) -> list[float]:
    """Microseconds for each of many tensors, one after the other.

    Args:
        in_context: each of an operation of its own; else all are handed over together.
    """
    torch.set_num_threads(1)
    config = OffloadConfig(mode="ssd", directories=(args.dir,), min_bytes=4096)
    engine = OffloadEngine(config, args.device)
    hooks, costs = engine.hooks, []

    batch = engine.new_batch()

    def pack(tensor: torch.Tensor) -> Any:  # as at the end of a layer
        move = hooks.find_move(tensor, tensor.untyped_storage())
        assert move is not None
        return hooks.take(tensor, move, batch)

    def seconds(function: Callable[[Any], Any], argument: Any) -> tuple[float, Any]:
        began = time.perf_counter()
        result = function(argument)
        return time.perf_counter() - began, result

    leaf = torch.zeros((), requires_grad=True)

    def pack_in_context(tensors: list[torch.Tensor]) -> tuple[list[tuple[float, Any]], float]:
        packed, context = [], engine.saved_tensors_hooks()
        with context:
            for tensor in tensors:
                _ = leaf + 0  # the next operation; it saves nothing
                packed.append(seconds(context.pack_hook, tensor))
        return packed, 0.0

    def pack_together(tensors: list[torch.Tensor]) -> tuple[list[tuple[float, Any]], float]:
        packed = [seconds(pack, tensor) for tensor in tensors]
        share, _ = seconds(lambda _: batch.submit(), None)
        return packed, share

    for step in range(args.loops + 1):
        with engine.step():
            with engine.forward(Scope()) as save_order:
                tensors = [torch.zeros(1024, device=args.device) for _ in range(LOOP_LENGTH)]
                packed, share = (pack_in_context if in_context else pack_together)(tensors)
                del tensors
            move_and_read(engine, [view for _, view in packed])
            with engine.backward(save_order):
                engine.dispatcher.drain()
                while packed:
                    spent, view = packed.pop()
                    unpacking, tensor = seconds(hooks.unpack, view)
                    if step:
                        costs.append((spent + share / LOOP_LENGTH + unpacking) * 1e6)
                    del view, tensor
    engine.close()
    return costs


def move_and_read(engine: OffloadEngine, views: list[Any]) -> None:
    """Waits until all were written, reads them back and waits until they are ready."""
    while not all(view.saved.state is State.ON_TIER for view in views):
        time.sleep(0.001)
    for view in views:
        engine.reader.begin_read(view.saved, 0.0)
    while not all(view.built for view in views):
        time.sleep(0.001)


def pack_unpack_in_training_us(args: argparse.Namespace, metrics: Path) -> list[float]:
    """Microseconds for each saved tensor that moved, waits for the drive left out."""
    costs: dict[int, float] = {}
    finished: list[float] = []
    fresh: list[int] = []  # of the layer that is being captured
    found: list[float] = []  # seconds that finding the move of the next one took
    find_move, take, unpack = (
        SavedTensorHooks.find_move,
        SavedTensorHooks.take,
        SavedTensorHooks.unpack,
    )
    submit = Writer.submit

    def timed_find(self: SavedTensorHooks, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        move = find_move(self, *args, **kwargs)
        found[:] = [time.perf_counter() - began]
        return move

    def timed_take(self: SavedTensorHooks, *args: Any) -> Any:
        began = time.perf_counter()
        packed = take(self, *args)
        costs[id(packed)] = time.perf_counter() - began + found[0]
        fresh.append(id(packed))
        return packed

    def timed_submit(self: Writer, outgoing: Any) -> None:
        counted = self._step.statistics
        waited, began = counted.write_wait_s, time.perf_counter()
        submit(self, outgoing)
        spent = time.perf_counter() - began - (counted.write_wait_s - waited)
        for key in fresh:
            costs[key] += spent / len(fresh)
        fresh.clear()

    def timed_unpack(self: SavedTensorHooks, packed: Any) -> Any:
        counted = self._step.statistics
        waited, began = counted.stall_s, time.perf_counter()
        tensor = unpack(self, packed)
        spent = time.perf_counter() - began - (counted.stall_s - waited)
        if id(packed) in costs:
            finished.append((costs.pop(id(packed)) + spent) * 1e6)
        return tensor

    SavedTensorHooks.find_move = timed_find  # type: ignore[method-assign]
    SavedTensorHooks.take = timed_take  # type: ignore[method-assign]
    Writer.submit = timed_submit  # type: ignore[method-assign]
    SavedTensorHooks.unpack = timed_unpack  # type: ignore[method-assign]
    flags = ["--train-iters", str(args.train_iters), *PLACEMENT_FLAGS["ssd"]]
    train([*flags, "--activation-offload-dir", str(args.dir)], metrics)
    return finished


def growth(args: argparse.Namespace) -> dict[str, float]:
    """Resident memory and live objects that 1000 steps of a small model leave behind."""
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
    model.to(args.device)
    x = torch.randn(64, 256, device=args.device)
    config = OffloadConfig(mode="ssd", directories=(args.dir,), min_bytes=1)
    engine = OffloadEngine(config, args.device)
    process = psutil.Process()
    samples: list[tuple[int, int, int]] = []
    for step in tqdm(range(WARM_STEPS + args.steps + 1), unit="step", disable=None):
        engine.exclude(model.parameters())
        with engine.step():
            with engine.forward(Scope()) as save_order, engine.saved_tensors_hooks():
                loss = model(x).relu().square().mean()
            with engine.backward(save_order):
                loss.backward()
        del loss, save_order
        model.zero_grad()
        if step >= WARM_STEPS and (step - WARM_STEPS) % max(args.steps // 4, 1) == 0:
            gc.collect()
            samples.append((step, process.memory_info().rss, len(gc.get_objects())))
    engine.close()
    (first, rss, objects), (last, rss_end, objects_end) = samples[0], samples[-1]
    thousands = (last - first) / 1000
    return {
        "rss_growth_bytes_per_1000_steps": (rss_end - rss) / thousands,
        "object_growth_per_1000_steps": (objects_end - objects) / thousands,
    }


def paired_ratio(args: argparse.Namespace, folder: Path) -> float | None:
    """Step time with hooks over without, the median over interleaved pairs of whole runs."""
    ratios = []
    for pair in range(args.pairs):
        seconds = {}
        for placement in ("off", "keep") if pair % 2 else ("keep", "off"):
            metrics = folder / f"{pair}-{placement}.jsonl"
            command = [
                *(sys.executable, str(ROOT / "examples/pretrain_gpt.py"), *MODEL),
                *("--train-iters", str(args.train_iters), *PLACEMENT_FLAGS[placement]),
                *("--activation-offload-dir", str(args.dir), "--metrics-file", str(metrics)),
            ]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            steps = [json.loads(line) for line in metrics.read_text().splitlines()][1:]
            seconds[placement] = statistics.median(step["step_time_s"] for step in steps)
        ratios.append(seconds["keep"] / seconds["off"])
    return statistics.median(ratios) if ratios else None


def in_a_process_of_its_own(part: str, args: argparse.Namespace) -> Any:
    """Each part trains from a fresh start: wrapped functions and allocators are not shared."""
    command = [sys.executable, __file__, "--part", part, "--dir", str(args.dir)]
    command += ["--train-iters", str(args.train_iters), "--steps", str(args.steps)]
    command += ["--loops", str(args.loops), "--device", args.device]
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        done = subprocess.run([*command, "--json", result.name], check=False, capture_output=True)
        if done.returncode:
            sys.stderr.write(done.stderr.decode(errors="replace")[-2000:])
            raise SystemExit(2)
        return json.loads(Path(result.name).read_text())


def measure_part(args: argparse.Namespace) -> Any:
    """What a process of its own measures."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        if args.part == "keep":
            return keep_overhead(args, metrics)
        if args.part in ("pack", "context"):
            return pack_unpack_us(args, in_context=args.part == "context")
        if args.part == "training":
            return pack_unpack_in_training_us(args, metrics)
        return growth(args)


def main() -> int:
    """Runs the parts and prints the table; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train-iters", type=int, default=6, help="of the benchmark GPT")
    parser.add_argument("--steps", type=int, default=1000, help="of the small model")
    parser.add_argument("--loops", type=int, default=50, help=f"of {LOOP_LENGTH} tensors in a row")
    parser.add_argument("--pairs", type=int, default=0, help="whole runs with and without hooks")
    has_cuda = torch.cuda.is_available()
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if has_cuda else "cpu",
        help="default: cuda where there is one",
    )
    parser.add_argument("--dir", type=Path, default=ROOT / "runs/offload", help="on an SSD")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument(
        "--part", choices=("keep", "pack", "context", "training", "growth"), help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    if args.device == "cuda" and not has_cuda:
        parser.error("--device cuda: torch sees no CUDA device")
    if args.device == "cpu" and has_cuda:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the trainer takes a GPU where there is one
    args.dir.mkdir(parents=True, exist_ok=True)
    if args.part:
        args.json.write_text(json.dumps(measure_part(args)))
        return 0
    costs, in_context, in_training = (
        in_a_process_of_its_own(part, args) for part in ("pack", "context", "training")
    )
    result = {
        "command": shlex.join(["tools/bench/hooks.py", *sys.argv[1:]]),
        "machine": machine_facts(args.dir),
        "keep_overhead_fraction": in_a_process_of_its_own("keep", args),
        "pack_unpack_us_median": statistics.median(costs),
        "pack_unpack_us_90th_percentile": statistics.quantiles(costs, n=10)[-1],
        "num_saved_tensors_timed": len(costs),
        "context_pack_unpack_us_median": statistics.median(in_context),
        "pack_unpack_us_median_in_training": statistics.median(in_training),
        "num_saved_tensors_timed_in_training": len(in_training),
        **in_a_process_of_its_own("growth", args),
    }
    with tempfile.TemporaryDirectory() as folder:
        result["paired_step_time_ratio"] = paired_ratio(args, Path(folder))
    grown, objects = (
        result["rss_growth_bytes_per_1000_steps"],
        result["object_growth_per_1000_steps"],
    )
    rows = [
        (
            "hooks, nothing moves",
            f"{result['keep_overhead_fraction']:.3%} of a step",
            "0.5 %",
            result["keep_overhead_fraction"] < MOST_OVERHEAD,
        ),
        (
            "pack + unpack of a saved tensor, in a row",
            f"{result['pack_unpack_us_median']:.1f} us (median of {len(costs)})",
            "20 us",
            result["pack_unpack_us_median"] <= MOST_PACK_UNPACK_US,
        ),
        (
            "the same in a context",
            f"{result['context_pack_unpack_us_median']:.1f} us (median of {len(in_context)})",
            "20 us",
            result["context_pack_unpack_us_median"] <= MOST_PACK_UNPACK_US,
        ),
        (
            "resident memory after 1000 steps",
            ("-" if grown < 0 else "+") + format_size(abs(grown)),
            format_size(MOST_GROWTH_BYTES),
            grown <= MOST_GROWTH_BYTES,
        ),
        (
            "live Python objects after 1000 steps",
            f"{objects:+.0f}",
            str(MOST_NEW_OBJECTS),
            objects <= MOST_NEW_OBJECTS,
        ),
    ]
    trained_us = result["pack_unpack_us_median_in_training"]
    rows.insert(
        3,
        (
            "the same between the operations of a training",
            f"{trained_us:.1f} us (median of {len(in_training)})",
            "20 us",
            trained_us <= MOST_PACK_UNPACK_US,
        ),
    )
    shown = [(*row[:3], "yes" if row[3] else "NO") for row in rows]
    print(
        tabulate(
            shown,
            headers=("", "measured", "at most", "kept"),
        )
    )
    if result["paired_step_time_ratio"] is not None:
        print(f"whole runs with hooks over without: {result['paired_step_time_ratio']:.4f}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1).replace(f"{ROOT}/", "") + "\n")
    return 0 if all(row[3] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
