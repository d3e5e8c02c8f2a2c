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
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from tabulate import tabulate
from tqdm import tqdm

from megatron.offload import offload_activations
from megatron.offload.activations.capture.context import SavingContext
from megatron.offload.activations.capture.hooks import SavedTensorHooks
from megatron.offload.activations.capture.layer import LayerCapture
from megatron.offload.activations.engine import OffloadEngine
from megatron.offload.activations.saved.scope import layer_of
from megatron.offload.activations.saved.view import SavedView
from megatron.offload.activations.stats.traffic import Traffic
from megatron.offload.activations.transfer.reader import Reader
from megatron.offload.activations.transfer.writer import Outgoing, Writer
from megatron.offload.commands.training_runs.machine import in_a_line, machine_facts
from megatron.offload.commands.training_runs.trainer import PLACEMENT_FLAGS
from megatron.offload.device.cpu import CpuDevice
from megatron.offload.integration.torch.layer_calls import LayerCalls
from megatron.offload.stats.statistics import StepStatistics
from megatron.offload.tiers.budget import ByteBudget
from megatron.offload.tiers.file import UnlinkedFile

ROOT = Path(__file__).resolve().parents[2]
MOST_US = 25.0  # a storage
PARTS = ("layers", "walk", "pack", "submit", "unpack", "read_ahead")
BOTH_WAYS = PARTS[2:]  # pack and unpack together
WAYS = ("door", "megatron")
WARM_STEPS = 5
CLOCKS = (time.perf_counter_ns, time.thread_time_ns)  # on the wall, on the processor
_LEFT_OUT = ""  # a part that does not count
_MIN_BYTES = 4096
_OURS = "activation-offload"  # our threads' names begin so
MOVING = "moving bytes"
_moving_s: collections.Counter[str] = collections.Counter()  # processor seconds, of I/O threads

Function = Callable[..., Any]


class Layer:
    """What one layer took in one step.

    Attributes:
        spent_ns: by part.
        num_storages: that it saved and that were handed over to be written.
        num_tensors: that hooks handed back.
    """

    def __init__(self) -> None:
        self.spent_ns: collections.defaultdict[str, float] = collections.defaultdict(float)
        self.num_storages = self.num_tensors = 0


class Clock(NamedTuple):
    """A clock, and what it costs to use it.

    Attributes:
        now_ns: nanoseconds.
        inside_ns: of a timed function's time, what the instrument adds.
        outside_ns: of the time of a timed function that calls another one, what that call adds.
    """

    now_ns: Callable[[], int]
    inside_ns: float = 0.0
    outside_ns: float = 0.0


class Account:
    """Nanoseconds by layer and part; time within a nested part is that one's alone.

    One thread at a time is in parts: the one that launches, in backward autograd's.

    Args:
        clocks: that take turns.
    """

    def __init__(self, *clocks: Clock) -> None:
        self.layers: dict[str, Layer] = collections.defaultdict(Layer)
        self._clocks = collections.deque(clocks)
        self._parts: list[tuple[Layer, str]] = []  # that it is in
        self._since_ns = 0

    @property
    def is_wall(self) -> bool:
        """Whether time goes by the clock on the wall, or is what the processor spends."""
        return self._clocks[0].now_ns is time.perf_counter_ns

    def take(self) -> dict[str, Layer]:
        """The layers since the last call. From now on it is the other clock's turn."""
        taken, self.layers = self.layers, collections.defaultdict(Layer)
        self._clocks.rotate()
        return taken

    def timed(self, part: str, function: Function, layer_of: Callable[..., str]) -> Function:
        """A function that does the same and is timed.

        Args:
            part: that it belongs to.
            function: of our code.
            layer_of: which layer its time is of, from its arguments. What this does is not timed.
        """
        parts = self._parts

        def timed(*args: Any, **kwargs: Any) -> Any:
            clock, inside_ns, outside_ns = self._clocks[0]
            now = clock()
            if parts:
                outer, outer_part = parts[-1]
                outer.spent_ns[outer_part] += now - self._since_ns - outside_ns
            layer = self.layers[layer_of(*args)]
            parts.append((layer, part))
            self._since_ns = clock()
            try:
                return function(*args, **kwargs)
            finally:
                layer.spent_ns[part] += clock() - self._since_ns - inside_ns
                parts.pop()
                self._since_ns = clock()

        return timed

    def of_outgoing(self, _: Writer, outgoing: list[Outgoing]) -> str:
        """The layer of storages that are handed over; each counts for the one that saved it."""
        name = ""
        for one in outgoing:
            record = one.record()
            if record is not None:
                name = record.scope.layer
                self.layers[name].num_storages += 1
        return name

    def of_packed(self, _: SavedTensorHooks, packed: Any) -> str:
        """The layer that a tensor was saved in, which counts."""
        scope = packed.saved.scope if isinstance(packed, SavedView) else packed._scope
        self.layers[scope.layer].num_tensors += 1
        return str(scope.layer)


