# SPDX-License-Identifier: Apache-2.0
"""Peak memory on a CPU: short peaks are seen, retained memory does not hide the next one."""

from __future__ import annotations

import mmap

from megatron.offload.device.cpu import CpuDevice
from megatron.offload.stats.memory import PeakMemory

MIB = 1 << 20


def touch(num_bytes: int) -> None:
    """Takes memory, uses every page of it and gives it back to the system."""
    with mmap.mmap(-1, num_bytes) as mapping:
        for offset in range(0, num_bytes, mmap.PAGESIZE):
            mapping[offset] = 1


def test_the_peak_of_each_step_is_its_own():
    peak = PeakMemory(CpuDevice())
    for megabytes in (64, 128, 32, 96):
        peak.begin_step()
        touch(megabytes * MIB)
        grown = peak.end_step()
        # The kernel counts pages in batches for each thread, so a few may be missing.
        assert (megabytes - 1) * MIB <= grown < (megabytes + 16) * MIB


def test_memory_kept_from_an_earlier_step_counts():
    peak = PeakMemory(CpuDevice())
    for _ in range(PeakMemory.NUM_BASE_STEPS):
        peak.begin_step()
        peak.end_step()
    kept = b"x" * (64 * MIB)
    peak.begin_step()
    assert peak.end_step() >= len(kept)
