#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How much of the I/O of optimizer states overlaps what else a device does, on the test
accelerator.

    tools/bench/states_overlap.py --json states_overlap.json           # half a minute

Each layer computes for a set time (backward for twice as long); its states are a bucket, which the
drive takes a set time to read and as long to write, one after the other: so is a drive whose
bandwidth is shared. The link to the host is four times as fast in each direction. The update of a
bucket takes a tenth of the time that the drive takes to read it.

Nothing here is a GPU or a drive: the device is `tests/support/lag`, whose streams are threads that
sleep, and who uses the drive, which is memory, sleeps too. So it shows who waits for whom: whether
reads, updates and writes run at the same time, and what runs behind backward and the next forward.

A row is a median iteration beside one with states in memory. Longer by: what is left visible of
the drive's time (the column beside it; of the link's for `host`). `serial` reads, updates and
writes one bucket after the other. Weights are compared with those of the row `off`.

Exit code: 0 all weights are equal; 1 not; 2 the accelerator cannot be used here.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
sys.path[1:1] = [str(ROOT / "tools")]
sys.path.append(str(ROOT))  # the accelerator is the tests'

from bench.simulated_machine import DriveSpan, SimulatedDrive  # noqa: E402
from megatron.offload.commands.training_runs.machine import machine_facts  # noqa: E402
from megatron.offload.device.platform import register_platform  # noqa: E402
from megatron.offload.integration.torch.optimizer import OptimizerOffload  # noqa: E402
from megatron.offload.states.config import StatesConfig  # noqa: E402
from megatron.offload.states.window import Window  # noqa: E402
from megatron.offload.tiers import ssd as ssd_tier  # noqa: E402
from tests.support.lag import load  # noqa: E402
from tests.support.lag.build import why_not  # noqa: E402
from tests.support.lag.module import LagModule  # noqa: E402
from tests.support.lag.platform import LagPlatform  # noqa: E402

_NUM_WEIGHTS = 1 << 16  # of a layer
_BUCKET_BYTES = 8 * _NUM_WEIGHTS
_WARM = 2  # iterations
_LINK = 4  # times as fast as the drive
_UPDATE = 0.1  # of the time of a bucket's read


class Layer(torch.autograd.Function):
    """Computes for a while; its weight has a gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, lag: LagModule, seconds: float
    ) -> torch.Tensor:
        """Takes its time on the current stream."""
        lag.sleep(seconds)
        ctx.save_for_backward(weight)
        ctx.lag, ctx.seconds = lag, seconds
        return x + weight[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Takes twice that."""
        (weight,) = ctx.saved_tensors
        ctx.lag.sleep(2 * ctx.seconds)
        return gradients[0].clone(), weight * gradients[0], None, None


