# SPDX-License-Identifier: Apache-2.0
"""Section `bandwidth`: how fast bytes move, alone and in both directions at once.

First plain copies between the GPU and host memory, pinned and not, which is all that the link can
do. Then every tier as the engine opens and calls it: write all blocks, read all blocks, both by
turns. Medians over the rounds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gpu_sections.result import Section
from gpu_sections.settings import Settings
from megatron.offload import ConfigurationError, OffloadConfig, Placement
from megatron.offload.config import MIB, format_size
from megatron.offload.device.cpu import CpuDevice
from megatron.offload.device.device import Device
from megatron.offload.device.open import open_device
from megatron.offload.tiers.gds_status import gds_status
from megatron.offload.tiers.open import open_tiers
from megatron.offload.tiers.tier import Tier

_OPERATIONS = ("write", "read", "both")
_WINDOW = 8  # transfers queued or under way
_THREADS = 4
_LEAST_OF_LINK, _LEAST_OF_DISK = 0.5, 0.7


def copy_rates(device: torch.device, num_bytes: int, rounds: int) -> dict[str, dict[str, float]]:
    """GB/s of copies from and to the GPU, by kind of host memory."""
    here = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    rates: dict[str, dict[str, float]] = {}
    for kind in ("pinned", "unpinned"):
        host = [
            torch.ones(num_bytes, dtype=torch.uint8, pin_memory=kind == "pinned") for _ in range(2)
        ]

        def copy(*ways: int, host: list[torch.Tensor] = host) -> None:
            for way in ways:
                with torch.cuda.stream(streams[way]):
                    if way == 0:
                        host[0].copy_(here[0], non_blocking=True)
                    else:
                        here[1].copy_(host[1], non_blocking=True)
            torch.cuda.synchronize(device)

        def timed(*ways: int, copy: Callable[..., None] = copy) -> float:
            return len(ways) * num_bytes / _seconds(lambda: copy(*ways), rounds) / 1e9

        rates[kind] = {"write": timed(0), "read": timed(1), "both": timed(0, 1)}
    return rates


def _seconds(work: Callable[[], None], rounds: int) -> float:
    """Median over the rounds; one more before them does not count."""
    seconds = []
    for _ in range(rounds + 1):
        began_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began_s)
    return median(seconds[1:])


class TierLoad:
    """A tier that holds `num_blocks` blocks; writes replace them in turn."""

    def __init__(self, tier: Tier, device: Device, block_bytes: int, num_blocks: int) -> None:
        self._tier = tier
        where = device.device
        self._sources = [
            torch.randint(0, 256, (block_bytes,), dtype=torch.uint8, device=where).untyped_storage()
            for _ in range(2)
        ]
        self._block_bytes = block_bytes
        self._blocks: list[Any] = [None] * num_blocks
        self.run("write")  # the tier grows to its size

    def run(self, operation: str) -> None:
        """All blocks once; for `both`, every other one is written and the rest read.

        Raises:
            MemoryError: the tier takes no more.
        """
        under_way: deque[tuple[Any, Any]] = deque()
        for index in range(len(self._blocks)):
            if len(under_way) == _WINDOW:
                under_way.popleft()[1].wait()
            if operation == "read" or (operation == "both" and index % 2):
                under_way.append(self._tier.begin_read(self._blocks[index]))
                continue
            self._blocks[index] = None
            started = self._tier.begin_write(self._sources[index % 2])
            if started is None:
                raise MemoryError(f"{self._tier} takes no more")
            self._blocks[index] = started[0]
            under_way.append((None, started[1]))
        while under_way:
            under_way.popleft()[1].wait()

    def rates(self, rounds: int) -> dict[str, float]:
        """GB/s of each operation."""
        num_bytes = len(self._blocks) * self._block_bytes
        return {
            operation: num_bytes / _seconds(partial(self.run, operation), rounds) / 1e9
            for operation in _OPERATIONS
        }


@contextmanager
def opened_tier(
    mode: str, io: str, device: Device, size_bytes: int, block_bytes: int, directory: Path
) -> Iterator[Tier]:
    """The tier that the engine would open, closed afterwards.

    Raises:
        ConfigurationError: it cannot work here.
    """
    inflight_bytes = _WINDOW * block_bytes
    config = OffloadConfig(
        mode=mode,
        directories=(directory,),
        io=io,
        threads=_THREADS,
        inflight_bytes=inflight_bytes,
        host_budget=size_bytes * (2 if mode == "host" else 1) // 2 + 16 * MIB,
    )
    room = size_bytes + size_bytes // 8
    tiers = open_tiers(config, device, reserve_bytes=room, num_local_ranks=1)
    with ExitStack() as stack:
        for placement, tier in tiers.items():
            if placement is not Placement.TIERED:
                stack.callback(tier.close)
        yield tiers[Placement(mode)]


def run(settings: Settings, section: Section) -> None:
    """Copies, then tiers."""
    rounds = 2 if settings.quick else 3
    section.progress.show(0.0, "copies")
    rows: list[list[str]] = []
    copies: dict[str, dict[str, float]] = {}
    if settings.on_gpu:
        copies = copy_rates(settings.device, (256 if settings.quick else 1024) * MIB, rounds)
        for kind, rates in copies.items():
            rows.append(_row(f"plain copies, {kind}", rates))
        section.check(
            "pinned memory is faster",
            all(copies["pinned"][op] > copies["unpinned"][op] for op in _OPERATIONS),
            f"pinned {_numbers(copies['pinned'])}, unpinned {_numbers(copies['unpinned'])} GB/s",
        )
    else:
        section.skip("copies", "there is no link to a device's memory")
    block_bytes = 64 * MIB if settings.on_gpu else MIB
    num_blocks = (16 if settings.quick else 32) if settings.on_gpu else 16
    here, host = open_device(settings.device), CpuDevice()
    cases = [
        ("host", "host", "auto", here),
        ("ssd direct", "ssd", "direct", here),
        ("ssd direct, from host memory", "ssd", "direct", host),
        ("ssd buffered", "ssd", "buffered", here),
        ("tiered", "tiered", "auto", here),
        ("gds", "ssd", "gds", here),
    ]
    tiers: dict[str, dict[str, float]] = {}
    for place, (name, mode, io, device) in enumerate(cases):
        section.progress.show((place + 1) / (len(cases) + 1), name)
        if io == "gds" and not gds_status(has_gpu=settings.on_gpu).available:
            section.skip(name, str(gds_status(has_gpu=settings.on_gpu)))
            continue
        size_bytes = num_blocks * block_bytes
        try:
            with opened_tier(mode, io, device, size_bytes, block_bytes, settings.directory) as tier:
                load = TierLoad(tier, device, block_bytes, num_blocks)
                settings.synchronize()
                tiers[name] = load.rates(rounds)
                del load
        except (ConfigurationError, OSError, MemoryError) as error:
            section.skip(name, str(error))
            continue
        rows.append(_row(name, tiers[name]))
    title = f"GB/s of blocks of {format_size(block_bytes)}, {num_blocks} of them"
    section.data |= {"copies_gbps": copies, "tiers_gbps": tiers, "block_bytes": block_bytes}
    section.table(title, ["what", "write (from device)", "read (to device)", "both at once"], rows)
    section.check("tiers were measured", "host" in tiers, f"{', '.join(tiers) or 'none'}")
    if copies and "host" in tiers:
        _check_share(section, "host", tiers["host"], copies["pinned"], _LEAST_OF_LINK)
    direct = "ssd direct"
    if settings.on_gpu and {direct, f"{direct}, from host memory"} <= tiers.keys():
        _check_share(
            section, direct, tiers[direct], tiers[f"{direct}, from host memory"], _LEAST_OF_DISK
        )


def _check_share(
    section: Section, name: str, rates: dict[str, float], of: dict[str, float], least: float
) -> None:
    """What a tier reaches of what its hardware can do."""
    section.check(
        f"{name} reaches {least:.0%} of its hardware",
        all(rates[op] >= least * of[op] for op in _OPERATIONS),
        f"{_numbers(rates)} of {_numbers(of)} GB/s ({', '.join(_OPERATIONS)})",
    )


def _row(name: str, rates: dict[str, float]) -> list[str]:
    return [name, *(f"{rates[op]:.2f}" for op in _OPERATIONS)]


def _numbers(rates: dict[str, float]) -> str:
    return "/".join(f"{rates[op]:.1f}" for op in _OPERATIONS)
