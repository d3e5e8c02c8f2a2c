#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a codec changes: gradients, bytes and time of models of transformers in fp32.

    tools/bench/codecs.py --json codecs.json     # a few minutes on 2 cores
    tools/bench/codecs.py --models llama --layers 2 --hidden 128 --turns 1 --warm 2

Each model trains exactly for some steps first. Then, from the same weights and for several batches,
the gradient with a codec is compared with the exact one, and so is that of bf16 autocast without a
codec: what many trainings take for granted. `gradient_error`, `bf16_error`: the difference over the
exact gradient, as norms of all parameters together, the mean over the batches. `batch_noise`: how
far the gradients of two batches are apart, in the same unit. `loss_identical`: all losses have the
same bits as without the codec. `bytes_ratio`: bytes that go to the tier in a step, over those of
the same run without the codec; `bytes_ratio_without_replay`: both without replay. `step_time_ratio`
is the median of paired steps, everything on the SSD. `fp8` is what is not offered: as many bytes as
int8, and a larger error.

Exit code: 0 all losses identical, no error of int8 above bf16 autocast's own, and none of int4
above 8 % of the noise between batches; 1 not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from tabulate import tabulate
from tqdm import tqdm

from megatron.offload import offload_activations
from megatron.offload.activations.saved import encoded
from megatron.offload.activations.saved.quantization import INT8
from megatron.offload.activations.saved.rounding_noise import GROUP
from megatron.offload.commands.training_runs.machine import in_a_line, machine_facts

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(1, str(ROOT / "tools"))

from bench.train_model import make_model  # noqa: E402

MODELS = ("llama", "gpt2", "bert")
CODECS = ("int8", "int4", "fp8")
_NOISE_PART = 0.08
_SETTLED = 3  # steps with offload before anything is compared: recipes are found


class Fp8(NamedTuple):
    """What is not offered: floating point in 8 bits (e4m3), with a scale for 128 values."""

    bits: int = 8

    def encoded_bytes(self, num_values: int) -> int:
        """As `Quantization.encoded_bytes`."""
        return INT8.encoded_bytes(num_values)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """As `Quantization.encode`."""
        groups = torch.nn.functional.pad(values.float(), (0, -values.numel() % GROUP))
        groups = groups.view(-1, GROUP)
        scales = (groups.abs().amax(1) / torch.finfo(torch.float8_e4m3fn).max).bfloat16()
        codes = (groups / scales.float().unsqueeze(1)).nan_to_num(0).to(torch.float8_e4m3fn)
        codes = codes.view(torch.uint8).view(-1)[: values.numel()]
        return torch.cat((scales.view(torch.uint8), codes))

    def decode(self, encoded: torch.Tensor, num_values: int, dtype: torch.dtype) -> torch.Tensor:
        """As `Quantization.decode`."""
        split = encoded.numel() - num_values
        codes = torch.nn.functional.pad(encoded[split:], (0, -num_values % GROUP))
        wide = codes.view(torch.float8_e4m3fn).float().view(-1, GROUP)
        wide *= encoded[:split].view(torch.bfloat16).float().unsqueeze(1)
        return wide.view(-1)[:num_values].to(dtype)


