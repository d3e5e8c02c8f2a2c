#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Layer-major steps beside micro-batch by micro-batch, with parameters on an SSD that is too slow.

    tools/bench/layer_major.py --json layer-major.json --plot layer-major.png     # about 10 minutes
    tools/bench/layer_major.py --gradients on       # those of layer-major wait on the SSD as well

A GPT (GPT-2 of transformers, output layer not tied, dropout on), fp32, whose layers are recomputed
in backward and whose parameters are on the SSD: those of two layers at a time are in memory. Reads
and writes take as long as on a drive of `--rate`, so that parameters cannot hide behind one
micro-batch. Each way trains in a process of its own, in turns; the first step, in which random
numbers are counted, does not count. Plain SGD, whose step moves the parameters as well, is no part
of a step's time, nor of the bytes.

`identical`: losses and final weights have the same bits in both ways. `speedup`: time of the one
over that of the other, medians. `parameter_bytes_read`: of a step, over the bytes of parameters.
Peaks are of the resident set, over what it was before there was a model. With `--gradients on`
those of the unit that runs backward last are still written when a step's time ends.

Exit code: 0 as promised (same bits, 1.5 times as fast at 8 micro-batches), 1 not.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron.offload.commands.drawing import BLACK, GREEN, figure  # noqa: E402
from megatron.offload.commands.training_runs.machine import (  # noqa: E402
    in_a_line,
    machine_facts,
)
from megatron.offload.sizes import format_size, parse_rate  # noqa: E402

WAYS = {"alone": "one after the other", "together": "layer-major"}
MOST_MICRO_BATCHES, LEAST_SPEEDUP = 8, 1.5
VOCABULARY = 4096


# -- One training ---------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Trains in one way with so many micro-batches; what was measured."""
    import transformers  # takes seconds

    from megatron.offload import LayerMajor, offload_activations, offload_parameters
    from megatron.offload.device.open import open_device
    from megatron.offload.machine import vector_math
    from tools.check.train_on_slow_disk import SlowDisk

    vector_math.first_call()
    device = open_device(torch.device("cpu"))
    peak = device.peak_reader()
    gc.collect()
    base_bytes = device.allocated_bytes()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=args.layers,
        n_embd=args.hidden,
        n_head=args.hidden // 64,
        n_positions=args.tokens,
        vocab_size=VOCABULARY,
        use_cache=False,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.GPT2LMHeadModel(config).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    activations = offload_activations(model, mode="host", recompute_layers="all")
    parameters = offload_parameters(
        model, args.directory, gradients=args.gradients if args.measure == "together" else "off"
    )
    assert parameters.window is not None
    for unit in parameters.window.units:
        unit.wait_for_write()
    together = LayerMajor(model, offload=activations) if args.measure == "together" else None
    slow = SlowDisk()
    steps: list[dict[str, Any]] = []
    losses: list[float] = []
    for number in range(args.steps + 1):
        draw = torch.Generator().manual_seed(number)
        shape = (args.micro_batches, args.batch, args.tokens)
        batches = torch.randint(VOCABULARY, shape, generator=draw).unbind()

        def loss_of(batch: torch.Tensor) -> Any:
            return model(input_ids=batch, labels=batch).loss / args.micro_batches

        slow.slow_down(args.rate)
        read_before = parameters.statistics["read_bytes"]
        device.return_freed_memory()
        peak.reset()
        began_s = time.perf_counter()
        if together is not None:
            losses += [loss.item() for loss in together.step(batches, loss_of)]
        else:
            for batch in batches:
                loss = loss_of(batch)
                loss.backward()
                losses.append(loss.item())
        steps.append(
            {
                "step_s": time.perf_counter() - began_s,
                "read_bytes": parameters.statistics["read_bytes"] - read_before,
                "peak_bytes": peak.peak_bytes() - base_bytes,
            }
        )
        slow.slow_down(1e12)
        optimizer.step()
        optimizer.zero_grad()
    parameter_bytes = parameters.statistics["parameter_bytes"]
    parameters.close()
    activations.close()
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.detach().numpy())
    return {
        "step_s": median(one["step_s"] for one in steps[1:]),
        "read_bytes": median(one["read_bytes"] for one in steps[1:]),
        "peak_bytes": max(one["peak_bytes"] for one in steps[1:]),
        "parameter_bytes": parameter_bytes,
        "losses": losses,
        "weights": digest.hexdigest(),
    }


# -- All of them ----------------------------------------------------------------------------------


