# SPDX-License-Identifier: Apache-2.0
"""Times and bytes of steps whose optimizer states are on tiers: `StatesStep`, `StatesMeter`.

`OptimizerStates` calls the meter during a step; reports and predictions read the last steps.
"""

from __future__ import annotations

import collections
import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron.offload.device.clock import Clock, Moment
from megatron.offload.device.device import Device
from megatron.offload.errors import STATES_PREFIX
from megatron.offload.tiers.tier import Tier

_REMEMBERED_STEPS = 1000
_WAIT = f"wait for {STATES_PREFIX.removesuffix(': ')}"  # named as by `OnlyCopy`
_WHOLE = ("between_s", "step_s")


@dataclass
class StatesStep:
    """One step of one optimizer. Bytes of states, and seconds of the device that steps.

    Attributes:
        between_s: from the end of the previous step to this one: forward, backward and the rest,
            also evaluation. So predictions use the median of several steps.
        prefetch_s: the part of it since the step's first reads were queued.
        step_s: the step.
        wait_s: the part of it in which it waits for reads, or for writes to make room.
        update_s: the part of it in the optimizer's own work.
        updated_bytes: of states that were updated.
        read_bytes: since the previous step began.
        written_bytes: likewise; writes of this step end after it and count in the next one.
        peak_bytes: most bytes of states in memory.
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
    """Measures the parts of each step. Only the thread that trains calls it.

    Args:
        device: where the optimizer's step runs.
        tiers: whose bytes are counted.
        memory_bytes: returns the bytes of states in memory.
    """

    def __init__(
        self, device: Device, tiers: Sequence[Tier], memory_bytes: Callable[[], int]
    ) -> None:
        self.steps: collections.deque[StatesStep] = collections.deque(maxlen=_REMEMBERED_STEPS)
        self.num_steps = 0
        self._device = device
        self._clock = Clock(device)
        self._tiers = tiers
        self._memory_bytes = memory_bytes
        self._step = StatesStep()
        self._seconds = 0.0  # of all steps, and of the time between them
        self._stall_s = 0.0  # of all steps
        self._ended: Moment | None = None
        self._prefetched: Moment | None = None
        self._moved = (0, 0)

    def prefetch(self) -> None:
        """The next step's first reads were queued; counts the first call since the last step."""
        if self._prefetched is None:
            self._prefetched = self._clock.now()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A context around a step of the optimizer."""
        self._clock.read()
        began = self._clock.now()
        read, written = self._moved_bytes()
        self._step = step = StatesStep(
            read_bytes=read - self._moved[0],
            written_bytes=written - self._moved[1],
            peak_bytes=self._memory_bytes(),
        )
        for name, since in (("between_s", self._ended), ("prefetch_s", self._prefetched)):
            if since is not None:
                self._clock.tell(since, began, self._adds_to(step, name))
        self._moved = (read, written)
        yield
        self._ended, self._prefetched = self._clock.now(), None
        self._clock.tell(began, self._ended, self._adds_to(step, "step_s"))
        self.num_steps += 1
        self.steps.append(step)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A context around calls that may wait for the tiers; profiles show it."""
        waits = self._clock.timed(self._adds_to(self._step, "wait_s"))
        with waits, self._device.annotate(_WAIT):
            yield
        self._step.peak_bytes = max(self._step.peak_bytes, self._memory_bytes())

    def updating(self) -> contextlib.AbstractContextManager[None]:
        """A context around the optimizer's own work for one bucket."""
        return self._clock.timed(self._adds_to(self._step, "update_s"))

    def _adds_to(self, step: StatesStep, name: str) -> Callable[[float], None]:
        def hear(seconds: float) -> None:
            setattr(step, name, getattr(step, name) + seconds)
            self._seconds += seconds * (name in _WHOLE)
            self._stall_s += seconds * (name == "wait_s")

        return hear

    def updated(self, num_bytes: int) -> None:
        """This many bytes of states are updated."""
        self._step.updated_bytes += num_bytes

    @property
    def seconds(self) -> float:
        """Seconds of all steps, and of the time between them."""
        self._clock.wait()
        return self._seconds

    @property
    def stall_s(self) -> float:
        """Seconds that steps have waited for tiers, up to where the device is now."""
        self._clock.read()
        return self._stall_s

    def settled(self) -> list[StatesStep]:
        """All steps but the first, which makes the states, and the second if there are more."""
        self._clock.wait()  # between steps the device has finished them
        unsettled = min(2, self.num_steps - 1) - (self.num_steps - len(self.steps))
        return list(self.steps)[max(0, unsettled) :]

    def median(self, name: str) -> float:
        """The median of a field over the settled steps; 0 before there are any."""
        found = [getattr(step, name) for step in self.settled()]
        return float(statistics.median(found)) if found else 0.0

    def _moved_bytes(self) -> tuple[int, int]:
        """Bytes read and written since the tiers were opened."""
        statistics_of = [tier.statistics for tier in self._tiers]
        return (
            sum(one.reads.total_bytes for one in statistics_of),
            sum(one.writes.total_bytes for one in statistics_of),
        )
