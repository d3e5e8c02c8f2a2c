#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures bandwidth and processor time of the storage tiers, side by side with fio.

    bench_storage.py --directory /mnt/nvme/bench --json bench.json --plot bench.png
    bench_storage.py --quick                     # half a minute: 4 MiB blocks, depth 4
    bench_storage.py --tiers ssd --require       # exit code 1 if the SSD tier falls behind fio

The tiers are called as training calls them: begin_write, begin_read and wait, on storages made by
torch.empty. A tier has as many I/O threads as fio's iodepth, so that the drive sees the same number
of requests; two more transfers wait in its queue, so that a thread finds the next one when it is
done with the last. Each figure comes from several rounds, fio and the tier right after each other
in alternating order: shown are medians over the rounds, and the median of the rounds' ratios. Both
overwrite, or read, a file of the same size that was allocated and written before, on the same file
system: random data, blocks in order. In `mixed` every other transfer is a read. fio always uses
direct I/O.

CPU s/GB is processor time, user and system, for each GB moved: of fio's job, from its JSON output,
(usr_cpu + sys_cpu) percent of the runtime; of the tier, of this whole process with all threads.

The host tier is compared with a plain memcpy of the same blocks by as many threads; the tiered tier
(half of it in host memory) with fio, which has the drive alone.

Buffers on huge pages make direct I/O cheaper, on virtual drives also faster. This program starts
itself again with the allocator that training uses, which asks for huge pages. fio is started
without it; --fio-hugepages gives it the same allocator, for a harsher comparison.

Exit code: 0; 1 if --require is not met; 2 if it could not be measured.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import itertools
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from compare_placements import ROOT
from fio import Fio, FioError, Memcpy, Sample, Stopwatch, huge_page_bytes, random_storage
from plot_storage import draw, format_table, system_lines
from storage_figures import (
    HEADLINE_BLOCK_BYTES,
    HOW_COMPUTED,
    MAX_CPU_RATIO,
    MIN_BANDWIDTH_RATIO,
    OPERATIONS,
    MeasuredPoint,
    Round,
    headline,
    shortfalls,
)
from tqdm import tqdm

from megatron.offload.commands.training_runs.machine import machine_facts
from megatron.offload.config import GIB, MIB, format_size, parse_size
from megatron.offload.device.allocator import allocator_environment, allocator_name
from megatron.offload.device.memory_limit import memory_limit
from megatron.offload.device.mounts import block_devices, mount_of, parse_mountinfo
from megatron.offload.errors import ConfigurationError
from megatron.offload.tiers.host import HostTier
from megatron.offload.tiers.ssd import SsdTier
from megatron.offload.tiers.tier import Tier
from megatron.offload.tiers.tiered import TieredTier
from megatron.offload.tiers.transfer import Transfer

NUM_WAITING = 2  # transfers in the queue beyond those under way
WARM_UP_S = 0.05
FULL = {
    "size": 2 * GIB,
    "blocks": [MIB, 4 * MIB, 16 * MIB],
    "depths": [1, 4, 8],
    "pairs": 5,
}
QUICK = {"size": 512 * MIB, "blocks": [4 * MIB], "depths": [4], "pairs": 3}
Run = Callable[[str, float | None], Sample]  # of an operation, for so many seconds or one pass


class BenchError(Exception):
    """It cannot be measured; the message is the sentence to print."""


class TierLoad:
    """A tier full of live blocks. Every write takes the place of the block that it replaces.

    At most `depth + NUM_WAITING` transfers are submitted. Sources are used again when their
    transfer is done, as fio's buffers are; what is read is dropped as soon as it is there.
    """

    def __init__(self, tier: Tier, block_bytes: int, num_blocks: int, depth: int) -> None:
        self._tier = tier
        self._block_bytes = block_bytes
        self._window = depth + NUM_WAITING
        self._sources = [random_storage(block_bytes) for _ in range(self._window)]
        self._blocks: list[Any] = [None] * num_blocks
        self.run("write", None)
        self.run("read", WARM_UP_S)  # memory for reads comes from the allocator's free blocks then

    def run(self, operation: str, seconds: float | None) -> Sample:
        """One timed piece: all blocks once, or over and over for `seconds`."""
        watch = Stopwatch()
        end = None if seconds is None else time.perf_counter() + seconds
        under_way: collections.deque[tuple[object, Transfer]] = collections.deque()
        num_moved = 0
        while num_moved < len(self._blocks) if end is None else time.perf_counter() < end:
            if len(under_way) == self._window:
                under_way.popleft()[1].wait()
            under_way.append(self._begin(operation, num_moved))
            num_moved += 1
        while under_way:
            under_way.popleft()[1].wait()
        return watch.stop(num_moved * self._block_bytes)

    def _begin(self, operation: str, index: int) -> tuple[object, Transfer]:
        """Starts transfer `index` of a piece. Mixed reads stay half the tier away from writes."""
        place, is_write = index, operation == "write"
        if operation == "mixed":
            is_write = index % 2 == 0
            place = index // 2 + (0 if is_write else len(self._blocks) // 2)
        place %= len(self._blocks)
        if not is_write:
            return self._tier.begin_read(self._blocks[place])
        self._blocks[place] = None  # its space is free for the new one
        started = self._tier.begin_write(self._sources[index % self._window])
        if started is None:
            raise BenchError(f"{self._tier} takes no more")
        self._blocks[place], transfer = started
        return None, transfer