def run(args: argparse.Namespace, way: str, micro_batches: int) -> dict[str, Any]:
    """One training in a process of its own.

    Raises:
        RuntimeError: it failed.
    """
    command = [sys.executable, str(Path(__file__)), "--measure", way]
    command += ["--micro-batches", str(micro_batches)]
    for name in ("layers", "hidden", "tokens", "batch", "steps", "directory", "gradients"):
        command += [f"--{name}", str(getattr(args, name))]
    command += ["--rate", f"{args.rate:.0f}B/s"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr[-3000:]}")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def summary_of(found: dict[int, dict[str, list[dict[str, Any]]]]) -> dict[str, Any]:
    """The figures of all numbers of micro-batches."""
    rows: dict[str, Any] = {}
    for number, ways in found.items():
        outcomes = {json.dumps([o["losses"], o["weights"]]) for w in ways.values() for o in w}
        row: dict[str, Any] = {"identical": len(outcomes) == 1}
        for way, runs in ways.items():
            row[f"{way}_step_s"] = median(one["step_s"] for one in runs)
            row[f"{way}_peak_bytes"] = max(one["peak_bytes"] for one in runs)
            row[f"{way}_read"] = median(o["read_bytes"] / o["parameter_bytes"] for o in runs)
        row["speedup"] = row["alone_step_s"] / row["together_step_s"]
        rows[str(number)] = row
    most = rows[str(max(found))]
    return {
        "identical": all(row["identical"] for row in rows.values()),
        f"speedup_at_{max(found)}_sub_batches": most["speedup"],
        "parameter_bytes_read": {way: most[f"{way}_read"] for way in WAYS},
        "by_micro_batches": rows,
    }


def table(summary: dict[str, Any]) -> str:
    """A row for each number of micro-batches."""
    rows = []
    for number, row in summary["by_micro_batches"].items():
        rows.append(
            (
                number,
                "identical" if row["identical"] else "DIFFERENT",
                *(f"{row[f'{way}_step_s']:.2f}" for way in WAYS),
                f"{row['speedup']:.2f}",
                *(f"{row[f'{way}_read']:.2f}" for way in WAYS),
                *(format_size(row[f"{way}_peak_bytes"]) for way in WAYS),
            )
        )
    columns = ["micro-batches", "bits", *(f"step s, {name}" for name in WAYS.values()), "speedup"]
    columns += [f"parameters read, {name}" for name in WAYS.values()]
    columns += [f"peak, {name}" for name in WAYS.values()]
    return tabulate(rows, headers=columns, disable_numparse=True)


def title_of(args: argparse.Namespace) -> str:
    """The model and where its parameters are, for the picture."""
    model = f"GPT, {args.layers} layers, hidden size {args.hidden}"
    return f"{model}; parameters on a drive held at {args.rate / 1e6:.0f} MB/s"


def draw(summary: dict[str, Any], tokens: int, path: Path, title: str) -> None:
    """Tokens a second over tokens a step."""
    looks = dict(zip(WAYS, ((BLACK, "s"), (GREEN, "o")), strict=True))
    with figure(path, figsize=(7, 4), layout="constrained") as (_, axes):
        for way, name in WAYS.items():
            points = [
                (int(number) * tokens, int(number) * tokens / row[f"{way}_step_s"])
                for number, row in summary["by_micro_batches"].items()
            ]
            color, marker = looks[way]
            axes.plot(*zip(*points, strict=True), marker=marker, color=color, label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks([place for place, _ in points], [f"{place:,}" for place, _ in points])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens a step")
        axes.set_ylabel("tokens a second")
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend()


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "default: %(default)s"
    parser.add_argument("--layers", type=int, default=16, help=default)
    parser.add_argument("--hidden", type=int, default=512, help=default)
    parser.add_argument("--tokens", type=int, default=128, help=f"of a sequence; {default}")
    parser.add_argument("--batch", type=int, default=1, help=f"sequences each; {default}")
    parser.add_argument("--rate", type=parse_rate, default=150e6, help="of the drive")
    parser.add_argument("--counts", default="1,2,4,8", help=f"of micro-batches; {default}")
    parser.add_argument("--steps", type=int, default=3, help=f"that count; {default}")
    parser.add_argument("--rounds", type=int, default=2, help=default)
    parser.add_argument("--gradients", choices=("off", "on"), default="off", help="wait there too")
    parser.add_argument("--directory", type=Path, default=ROOT / "runs/offload", help=default)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--plot", type=Path, help="a picture: PNG or SVG")
    parser.add_argument("--measure", choices=tuple(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--micro-batches", type=int, help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Runs the comparison; the exit code."""
    args = make_parser().parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    if args.measure is not None:
        print(json.dumps(train(args)))
        return 0
    facts = machine_facts(args.directory)
    print(in_a_line(facts))
    counts = [int(one) for one in args.counts.split(",")]
    found: dict[int, dict[str, list[dict[str, Any]]]] = {n: {w: [] for w in WAYS} for n in counts}
    order = [(n, way) for _ in range(args.rounds) for n in counts for way in WAYS]
    for number, way in (bar := tqdm(order, unit="run", disable=None)):
        bar.set_description(f"{number} micro-batches, {WAYS[way]}")
        found[number][way].append(run(args, way, number))
    summary = summary_of(found)
    print(table(summary))
    if args.json is not None:
        command = shlex.join(["tools/bench/layer_major.py", *sys.argv[1:]]).replace(f"{ROOT}/", "")
        result = {"machine": facts, "command": command, "summary": summary}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot is not None:
        draw(summary, args.batch * args.tokens, args.plot, title_of(args))
    print("\n" + json.dumps({k: v for k, v in summary.items() if k != "by_micro_batches"}))
    fast = max(counts) < MOST_MICRO_BATCHES or (
        summary[f"speedup_at_{max(counts)}_sub_batches"] >= LEAST_SPEEDUP
    )
    return 0 if summary["identical"] and fast else 1


if __name__ == "__main__":
    sys.exit(main())
