#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A long sequence, step by step: what each means against memory buys, in peak and in time.

    tools/bench/long.py --json long.json                     # 8192 tokens; about 6 minutes
    tools/bench/long.py --tokens 16384 --ways checkpointing,tiled

A Llama of 8 layers of 512, vocabulary 32000, bf16, one sequence, AdamW. Each way is a process of
its own, and they take turns. Memory is the growth of the resident set over the state before a
step's forward pass, and what is freed goes back to the system at once; time is that of a step,
medians.

none            everything stays in memory
checkpointing   model.gradient_checkpointing_enable(), transformers' own
inputs          each layer recomputed, its input on the SSD
chunked         the same, and the loss over chunks of tokens
tiled           the same, and the MLPs over tiles of tokens
deepspeed       checkpointing, with DeepSpeed's TiledMLP in as many tiles as its documentation says
                and its TiledFusedLogitsLoss in as many chunks as ours; on a CPU checkpoints are on
                the host anyway. Only if it is asked for

Exit code: 0 if each step against memory takes no more than the one before it, 1 if not, 2 if it
could not be measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

from megatron.offload.commands.training_runs.machine import in_a_line, machine_facts
from megatron.offload.machine.allocator import allocator_environment
from megatron.offload.sizes import MIB

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_WAYS = ("none", "checkpointing", "inputs", "chunked", "tiled")
WAYS = (*DEFAULT_WAYS, "deepspeed")
_INPUTS = {"recompute_layers": "all", "recompute_input": "ssd", "mode": "ssd"}
_SETTINGS: dict[str, dict[str, Any]] = {
    "inputs": _INPUTS,
    "chunked": _INPUTS | {"chunked_loss": "auto"},
    "tiled": _INPUTS | {"chunked_loss": "auto", "tiled_mlp": "auto"},
}


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192, help="default: %(default)s")
    parser.add_argument("--ways", default=",".join(DEFAULT_WAYS), help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=3, help="the first counts for nothing; 3")
    parser.add_argument("--layers", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--hidden", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--vocabulary", type=int, default=32000, help="default: %(default)s")
    parser.add_argument("--directory", type=Path, help="on the SSD; default: a temporary one")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--train", metavar="WAY", help=argparse.SUPPRESS)
    return parser


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Some steps in one way: seconds and peaks. Runs in a process of its own."""
    import torch

    from bench.train_model import make_model
    from megatron.offload import offload_activations
    from megatron.offload.device.open import open_device
    from megatron.offload.stats.memory import PeakMemory

    args.model, args.dtype, args.sequence = "llama", "bfloat16", args.tokens
    model = make_model(args).train()
    model.config.max_position_embeddings = args.tokens
    if args.train in ("checkpointing", "deepspeed"):
        model.gradient_checkpointing_enable()
    if args.train == "deepspeed":
        _tile_with_deepspeed(model, args)
    handle = None
    if args.train in _SETTINGS:
        handle = offload_activations(model, args.directory, **_SETTINGS[args.train])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, args.vocabulary, (1, args.tokens))
    peak = PeakMemory(open_device(torch.device("cpu")))
    found: dict[str, Any] = {"step_s": [], "peak_bytes": [], "losses": []}
    for _ in range(args.steps):
        began_s = time.perf_counter()
        peak.begin_step()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        found["peak_bytes"].append(peak.end_step())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        found["step_s"].append(time.perf_counter() - began_s)
        found["losses"].append(float(loss))
        found["device_bytes"] = max(found.get("device_bytes", 0), peak.device_bytes())
    if handle is not None:
        handle.close()
    return found


def _tile_with_deepspeed(model: Any, args: argparse.Namespace) -> None:
    """As its documentation shows, by replacing the forward passes of MLPs and of the model."""
    import types

    import torch
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP
    from transformers.modeling_outputs import CausalLMOutput

    from megatron.offload.ops.chunked_logits import chunk_tokens_for

    def mlp_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    def tiled_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        weights = [self.down_proj.weight, self.gate_proj.weight, self.up_proj.weight]
        return TiledMLP.apply(mlp_forward, self, x, -(-x.shape[-2] // args.hidden), weights)

    def loss_of(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head(x).float()
        return torch.nn.functional.cross_entropy(logits, y, reduction="sum")

    def with_loss(self: Any, input_ids: torch.Tensor, labels: torch.Tensor) -> CausalLMOutput:
        x = self.model(input_ids=input_ids).last_hidden_state
        y = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        of_chunk = chunk_tokens_for(y.numel(), args.hidden, args.vocabulary, "cpu")
        chunks, weights = -(-y.numel() // of_chunk), [self.lm_head.weight]
        total = TiledFusedLogitsLoss.apply(loss_of, self, x, y, None, chunks, weights, "sum")
        return CausalLMOutput(loss=total / (y.numel() - 1))

    for layer in model.model.layers:
        layer.mlp.forward = types.MethodType(tiled_forward, layer.mlp)
    model.forward = types.MethodType(with_loss, model)


def measure(args: argparse.Namespace, argv: list[str], way: str, directory: Path) -> dict[str, Any]:
    """The same from outside.

    Raises:
        RuntimeError: the process ended with an error; has its last line.
    """
    command = [sys.executable, __file__, *argv, "--train", way, "--directory", str(directory)]
    here = {"PYTHONPATH": os.pathsep.join((str(ROOT / "tools"), str(ROOT)))}
    environment = {**os.environ, **allocator_environment(keeps_for_reuse=False), **here}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{way}: {(ended.stderr.strip() or 'no word').splitlines()[-1]}")
    return json.loads(ended.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> int:
    """Measures, prints and writes; the exit code."""
    argv = sys.argv[1:]
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.train:
        print(json.dumps(train(args)))
        return 0
    ways = args.ways.split(",")
    if unknown := set(ways) - set(WAYS):
        parser.error(f"--ways {','.join(sorted(unknown))}: expected of {', '.join(WAYS)}")
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder, tqdm(total=args.turns * len(ways)) as bar:
        for _ in range(args.turns):
            for way in ways:
                bar.set_postfix_str(way)
                try:
                    runs[way].append(measure(args, argv, way, args.directory or Path(folder)))
                except RuntimeError as error:
                    print(f"long.py: error: {error}", file=sys.stderr)
                    return 2
                bar.update()
    found = {way: _figures(of_way, args.tokens) for way, of_way in runs.items()}
    facts = machine_facts(args.directory or Path(tempfile.gettempdir()))
    first = next(iter(found.values()))
    rows = []
    for way, one in found.items():
        size, ratio = one["peak_bytes"] / MIB, one["peak_bytes"] / first["peak_bytes"]
        rate = f"{one['tokens_per_s']:,.0f}"
        rows.append([way, f"{size:,.0f} MiB", f"{ratio:.3f}", f"{one['step_s']:.1f} s", rate])
    print(f"{in_a_line(facts)}\n{args.tokens} tokens")
    print(tabulate(rows, ["way", "peak", f"/ {ways[0]}", "step", "tokens/s"], tablefmt="github"))
    if args.json is not None:
        sizes = {name: getattr(args, name) for name in ("tokens", "layers", "hidden", "vocabulary")}
        result = {"machine": facts, **sizes, "ways": found}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    peaks = [one["peak_bytes"] for way, one in found.items() if way in DEFAULT_WAYS]
    return int(any(later > 1.02 * before for before, later in itertools.pairwise(peaks)))


def _figures(runs: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """Of all turns: the median step, the largest settled peak, the losses of the first."""
    step_s = statistics.median(seconds for run in runs for seconds in run["step_s"][1:])
    return {
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "peak_bytes": max(size for run in runs for size in run["peak_bytes"][1:]),
        "losses": runs[0]["losses"],
        "steps_s": [run["step_s"] for run in runs],
    }


if __name__ == "__main__":
    sys.exit(main())
