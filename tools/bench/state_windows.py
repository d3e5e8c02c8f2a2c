#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long an optimizer's step takes with its states on the SSD, by bucket and window.

    tools/bench/state_windows.py --json state-windows.json            # two minutes
    tools/bench/state_windows.py --buckets 8MiB,64MiB --windows 25%,50% --rounds 9

AdamW's fused kernel alone: the parameters of a GPT (hidden size x layers) with constant gradients,
nothing else computes. One optimizer for each bucket and window, and one with its states in memory;
in each round each of them takes a step, and nothing is under way when it begins. Windows are
fractions of all states, or sizes. `more`: what a step takes beyond one in memory in its round,
median. `tokens`: a step of so many tokens takes 20 times that, at --tokens-per-s: from there on it
costs at most 5 %.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import shlex
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from tqdm import tqdm

from megatron.offload.commands.training_runs.machine import in_a_line, machine_facts
from megatron.offload.commands.training_runs.run import order_of_round
from megatron.offload.integration.torch.optimizer import offload_optimizer
from megatron.offload.sizes import format_size, parse_size

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 8192
MOST_SHARE = 0.05  # of a step, that may be spent on moving states


def make_params(hidden: int, layers: int) -> list[torch.Tensor]:
    """Of a GPT, with gradients."""
    matrices = [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]
    vectors = [3 * hidden, hidden, 4 * hidden, *[hidden] * 5]
    params = [torch.randn(VOCABULARY, hidden)]
    for _ in range(layers):
        params += [torch.randn(shape) for shape in matrices]
        params += [torch.randn(size) for size in vectors]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The figures of all buckets and windows; the first ones are those of memory."""
    hidden, layers = map(int, args.shape.split("x"))
    params = make_params(hidden, layers)
    num_bytes = 2 * sum(param.nbytes for param in params)
    kinds: list[tuple[int, int] | None] = [
        None,
        *itertools.product(args.buckets, [_bytes_of(one, num_bytes) for one in args.windows]),
    ]
    optimizers = {kind: torch.optim.AdamW(params, lr=1e-4, fused=True) for kind in kinds}
    handles = {
        kind: offload_optimizer(
            optimizers[kind], args.directory, bucket_bytes=kind[0], window_bytes=kind[1]
        )
        for kind in kinds
        if kind is not None
    }
    times: dict[tuple[int, int] | None, list[float]] = {kind: [] for kind in kinds}
    moved: dict[tuple[int, int] | None, int] = {}
    for round_ in tqdm(range(args.warm + args.rounds), unit="round", disable=None):
        for kind in order_of_round(kinds, round_):
            states = handles[kind].states if kind is not None else None
            before = _written(states)
            gc.collect()
            began_s = time.perf_counter()
            optimizers[kind].step()
            seconds = time.perf_counter() - began_s
            if states is not None:
                states.wait_for_writes()
            moved[kind] = _written(states) - before
            if round_ >= args.warm:
                times[kind].append(seconds)
    found = []
    for kind in kinds:
        more = [a - b for a, b in zip(times[kind], times[None], strict=True)]
        found.append(
            {
                "bucket_bytes": kind[0] if kind is not None else None,
                "window_bytes": kind[1] if kind is not None else None,
                "states_bytes": num_bytes,
                "step_s": median(times[kind]),
                "more_s": median(more),
                "written_bytes": moved[kind],
                "tokens": median(more) / MOST_SHARE * args.tokens_per_s,
            }
        )
    for handle in handles.values():
        for tier in handle.states.tiers if handle.states else []:
            tier.close()
    return found


def _written(states: Any) -> int:
    return sum(tier.statistics.writes.total_bytes for tier in states.tiers) if states else 0


def _bytes_of(text: str, num_bytes: int) -> int:
    if text.endswith("%"):
        return int(num_bytes * float(text[:-1]) / 100)
    return parse_size(text)


def table(found: list[dict[str, Any]]) -> str:
    """A row for each bucket and window."""
    rows = []
    for one in found:
        where = ("memory", "", "")
        if one["bucket_bytes"] is not None:
            share = f"{one['window_bytes'] / one['states_bytes']:.0%}"
            where = (format_size(one["bucket_bytes"]), format_size(one["window_bytes"]), share)
        rows.append(
            (
                *where,
                f"{one['step_s']:.3f}",
                f"{one['more_s']:.3f}",
                format_size(one["written_bytes"]),
                f"{one['tokens']:,.0f}" if one["bucket_bytes"] is not None else "",
            )
        )
    header = ("bucket", "window", "of states", "step s", "more s", "written/step", "tokens")
    return tabulate(rows, headers=header, disable_numparse=True)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "default: %(default)s"
    parser.add_argument("--shape", default="1024x8", help=f"hidden x layers; {default}")
    parser.add_argument("--buckets", default="8MiB,32MiB,64MiB", help=default)
    parser.add_argument("--windows", default="64MiB,128MiB,256MiB,512MiB", help=default)
    parser.add_argument("--tokens-per-s", type=float, default=230.0, help=default)
    parser.add_argument("--warm", type=int, default=2, help=f"rounds that do not count; {default}")
    parser.add_argument("--rounds", type=int, default=5, help=default)
    parser.add_argument("--directory", type=Path, default=ROOT / "runs/offload", help=default)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args()
    args.buckets = [parse_size(one) for one in args.buckets.split(",")]
    args.windows = args.windows.split(",")
    args.directory.mkdir(parents=True, exist_ok=True)
    machine = machine_facts(args.directory)
    print(in_a_line(machine))
    found = measure(args)
    print(table(found))
    if args.json is not None:
        command = shlex.join(["tools/bench/state_windows.py", *sys.argv[1:]])
        result = {"machine": machine, "command": command.replace(f"{ROOT}/", ""), "figures": found}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
