#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes and reads many bytes through the storage tiers, checks each one, watches memory.

    tools/check/soak.py --directory /mnt/nvme/soak --total 1TB --json soak.json
    tools/check/soak.py --host-budget 1GiB --total 100GB    # host memory and SSD side by side
    tools/check/soak.py --total 2GB --write-limit 500MB/s

Works in phases like a training step: storages are made one at a time and written, up to --window
bytes; when all are written they are read back in reverse order, at most --inflight bytes ahead,
compared byte by byte with what was made, and freed. Every storage has content of its own.

Meanwhile the kernel tracks the peak of this process's resident memory. Since the tiers were opened
it may grow by the bytes in flight and the host budget together, and by --margin percent of them. An
allocator that rounds sizes up counts: how much a storage really takes is measured first and shown.
This program starts itself again with the allocator that training uses, so that freed memory is
returned.

Exit code: 0 passed, 1 failed (different bytes, too much memory, lost space, a failed transfer), 2
if it could not run.
"""

from __future__ import annotations

import argparse
import collections
import json
import mmap
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

import torch
from tqdm import tqdm

from megatron.offload.commands.bench.command import restart_with_allocator
from megatron.offload.commands.flag_values import size
from megatron.offload.commands.training_runs.machine import machine_facts
from megatron.offload.device.cpu import CpuDevice
from megatron.offload.errors import ConfigurationError
from megatron.offload.machine.allocator import allocator_name, return_freed_memory
from megatron.offload.sizes import MIB, format_size, parse_rate
from megatron.offload.tiers.budget import ByteBudget
from megatron.offload.tiers.host import HostTier
from megatron.offload.tiers.ssd import SsdTier
from megatron.offload.tiers.tier import Block, Tier
from megatron.offload.tiers.tiered import TieredTier
from megatron.offload.tiers.transfer import Transfer

ROOT = Path(__file__).resolve().parents[2]
NUM_WARM_UP = 16  # storages
PATTERN_BYTES = 64 * MIB  # random; a storage's content is a piece of it
WORD_BYTES = 8


@dataclass
class Report:
    """What the soak did and found."""

    written_bytes: int = 0
    read_bytes: int = 0
    wall_s: float = 0.0
    write_gbps: float | None = None  # while at least one write ran
    read_gbps: float | None = None
    peak_growth_bytes: int = 0
    bound_bytes: int = 0  # in flight and host budget
    margin: float = 0.05
    storage_bytes: int = 0
    storage_resident_bytes: float = 0.0  # what the allocator takes for one
    file_bytes: int = 0
    largest_free_bytes: int = 0  # of the files; all of it if nothing was lost and all merged
    failures: list[str] = field(default_factory=list)


class ResidentMemory:
    """The peak of this process's resident memory from now on, as the kernel tracks it."""

    def __init__(self) -> None:
        device = CpuDevice()
        self._start_bytes = device.allocated_bytes()
        self._peak = device.peak_reader()

    def growth_bytes(self) -> int:
        """The largest growth since it was made."""
        return self._peak.peak_bytes() - self._start_bytes


class Content:
    """What the storages hold: storage `index` is a piece of one random pattern, cut at a place that
    follows from its index, so that every storage differs and none has to be kept for comparison."""

    def __init__(self, num_bytes: int, seed: int) -> None:
        self.num_words = num_bytes // WORD_BYTES
        self._num_places = PATTERN_BYTES // WORD_BYTES
        generator = torch.Generator().manual_seed(seed)
        self._pattern = torch.empty(self._num_places + self.num_words, dtype=torch.int64)
        self._pattern.random_(generator=generator)

    def make(self, index: int) -> torch.UntypedStorage:
        """Storage `index`, in fresh memory."""
        words = torch.empty(self.num_words, dtype=torch.int64)
        return words.copy_(self._piece(index)).untyped_storage()

    def matches(self, index: int, storage: torch.UntypedStorage) -> bool:
        """Whether every byte is what `make` made."""
        words = torch.empty(0, dtype=torch.int64).set_(storage)
        return torch.equal(words, self._piece(index))

    def _piece(self, index: int) -> torch.Tensor:
        # An odd factor: as many different places as there are, far apart.
        start = index * 0x9E3779B1 % self._num_places
        return self._pattern[start : start + self.num_words]


def warm_up(content: Content) -> float:
    """Resident bytes of one storage. Afterwards the code is loaded and the memory returned."""
    before = _resident_bytes()
    storages = [content.make(index) for index in range(NUM_WARM_UP)]
    assert all(content.matches(index, storage) for index, storage in enumerate(storages))
    grown = _resident_bytes() - before
    storages.clear()
    return_freed_memory()
    return grown / NUM_WARM_UP


