# SPDX-License-Identifier: Apache-2.0
"""One timed piece of work, ours or that of what it is compared with: `Sample`, `Stopwatch`.

`fio.py`, `memcpy.py` and `load.py` make them, `point.py` compares them. Nothing here does I/O.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sample:
    """What one timed piece moved, how long that took and the processor time it cost."""

    num_bytes: int
    wall_s: float
    cpu_s: float

    @property
    def gbps(self) -> float:
        """GB a second, both directions together."""
        return self.num_bytes / self.wall_s / 1e9

    @property
    def cpu_s_per_gb(self) -> float:
        """User and system seconds for each GB, of all threads."""
        return self.cpu_s / self.num_bytes * 1e9


class Stopwatch:
    """Wall time, and processor time of the whole process, from the moment it is made."""

    def __init__(self) -> None:
        self._cpu_s = self._process_cpu_s()
        self._started = time.perf_counter()

    def stop(self, num_bytes: int) -> Sample:
        """What it took to move so many bytes."""
        wall_s = time.perf_counter() - self._started
        return Sample(num_bytes, wall_s, self._process_cpu_s() - self._cpu_s)

    @staticmethod
    def _process_cpu_s() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime


def random_storage(num_bytes: int, device: torch.device | str = "cpu") -> torch.UntypedStorage:
    """A storage as training has them, of bytes that nothing can compress."""
    content = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    content[: num_bytes // 8 * 8].view(torch.int64).random_()  # eight times as fast as bytes
    return content.untyped_storage()
