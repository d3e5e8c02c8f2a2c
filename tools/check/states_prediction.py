#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares what is predicted of steps with optimizer states on an SSD with what then happens.

    tools/check/states_prediction.py --json result.json
    tools/check/states_prediction.py --only 512

Each configuration (width and layers, tokens a step, bucket, window, a cap on the SSD's writes)
trains once, in a process of its own: a few steps with the smallest window are measured, as `auto`
does; from them a step with the configuration's window is predicted; then that window is taken.
Measured step time is the median of the steps after the first two with it, measured peak the largest
resident set of theirs over what the process took before it had a model.

Exit code: 0 if both are off by at most 5 % in the median, 1 if not, 2 if a training failed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from megatron.offload.commands.training_runs.machine import in_a_line, machine_facts
from megatron.offload.device.cpu import CpuDevice
from megatron.offload.integration.torch.optimizer import offload_optimizer
from megatron.offload.sizes import MIB, format_size, parse_rate
from megatron.offload.states.measured import profile_of
from megatron.offload.states.prediction import predict

ROOT = Path(__file__).resolve().parents[2]
MOST_MEDIAN_ERROR = 0.05
_MEASURED_STEPS, _SETTLING_STEPS, _JUDGED_STEPS = 6, 2, 6


@dataclass(frozen=True)
class Configuration:
    """One training that is to be predicted. Sizes in MiB."""

    hidden: int
    layers: int
    tokens: int
    bucket: int
    window: int
    cap: str = ""

    def __str__(self) -> str:
        return (
            f"{self.hidden} x {self.layers} layers, {self.tokens} tokens, buckets {self.bucket} "
            f"MiB, window {self.window} MiB, {self.cap or 'no cap'}"
        )


CONFIGURATIONS = (
    Configuration(512, 8, 512, 8, 64),
    Configuration(512, 8, 2048, 8, 128),
    Configuration(512, 8, 512, 16, 160, "100MB/s"),
    Configuration(512, 8, 1024, 4, 32, "300MB/s"),
    Configuration(768, 8, 512, 32, 128),
    Configuration(768, 8, 2048, 16, 256),
    Configuration(1024, 6, 1024, 32, 256),
    Configuration(1024, 6, 512, 32, 480, "200MB/s"),
)


@dataclass(frozen=True)
class Result:
    """Seconds and bytes, predicted and measured."""

    configuration: Configuration
    predicted_step_s: float
    measured_step_s: float
    predicted_peak_bytes: float
    measured_peak_bytes: float
    details: dict[str, Any]

    @property
    def step_error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_step_s / self.measured_step_s - 1

    @property
    def peak_error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_peak_bytes / self.measured_peak_bytes - 1


class Training:
    """A small transformer with AdamW, whose states are on an SSD."""

    def __init__(self, one: Configuration, directory: str) -> None:
        self.limit = parse_rate(one.cap) if one.cap else None
        torch.manual_seed(0)
        self.device = CpuDevice()
        self.peak = self.device.peak_reader()
        torch.ones(1 << 16).log()  # threads and tables
        self.device.return_freed_memory()
        self.base_bytes = self.device.allocated_bytes()
        layer = torch.nn.TransformerEncoderLayer(
            one.hidden, one.hidden // 64, 4 * one.hidden, dropout=0.0, batch_first=True
        )
        self.model = torch.nn.TransformerEncoder(layer, one.layers, enable_nested_tensor=False)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.input = torch.randn(one.tokens // 256, 256, one.hidden)
        self.optimizer = optimizer
        self.handle = offload_optimizer(
            optimizer,
            directory,
            bucket_bytes=one.bucket * MIB,
            window_bytes=2 * one.bucket * MIB,
            write_bytes_per_s=self.limit,
        )
        assert self.handle.states is not None
        self.states = self.handle.states

    def steps(self, number: int) -> list[tuple[float, int, int]]:
        """Seconds of some steps, and the resident peaks of layers and of the optimizer."""
        found = []
        for _ in range(number):
            began_s = time.perf_counter()
            self.peak.reset()
            self.model(self.input).square().mean().backward()
            layers_bytes = self.peak.peak_bytes() - self.base_bytes
            self.peak.reset()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)
            peak = (layers_bytes, self.peak.peak_bytes() - self.base_bytes)
            found.append((time.perf_counter() - began_s, *peak))
        return found


def train(one: Configuration, directory: str) -> Result:
    """Measures, predicts, and measures with the wanted window."""
    training = Training(one, directory)
    measured = training.steps(2 + _MEASURED_STEPS)[2:]
    states = training.states
    profile = profile_of(states, training.limit)
    assert profile is not None
    before = predict(profile, states.window_bytes)
    states.window_bytes = one.window * MIB
    after = predict(profile, states.window_bytes)
    layers_bytes = max(one[1] for one in measured) + after.between_bytes - before.between_bytes
    optimizer_bytes = max(one[2] for one in measured) + after.peak_bytes - before.peak_bytes
    judged = training.steps(_SETTLING_STEPS + _JUDGED_STEPS)[_SETTLING_STEPS:]
    last = list(states.meter.steps)[-_JUDGED_STEPS:]
    training.handle.close()
    return Result(
        one,
        after.step_s,
        statistics.median(one[0] for one in judged),
        max(layers_bytes, optimizer_bytes),
        max(max(one[1:]) for one in judged),
        {
            "small_window": [before.step_s, statistics.median(one[0] for one in measured)],
            "predicted": asdict(after),
            "measured": [asdict(one) for one in last],
            "measured_small": [asdict(one) for one in list(states.meter.steps)[2:8]],
            "profile": {
                **asdict(profile),
                "bucket_bytes": [len(profile.bucket_bytes), sum(profile.bucket_bytes)],
            },
            "peaks": [layers_bytes, optimizer_bytes, *map(max, zip(*judged, strict=True))],
        },
    )


def table(results: Sequence[Result]) -> str:
    """The results as a table in Markdown."""
    rows = [
        (
            str(one.configuration),
            f"{one.predicted_step_s:.3f} s",
            f"{one.measured_step_s:.3f} s",
            f"{one.step_error:+.1%}",
            format_size(one.predicted_peak_bytes),
            format_size(one.measured_peak_bytes),
            f"{one.peak_error:+.1%}",
        )
        for one in results
    ]
    headings = ("", "step predicted", "measured", "error", "peak predicted", "measured", "error")
    return str(tabulate(rows, headings, tablefmt="github", disable_numparse=True))


def run(one: Configuration, directory: Path) -> Result:
    """Trains in a process of its own."""
    command = [sys.executable, __file__, "--dir", str(directory), "--train"]
    found = subprocess.run(
        [*command, json.dumps(asdict(one))], capture_output=True, text=True, timeout=600, check=True
    )
    values = json.loads(found.stdout.splitlines()[-1])
    return Result(**{**values, "configuration": one})


def main(argv: Sequence[str] | None = None) -> int:
    """Trains all configurations, prints the table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--only", default="", help="configurations with this in their name")
    parser.add_argument("--dir", type=Path, default=ROOT / "runs" / "offload", help="on the SSD")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.dir.mkdir(parents=True, exist_ok=True)
    if args.train:
        print(json.dumps(asdict(train(Configuration(**json.loads(args.train)), str(args.dir)))))
        return 0
    print(in_a_line(machine_facts(args.dir)))
    results: list[Result] = []
    for one in CONFIGURATIONS:
        if args.only not in str(one):
            continue
        try:
            results.append(run(one, args.dir))
        except subprocess.SubprocessError as error:
            print(f"states_prediction.py: error: {error}", file=sys.stderr)
            print(getattr(error, "stderr", ""), file=sys.stderr)
            return 2
        print(table(results[-1:]).splitlines()[-1], flush=True)
        _save(args.json, results)
    step = statistics.median(abs(one.step_error) for one in results)
    peak = statistics.median(abs(one.peak_error) for one in results)
    print(f"\nstep time: off by {step:.1%} in the median; peak: by {peak:.1%}")
    return 0 if max(step, peak) <= MOST_MEDIAN_ERROR else 1


def _save(path: Path | None, results: Sequence[Result]) -> None:
    if path is None:
        return
    values = [
        {**asdict(one), "step_error": one.step_error, "peak_error": one.peak_error}
        for one in results
    ]
    path.write_text(json.dumps({"command": shlex.join(sys.argv), "results": values}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
