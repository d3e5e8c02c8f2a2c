# SPDX-License-Identifier: Apache-2.0
"""What tools/bench/overlap.py reckons with: the machine that it simulates, and its drives."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
from bench.overlap import step_of
from bench.simulated_machine import PAGE, DriveSpan, Machine, SimulatedDrive

from tests.support.lag.module import Span

H200 = Machine(12, 8, 0.01, 25e9, 6e9, 4, 0.9, 100, 3)


def spans(*times: tuple[float, float]) -> list[Span]:
    return [Span(0, 0, "sleep", began_s, ended_s) for began_s, ended_s in times]


def test_idle_is_what_lies_between_the_parts() -> None:
    step = step_of(spans((1, 2), (2.5, 3), (4, 6), (6, 8)), num_parts=2)
    assert (step.forward_s, step.forward_idle_s) == (2, 0.5)
    assert (step.backward_s, step.backward_idle_s) == (5, 1)  # the turn belongs to backward
    assert step.idle_share == 1.5 / 7


def test_a_step_whose_parts_did_not_all_run_is_no_figure() -> None:
    with pytest.raises(ValueError, match="3 parts ran, and not 4"):
        step_of(spans((0, 1), (1, 2), (2, 3)), num_parts=2)


def test_here_the_bandwidths_have_the_ratios_of_the_machine_that_is_meant() -> None:
    here_bytes_per_s = H200.num_parts * H200.part_bytes / (H200.layer_s * H200.slower)
    drives = H200.num_drives * H200.drive_bytes_per_s
    assert H200.produced_bytes_per_s * H200.share == drives
    assert drives / H200.rate_scale / here_bytes_per_s == pytest.approx(0.9)
    assert H200.part_bytes % PAGE == 0
    assert H200.rate_scale == pytest.approx(300, rel=0.02)  # parts are whole pages


def test_a_drives_transfers_take_turns_and_its_bytes_come_back() -> None:
    done: list[DriveSpan] = []
    drive = SimulatedDrive(Path("3"), 1e9, done)
    drive.grow(2 * PAGE)
    with mmap.mmap(-1, PAGE) as source, mmap.mmap(-1, PAGE) as target:
        source.write(bytes(range(256)) * (PAGE // 256))
        drive.write(memoryview(source), PAGE)
        drive.read(memoryview(target), PAGE)
        assert target[:] == source[:]
    assert [(span.drive, span.kind) for span in done] == [(3, "write"), (3, "read")]
    for span in done:
        assert span.ended_s - span.began_s == pytest.approx(PAGE / 1e9, abs=1e-9)
    assert done[1].began_s >= done[0].ended_s
    with pytest.raises(OSError, match="full"):
        drive.grow(1 << 40)
