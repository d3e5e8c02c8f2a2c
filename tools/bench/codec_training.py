#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Where trainings end with a codec: a small Llama on real text, exact and with codecs.

    tools/bench/codec_training.py --json codec-training.json    # some 15 minutes on 2 cores
    tools/bench/codec_training.py --seeds 2 --steps 40 --pretraining 40 --epochs 2

- From scratch: for each of some initialisations the mean loss of the last eighth of the steps. A
  single run cannot tell: weights that are changed by 1 % before the first step (`perturbed`) end
  elsewhere too. So runs of one initialisation are compared in pairs: the mean of the differences to
  the exact run, beside its standard error.
- Fine-tuning: from one model that was trained exactly, some epochs over 24 sequences in several
  orders; the mean loss of the last epoch, which is smooth enough to compare single runs.

`int4, sums too` is what int4 is not: it keeps the residual stream in 4 bits as well.

Text is what `examples/text.py` gives, a token a byte. Activations stay in memory (`keep`): where
they are changes nothing.

Exit code: 0 fine-tuning ends within 0.001 of the exact loss, and from scratch no mean difference is
above its standard error, 1 not.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tabulate import tabulate
from tqdm import tqdm

from megatron.offload import offload_activations
from megatron.offload.activations.saved.encoded import CODECS, Codec
from megatron.offload.activations.saved.quantization import INT4
from megatron.offload.commands.training_runs.machine import in_a_line, machine_facts

ROOT = Path(__file__).resolve().parents[2]
sys.path[1:1] = [str(ROOT / "tools"), str(ROOT / "examples")]

from text import NUM_WORDS, rows_of_text  # noqa: E402

from bench.train_model import make_model  # noqa: E402

KINDS = ("int8", "int4", "int4, sums too")
_NUM_TUNED = 24  # sequences
_PERTURBATION = 0.01
_NEAR = 0.001  # of the exact loss, after fine-tuning


def losses_of(
    model: Any, batches: Iterable[torch.Tensor], rate: float, codec: str, bar: Any
) -> list[float]:
    """Trains with AdamW, a step for each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses = []
    with contextlib.ExitStack() as ends:
        if codec != "off":
            if codec == KINDS[-1]:
                ends.enter_context(mock.patch.dict(CODECS, int4=Codec(INT4, INT4)))
            name = codec.partition(",")[0]
            ends.enter_context(
                offload_activations(model, mode="keep", codec=name, min_bytes="16KiB")
            )
        for ids in batches:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            bar.update()
    return losses


def from_scratch(args: argparse.Namespace, rows: torch.Tensor, bar: Any) -> dict[str, list[float]]:
    """The last losses by kind of run, one for each initialisation."""
    found: dict[str, list[float]] = {}
    last = max(1, args.steps // 8)
    for seed in range(args.seeds):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        batches = rows[order][: args.steps * args.batch].split(args.batch)
        for kind in ("exact", "perturbed", *KINDS):
            model = make_model(argparse.Namespace(**vars(args), seed=seed))
            if kind == "perturbed":
                torch.manual_seed(1000 + seed)
                with torch.no_grad():
                    for param in model.parameters():
                        param.mul_(1 + _PERTURBATION * torch.randn_like(param))
            codec = kind if kind in KINDS else "off"
            losses = losses_of(model, batches, args.rate, codec, bar)
            found.setdefault(kind, []).append(statistics.mean(losses[-last:]))
    return found


def fine_tuned(args: argparse.Namespace, rows: torch.Tensor, bar: Any) -> dict[str, list[float]]:
    """The losses of the last epoch by kind of run, one for each order of the sequences."""
    trained = make_model(argparse.Namespace(**vars(args), seed=0))
    some = rows[: args.pretraining * args.batch].split(args.batch)
    losses_of(trained, some, args.rate, "off", bar)
    tuned = rows[-_NUM_TUNED:]
    found: dict[str, list[float]] = {}
    for seed in range(args.seeds):
        generator = torch.Generator().manual_seed(seed)
        epochs = [
            tuned[torch.randperm(_NUM_TUNED, generator=generator)] for _ in range(args.epochs)
        ]
        batches = torch.cat(epochs).split(args.batch)
        for kind in ("exact", *KINDS):
            codec = kind if kind in KINDS else "off"
            losses = losses_of(copy.deepcopy(trained), batches, args.tuning_rate, codec, bar)
            found.setdefault(kind, []).append(statistics.mean(losses[-_NUM_TUNED // args.batch :]))
    return found


def differences(runs: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Of each kind to the exact runs, in pairs: the mean, its standard error, the largest."""
    found = {}
    for kind, losses in runs.items():
        apart = [ours - exact for ours, exact in zip(losses, runs["exact"], strict=True)]
        found[kind] = {
            "loss": statistics.mean(losses),
            "mean": statistics.mean(apart),
            "standard_error": statistics.stdev(apart) / len(apart) ** 0.5,
            "largest": max(map(abs, apart)),
        }
    return found


