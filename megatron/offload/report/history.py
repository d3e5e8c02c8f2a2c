# SPDX-License-Identifier: Apache-2.0
"""What the steps of a run moved: `StepHistory`, and the few lines that sum it up.

An integration adds each finished step. Memory use does not grow with the run.
"""

from __future__ import annotations

import collections
import statistics

from megatron.offload.config import format_size
from megatron.offload.report.statistics import StepStatistics

_REMEMBERED_STEPS = 1000


class StepHistory:
    """The latest steps, and totals over all of them."""

    def __init__(self) -> None:
        self._steps: collections.deque[StepStatistics] = collections.deque(maxlen=_REMEMBERED_STEPS)
        self._num_steps = 0
        self._written_bytes = 0

    def add(self, step: StepStatistics) -> None:
        """Notes a finished step."""
        self._num_steps += 1
        self._written_bytes += step.written_bytes
        if self._num_steps == 2:
            self._steps.clear()  # the first step is not like the others: files grow, caches fill
        self._steps.append(step)

    def last(self) -> dict[str, int | float]:
        """Counters of the last step, see `StepStatistics`; empty before the first."""
        return self._steps[-1].as_dict() if self._steps else {}

    def summary(self, where: str) -> str:
        """A few lines for the end of a run; empty if there was no step."""
        if not self._steps:
            return ""

        def size(name: str) -> str:
            return format_size(self._median(name))

        return "\n".join(
            (
                f"activation offload to {where}, median of {len(self._steps)} steps:",
                f"  offloaded     {size('offloaded_bytes')} "
                f"({size('deduplicated_bytes')} more were duplicates)",
                f"  written       {size('written_bytes')}",
                f"  read          {size('read_bytes')}",
                f"  forwarded     {size('forwarded_bytes')} (needed while in memory: no read)",
                f"  kept          {size('kept_bytes')} (the disk was full or failed)",
                f"  stall         {self._median('stall_s'):.3f} s waiting for reads, "
                f"{self._median('write_wait_s'):.3f} s for writes",
                f"  drive writes  {format_size(self._written_bytes)} in this run",
            )
        )

    def _median(self, name: str) -> float:
        return float(statistics.median(getattr(step, name) for step in self._steps))
