# SPDX-License-Identifier: Apache-2.0
"""A machine that is simulated, and its drives: `Machine`, `SimulatedDrive`.

`overlap.py` measures with them. What computes and copies is the test accelerator's part.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import mmap
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from megatron.offload.sizes import GIB
from megatron.offload.tiers.direct_io import Alignment
from megatron.offload.tiers.staging import PIECE_BYTES, StagingPool

PAGE = mmap.PAGESIZE
# Bounds of the package in bytes, which are for activations of full size.
BOUNDS = (
    ("activations.engine", "DEFAULT_INFLIGHT_BYTES"),
    ("tiers.striping", "MIN_STRIPE_BYTES"),
    ("tiers.drive", "GROWTH_BYTES"),
    ("tiers.arena", "GROWTH_BYTES"),
)


@dataclass(frozen=True)
class Machine:
    """What is simulated. Times and bytes as they are meant, without `smaller` and `slower`."""

    num_layers: int
    num_parts: int  # of a layer, each saves one tensor
    layer_s: float  # of forward; backward takes twice that
    link_bytes_per_s: float  # in each direction
    drive_bytes_per_s: float
    num_drives: int
    share: float  # of what forward makes in a second, what the drives take
    smaller: float
    slower: float

    @property
    def produced_bytes_per_s(self) -> float:
        """What forward makes if nothing holds it up."""
        return self.num_drives * self.drive_bytes_per_s / self.share

    @property
    def layer_bytes(self) -> float:
        """That a layer saves."""
        return self.produced_bytes_per_s * self.layer_s

    @property
    def part_bytes(self) -> int:
        """That a part saves here: smaller, and in whole pages."""
        return scaled(self.layer_bytes / self.num_parts, self.smaller)

    @property
    def rate_scale(self) -> float:
        """How many times less a bandwidth is here: what forward makes is exactly `share` more."""
        here_bytes_per_s = self.num_parts * self.part_bytes / (self.layer_s * self.slower)
        return self.produced_bytes_per_s / here_bytes_per_s


def scaled(num_bytes: float, smaller: float) -> int:
    """So many bytes as they are here, in whole pages."""
    return max(round(num_bytes / smaller / PAGE), 1) * PAGE


# -- Drives ---------------------------------------------------------------------------------------


class DriveSpan(NamedTuple):
    """What a drive did from one moment until another, in seconds of `time.monotonic`."""

    drive: int
    kind: str
    began_s: float
    ended_s: float


class SimulatedDrive:
    """A file in memory whose reads and writes take as long as those of a drive; see `DriveFile`.

    They share its bandwidth and take turns, whatever thread they come from. Who waits sleeps
    without the interpreter's lock.
    """

    kind = "simulated"
    alignment = Alignment(PAGE, PAGE)

    def __init__(self, directory: Path, bytes_per_s: float, spans: list[DriveSpan]) -> None:
        self.directory = directory
        self.size_bytes = 0
        self._number = int(directory.name)
        self._bytes_per_s = bytes_per_s
        self._spans = spans
        self._memory = mmap.mmap(-1, GIB)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._free_at = 0.0
        self._lock = threading.Lock()  # protects the line above; held for a few instructions

    def grow(self, num_bytes: int) -> None:
        """Makes room."""
        if self.size_bytes + num_bytes > len(self._memory):
            raise OSError(errno.ENOSPC, "the simulated drive is full")
        self.size_bytes += num_bytes

    def write(self, body: memoryview, offset: int) -> None:
        """Takes the bytes, and the time."""
        source = ctypes.addressof(ctypes.c_char.from_buffer(body))
        self._move("write", self._address + offset, source, len(body))

    def read(self, body: memoryview, offset: int) -> None:
        """Gives the bytes back, and takes the time."""
        target = ctypes.addressof(ctypes.c_char.from_buffer(body))
        self._move("read", target, self._address + offset, len(body))

    def close(self) -> None:
        """Nothing to do: the memory goes with the object."""

    def _move(self, kind: str, target: int, source: int, num_bytes: int) -> None:
        with self._lock:
            began = max(self._free_at, time.monotonic())
            self._free_at = ended = began + num_bytes / self._bytes_per_s
        self._spans.append(DriveSpan(self._number, kind, began, ended))
        ctypes.memmove(target, source, num_bytes)
        time.sleep(max(ended - time.monotonic(), 0.0))


@contextlib.contextmanager
def simulated_drives(machine: Machine, spans: list[DriveSpan]) -> Iterator[None]:
    """The package opens drives of that machine, and its bounds in bytes are as much smaller.

    Args:
        spans: what the drives do is added to these.
    """
    rate = machine.drive_bytes_per_s / machine.rate_scale

    def open_drive(directory: Path, *_: object) -> SimulatedDrive:
        return SimulatedDrive(directory, rate, spans)

    with contextlib.ExitStack() as replaced:
        for room, name in BOUNDS:
            module = importlib.import_module(f"megatron.offload.{room}")
            value = scaled(getattr(module, name), machine.smaller)
            replaced.enter_context(mock.patch.object(module, name, value))
        ssd = importlib.import_module("megatron.offload.tiers.ssd")
        pool = partial(StagingPool, piece_bytes=scaled(PIECE_BYTES, machine.smaller))
        replaced.enter_context(mock.patch.object(ssd, "StagingPool", pool))
        replaced.enter_context(mock.patch.object(ssd, "UnlinkedFile", open_drive))
        yield
