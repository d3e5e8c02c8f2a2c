#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures output projection and loss, forward and backward: seconds, peak bytes, errors.

    tools/bench/loss.py --json loss.json                    # hidden 512, vocabulary 8192: 1 minute
    tools/bench/loss.py --vocab-size 32000 --hidden-size 1024 --dtype bf16 --rounds 3
    tools/bench/loss.py --ways chunked --chunk-tokens 128

Ways: eager (a linear layer and torch's cross entropy), compiled (the same by torch.compile),
megatron (megatron-core's cross entropy) and megatron-fused (--cross-entropy-loss-fusion), chunked
(--activation-chunked-loss), chunked-masked (the same where a loss mask leaves tokens out),
chunked-mean (as for transformers) and, on CUDA, liger (Liger's fused linear cross entropy). Each
runs in a process of its own; one whose library is missing is left out with the reason.

Seconds are of forward and backward together, the median of the rounds and the fastest; CPU seconds
are what all threads of the process computed in the fastest round, whatever else ran on the machine.
Peak bytes are what memory grew by meanwhile, the gradients of hidden states and weight included: on
a CPU the process, on CUDA the allocator's count. Errors are relative distances to fp64, of the loss
and both gradients.

Exit code: 0, or 1 if an error of the chunked loss is over 1.5 times the eager one's.
"""

from __future__ import annotations

import argparse
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

import torch
from tabulate import tabulate

from megatron.offload.commands.training_runs.machine import in_a_line, machine_facts
from megatron.offload.device.open import open_device
from megatron.offload.machine.allocator import allocator_environment
from megatron.offload.ops.chunked_logits import LossSettings
from megatron.offload.ops.chunked_loss import ExpectedGradient, chunked_cross_entropy
from megatron.offload.ops.chunked_mean import chunked_mean_loss
from megatron.offload.sizes import format_size
from megatron.offload.stats.memory import PeakMemory

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MOST = 1.5  # times the error of eager
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def eager(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean, as frameworks compute it: logits in the model's dtype, the loss in fp32."""
    logits = torch.nn.functional.linear(hidden, weight)
    wide = logits if logits.dtype is torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(wide, labels)


def _megatron(fused: bool) -> Loss:
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    from megatron.offload.integration.megatron import cpu_runtime

    if not torch.cuda.is_available():
        cpu_runtime.activate()
    meeting = Path(tempfile.mkdtemp()) / "meet"
    torch.distributed.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"file://{meeting}",
        rank=0,
        world_size=1,
    )
    parallel_state.initialize_model_parallel()
    group = parallel_state.get_tensor_model_parallel_group()

    def loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden, weight)[:, None]  # [sequence, batch, words]
        if fused:
            losses = fused_vocab_parallel_cross_entropy(logits, labels[:, None], group)
        else:
            losses = vocab_parallel_cross_entropy(logits, labels[:, None])
        return losses.mean()

    return loss


def _liger() -> Loss:
    if not torch.cuda.is_available():
        raise RuntimeError("its kernels are for CUDA")
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    module = LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight, labels: module(weight, hidden, labels)


def way(name: str, chunk_tokens: int | None) -> Loss:
    """What computes the mean loss; raises what is missing for it."""
    settings = LossSettings(chunk_tokens)
    if name in ("chunked", "chunked-masked"):
        expected = ExpectedGradient() if name == "chunked" else None
        return lambda h, w, y: chunked_cross_entropy(
            h, w, y, settings=settings, expected=expected
        ).mean()
    if name == "chunked-mean":
        return lambda h, w, y: chunked_mean_loss(
            h, w, y, torch.tensor(len(y), device=h.device), settings=settings
        )
    if name == "compiled":
        compiled: Loss = torch.compile(eager)
        return compiled
    if name == "liger":
        return _liger()
    return eager if name == "eager" else _megatron(name == "megatron-fused")


_CHUNKED = ("chunked", "chunked-masked", "chunked-mean")
WAYS = ("eager", "compiled", "megatron", "megatron-fused", *_CHUNKED, "liger")


class Inputs:
    """Hidden states, weight and labels from a fixed seed, on the device."""

    def __init__(self, args: argparse.Namespace) -> None:
        draw = torch.Generator().manual_seed(1)
        dtype, device = DTYPES[args.dtype], args.device
        hidden = torch.randn(args.tokens, args.hidden_size, generator=draw)
        weight = torch.randn(args.vocab_size, args.hidden_size, generator=draw)
        self.hidden = hidden.to(device, dtype).requires_grad_()
        self.weight = (weight / args.hidden_size**0.5).to(device, dtype).requires_grad_()
        self.labels = torch.randint(args.vocab_size, (args.tokens,), generator=draw).to(device)

    def run(self, loss: Loss) -> torch.Tensor:
        """Forward and backward, the gradients left in the tensors."""
        self.hidden.grad = self.weight.grad = None
        value = loss(self.hidden, self.weight, self.labels)
        value.backward()
        return value.detach()

    def errors(self, loss: Loss) -> dict[str, float]:
        """Relative distances to fp64."""
        value = self.run(loss)
        exact = [one.detach().double().requires_grad_() for one in (self.hidden, self.weight)]
        exact_value = eager(*exact, self.labels)
        exact_value.backward()
        found = {"loss": (value, exact_value.detach())}
        found |= {"hidden": (self.hidden.grad, exact[0].grad)}
        found |= {"weight": (self.weight.grad, exact[1].grad)}
        return {
            name: float((one.double() - true).norm() / true.norm())
            for name, (one, true) in found.items()
        }


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One way, in this process."""
    loss, inputs = way(name, args.chunk_tokens), Inputs(args)
    inputs.run(loss)  # compiles, and touches what is touched once
    inputs.hidden.grad = inputs.weight.grad = None
    peak = PeakMemory(open_device(torch.device(args.device)))
    seconds, cpu_seconds = [], []
    for _ in range(args.rounds):
        inputs.hidden.grad = inputs.weight.grad = None
        peak.begin_step()
        began, cpu_began = time.perf_counter(), time.process_time()
        inputs.run(loss)
        if args.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(time.process_time() - cpu_began)
        peak_bytes = peak.end_step()
    return {
        "way": name,
        "seconds": statistics.median(seconds),
        "fastest_s": min(seconds),
        "cpu_s": min(cpu_seconds),
        "peak_bytes": peak_bytes,
        "errors": inputs.errors(loss),
    }


def in_a_process(name: str, argv: list[str]) -> tuple[dict[str, Any] | None, str]:
    """One way in a process of its own: what was measured, or the reason why not."""
    ran = subprocess.run(
        [sys.executable, __file__, *argv, "--in-process", name],
        env={**os.environ, **allocator_environment(), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
    )
    if ran.returncode:
        return None, (ran.stderr.strip().splitlines() or ["it was ended"])[-1]
    return json.loads(ran.stdout.splitlines()[-1]), ""


def table(measured: list[dict[str, Any]]) -> str:
    """The figures as text."""
    rows = [
        (
            one["way"],
            f"{one['seconds']:.3f}",
            f"{one['fastest_s']:.3f}",
            f"{one['cpu_s']:.3f}",
            format_size(one["peak_bytes"]),
            *(f"{one['errors'][name]:.1e}" for name in ("loss", "hidden", "weight")),
        )
        for one in measured
    ]
    headers = ("way", "seconds", "fastest", "CPU s", "peak", "error: loss", "dx", "dW")
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def too_far(measured: list[dict[str, Any]]) -> list[str]:
    """Sentences about errors of a chunked loss that are over the bound."""
    by_way = {one["way"]: one["errors"] for one in measured}
    floor = 2.0**-24  # the mean is one number: its sum and its quotient are rounded to fp32
    return [
        f"{way}: the error of {name} is {error:.1e}, eager's {by_way['eager'][name]:.1e}"
        for way in _CHUNKED
        for name, error in by_way.get(way, {}).items()
        if "eager" in by_way and error > max(MOST * by_way["eager"][name], 2 * floor)
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048, help="default: 2048")
    parser.add_argument("--hidden-size", type=int, default=512, help="default: 512")
    parser.add_argument("--vocab-size", type=int, default=8192, help="default: 8192")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="default: fp32")
    parser.add_argument("--chunk-tokens", type=int, metavar="TOKENS", help="default: auto")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--ways", default=",".join(WAYS), help="default: all of them")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    parser.add_argument("--in-process", choices=WAYS, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measures all ways and prints them; the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    args = parser.parse_args(argv)
    if args.in_process:
        print(json.dumps(measure(args.in_process, args)))
        return 0
    names = args.ways.split(",")
    if unknown := set(names) - set(WAYS):
        parser.error(f"there is no way {', '.join(unknown)}; choose of {', '.join(WAYS)}")
    measured, left_out = [], {}
    for name in names:
        one, reason = in_a_process(name, argv)
        if one is None:
            left_out[name] = reason
        else:
            measured.append(one)
    machine = machine_facts(Path.cwd())
    print(f"{in_a_line(machine)}, {torch.get_num_threads()} threads\n")
    print(table(measured))
    for name, reason in left_out.items():
        print(f"{name}: not measured: {reason}")
    if args.json is not None:
        result = {
            "command": shlex.join(["tools/bench/loss.py", *argv]),
            "machine": machine,
            "threads": torch.get_num_threads(),
            "ways": measured,
            "left_out": left_out,
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    for sentence in (complaints := too_far(measured)):
        print(sentence, file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
