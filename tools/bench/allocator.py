#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the extent allocator of the SSD tier: time per operation and space lost to fragments.

    tools/bench/allocator.py                             # a million operations, some seconds
    tools/bench/allocator.py --operations 100000 --json a.json
    tools/bench/allocator.py --extents 10000             # more of them alive at the same time

Extents of 1 to 64 MiB (evenly distributed on a logarithmic scale) are allocated and freed in random
order around a steady number of live ones: harder than training, where each step asks for the sizes
of the step before. The space grows as a drive's file does, by what a request lacks at its end.
Fragmentation loss is the part of the file that live bytes never filled: 1 - most live bytes / size
of the file at the end. Times are read from a clock on the wall: in the longest operation the system
as a rule ran somebody else.

Exit code: 0.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import trange

from megatron.offload.sizes import MIB, format_size
from megatron.offload.tiers.drive import FILE_BLOCK_BYTES, GROWTH_BYTES
from megatron.offload.tiers.extents import ExtentAllocator

MIN_BYTES, MAX_BYTES = MIB, 64 * MIB


@dataclass
class Churn:
    """What many allocations and frees did. An operation is one of either."""

    operations: int
    mean_us: float  # of the allocator's calls alone
    median_us: float
    p99_us: float
    worst_us: float
    most_extents: int
    most_live_bytes: int
    file_bytes: int

    @property
    def fragmentation_loss(self) -> float:
        """The part of the file that live bytes never filled."""
        return 1 - self.most_live_bytes / self.file_bytes


def churn(operations: int, extents: int = 2000, seed: int = 0, show: bool = False) -> Churn:
    """Allocates and frees in random order.

    Args:
        extents: how many are alive, on average, once as many have been allocated.
        show: a progress bar on stderr.
    """
    chance = random.Random(seed)
    allocator = ExtentAllocator(FILE_BLOCK_BYTES)
    live: list[tuple[int, int]] = []  # offset, bytes
    live_bytes = most_live_bytes = most_extents = 0
    times_ns: list[int] = []
    for _ in trange(operations, disable=not show, unit="op", file=sys.stderr):
        if chance.random() < len(live) / (2 * extents):
            index = chance.randrange(len(live))
            live[index], live[-1] = live[-1], live[index]
            offset, num_bytes = live.pop()
            began = time.perf_counter_ns()
            allocator.free(offset)
            times_ns.append(time.perf_counter_ns() - began)
            live_bytes -= num_bytes
        else:
            num_bytes = int(MIN_BYTES * (MAX_BYTES / MIN_BYTES) ** chance.random())
            began = time.perf_counter_ns()
            offset = _allocate(allocator, num_bytes)
            times_ns.append(time.perf_counter_ns() - began)
            live.append((offset, num_bytes))
            live_bytes += num_bytes
            most_live_bytes = max(most_live_bytes, live_bytes)
            most_extents = max(most_extents, len(live))
    times_ns.sort()
    return Churn(
        operations=operations,
        mean_us=sum(times_ns) / operations / 1000,
        median_us=times_ns[operations // 2] / 1000,
        p99_us=times_ns[operations * 99 // 100] / 1000,
        worst_us=times_ns[-1] / 1000,
        most_extents=most_extents,
        most_live_bytes=most_live_bytes,
        file_bytes=allocator.size_bytes,
    )


def _allocate(allocator: ExtentAllocator, num_bytes: int) -> int:
    """As a drive does: the space grows where no free extent is large enough."""
    offset = allocator.allocate(num_bytes)
    if offset is None:
        missing = allocator.round_up(num_bytes) - allocator.free_at_end_bytes
        allocator.grow(max(missing, GROWTH_BYTES))
        offset = allocator.allocate(num_bytes)
        assert offset is not None
    return offset


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def main() -> int:
    """Runs the churn and prints what it took; the exit code."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--operations", type=_count, default=10**6, help="default: a million")
    parser.add_argument(
        "--extents", type=_count, default=2000, help="alive at the same time; default: 2000"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random sizes and order")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    args = parser.parse_args()
    result = churn(args.operations, args.extents, args.seed, show=sys.stderr.isatty())
    print(
        f"{result.operations} operations on up to {result.most_extents} extents: "
        f"{result.mean_us:.2f} us each, median {result.median_us:.2f}, 99th percentile "
        f"{result.p99_us:.2f}, longest {result.worst_us:.0f} us"
    )
    print(
        f"{format_size(result.file_bytes)} of file for at most "
        f"{format_size(result.most_live_bytes)} alive: {result.fragmentation_loss:.2%} lost to "
        "fragments"
    )
    if args.json:
        numbers = {**asdict(result), "fragmentation_loss": result.fragmentation_loss}
        numbers |= {"extents": args.extents, "seed": args.seed}
        args.json.write_text(json.dumps(numbers, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
