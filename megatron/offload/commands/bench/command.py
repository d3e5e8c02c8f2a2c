# SPDX-License-Identifier: Apache-2.0
"""`megatron-offload bench`, from checked flags to tables, JSON and picture: `run`.

The CLI calls it. What is timed stands in `load.py`, `fio.py` and `memcpy.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.offload.commands.bench.arguments import HEADLINE_BLOCK_BYTES
from megatron.offload.commands.bench.fio import Fio, FioError, huge_page_bytes
from megatron.offload.commands.bench.load import open_load
from megatron.offload.commands.bench.memcpy import Memcpy
from megatron.offload.commands.bench.picture import draw
from megatron.offload.commands.bench.point import (
    HOW_COMPUTED,
    OPERATIONS,
    MeasuredPoint,
    Round,
    headline,
    shortfalls,
)
from megatron.offload.commands.bench.sample import Sample, random_storage
from megatron.offload.commands.bench.text import format_table, system_lines
from megatron.offload.commands.drawing import check_picture
from megatron.offload.commands.progress import progress
from megatron.offload.commands.training_runs.machine import machine_facts
from megatron.offload.commands.training_runs.run import RunError
from megatron.offload.commands.training_runs.trainer import CHECKOUT
from megatron.offload.device.open import open_device
from megatron.offload.machine.allocator import allocator_environment, allocator_name
from megatron.offload.machine.memory_limit import memory_limit
from megatron.offload.machine.mounts import block_devices, mount_of, read_mountinfo
from megatron.offload.sizes import format_size

Work = Callable[[str, float | None], Sample]  # of an operation, for so many seconds or one pass


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Measures everything, prints a table for each tier, writes the files; the exit code.

    Args:
        args: checked, see `arguments`.
        command: as it was typed, for the record.

    Raises:
        ConfigurationError: a tier cannot work here, or --plot cannot.
        RunError: it cannot be measured.
        OSError: a file cannot be written.
    """
    if args.plot:
        check_picture("--plot", args.plot)
    args.directory.mkdir(parents=True, exist_ok=True)
    _check_memory(args)
    with contextlib.ExitStack() as opened:
        fio = None
        try:
            fio = Fio(args.directory, args.size, args.fio_hugepages)
            opened.callback(fio.close)
        except FioError as error:
            print(f"no comparison with fio: {error}")
        facts = _system_facts(args.directory, fio)
        print(system_lines(facts))
        if fio is not None and fio.refused:
            print(f"fio: not io_uring, which was refused ({fio.refused})")
        amount = f"{args.seconds:g} s" if args.seconds else format_size(args.size)
        print(f"medians of {args.pairs} rounds of {amount}")
        points: list[MeasuredPoint] = []
        rounds = len(args.blocks) * len(args.depths) * len(OPERATIONS) * args.pairs
        for kind in args.kinds:
            with progress(rounds, kind, "round") as advance:
                measured = _measure(kind, fio, args, advance)
            points += measured
            table = format_table([point.as_result() for point in measured])
            print(f"\n{kind}\n{table}", flush=True)
    ratios = {kind: headline(points, kind, args.headline_depth) for kind in args.kinds}
    result = {
        "command": shlex.join(command).replace(f"{CHECKOUT}/", ""),
        "machine": facts,
        "device": args.device,
        "size_bytes": args.size,
        "seconds": args.seconds,
        "headline_depth": args.headline_depth,
        "tiers": ratios,
        "headline_is": HOW_COMPUTED,
        "figures": [point.as_result() for point in points],
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
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **ours})


def _check_memory(args: argparse.Namespace) -> None:
    needed_bytes, available_bytes = 3 * args.size, memory_limit().available_bytes
    if {*args.kinds} & {"host", "tiered"} and needed_bytes > available_bytes:
        raise RunError(
            f"tiers in host memory need {format_size(needed_bytes)} of memory, there is "
            f"{format_size(available_bytes)}; give a smaller --size or --tiers ssd"
        )


def _measure(
    kind: str, fio: Fio | None, args: argparse.Namespace, advance: Callable[[], object]
) -> list[MeasuredPoint]:
    """All points of one kind of tier."""
    points = []
    device = open_device(args.device)
    for block_bytes, depth in itertools.product(args.blocks, args.depths):
        name: str | None = None
        reference: Work | None = None  # not the one before: it may hold much memory
        if kind != "host" and fio is not None:
            name, reference = "fio", functools.partial(fio.run, block_bytes, depth)
        elif kind == "host" and device.is_host:
            name, reference = "memcpy", Memcpy(block_bytes, args.size // block_bytes, depth).run
        with open_load(kind, args.directory, device, args.size, block_bytes, depth) as load:
            for operation in OPERATIONS:
                point = MeasuredPoint(kind, name, block_bytes, depth, operation)
                for index in range(args.pairs):
                    point.rounds.append(_round(load.run, reference, operation, args.seconds, index))
                    advance()
                points.append(point)
    return points


def _round(
    ours: Work, reference: Work | None, operation: str, seconds: float | None, index: int
) -> Round:
    """The reference goes first in every other round."""
    if reference is None:
        return Round(ours(operation, seconds), None)
    if index % 2:
        first = ours(operation, seconds)
        return Round(first, reference(operation, seconds))
    theirs = reference(operation, seconds)
    return Round(ours(operation, seconds), theirs)


def _system_facts(directory: Path, fio: Fio | None) -> dict[str, Any]:
    """What the measurements depend on."""
    facts = machine_facts(directory)
    mount = mount_of(directory.resolve(), read_mountinfo())
    drives = block_devices(mount) if mount else ()
    before_bytes = huge_page_bytes("self")
    sample = random_storage(4 * HEADLINE_BLOCK_BYTES)
    on_huge_pages = (huge_page_bytes("self") - before_bytes) / sample.nbytes()
    facts |= {
        "drives": [
            f"{drive.model or drive.name}{' (virtual)' if drive.is_virtual else ''}"
            for drive in drives
        ],
        "allocator": allocator_name(),
        "huge_page_share": min(on_huge_pages, 1.0),
        "fio": None,
    }
    if fio is not None:
        facts["fio"] = {"version": fio.version, "engine": fio.engine, "memory": fio.memory}
    return facts
