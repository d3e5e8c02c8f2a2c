#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How much of a step a device stands still because its activations are moved, on the test
accelerator.

    tools/bench/overlap.py --json overlap.json           # half a minute
    tools/plot/overlap.py overlap.json --output overlap.png

Each layer computes for a set time (backward for twice as long) and saves a set number of bytes in
several parts. The drives have 90 % of the bandwidth at which forward makes them, and the link to
the host the ratio to that which the machine meant has: by default that of a PCIe 4.0 x16 link and
four NVMe drives, with layers of 10 ms as a large model has on an H200.

Nothing here is that machine. The device is `tests/support/lag`: its streams are threads that sleep
for as long as kernels and copies would take. The drives are memory, and whoever uses one sleeps.
Bytes are --smaller times fewer and all takes --slower times longer, so that neither this machine's
memory nor its two cores are what is measured; bounds in bytes of the package (pieces, what is in
flight, the pool) are smaller by the same factor. So it shows whether the schedule overlaps: who
waits for whom. It shows nothing of CUDA's speed, nor of a real drive's.

Idle is what lies between the parts on the stream that computes, from the first of a step to the
last, the few kernels that make and compare bytes included: the row `off` shows how much that is.
One word of each page that comes back is compared. Python's garbage is collected between steps.

Exit code: 0 at most 3 % idle and all bytes right; 1 not; 2 the accelerator cannot be used here.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
sys.path[1:1] = [str(ROOT / "tools")]
sys.path.append(str(ROOT))  # the accelerator is the tests'

from bench.simulated_machine import PAGE, DriveSpan, Machine, scaled, simulated_drives  # noqa: E402
from megatron.offload import OffloadConfig, OffloadEngine, Scope  # noqa: E402
from megatron.offload.commands.training_runs.machine import machine_facts  # noqa: E402
from megatron.offload.device.accelerator import AcceleratorDevice  # noqa: E402
from megatron.offload.sizes import GIB, MIB, format_size, parse_rate  # noqa: E402
from tests.support.lag import load  # noqa: E402
from tests.support.lag.build import why_not  # noqa: E402
from tests.support.lag.module import LagModule, Span  # noqa: E402
from tests.support.lag.platform import LagPlatform  # noqa: E402

MOST_IDLE = 0.03
TIERS = ("off", "host", "ssd")
POOL_BYTES = 2 * GIB  # the default on a machine with enough memory
WARM_STEPS = 2
_CHECKED = PAGE // 8  # one word of each page: more would take this machine's time

# -- The model ------------------------------------------------------------------------------------


class Work:
    """What all parts of a model share."""

    def __init__(self, lag: LagModule, machine: Machine) -> None:
        self.lag = lag
        self.num_words = machine.part_bytes // 8
        self.forward_s = machine.layer_s * machine.slower / machine.num_parts
        self.num_wrong = torch.zeros((), dtype=torch.int64, device="lag")
        self.number = 0  # of parts that ran so far: what the next one saves


class Part(torch.autograd.Function):
    """Computes for a while and saves a tensor, which its backward looks at."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, work: Work) -> torch.Tensor:
        """Made at the end of its time: nothing of it can be moved before."""
        saved = torch.empty(work.num_words, dtype=torch.int64, device=x.device)
        work.lag.sleep(work.forward_s)
        work.number += 1
        saved[::_CHECKED].fill_(work.number)
        ctx.save_for_backward(saved)
        ctx.work, ctx.number = work, work.number
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Needs what was saved from its beginning on."""
        (saved,) = ctx.saved_tensors
        ctx.work.num_wrong += (saved[::_CHECKED] != ctx.number).sum()
        ctx.work.lag.sleep(2 * ctx.work.forward_s)
        return gradients[0].clone(), None