@contextlib.contextmanager
def open_load(
    kind: str, args: argparse.Namespace, block_bytes: int, depth: int
) -> Iterator[TierLoad]:
    """A tier of a kind with everything that it needs, closed afterwards."""
    num_blocks = args.size // block_bytes
    room = args.size + args.size // 16  # a block's space may be larger than the block
    tiers: list[Tier] = []
    try:
        if kind in ("host", "tiered"):
            budget = room if kind == "host" else args.size // 2
            tiers.append(HostTier(budget, num_threads=depth))
        if kind != "host":
            tiers.append(
                SsdTier(
                    [args.directory],
                    reserve_bytes=room,
                    num_threads=depth,
                    io="buffered" if kind == "ssd-buffered" else "auto",
                )
            )
        tier = tiers[0] if len(tiers) == 1 else TieredTier(tiers)
        yield TierLoad(tier, block_bytes, num_blocks, depth)
    finally:
        for tier in tiers:
            tier.close()


def measure(
    kind: str, fio: Fio | None, args: argparse.Namespace, bar: tqdm[NoReturn]
) -> list[MeasuredPoint]:
    """All figures of one kind of tier."""
    figures = []
    for block_bytes, depth in itertools.product(args.blocks, args.depths):
        bar.set_description(f"{kind} {format_size(block_bytes)} depth {depth}")
        name, theirs = None, None  # not the one before: it may hold much memory
        if kind == "host":
            name, theirs = "memcpy", Memcpy(block_bytes, args.size // block_bytes, depth).run
        elif fio is not None:
            name, theirs = "fio", functools.partial(fio.run, block_bytes, depth)
        with open_load(kind, args, block_bytes, depth) as load:
            for operation in OPERATIONS:
                figure = MeasuredPoint(kind, name, block_bytes, depth, operation)
                for round_ in range(args.pairs):
                    figure.rounds.append(_round(load.run, theirs, operation, args.seconds, round_))
                    bar.update()
                figures.append(figure)
    return figures


def _round(
    ours: Run, theirs: Run | None, operation: str, seconds: float | None, index: int
) -> Round:
    """The reference goes first in every other round."""
    if theirs is None:
        return Round(ours(operation, seconds), None)
    if index % 2:
        first = ours(operation, seconds)
        return Round(first, theirs(operation, seconds))
    reference = theirs(operation, seconds)
    return Round(ours(operation, seconds), reference)


def system_facts(directory: Path, fio: Fio | None) -> dict[str, Any]:
    """What the figures depend on."""
    facts = machine_facts(directory)
    mount = mount_of(directory.resolve(), parse_mountinfo(Path("/proc/self/mountinfo").read_text()))
    drives = block_devices(mount) if mount else ()
    before = huge_page_bytes("self")
    sample = random_storage(4 * HEADLINE_BLOCK_BYTES)
    facts |= {
        "drives": [
            f"{drive.model or drive.name}{' (virtual)' if drive.is_virtual else ''}"
            for drive in drives
        ],
        "allocator": allocator_name(),
        "huge_page_share": min((huge_page_bytes("self") - before) / sample.nbytes(), 1.0),
        "fio": None,
    }
    if fio is not None:
        facts["fio"] = {"version": fio.version, "engine": fio.engine, "memory": fio.memory}
    return facts


class Parser(argparse.ArgumentParser):
    """Reports a bad flag in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def size_type(text: str) -> int:
    """For argparse: bytes from `512MiB`."""
    try:
        return parse_size(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _sizes(text: str) -> list[int]:
    return [size_type(part) for part in text.split(",")]


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(
        prog="bench_storage.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--directory",
        type=Path,
        default=ROOT / "runs/offload",
        help="on the SSD, made if it is missing; nothing stays in it",
    )
    what.add_argument("--tiers", default="ssd,host,tiered", help="default: ssd,host,tiered")
    what.add_argument(
        "--io",
        choices=("auto", "buffered"),
        default="auto",
        help="buffered: measure the SSD tier with buffered I/O too, as it works without O_DIRECT",
    )
    what.add_argument("--blocks", type=_sizes, metavar="SIZE,...", help="default: 1MiB,4MiB,16MiB")
    what.add_argument("--depths", type=_counts, metavar="N,...", help="default: 1,4,8")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--size", type=size_type, help="of the files, and moved for each figure; default: 2GiB"
    )
    how.add_argument(
        "--seconds", type=float, help="for each figure instead, over and over the file"
    )
    how.add_argument("--pairs", type=int, metavar="N", help="rounds of each figure; default: 5")
    how.add_argument(
        "--quick", action="store_true", help="--blocks 4MiB --depths 4 --size 512MiB --pairs 3"
    )
    how.add_argument(
        "--fio-hugepages", action="store_true", help="start fio with training's allocator"
    )
    out = parser.add_argument_group("results")
    out.add_argument("--json", type=Path, metavar="FILE", help="every measurement and the ratios")
    out.add_argument("--plot", type=Path, metavar="FILE", help="PNG or SVG")
    out.add_argument(
        "--headline-depth", type=int, default=4, metavar="N", help="of the ratios; default: 4"
    )
    out.add_argument(
        "--require",
        action="store_true",
        help="exit code 1 if the SSD tier's headline ratios to fio are not met: bandwidth at least "
        f"{MIN_BANDWIDTH_RATIO}, processor time at most {MAX_CPU_RATIO}",
    )
    return parser


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fills in defaults. Ends with a sentence and exit code 2 where nothing can be measured."""
    for name, value in (QUICK if args.quick else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    kinds = dict.fromkeys(filter(None, args.tiers.split(",")))
    if unknown := kinds.keys() - {"ssd", "host", "tiered"}:
        parser.error(f"--tiers: unknown {', '.join(sorted(unknown))}; choose ssd, host, tiered")
    args.kinds = [*kinds, *(["ssd-buffered"] if args.io == "buffered" else [])]
    if min(args.pairs, *args.depths, *args.blocks) < 1 or (args.seconds or 1) <= 0:
        parser.error("--pairs, --depths, --blocks and --seconds must be above 0")
    least = 2 * (max(args.depths) + NUM_WAITING) * max(args.blocks)
    if args.size < least:
        parser.error(f"--size must be at least {format_size(least)} for these blocks and depths")
    if args.require and (
        "ssd" not in kinds
        or HEADLINE_BLOCK_BYTES not in args.blocks
        or args.headline_depth not in args.depths
    ):
        parser.error("--require needs the tier ssd, blocks of 4 MiB and the depth --headline-depth")
    for path in (args.json, args.plot):
        if path and not path.resolve().parent.is_dir():
            parser.error(f"no such folder: {path.resolve().parent}")


def bench(args: argparse.Namespace, command: list[str]) -> int:
    """Measures everything, prints the tables; the exit code."""
    args.directory.mkdir(parents=True, exist_ok=True)
    needed, available = 3 * args.size, memory_limit().available_bytes
    if set(args.kinds) - {"ssd", "ssd-buffered"} and needed > available:
        raise BenchError(
            f"tiers in host memory need {format_size(needed)} of memory, there is "
            f"{format_size(available)}; give a smaller --size or --tiers ssd"
        )
    with contextlib.ExitStack() as opened:
        fio = None
        try:
            fio = Fio(args.directory, args.size, args.fio_hugepages)
            opened.callback(fio.close)
        except FioError as error:
            print(f"no comparison with fio: {error}")
        facts = system_facts(args.directory, fio)
        print(system_lines(facts))
        if fio is not None and fio.refused:
            print(f"fio: not io_uring, which was refused ({fio.refused})")
        amount = f"{args.seconds:g} s" if args.seconds else format_size(args.size)
        print(f"figures: median of {args.pairs} rounds of {amount}")
        figures: list[MeasuredPoint] = []
        total = len(args.kinds) * len(args.blocks) * len(args.depths) * 3 * args.pairs
        with tqdm(total=total, unit="round", dynamic_ncols=True, disable=None) as bar:
            for kind in args.kinds:
                measured = measure(kind, fio, args, bar)
                figures += measured
                with bar.external_write_mode():
                    table = format_table([figure.as_result() for figure in measured])
                    print(f"\n{kind}\n{table}", flush=True)
    ratios = {kind: headline(figures, kind, args.headline_depth) for kind in args.kinds}
    result = {
        "command": shlex.join(command).replace(f"{ROOT}/", ""),
        "machine": facts,
        "size_bytes": args.size,
        "seconds": args.seconds,
        "headline_depth": args.headline_depth,
        "tiers": ratios,
        "headline_is": HOW_COMPUTED,
        "figures": [figure.as_result() for figure in figures],
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        draw(result, args.plot)
    complaints = shortfalls(ratios["ssd"]) if args.require else []
    for complaint in complaints:
        print(f"not met: {complaint}")
    return 1 if complaints else 0


def restart_with_allocator() -> None:
    """Starts this program again in the environment that training starts in, unless it has it."""
    ours = allocator_environment()
    if any(os.environ.get(name) != value for name, value in ours.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ours})


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    check_arguments(parser, args)
    try:
        return bench(args, [parser.prog, *(sys.argv[1:] if argv is None else argv)])
    except (BenchError, FioError, ConfigurationError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    restart_with_allocator()
    sys.exit(main())
