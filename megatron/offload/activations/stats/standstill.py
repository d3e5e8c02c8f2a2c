# SPDX-License-Identifier: Apache-2.0
"""Says once that transfers do not hide behind compute, and by how much: `Standstill`.

`TrainingSteps` shows it the first steps. Plans know what they cost: with `auto` it is not asked.
"""

from __future__ import annotations

import functools
import statistics

from megatron.offload.activations.stats.compute_waits import ComputeWaits, StepWaits
from megatron.offload.device.clock import Moment

LARGE = 0.1  # of a step; less is what people who save memory expect to pay
_UNLIKE_OTHERS = 2  # steps: memory comes from the system, is page-locked, and files grow
_JUDGED_STEPS = 4


class Standstill:
    """Compares what the first steps waited for transfers with what they took.

    Args:
        waits: of the engine.
        what: stands still, for people.
    """

    def __init__(self, waits: ComputeWaits, what: str) -> None:
        self._waits = waits
        self._what = what
        self._began: Moment | None = None
        self._num_steps = 0
        self._seen: list[tuple[float, float]] = []  # seconds of a step, and of them waited
        self._sentence: str | None = None

    def begin_step(self) -> None:
        """A step begins, so the last one is over; its optimizer and its data belong to it."""
        if len(self._seen) == _JUDGED_STEPS:
            return
        self._waits.clock.read()
        before, self._began = self._began, self._waits.clock.now()
        step = self._waits.step
        if before is not None and step is not None:
            self._waits.clock.tell(before, self._began, functools.partial(self._see, step))

    def pause(self) -> None:
        """What follows until the next step is no part of one."""
        self._began = None

    def _see(self, step: StepWaits, seconds: float) -> None:
        self._num_steps += 1
        if self._num_steps <= _UNLIKE_OTHERS or len(self._seen) == _JUDGED_STEPS:
            return
        self._seen.append((seconds, step.seconds))
        if len(self._seen) < _JUDGED_STEPS:
            return
        step_s, waited_s = (statistics.median(column) for column in zip(*self._seen, strict=True))
        if waited_s >= LARGE * step_s:
            self._sentence = (
                f"activation offload: {self._what} stood still {waited_s / step_s:.0%} of the step "
                f"for transfers ({waited_s:.3f} s of {step_s:.3f} s); they do not hide behind what "
                "it computes: use auto, which moves what hides, or offload fewer layers"
            )

    def sentence(self) -> str | None:
        """What is to be said, once; None: nothing."""
        sentence, self._sentence = self._sentence, None
        return sentence