def main() -> int:
    """Trains and compares; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "default: %(default)s"
    parser.add_argument("--seeds", type=int, default=5, help=f"runs of each kind; {default}")
    parser.add_argument("--steps", type=int, default=400, help=f"from scratch; {default}")
    parser.add_argument("--pretraining", type=int, default=400, help=f"exact steps; {default}")
    parser.add_argument("--epochs", type=int, default=8, help=f"of fine-tuning; {default}")
    parser.add_argument("--rate", type=float, default=1e-3, help=f"of learning; {default}")
    parser.add_argument("--tuning-rate", type=float, default=1e-4, help=default)
    parser.add_argument("--layers", type=int, default=2, help=default)
    parser.add_argument("--hidden", type=int, default=128, help=default)
    parser.add_argument("--sequence", type=int, default=128, help=default)
    parser.add_argument("--batch", type=int, default=4, help=default)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args()
    command = shlex.join(["tools/bench/codec_training.py", *sys.argv[1:]]).replace(f"{ROOT}/", "")
    if args.seeds < 2 or _NUM_TUNED % args.batch:
        parser.error(f"--seeds is at least 2, and --batch divides {_NUM_TUNED}")
    args.model, args.dtype, args.vocabulary = "llama", "float32", NUM_WORDS
    needed = max(args.steps, args.pretraining) * args.batch + _NUM_TUNED
    rows = rows_of_text(needed, args.sequence)
    if len(rows) < needed:
        parser.error(f"there is text for {len(rows)} sequences, and {needed} are asked for")
    machine = machine_facts(ROOT)
    print(in_a_line(machine))
    num_steps = (2 + len(KINDS)) * args.seeds * args.steps + args.pretraining
    num_steps += (1 + len(KINDS)) * args.seeds * args.epochs * _NUM_TUNED // args.batch
    ways: dict[str, Callable[..., dict[str, list[float]]]]
    ways = {"fine-tuning": fine_tuned, "from scratch": from_scratch}
    result: dict[str, Any] = {"machine": machine, "command": command}
    with tqdm(total=num_steps, unit="step", disable=None) as bar:
        for name, train in ways.items():
            bar.set_description(name)
            runs = train(args, rows, bar)
            result[name] = {"runs": runs, "differences": differences(runs)}
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    table = [
        (name, kind, *(f"{figure:.5f}" for figure in figures.values()))
        for name in ways
        for kind, figures in result[name]["differences"].items()
    ]
    headers = ("training", "run", "loss", "difference", "standard error", "largest")
    print(tabulate(table, headers=headers, disable_numparse=True))
    tuned, scratch = (result[name]["differences"] for name in ways)
    is_good = all(
        tuned[codec]["largest"] <= _NEAR
        and abs(scratch[codec]["mean"]) <= scratch[codec]["standard_error"]
        for codec in KINDS[:-1]
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