class _Writing:
    """A storage on its way, which holds its bytes in flight."""


class Soak:
    """The phases. Stops at the first failure."""

    def __init__(
        self,
        tier: Tier,
        content: Content,
        inflight: ByteBudget,
        advance: Callable[[int], object],
    ) -> None:
        self._tier = tier
        self._content = content
        self._num_bytes = content.num_words * WORD_BYTES
        self._inflight = inflight
        self._num_ahead = max(inflight.limit_bytes // self._num_bytes, 1)
        self._advance = advance

    def run(self, num_storages: int, window: int, report: Report) -> None:
        """Writes and reads so many storages, at most `window` of them at a time."""
        for first in range(0, num_storages, window):
            indices = range(first, min(first + window, num_storages))
            try:
                blocks = self._write(indices, report)
                self._read(indices, blocks, report)
            except OSError as error:
                report.failures.append(f"a transfer failed: {error}")
            if report.failures:
                return

    def _write(self, indices: range, report: Report) -> list[Block]:
        blocks: list[Block] = []
        under_way: collections.deque[Transfer] = collections.deque()
        for index in indices:
            storage = self._content.make(index)
            writing = _Writing()
            self._inflight.acquire(writing, self._num_bytes)
            started = self._tier.begin_write(storage)
            del storage
            if started is None:
                report.failures.append(f"the tier took no more after {len(blocks)} storages")
                break
            started[1].add_done_callback(lambda _, one=writing: self._inflight.release(one))
            blocks.append(started[0])
            under_way.append(started[1])
            while under_way and under_way[0].done():
                self._written(under_way.popleft(), report)
        while under_way:
            self._written(under_way.popleft(), report)
        return blocks

    def _written(self, transfer: Transfer, report: Report) -> None:
        transfer.wait()
        report.written_bytes += self._num_bytes
        self._advance(self._num_bytes)

    def _read(self, indices: range, blocks: list[Block], report: Report) -> None:
        coming: collections.deque[tuple[torch.UntypedStorage, Transfer]] = collections.deque()
        not_begun = len(blocks)
        for place in reversed(range(len(blocks))):
            while not_begun and len(coming) < self._num_ahead:
                not_begun -= 1
                deadline = float(len(blocks) - not_begun)
                coming.append(self._tier.begin_read(blocks[not_begun], deadline))
            storage, transfer = coming.popleft()
            transfer.wait()
            if not self._content.matches(indices[place], storage):
                report.failures.append(f"other bytes came back from {blocks[place]}")
                return
            del blocks[place], storage, transfer
            report.read_bytes += self._num_bytes
            self._advance(self._num_bytes)


def soak(args: argparse.Namespace, command: list[str]) -> int:
    """Runs it all, prints the report; the exit code."""
    args.directory.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # for copies and comparisons one is fast enough, more would spin
    content = Content(args.storage_bytes, args.seed)
    num_storages = -(-args.total // args.storage_bytes)
    window = args.window // args.storage_bytes
    report = Report(
        bound_bytes=args.inflight + args.host_budget,
        margin=args.margin / 100,
        storage_bytes=args.storage_bytes,
        storage_resident_bytes=warm_up(content),
    )
    ssd = SsdTier(
        [args.directory],
        reserve_bytes=args.window,
        num_threads=args.threads,
        write_bytes_per_s=args.write_limit,
        verify=args.verify,
    )
    tier: Tier = ssd
    try:
        if args.host_budget:
            tier = TieredTier([HostTier(args.host_budget), ssd])
        print(f"{tier}; {machine_facts(args.directory)['offload_filesystem']}")
        total = 2 * num_storages * args.storage_bytes
        with tqdm(total=total, unit="B", unit_scale=True, dynamic_ncols=True, disable=None) as bar:
            memory = ResidentMemory()
            started = time.monotonic()
            Soak(tier, content, ByteBudget(args.inflight), bar.update).run(
                num_storages, window, report
            )
            report.wall_s = time.monotonic() - started
            report.peak_growth_bytes = memory.growth_bytes()
        judge(report, tier, ssd)
    finally:
        tier.close()
    print_report(report)
    if args.json:
        result = {
            "command": shlex.join(command).replace(f"{ROOT}/", ""),
            "machine": machine_facts(args.directory),
            "passed": not report.failures,
            **asdict(report),
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if report.failures else 0


def judge(report: Report, tier: Tier, ssd: SsdTier) -> None:
    """Fills in what the tiers say at the end, and what is wrong with it."""
    statistics = tier.statistics
    for name, meter in (("write_gbps", statistics.writes), ("read_gbps", statistics.reads)):
        if meter.busy_s:
            setattr(report, name, meter.total_bytes / meter.busy_s / 1e9)
    used = tier.used_bytes  # also takes in what was freed
    report.file_bytes = ssd.capacity_bytes
    report.largest_free_bytes = sum(drive.extents.largest_free_bytes for drive in ssd.drives)
    most_bytes = (1 + report.margin) * report.bound_bytes
    if report.peak_growth_bytes > most_bytes:
        report.failures.append(
            f"memory grew by {format_size(report.peak_growth_bytes)}, expected at most "
            f"{format_size(most_bytes)}"
        )
    if tier.degraded:
        report.failures.append("the tier is degraded; see the log")
    if used and not report.failures:
        report.failures.append(f"{format_size(used)} are still taken although all was freed")
    if report.largest_free_bytes < report.file_bytes and not report.failures:
        report.failures.append("the file's free space is in pieces although all was freed")


def print_report(report: Report) -> None:
    """Prints the report, with PASS or FAIL at its end."""

    def rate(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f} GB/s"

    both = report.written_bytes + report.read_bytes
    print(f"written     {report.written_bytes / 1e9:.2f} GB, {rate(report.write_gbps)} while busy")
    print(f"read        {report.read_bytes / 1e9:.2f} GB, {rate(report.read_gbps)} while busy")
    print(f"together    {rate(both / report.wall_s / 1e9)} over {report.wall_s:.1f} s")
    print(
        f"memory      grew by {format_size(report.peak_growth_bytes)} at most; in flight and host "
        f"budget are {format_size(report.bound_bytes)}, with {report.margin:.0%} "
        f"{format_size((1 + report.margin) * report.bound_bytes)}"
    )
    print(
        f"allocator   {allocator_name()}: a storage of {format_size(report.storage_bytes)} takes "
        f"{format_size(report.storage_resident_bytes)}; memory grew by as much as "
        f"{report.peak_growth_bytes / max(report.storage_resident_bytes, 1):.1f} of them take, "
        f"{report.bound_bytes / report.storage_bytes:.0f} are allowed"
    )
    print(
        f"file        {format_size(report.file_bytes)}, largest free piece "
        f"{format_size(report.largest_free_bytes)}"
    )
    for failure in report.failures:
        print(f"            {failure}")
    print("FAIL" if report.failures else "PASS")


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _rate(text: str) -> float:
    try:
        return parse_rate(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class _Parser(argparse.ArgumentParser):
    """Reports a bad flag in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def make_parser() -> argparse.ArgumentParser:
    """The command line; flags that training has too are named alike."""
    parser = _Parser(
        prog="tools/check/soak.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for flag, default, text in (
        ("--total", "100GB", "to write"),
        ("--window", "1GiB", "most bytes stored at a time"),
        ("--storage-bytes", "16MiB", "of each storage"),
        ("--inflight", "512MiB", "most bytes on their way, and read ahead"),
        ("--host-budget", "0", "host memory used beside the SSD"),
    ):
        parser.add_argument(
            flag,
            type=size,
            metavar="SIZE",
            default=default,
            help=f"{text}; default: {default}",
        )
    parser.add_argument("--write-limit", type=_rate, metavar="RATE", help="for example 500MB/s")
    parser.add_argument(
        "--verify", action="store_true", help="let the SSD tier compare checksums as well"
    )
    parser.add_argument("--threads", type=int, default=4, help="I/O threads; default: 4")
    parser.add_argument(
        "--margin",
        type=float,
        default=5,
        metavar="PERCENT",
        help="that memory may grow beyond bytes in flight and host budget; default: 5",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the content; default: 1")
    parser.add_argument(
        "--directory",
        type=Path,
        default=ROOT / "runs/offload",
        help="on the SSD, made if it is missing; nothing stays in it",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    return parser


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends with a sentence and exit code 2 where the flags make no sense together."""
    if args.storage_bytes < WORD_BYTES or args.storage_bytes % WORD_BYTES:
        parser.error(f"--storage-bytes must be a multiple of {WORD_BYTES}")
    if not args.storage_bytes <= min(args.window, args.inflight) or args.threads < 1:
        parser.error("--window and --inflight must hold a storage, --threads be at least 1")
    if args.json and not args.json.resolve().parent.is_dir():
        parser.error(f"--json: no such folder: {args.json.resolve().parent}")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    check_arguments(parser, args)
    try:
        return soak(args, [parser.prog, *(sys.argv[1:] if argv is None else argv)])
    except (ConfigurationError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    restart_with_allocator()
    sys.exit(main())
