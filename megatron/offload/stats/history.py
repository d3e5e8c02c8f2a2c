# SPDX-License-Identifier: Apache-2.0
"""What the steps of a run moved: `StepHistory`, and the few lines that sum it up.

An integration adds each finished step. Memory use does not grow with the run.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Mapping

from megatron.offload.sizes import format_size
from megatron.offload.stats.endurance import Endurance
from megatron.offload.stats.statistics import StepStatistics

# Memory that only the library that allocated it can give back, as the summary names it.
FOREIGN = "PyTorch's allocator does not own"

# Why saved bytes stay, by the name of their counter in `StepStatistics`, for people.
LEFT_ALONE = {
    "small_bytes": "in storages that are too small",
    "kept_bytes": "in layers that the settings or a plan keep in memory",
    "other_device_bytes": "on another device than the one whose activations move",
    "unsupported_bytes": "in subclasses, sparse or nested tensors",
    "held_bytes": "in storages that something else holds",
    "foreign_bytes": f"in memory that {FOREIGN}",
}

_REMEMBERED_STEPS = 1000
_NAMED_OPERATIONS = 3  # in a line of the summary


def replay_line(replayed_bytes: float, unreplayed: Mapping[str, int]) -> str:
    """How much a step computes again of what autograd saves, and what most of the rest is.

    Args:
        replayed_bytes: a step.
        unreplayed: see `StepStatistics.unreplayed_by_operation`.
    """
    all_bytes = replayed_bytes + sum(unreplayed.values())
    text = f"{format_size(replayed_bytes)} of {format_size(all_bytes)} computed again"
    largest = sorted(unreplayed.items(), key=lambda one: -one[1])[:_NAMED_OPERATIONS]
    named = ", ".join(f"{format_size(num_bytes)} of {name}" for name, num_bytes in largest)
    return f"{text}; most of the rest: {named}" if named else text


class StepHistory:
    """The latest steps, and what all of them wrote to the drives."""

    def __init__(self, endurance: Endurance) -> None:
        self.endurance = endurance
        self._steps: collections.deque[StepStatistics] = collections.deque(maxlen=_REMEMBERED_STEPS)
        self._num_steps = 0

    def add(self, step: StepStatistics) -> None:
        """Adds a finished step's counters."""
        self._num_steps += 1
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

        spared = f"{size('deduplicated_bytes')} more were duplicates"
        if self._median("bit_packed_bytes"):
            spared += f", {size('bit_packed_bytes')} spared by moving masks as bits"
        if self._median("replayed_bytes"):
            spared += f", {size('replayed_bytes')} spared by computing it again (replay)"
        if self._median("recast_bytes"):
            spared += f", {size('recast_bytes')} of weights' casts are made again"
        rows = [("offloaded", f"{size('offloaded_bytes')} ({spared})")]
        if self._median("replayed_bytes"):
            makers = self._steps[-1].unreplayed_by_operation
            rows.append(("replay", replay_line(self._median("replayed_bytes"), makers)))
        if self._median("encoded_bytes"):
            text = f"{size('encoded_bytes')} in few bits a value: gradients are approximate"
            rows.append(("codec", text))
        if self._median("host_written_bytes"):
            rows += [
                ("to host", f"{size('host_written_bytes')}, back {size('host_read_bytes')}"),
            ]
        if self._median("written_bytes"):
            rows += [
                ("to SSD", f"{size('written_bytes')} at {size('write_bytes_per_s')}/s"),
                ("from SSD", f"{size('read_bytes')} at {size('read_bytes_per_s')}/s"),
            ]
        rows += [
            ("forwarded", f"{size('forwarded_bytes')} (needed while in memory: no read)"),
            ("rejected", f"{size('rejected_bytes')} (no room on any tier, or a write failed)"),
        ]
        for name, reason in LEFT_ALONE.items():
            if self._median(name):
                rows.append(("left alone", f"{size(name)} ({reason}: stayed)"))
        rows += [
            (
                "stall",
                f"{self._median('stall_s'):.3f} s waiting for reads, "
                f"{self._median('write_wait_s'):.3f} s for writes",
            ),
        ]
        if self._median("reserved_bytes"):
            unused = f"{size('fragmented_bytes')} of it more than tensors took at the peak"
            rows.append(("reserved", f"{size('reserved_bytes')} of device memory, {unused}"))
        rows += [("drive", line) for line in self.endurance.lines()]
        heading = f"activation offload to {where}, median of {len(self._steps)} steps:"
        return "\n".join([heading, *(f"  {name:<12}{text}" for name, text in rows)])

    def _median(self, name: str) -> float:
        return float(statistics.median(getattr(step, name) for step in self._steps))