def calibrated(now_ns: Callable[[], int]) -> Clock:
    """A clock with what it costs, from the fastest of some batches: in a training it costs more."""

    def nothing(*_: object) -> None:
        pass

    def once(_: object, times: int = 500) -> tuple[float, float, float]:
        account = Account(Clock(now_ns))
        inner = account.timed("inner", nothing, lambda *_: "")

        def calls(function: Function) -> None:
            for _ in range(times):
                function(None)

        account.timed("plain", lambda: calls(nothing), lambda *_: "")()
        account.timed("outer", lambda: calls(inner), lambda *_: "")()
        spent_ns = account.layers[""].spent_ns
        return tuple(spent_ns[name] / times for name in ("plain", "inner", "outer"))

    # A plain call's time is that of the call, which is no cost of the clock, and of the loop.
    batches = [once(number) for number in range(40)]
    plain_ns, inner_ns, outer_ns = (min(of_all) for of_all in zip(*batches, strict=True))
    return Clock(now_ns, max(inner_ns - plain_ns, 0.0), max(outer_ns - plain_ns, 0.0))


def watch(account: Account, stack: contextlib.ExitStack) -> None:
    """Has our code's entry points timed until the stack is closed."""

    def replace(owner: Any, name: str, part: str, layer_of: Callable[..., str]) -> None:
        timed = account.timed(part, getattr(owner, name), layer_of)
        stack.enter_context(mock.patch.object(owner, name, timed))

    replace(OffloadEngine, "capture", "pack", lambda _, scope, *__: scope.layer)
    replace(LayerCapture, "_find", "walk", lambda _, scope, *__: scope.layer)
    for name in ("_pack", "__exit__"):
        replace(SavingContext, name, "pack", lambda one, *_: one._hooks._step.scope.layer)
    replace(Writer, "submit", "submit", account.of_outgoing)
    replace(SavedTensorHooks, "unpack", "unpack", account.of_packed)
    replace(Reader, "end_use", "read_ahead", lambda _, view: view.saved.scope.layer)
    replace(Reader, "_stall", _LEFT_OUT, lambda _, record: record.scope.layer)
    replace(ByteBudget, "acquire", _LEFT_OUT, lambda *_: "")
    for name in ("begin", "end"):
        replace(LayerCalls, name, "layers", lambda one, layer, *_: one._names[layer])