def forward(
    work: Work,
    machine: Machine,
    engine: OffloadEngine | None,
    after_part: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """All layers; each part is captured when it has been queued, as Megatron's operations are."""
    x = torch.ones(8, device="lag", requires_grad=True)
    for layer in range(1, machine.num_layers + 1):
        for part in range(machine.num_parts):
            y: torch.Tensor = Part.apply(x, work)  # type: ignore[no-untyped-call]
            if engine is not None:
                scope = Scope(layer=f"decoder.{layer}", part=str(part))
                engine.capture(scope, outputs=[y], inputs=[x])
            x = y
            after_part()
    return x


# -- What is measured -----------------------------------------------------------------------------


class Step(NamedTuple):
    """A step on the stream that computes, in seconds."""

    forward_s: float
    backward_s: float
    forward_idle_s: float
    backward_idle_s: float

    @property
    def idle_share(self) -> float:
        """Of the step."""
        idle_s = self.forward_idle_s + self.backward_idle_s
        return idle_s / (self.forward_s + self.backward_s)


def step_of(computed: Sequence[Span], num_parts: int) -> Step:
    """What the computing of one step shows.

    Args:
        computed: in order; between these spans nothing is computed.
        num_parts: of forward, and as many of backward.
    """
    if len(computed) != 2 * num_parts:
        raise ValueError(f"{len(computed)} parts ran, and not {2 * num_parts}")
    began_s, turned_s = computed[0].began_s, computed[num_parts - 1].ended_s
    forward_s, backward_s = turned_s - began_s, computed[-1].ended_s - turned_s
    return Step(
        forward_s,
        backward_s,
        forward_s - sum(span.ended_s - span.began_s for span in computed[:num_parts]),
        backward_s - sum(span.ended_s - span.began_s for span in computed[num_parts:]),
    )


class Bench:
    """The accelerator, the drives and what they did.

    Args:
        machine: that is simulated.
        folder: for one directory a drive; nothing is written there.
    """

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.machine = machine
        self.lag = load()
        self.device = AcceleratorDevice(torch.device("lag", 0), LagPlatform(self.lag))
        self.drive_spans: list[DriveSpan] = []
        self.directories = tuple(folder / str(number) for number in range(machine.num_drives))
        for directory in self.directories:
            directory.mkdir()

    @contextlib.contextmanager
    def simulated(self) -> Iterator[None]:
        """Links and drives have the machine's bandwidths."""
        link = self.machine.link_bytes_per_s / self.machine.rate_scale
        self.lag.set_bandwidth(link, link)
        self.lag.set_poison(False)  # it takes the time of this machine's memory
        try:
            with simulated_drives(self.machine, self.drive_spans):
                yield
        finally:
            self.lag.reset()

    def open_engine(self, tier: str) -> OffloadEngine | None:
        """An engine as it is by default; None for `off`."""
        if tier == "off":
            return None
        machine = self.machine
        options: dict[str, Any] = {"mode": tier, "min_bytes": scaled(MIB, machine.smaller)}
        if tier == "ssd":
            options["directories"] = self.directories
            if hasattr(OffloadConfig, "pinned_bytes"):  # not before there was a pool
                options["pinned_bytes"] = scaled(POOL_BYTES, machine.smaller)
        else:
            options["host_budget"] = 2 * machine.num_layers * machine.num_parts * machine.part_bytes
        return OffloadEngine(OffloadConfig(**options), self.device)

    def run(self, tier: str, num_steps: int) -> dict[str, Any]:
        """Some steps with one placement; what they took."""
        machine = self.machine
        engine = self.open_engine(tier)
        work = Work(self.lag, machine)
        base_bytes = self.device.allocated_bytes()
        compute = self.device.current_stream().stream_id
        steps, waits, timelines = [], [], []
        gc.freeze()
        gc.disable()  # as Megatron's --manual-gc: a collection stops all threads for 0.1 s
        try:
            for number in range(WARM_STEPS + num_steps):
                self.lag.synchronize()
                self.drive_spans.clear()
                gc.collect()
                with self.lag.recorded() as spans:
                    self._step(work, engine)
                    self.lag.synchronize()
                if number < WARM_STEPS:
                    continue
                computed = [s for s in spans if s.stream == compute and s.kind == "sleep"]
                steps.append(step_of(computed, machine.num_layers * machine.num_parts))
                if engine is not None:
                    engine.waits.clock.read()  # the device has passed the step
                counted = engine.statistics if engine is not None else None
                waits.append((counted.write_wait_s, counted.stall_s) if counted else (0.0, 0.0))
                timelines.append(self._timeline(spans, compute, computed[0].began_s))
            peak_bytes, pool_bytes = self._forward_peaks(work, engine)
        finally:
            gc.enable()
            gc.unfreeze()
            if engine is not None:
                engine.close()
        shares = [step.idle_share for step in steps]
        median = sorted(range(num_steps), key=lambda n: shares[n])[num_steps // 2]
        return {
            "tier": tier,
            "idle_share": statistics.median(shares),
            "forward_idle_share": statistics.median(s.forward_idle_s / s.forward_s for s in steps),
            "backward_idle_share": statistics.median(
                s.backward_idle_s / s.backward_s for s in steps
            ),
            "step_s": statistics.median(s.forward_s + s.backward_s for s in steps),
            "forward_wait_s": statistics.median(wait for wait, _ in waits),
            "backward_wait_s": statistics.median(stall for _, stall in waits),
            "forward_peak_bytes": peak_bytes - base_bytes,
            "most_pool_bytes": pool_bytes,
            "num_wrong": int(work.num_wrong),
            "median_step": median,
            "steps": [step._asdict() for step in steps],
            "timeline": timelines[median],
        }

    def _step(
        self,
        work: Work,
        engine: OffloadEngine | None,
        after_part: Callable[[], None] = lambda: None,
        at_turn: Callable[[], None] = lambda: None,
    ) -> None:
        """Forward and backward.

        Args:
            after_part: called when a part of forward has been queued.
            at_turn: called when all of forward has been, and backward has not begun.
        """
        if engine is None:
            y = forward(work, self.machine, None, after_part)
            at_turn()
            y.sum().backward()
            return
        with engine.step():
            with engine.forward(Scope()) as save_order:
                y = forward(work, self.machine, engine, after_part)
            engine.end_layers()
            at_turn()
            with engine.backward(save_order):
                y.sum().backward()

    def _forward_peaks(self, work: Work, engine: OffloadEngine | None) -> tuple[int, int]:
        """Most bytes in device memory and in the pool in a forward pass; backward waits then.

        What the host allocates counts from then on, though the device comes to it later.
        """
        tiers: list[Any] = [] if engine is None else list(engine.tiers.values())
        peaks, in_pool = [], [0]
        peak = self.device.peak_reader()

        def look() -> None:
            in_pool.append(sum(getattr(tier, "pool_bytes", 0) for tier in tiers))

        def at_turn() -> None:
            peaks.append(peak.peak_bytes())
            self.lag.synchronize()
            look()

        self.lag.synchronize()
        peak.reset()
        self._step(work, engine, look, at_turn)
        self.lag.synchronize()
        return peaks[0], max(in_pool)

    def _timeline(
        self, spans: Sequence[Span], compute: int, zero_s: float
    ) -> dict[str, list[list[float]]]:
        """Begin and end of all that was done, by who did it, in milliseconds of a step."""
        device: Any = self.device
        loading = device._load.stream_id
        rows: dict[str, list[list[float]]] = {}

        def add(row: str, span: Span | DriveSpan) -> None:
            times = [round(1e3 * (at - zero_s), 2) for at in (span.began_s, span.ended_s)]
            rows.setdefault(row, []).append(times)

        for span in spans:
            if span.stream == compute and span.kind == "sleep":
                add("compute", span)
            elif span.kind == "copy":
                add("from host" if span.stream == loading else "to host", span)
        for moved in self.drive_spans:
            add(f"drive {moved.drive + 1} {moved.kind}", moved)
        return rows


# -- What is shown --------------------------------------------------------------------------------


def table(figures: Sequence[dict[str, Any]], machine: Machine) -> str:
    """A row for each tier."""
    base_s = next((one["step_s"] for one in figures if one["tier"] == "off"), None)
    layer_bytes = machine.num_parts * machine.part_bytes
    rows = [
        (
            one["tier"],
            f"{one['idle_share']:.1%}",
            f"{one['forward_idle_share']:.1%}",
            f"{one['backward_idle_share']:.1%}",
            f"{one['step_s'] / base_s:.3f}" if base_s else "",
            f"{1e3 * one['forward_wait_s']:.0f} ms",
            f"{1e3 * one['backward_wait_s']:.0f} ms",
            f"{one['forward_peak_bytes'] / layer_bytes:.2f}",
            f"{one['most_pool_bytes'] / layer_bytes:.2f}",
            "yes" if not one["num_wrong"] else "NO",
        )
        for one in figures
    ]
    headings = (
        *("tier", "idle", "in forward", "in backward", "step / off", "host waits in forward"),
        *("in backward", "forward peak, layers", "in the pool", "bytes right"),
    )
    return str(tabulate(rows, headings, tablefmt="github", disable_numparse=True))


def in_words(machine: Machine) -> str:
    """What is simulated, in two lines."""
    drives = machine.num_drives * machine.drive_bytes_per_s
    made = machine.produced_bytes_per_s
    return (
        f"{machine.num_layers} layers of {1e3 * machine.layer_s:g} ms and "
        f"{format_size(machine.layer_bytes)} in {machine.num_parts} parts: forward makes "
        f"{made / 1e9:.1f} GB/s; the link takes {machine.link_bytes_per_s / made:.0%} of that, "
        f"{machine.num_drives} drives take {drives / made:.0%}\n"
        f"on a simulated device, {machine.smaller:g} times fewer bytes, {machine.slower:g} times "
        "slower: the order of things, not the speed of CUDA"
    )


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--layers", type=int, default=12, help="(12)")
    result.add_argument("--parts", type=int, default=8, help="that a layer saves (8)")
    result.add_argument("--layer-ms", type=float, default=10.0, help="of its forward (10)")
    result.add_argument("--link", type=parse_rate, default=25e9, metavar="RATE", help="(25GB/s)")
    result.add_argument("--drive", type=parse_rate, default=6e9, metavar="RATE", help="(6GB/s)")
    result.add_argument("--drives", type=int, default=4, help="(4)")
    result.add_argument(
        "--share", type=float, default=0.9, help="of what is made, what drives take (0.9)"
    )
    result.add_argument("--smaller", type=float, default=100.0, help="see above (100)")
    result.add_argument("--slower", type=float, default=3.0, help="see above (3)")
    result.add_argument("--steps", type=int, default=5, help="that are measured of each tier (5)")
    result.add_argument("--tiers", default=",".join(TIERS), help="(off,host,ssd)")
    result.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Measures all tiers and prints the table; the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(arguments)
    tiers = args.tiers.split(",")
    for tier in tiers:
        if tier not in TIERS:
            parser().error(f"there is no tier {tier}; choose of {', '.join(TIERS)}")
    if reason := why_not():
        print(f"overlap.py: the test accelerator cannot be used: {reason}", file=sys.stderr)
        return 2
    machine = Machine(
        *(args.layers, args.parts, args.layer_ms / 1e3, args.link, args.drive, args.drives),
        *(args.share, args.smaller, args.slower),
    )
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(machine, Path(folder))
        with bench.simulated():
            figures = [bench.run(tier, args.steps) for tier in tiers]
    print(f"{in_words(machine)}\n\n{table(figures, machine)}")
    if args.json is not None:
        values = {
            "command": shlex.join(["tools/bench/overlap.py", *arguments]),
            "machine": machine_facts(ROOT),
            "simulated": {
                **vars(machine),
                "produced_bytes_per_s": machine.produced_bytes_per_s,
                "layer_bytes": machine.num_parts * machine.part_bytes,
            },
            "figures": figures,
        }
        args.json.write_text(json.dumps(values).replace(f"{ROOT}/", "") + "\n")
    kept = all(not one["num_wrong"] and one["idle_share"] <= MOST_IDLE for one in figures)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
