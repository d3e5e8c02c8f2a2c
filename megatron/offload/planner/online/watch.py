# SPDX-License-Identifier: Apache-2.0
"""Looks at every step of a run for reasons to plan again: `Watch`.

`Drift` compares with one plan; what is remembered from one plan to the next is here. What follows
is the planner's.
"""

from __future__ import annotations

import collections
import enum

from megatron.offload.planner.online.drift import JUDGED_STEPS, Drift, MeasuredStep

_SETTLING_STEPS = 2  # after a new plan: files grow, the read-ahead finds its window
_FIRST_PATIENCE_STEPS = 4


class Reason(enum.Enum):
    """Why to plan again, the most urgent first. In the words of who has heard of it from others."""

    OVER = "another rank is over its budget"
    CAUSE = "another rank has noticed a change"
    SMALLER = "another rank's micro-batches have become smaller"
    EFFECT = "another rank's steps go otherwise than planned"


# Plans take seconds.
_MOST_PATIENT_STEPS = {
    Reason.OVER: 64,
    Reason.CAUSE: 0,
    Reason.SMALLER: 1024,
    Reason.EFFECT: 1024,
}


class Watch:
    """Of one rank, over all plans of its run."""

    def __init__(self) -> None:
        self.num_followed = 0  # steps under the present plan
        # The last of them with micro-batches as it expects, once it had settled.
        self.recent: collections.deque[MeasuredStep] = collections.deque(maxlen=JUDGED_STEPS)
        self._drift: Drift | None = None
        self._found = dict.fromkeys(Reason, "")
        self._patient_steps = dict.fromkeys(Reason, 0)  # so long it is no reason

    def follow(self, drift: Drift | None) -> None:
        """A new plan. None: there is nothing to compare with it."""
        self._drift = drift
        self.num_followed = 0
        self.recent.clear()
        self.take()

    def see(self, step: MeasuredStep | None, *, with_effects: bool) -> None:
        """A step that has followed the plan; with None only that there was one.

        Args:
            with_effects: whether what the plan leads to may be a reason.
        """
        self.num_followed += 1
        if self._drift is None or step is None:
            return
        self._note(Reason.OVER, self._drift.over_budget(step))
        if self.num_followed > _SETTLING_STEPS:
            self._note(Reason.CAUSE, self._drift.cause(step))
            self._note(Reason.SMALLER, self._drift.smaller(step))
            if not self._drift.is_comparable(step):
                return
            self.recent.append(step)
            if with_effects:
                recent_s = [one.step_s for one in self.recent]
                self._note(Reason.EFFECT, self._drift.effect(step, recent_s))

    def _note(self, reason: Reason, found: str) -> None:
        if self.num_followed > self._patient_steps[reason]:
            self._found[reason] = self._found[reason] or found

    def take(self) -> dict[Reason, str]:
        """What was found since the last time, in words; empty: nothing."""
        found, self._found = self._found, dict.fromkeys(Reason, "")
        return found

    def planned(self, reason: Reason | None, *, changed: bool) -> None:
        """What planning again does not help against, or may not, is a reason more and more rarely.

        Args:
            reason: that it was for; None: none of these.
            changed: whether another plan came of it.
        """
        if changed and reason in (None, Reason.OVER, Reason.CAUSE):
            with_smaller = self._patient_steps[Reason.SMALLER]  # sizes may vary for ever
            self._patient_steps = {**dict.fromkeys(Reason, 0), Reason.SMALLER: with_smaller}
        elif reason is not None:
            longer = max(2 * self._patient_steps[reason], _FIRST_PATIENCE_STEPS)
            self._patient_steps[reason] = min(longer, _MOST_PATIENT_STEPS[reason])