class Gradients:
    """The loss and the gradient of a model for a batch, in one of several ways."""

    def __init__(self, model: Any, args: argparse.Namespace) -> None:
        self._model = model
        self._args = args

    def batch(self, number: int) -> torch.Tensor:
        """Token ids of shape [batch, sequence]: there is something to learn."""
        generator = torch.Generator().manual_seed(number)
        shape = (self._args.batch, self._args.sequence)
        steps = torch.randint(1, 4, shape, generator=generator).cumsum(1)
        return steps % self._args.vocabulary

    def of(self, number: int, *, autocast: bool = False) -> tuple[float, torch.Tensor]:
        """The loss, and the gradient of all parameters together, in fp32."""
        self._model.zero_grad()
        ids = self.batch(number)
        torch.manual_seed(number)  # of dropout
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = self._model(input_ids=ids, labels=ids).loss
        loss.backward()
        found = [one.grad.flatten() for one in self._model.parameters() if one.grad is not None]
        return loss.item(), torch.cat(found)

    def train(self, num_steps: int) -> None:
        """Exact steps of AdamW."""
        optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        for number in range(num_steps):
            self.of(1000 + number)
            optimizer.step()


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference over that of the exact one."""
    return float((found - exact).norm() / exact.norm())


class Step(NamedTuple):
    """A step with offload."""

    loss: float
    gradient: torch.Tensor
    counted: dict[str, Any]
    step_s: float


def steps_of(
    model: Any, gradients: Gradients, args: argparse.Namespace, folder: str, **settings: Any
) -> list[Step]:
    """A step for each batch with offload to the SSD, after some in which recipes are found."""
    found = []
    with contextlib.ExitStack() as ends:
        if settings["codec"] == "fp8":  # in the place of one that is offered
            settings["codec"] = "int8"
            ends.enter_context(mock.patch.dict(encoded.CODECS, int8=encoded.Codec(Fp8(), Fp8())))
        handle = offload_activations(model, folder, min_bytes=args.min_bytes, **settings)
        ends.enter_context(handle)
        for number in range(_SETTLED):
            gradients.of(number)
        for number in range(args.batches):
            began = time.perf_counter()
            loss, gradient = gradients.of(number)
            step_s = time.perf_counter() - began
            found.append(Step(loss, gradient, handle.statistics, step_s))
    return found


def measure(name: str, args: argparse.Namespace, bar: Any) -> dict[str, Any]:
    """The figures of one model, by codec."""
    own = argparse.Namespace(**{**vars(args), "model": name, "dtype": "float32"})
    model = make_model(own)
    gradients = Gradients(model, args)
    gradients.train(args.warm)
    exact = [gradients.of(number) for number in range(args.batches)]
    bf16 = [gradients.of(number, autocast=True)[1] for number in range(args.batches)]
    batch_noise = [error(a[1], b[1]) for a, b in zip(exact, exact[1:] + exact[:1], strict=True)]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        for codec in args.codecs.split(","):
            results, plain = (
                [
                    steps_of(model, gradients, args, folder, codec=used, replay=replay)
                    for replay in ("on", "off")
                ]
                for used in (codec, "off")
            )
            ratios = [
                ours[-1].counted["offloaded_bytes"] / theirs[-1].counted["offloaded_bytes"]
                for ours, theirs in zip(results, plain, strict=True)
            ]
            pairs = list(zip(results[0], exact, strict=True))
            errors = [error(one.gradient, right[1]) for one, right in pairs]
            found[codec] = {
                "gradient_error": statistics.mean(errors),
                "bf16_error": statistics.mean(
                    error(one, right[1]) for one, right in zip(bf16, exact, strict=True)
                ),
                "batch_noise": statistics.mean(batch_noise),
                "loss_identical": all(one.loss == right[0] for one, right in pairs),
                "bytes_ratio": ratios[0],
                "bytes_ratio_without_replay": ratios[1],
                "encoded_bytes": results[0][-1].counted["encoded_bytes"],
                "step_time_ratio": paired(model, gradients, args, folder, codec, bar),
            }
    return found


def paired(
    model: Any, gradients: Gradients, args: argparse.Namespace, folder: str, codec: str, bar: Any
) -> float:
    """The median of step times with the codec over without, a step a batch of each in turn."""
    ratios = []
    for turn in range(args.turns):
        times = {}
        for used in ("off", codec) if turn % 2 else (codec, "off"):
            steps = steps_of(model, gradients, args, folder, codec=used)
            times[used] = statistics.median(one.step_s for one in steps)
        ratios.append(times[codec] / times["off"])
        bar.update()
    return statistics.median(ratios)


def main() -> int:
    """Measures; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "default: %(default)s"
    parser.add_argument("--models", default=",".join(MODELS), help=default)
    parser.add_argument("--codecs", default=",".join(CODECS), help=default)
    parser.add_argument("--batches", type=int, default=4, help=default)
    parser.add_argument("--warm", type=int, default=30, help=f"exact steps before; {default}")
    parser.add_argument("--turns", type=int, default=5, help=f"for times; {default}")
    parser.add_argument("--layers", type=int, default=4, help=default)
    parser.add_argument("--hidden", type=int, default=256, help=default)
    parser.add_argument("--sequence", type=int, default=256, help=default)
    parser.add_argument("--batch", type=int, default=4, help=default)
    parser.add_argument("--vocabulary", type=int, default=1024, help=default)
    parser.add_argument("--min-bytes", default="64KiB", help=f"smaller storages stay; {default}")
    parser.add_argument("--directory", type=Path, default=ROOT / "runs/offload", help=default)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args()
    models = args.models.split(",")
    args.directory.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["tools/bench/codecs.py", *sys.argv[1:]]).replace(f"{ROOT}/", "")
    result: dict[str, Any] = {"machine": machine_facts(args.directory), "command": command}
    result["models"] = {}
    print(in_a_line(result["machine"]))
    num_turns = args.turns * len(models) * len(args.codecs.split(","))
    with tqdm(total=num_turns, unit="turn", disable=None) as bar:
        for name in models:
            bar.set_description(name)
            result["models"][name] = measure(name, args, bar)
            if args.json is not None:
                args.json.write_text(json.dumps(result, indent=1) + "\n")
    columns = ("gradient_error", "bf16_error", "batch_noise", "bytes_ratio")
    columns += ("bytes_ratio_without_replay", "step_time_ratio")
    rows = [
        (
            *(name, codec, "identical" if one["loss_identical"] else "DIFFERENT"),
            *(f"{one[column]:.4f}" for column in columns),
        )
        for name, found in result["models"].items()
        for codec, one in found.items()
    ]
    header = ("model", "codec", "loss", "gradient", "bf16's", "batches", "moved")
    print(tabulate(rows, headers=(*header, "without replay", "step"), disable_numparse=True))
    is_good = all(
        one["loss_identical"] and one["gradient_error"] <= limit_of(codec, one)
        for found in result["models"].values()
        for codec, one in found.items()
    )
    return 0 if is_good else 1


def limit_of(codec: str, found: dict[str, Any]) -> float:
    """How large the gradient's error may be."""
    if codec == "int8":
        return float(found["bf16_error"])
    return _NOISE_PART * float(found["batch_noise"]) if codec == "int4" else float("inf")


if __name__ == "__main__":
    sys.exit(main())
