# SPDX-License-Identifier: Apache-2.0
"""What steps of an optimizer took whose states are on tiers: `StatesStep`, filled by `StatesMeter`.

`OptimizerStates` tells where a step stands; reports and predictions read the last steps.
"""

from __future__ import annotations

import collections
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.offload.device.device import Device
from megatron.offload.tiers.tier import Tier

_REMEMBERED_STEPS = 1000


@dataclass
class StatesStep:
    """One step of one optimizer. Bytes of states, and seconds.

    Attributes:
        between_s: from the end of the step before until this one: forward, backward and all else.
        prefetch_s: of it, since the step's first reads were asked for.
        step_s: of the step.
        wait_s: of it, until buckets had been read, and until writes had made room for them.
        update_s: of it, for the optimizer's own work, as the device saw it.
        updated_bytes: of states that were updated.
        read_bytes: since the step before began.
        written_bytes: likewise; the writes of this step go on after it and count to the next one.
        peak_bytes: the most that was in memory at a time.
    """

    between_s: float = 0.0
    prefetch_s: float = 0.0
    step_s: float = 0.0
    wait_s: float = 0.0
    update_s: float = 0.0
    updated_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    peak_bytes: int = 0


class StatesMeter:
    """Takes the time of the parts of each step. Only the thread that trains calls it.

    Args:
        device: where the optimizer's step runs.
        tiers: whose bytes are counted.
        memory_bytes: of states, at present.
    """

    def __init__(
        self, device: Device, tiers: Sequence[Tier], memory_bytes: Callable[[], int]
    ) -> None:
        self.steps: collections.deque[StatesStep] = collections.deque(maxlen=_REMEMBERED_STEPS)
        self.num_steps = 0
        self.seconds = 0.0  # of all steps, and between them
        self._device = device
        self._tiers = tiers
        self._memory_bytes = memory_bytes
        self._step = StatesStep()
        self._updates: list[tuple[Any, Any]] = []  # begin and end, timestamps of the device
        self._ended_s: float | None = None
        self._prefetched_s: float | None = None
        self._moved = (0, 0)

    def prefetch(self) -> None:
        """The next step's first reads are asked for; the first time since the last step counts."""
        if self._prefetched_s is None:
            self._prefetched_s = time.perf_counter()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a step of the optimizer."""
        self._read_updates()
        began_s = time.perf_counter()
        read, written = self._moved_bytes()
        self._step = step = StatesStep(
            between_s=began_s - self._ended_s if self._ended_s is not None else 0.0,
            prefetch_s=began_s - (self._prefetched_s or began_s),
            read_bytes=read - self._moved[0],
            written_bytes=written - self._moved[1],
            peak_bytes=self._memory_bytes(),
        )
        self._moved = (read, written)
        yield
        self._ended_s, self._prefetched_s = time.perf_counter(), None
        step.step_s = self._ended_s - began_s
        self.num_steps += 1
        self.seconds += step.between_s + step.step_s
        self.steps.append(step)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what may wait for the tiers."""
        began_s = time.perf_counter()
        yield
        self._step.wait_s += time.perf_counter() - began_s
        self._step.peak_bytes = max(self._step.peak_bytes, self._memory_bytes())

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Around the optimizer's own work for one bucket."""
        began = self._device.timestamp()
        yield
        self._updates.append((began, self._device.timestamp()))

    def updated(self, num_bytes: int) -> None:
        """So many bytes of states are up to date."""
        self._step.updated_bytes += num_bytes

    def pause(self) -> None:
        """What follows until the next step is no training: a checkpoint, evaluation."""
        self._ended_s = None

    def settled(self) -> list[StatesStep]:
        """The steps but the first, which makes the states, and the second if there are more."""
        self._read_updates()
        unsettled = min(2, self.num_steps - 1) - (self.num_steps - len(self.steps))
        return list(self.steps)[max(0, unsettled) :]

    def median(self, name: str) -> float:
        """Of a field of the settled steps; 0 before there are any."""
        found = [getattr(step, name) for step in self.settled()]
        return float(statistics.median(found)) if found else 0.0

    def _read_updates(self) -> None:
        """Once the device is through with them: it has to wait for nothing between steps."""
        updates, self._updates = self._updates, []
        if self.steps and updates:
            self.steps[-1].update_s = sum(self._device.seconds_between(*one) for one in updates)

    def _moved_bytes(self) -> tuple[int, int]:
        """Read and written since the tiers were opened."""
        statistics_of = [tier.statistics for tier in self._tiers]
        return (
            sum(one.reads.total_bytes for one in statistics_of),
            sum(one.writes.total_bytes for one in statistics_of),
        )
