# SPDX-License-Identifier: Apache-2.0
"""Invariant 7 on a slow disk: forward waits, memory does not grow, nothing deadlocks.

Slow by `--activation-offload-write-limit` anywhere, and by the kernel's own throttle where root may
make a control group.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatron.offload import OffloadEngine
from megatron.offload.sizes import MIB
from tests.support.models import Model, assert_same, run_step, ssd
from tests.support.mounts import mounted_ext4, write_throttle
from tests.support.processes import finish, start_python
from tests.support.waiting import SOON_S

pytestmark = pytest.mark.timeout(240)

BYTES_PER_S = 20_000_000
INFLIGHT_BYTES = 8 * MIB
STEP_BYTES = 20 * MIB  # a step offloads more than this


class InFlight:
    """Samples, from a thread of its own, how many bytes are on their way."""

    def __init__(self, engine: OffloadEngine) -> None:
        self.peak_bytes = 0
        self._writer = engine.writer
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> InFlight:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(timeout=SOON_S)

    def _sample(self) -> None:
        while not self._ends.wait(0.001):
            self.peak_bytes = max(self.peak_bytes, self._writer.bytes_in_flight)


@pytest.mark.parametrize("num_directories", [1, 2])
def test_a_write_limit_holds_forward_up_and_bounds_what_is_in_flight(
    num_directories: int, make_engine: Callable[..., OffloadEngine], tmp_path: Path
) -> None:
    model, x = Model(hidden=64), torch.randn(16, 128, 64)
    plain = run_step(model, x)
    directories = tuple(tmp_path / str(number) for number in range(num_directories))
    for directory in directories:
        directory.mkdir()
    engine = make_engine(
        directories=directories, inflight_bytes=INFLIGHT_BYTES, write_bytes_per_s=BYTES_PER_S
    )
    largest_bytes = x.nbytes * 4  # inside an MLP
    began = time.monotonic()

    def check_rate() -> None:
        allowed_bytes = BYTES_PER_S * (time.monotonic() - began) + largest_bytes
        assert ssd(engine).statistics.writes.total_bytes <= allowed_bytes

    with InFlight(engine) as in_flight:
        assert_same(run_step(model, x, engine, between=check_rate), plain)
    assert engine.statistics.write_wait_s > 0 and engine.statistics.rejected_bytes == 0
    assert engine.statistics.written_bytes > STEP_BYTES
    assert INFLIGHT_BYTES // 2 < in_flight.peak_bytes <= INFLIGHT_BYTES


THROTTLED = f"""
    import json, os, pathlib, sys, time
    import torch
    from megatron.offload import OffloadConfig, OffloadEngine
    from tests.behaviour.test_slow_disk import InFlight
    from tests.support.models import Model, assert_same, run_step

    pathlib.Path(sys.argv[2]).write_text(str(os.getpid()))
    config = OffloadConfig(
        mode="ssd", directories=(pathlib.Path(sys.argv[1]),), min_bytes=1, io="direct",
        inflight_bytes={INFLIGHT_BYTES},
    )
    model, x = Model(hidden=64), torch.randn(16, 128, 64)
    plain = run_step(model, x)
    engine = OffloadEngine(config)
    ends = []
    began = time.monotonic()
    with InFlight(engine) as in_flight:
        ours = run_step(model, x, engine, between=lambda: ends.append(time.monotonic()))
    assert_same(ours, plain)
    print(json.dumps({{
        "peak_bytes": in_flight.peak_bytes,
        "seconds": ends[0] - began,
        **engine.statistics.as_dict(),
    }}))
    engine.close()
"""


@pytest.fixture
def slow_disk(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A directory, and the file to write a process id to that is to find it slow."""
    with mounted_ext4(tmp_path, 64 * MIB) as disk, write_throttle(disk, BYTES_PER_S) as members:
        yield disk.path, members


@pytest.mark.slow
def test_a_disk_that_the_kernel_throttles_holds_forward_up(slow_disk: tuple[Path, Path]) -> None:
    code, output, errors = finish(start_python(THROTTLED, *slow_disk))
    assert code == 0, errors
    told = json.loads(output)
    if told["written_bytes"] > 2 * BYTES_PER_S * told["seconds"]:
        pytest.skip("the kernel does not throttle writes to a loop device")
    assert told["write_wait_s"] > 0 and told["rejected_bytes"] == 0
    assert INFLIGHT_BYTES // 2 < told["peak_bytes"] <= INFLIGHT_BYTES
