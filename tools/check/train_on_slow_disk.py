#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a GPT on an SSD that is slow from the start, or becomes slow in the middle of the run.

    tools/check/train_on_slow_disk.py --rate 50MB/s --after 7 -- FLAGS OF THE TRAINER

What is slow is the storage: reads and writes of the SSD tier's files take as long as at that rate,
each direction by itself, as under a control group's `io.max`. The planner is not told and has to
measure it. With `--only-writes` it is the tier's own `--activation-offload-write-limit` that
changes instead. The tests call it, and `tools/bench/layer_major.py` uses its slow disk; otherwise
the run is that of examples/pretrain_gpt.py with the same flags.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.offload.activations.placement.policy import Placement
from megatron.offload.sizes import parse_rate
from megatron.offload.tiers.file import UnlinkedFile

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT / "examples") not in sys.path:
    sys.path.insert(0, str(ROOT / "examples"))


class Lane:
    """One direction of a disk: bytes go one after the other, so many a second."""

    def __init__(self) -> None:
        self.bytes_per_s = math.inf
        self._free_at = 0.0
        # Protects the above. Held for a few instructions; no other lock is taken under it.
        self._lock = threading.Lock()

    def wait(self, num_bytes: int) -> None:
        """Until as many bytes have gone through, after those that came before."""
        with self._lock:
            begins = max(self._free_at, time.monotonic())
            self._free_at = ends = begins + num_bytes / self.bytes_per_s
        time.sleep(max(ends - time.monotonic(), 0.0))


class SlowDisk:
    """Stands before the files of the SSD tier, as fast as they are until `slow_down`."""

    def __init__(self) -> None:
        self._lanes = {"write": Lane(), "read": Lane()}
        for name, lane in self._lanes.items():
            setattr(UnlinkedFile, name, _paced(getattr(UnlinkedFile, name), lane))

    def slow_down(self, bytes_per_s: float) -> None:
        """From the next read and write on."""
        for lane in self._lanes.values():
            lane.bytes_per_s = bytes_per_s


def _paced(move: Callable[..., None], lane: Lane) -> Callable[..., None]:
    @functools.wraps(move)
    def paced(file: UnlinkedFile, body: memoryview, offset: int) -> None:
        move(file, body, offset)
        lane.wait(len(body))

    return paced


def after_step(number: int, action: Callable[[Any], None]) -> None:
    """Runs it between the passes of this step and those of the next, with the engine."""
    from megatron.offload.integration.megatron.connect import MegatronOffload

    step, num_steps = MegatronOffload.step, 0

    @contextlib.contextmanager
    def counted(self: MegatronOffload) -> Iterator[None]:
        nonlocal num_steps
        with step(self):
            yield
        num_steps += 1
        if num_steps == number:
            action(self.engine)

    MegatronOffload.step = counted  # type: ignore[method-assign]


def main(argv: Sequence[str] | None = None) -> int:
    """Trains on the slow disk; the trainer's exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=parse_rate, required=True, help="for example 50MB/s")
    parser.add_argument("--after", type=int, default=0, help="this step; 0: from the start")
    parser.add_argument("--only-writes", action="store_true", help="by the tier's write limit")
    parser.add_argument("flags", nargs="*", help="of the trainer, after --")
    args = parser.parse_args(argv)
    from trainer.start import start

    flags = list(args.flags)
    if args.only_writes:
        limit = f"{args.rate:.0f}" if not args.after else "1TB/s"  # which slows nothing
        flags += ["--activation-offload-write-limit", limit]

        def slow_down(engine: Any) -> None:
            engine.tiers[Placement.SSD].write_limit.bytes_per_s = args.rate
    else:
        disk = SlowDisk()

        def slow_down(engine: Any) -> None:
            disk.slow_down(args.rate)

        if not args.after:
            disk.slow_down(args.rate)
    if args.after:
        after_step(args.after, slow_down)
    sys.argv = ["pretrain_gpt.py", *flags]
    return start(_gpt)


def _gpt() -> Any:
    from trainer.gpt import GPT

    return GPT()


if __name__ == "__main__":
    sys.exit(main())