def watch_megatron(account: Account, stack: contextlib.ExitStack) -> None:
    """The same for what the integration with Megatron does around layers."""
    from megatron.offload.integration.megatron import layer_hooks, layer_split

    running = [""]  # the layer

    def name_of_running(*_: Any) -> str:
        return running[0]

    own_layer = account.timed("layers", layer_hooks.LayerHooks.layer, name_of_running)

    def layer(hooks: Any, forward: Function, module: Any, args: Any, kwargs: Any) -> Any:
        outer, running[0] = running[0], hooks._names.get(module, "")
        try:
            not_ours = account.timed(_LEFT_OUT, forward, name_of_running)
            return own_layer(hooks, not_ours, module, args, kwargs)
        finally:
            running[0] = outer

    hook = account.timed("layers", layer_split.LayerDivision._hook, name_of_running)
    stack.enter_context(mock.patch.object(layer_hooks.LayerHooks, "layer", layer))
    stack.enter_context(mock.patch.object(layer_split.LayerDivision, "_hook", hook))


class Block(torch.nn.Module):
    """A transformer layer, pre-norm."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = (torch.nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.proj = torch.nn.Linear(hidden, 3 * hidden), torch.nn.Linear(hidden, hidden)
        self.wide, self.narrow = (
            torch.nn.Linear(hidden, 4 * hidden),
            torch.nn.Linear(4 * hidden, hidden),
        )
        self.hidden = hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape [batch, sequence, hidden], as is the result."""
        heads = [
            one.unflatten(-1, (-1, 16)).transpose(1, 2)
            for one in self.qkv(self.before_attention(x)).split(self.hidden, dim=-1)
        ]
        context = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.proj(context.transpose(1, 2).flatten(2))
        return x + self.narrow(torch.nn.functional.gelu(self.wide(self.before_mlp(x))))


class Model(torch.nn.Module):
    """Layers one after the other."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block(args.hidden_size) for _ in range(args.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape [batch, sequence, hidden], as is the result."""
        for layer in self.layers:
            x = layer(x)
        return x

    @staticmethod
    def inputs(args: argparse.Namespace) -> torch.Tensor:
        """Of shape [batch, sequence, hidden]."""
        return torch.randn(args.batch, args.sequence, args.hidden_size)


class Llama(torch.nn.Module):
    """transformers' Llama in bf16, without its head and with its defaults."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaModel

        config = LlamaConfig(
            vocab_size=512,
            hidden_size=args.hidden_size,
            intermediate_size=7 * args.hidden_size // 2,
            num_hidden_layers=args.layers,
            num_attention_heads=args.hidden_size // 16,
            num_key_value_heads=args.hidden_size // 64,
            max_position_embeddings=args.sequence,
        )
        self.model = LlamaModel(config).to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Token numbers of shape [batch, sequence]; hidden states of one dimension more."""
        return self.model(input_ids=x).last_hidden_state

    @staticmethod
    def inputs(args: argparse.Namespace) -> torch.Tensor:
        """Of shape [batch, sequence]."""
        return torch.randint(512, (args.batch, args.sequence))


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


def others_seconds() -> collections.Counter[str]:
    """Processor seconds of our threads so far: of that which starts transfers, and of I/O."""
    spent: collections.Counter[str] = collections.Counter()
    for thread in threading.enumerate():
        if thread.name.startswith(_OURS) and thread.ident is not None:
            name = "starts transfers" if thread.name == f"{_OURS} transfers" else "I/O"
            spent[name] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    spent["I/O"] -= _moving_s[MOVING]
    return spent + _moving_s


def watch_moving(stack: contextlib.ExitStack) -> None:
    """Has the calls timed in which I/O threads move bytes, without the interpreter."""

    def replace(owner: Any, name: str) -> None:
        move = getattr(owner, name)

        def moving(*args: Any) -> Any:
            began_s = time.thread_time()
            try:
                return move(*args)
            finally:
                _moving_s[MOVING] += time.thread_time() - began_s

        stack.enter_context(mock.patch.object(owner, name, moving))

    for name in ("write", "read"):
        replace(UnlinkedFile, name)
    for name in ("copy_to_host", "copy_from_host"):
        replace(CpuDevice, name)


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
            offload_activations(moved, args.dir, mode=args.mode, min_bytes=_MIN_BYTES)
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
    env = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
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