class Bench:
    """The accelerator and its drive.

    Args:
        layer_s: of a layer's forward.
        read_s: of a bucket.
        num_layers: each a bucket.
        folder: nothing is written there.
    """

    def __init__(self, layer_s: float, read_s: float, num_layers: int, folder: Path) -> None:
        self.layer_s, self.read_s, self.num_layers = layer_s, read_s, num_layers
        self.lag = load()
        register_platform("lag", LagPlatform(self.lag))
        self.directory = folder / "0"
        self.directory.mkdir()
        self.spans: list[DriveSpan] = []
        self.weights: list[torch.Tensor] = []  # of the row `off`

    @contextlib.contextmanager
    def simulated(self) -> Iterator[None]:
        """The link and the drive have their bandwidths."""
        rate = _BUCKET_BYTES / self.read_s
        self.lag.set_bandwidth(_LINK * rate, _LINK * rate)
        self.lag.set_poison(False)

        def open_drive(directory: Path, *_: object) -> SimulatedDrive:
            return SimulatedDrive(directory, rate, self.spans)

        try:
            with mock.patch.object(ssd_tier, "UnlinkedFile", open_drive):
                yield
        finally:
            self.lag.reset()

    def run(self, name: str, num_iterations: int, **settings: Any) -> dict[str, Any]:
        """Some iterations with states somewhere; what they took."""
        torch.manual_seed(3)
        weights = [
            torch.nn.Parameter(torch.randn(_NUM_WEIGHTS).to("lag")) for _ in range(self.num_layers)
        ]
        optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)
        config = StatesConfig.from_settings({"bucket_bytes": _BUCKET_BYTES, **settings})
        offload = OptimizerOffload(
            optimizer, config, updated=lambda params: self.lag.sleep(_UPDATE * self.read_s)
        )
        took: list[float] = []
        try:
            for number in range(_WARM + num_iterations):
                if number == _WARM:
                    self.spans.clear()
                began = time.perf_counter()
                self._iterate(weights, optimizer, offload)
                took.append(time.perf_counter() - began)
            drive_s = sum(span.ended_s - span.began_s for span in self.spans) / num_iterations
        finally:
            offload.close()
        ours = [weight.detach().cpu() for weight in weights]
        self.weights = self.weights or ours
        return {
            "row": name,
            "iteration_s": statistics.median(took[_WARM:]),
            "drive_s": drive_s,
            "identical": all(map(torch.equal, ours, self.weights)),
        }

    def _iterate(
        self,
        weights: Sequence[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        offload: OptimizerOffload,
    ) -> None:
        x = torch.ones(1).to("lag")
        for weight in weights:
            x = Layer.apply(x, weight, self.lag, self.layer_s)  # type: ignore[no-untyped-call]
        x.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if offload.states is None:
            self.lag.sleep(_UPDATE * self.read_s * self.num_layers)
        optimizer.zero_grad()
        done = torch.Event("lag")
        done.record(self.lag.current_stream())
        done.synchronize()


@contextlib.contextmanager
def serial() -> Iterator[None]:
    """Nothing is read ahead, and a write is waited for."""
    put_away = Window.put_away

    def put_away_now(self: Window, bucket: Any) -> None:
        put_away(self, bucket)
        bucket.wait_for_write()

    with (
        mock.patch.object(Window, "read_ahead", lambda self, ahead: None),
        mock.patch.object(Window, "put_away", put_away_now),
    ):
        yield


def rows_of(bench: Bench, num_iterations: int) -> list[dict[str, Any]]:
    """All rows."""
    half = bench.num_layers * _BUCKET_BYTES // 2
    ssd = {"mode": "ssd", "directories": (bench.directory,), "window_bytes": 0}
    rows = [bench.run("off", num_iterations, mode="off")]
    rows.append(bench.run("host", num_iterations, mode="host", host_budget=4 * half))
    rows.append(bench.run("ssd", num_iterations, **ssd))
    rows.append(bench.run("ssd, half of it in the window", num_iterations, **ssd | _window(half)))
    # There the window is memory that the step works in, and has room for two buckets beside one.
    on_host = {**ssd, "step_on": "cpu"} | _window(3 * _BUCKET_BYTES)
    rows.append(bench.run("ssd, step on the host", num_iterations, **on_host))
    with serial():
        rows.append(bench.run("ssd, serial", num_iterations, **ssd))
    for row in rows:
        row["longer_s"] = row["iteration_s"] - rows[0]["iteration_s"]
    return rows


def _window(num_bytes: int) -> dict[str, int]:
    return {"window_bytes": num_bytes}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures all rows and prints the table; the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12, help="(12)")
    parser.add_argument("--layer-ms", type=float, default=10.0, help="of its forward (10)")
    parser.add_argument("--read-ms", type=float, default=20.0, help="of a bucket (20)")
    parser.add_argument("--iterations", type=int, default=4, help="that are measured (4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    args = parser.parse_args(arguments)
    if reason := why_not():
        print(f"states_overlap.py: the test accelerator cannot be used: {reason}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args.layer_ms / 1e3, args.read_ms / 1e3, args.layers, Path(folder))
        with bench.simulated():
            rows = rows_of(bench, args.iterations)
    print(
        tabulate(
            [
                (
                    row["row"],
                    f"{1e3 * row['iteration_s']:.0f} ms",
                    f"{1e3 * row['longer_s']:.0f} ms",
                    f"{1e3 * row['drive_s']:.0f} ms",
                    "yes" if row["identical"] else "NO",
                )
                for row in rows
            ],
            ("states", "iteration", "longer by", "the drive is busy for", "weights equal"),
            tablefmt="github",
        )
    )
    if args.json is not None:
        command = shlex.join(["tools/bench/states_overlap.py", *arguments])
        values = {"command": command, "machine": machine_facts(ROOT), "rows": rows}
        args.json.write_text(json.dumps(values, indent=1).replace(f"{ROOT}/", "") + "\n")
    return 0 if all(row["identical"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
