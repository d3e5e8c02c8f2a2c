# SPDX-License-Identifier: Apache-2.0
"""Looks at every step of a run for reasons to plan again: `Drift`.

One for each rank, over all plans of its run. The planner shows it the steps and asks what it has
found; it never plans, and never talks to other ranks.
"""

from __future__ import annotations

import collections
import enum
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.offload.activations.placement.plan import Prediction
from megatron.offload.planner.profile.stage_profile import TierProfile, tokens_of
from megatron.offload.sizes import MIB, format_size

OVER_BUDGET = 1.02  # a resident set is known to a page or so, and the allocator rounds
_OVER_BUDGET_OF_DEVICE = 1.005  # an accelerator's allocator counts to the byte
JUDGED_STEPS = 8  # for the time of a step: fewer may be those of a slow moment
_OTHER_TIME = 0.1  # of the predicted step, up or down, in the median of these
_STALLED = 0.1  # of the predicted step, beyond the predicted stall
_LESS_BANDWIDTH, _MORE_BANDWIDTH = 0.5, 2.0  # of the tier's, as it was when the plan was made
_OTHER_PEAK = 0.1  # of the predicted peak, up or down
_LEAST_BYTES = 4 * MIB  # a smaller difference of peaks is the allocator's
_SETTLING_STEPS = 2  # after a new plan: files grow, the read-ahead finds its window
_FIRST_PATIENCE_STEPS = 4


class Reason(enum.Enum):
    """Why to plan again, the most urgent first; the words are for ranks that heard it from others.

    `OVER`, `SLOWER` and `LARGER` are found in what the plan was made from, `UNEXPECTED` in what it
    leads to.
    """

    OVER = "another rank is over its budget"
    SLOWER = "another rank has a tier that has become slow"
    LARGER = "another rank's micro-batches have become larger"
    UNEXPECTED = "another rank's steps go otherwise than planned"


# So many steps in a row must show it: one may have been disturbed.
_IN_A_ROW = {Reason.OVER: 1, Reason.SLOWER: 2, Reason.LARGER: 2, Reason.UNEXPECTED: 2}
# Plans take seconds: what another plan does not remove must wait for up to so many steps under it.
_MOST_PATIENCE_STEPS = {
    Reason.OVER: 64,
    Reason.SLOWER: 0,
    Reason.LARGER: 0,
    Reason.UNEXPECTED: 1024,
}


@dataclass(frozen=True)
class MeasuredStep:
    """One training step of this rank, as it was.

    Attributes:
        step_s: all of it, in seconds.
        stall_s: of it, computing waited for reads or for room to write; None: not measured.
        peak_bytes: most bytes of activations at a time.
        sizes: of its largest micro-batch, see `StageProfile`; empty: not known.
        write_bytes_per_s: by the name of each tier that was written to.
        gap_s: of it, between the passes of two steps, as far as it was known then.
        in_detail: it was noted for a profile.
    """

    step_s: float
    stall_s: float | None
    peak_bytes: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    write_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    gap_s: float = 0.0
    in_detail: bool = False


@dataclass(frozen=True)
class Expectation:
    """What steps under a plan should be like.

    Attributes:
        predicted: for one step.
        sizes: of the micro-batches that the plan was made for.
        tiers: as this rank has measured them for it; the plan counts on the mean of a group, in
            which drives may differ.
        budget_bytes: that the plan keeps to; None: no budget.
        on_host: a resident set is measured, else what an accelerator's allocator has given out.
    """

    predicted: Prediction
    sizes: Mapping[str, int]
    tiers: Sequence[TierProfile]
    budget_bytes: int | None
    on_host: bool = True


class Drift:
    """Compares the steps of a run with what its present plan predicts."""

    def __init__(self) -> None:
        self.num_followed = 0  # steps under the present plan
        self._num_seen = 0  # of them: where compute runs behind, a step is seen after later ones
        # The last of them with micro-batches as it expects, once it had settled.
        self.recent: collections.deque[MeasuredStep] = collections.deque(maxlen=JUDGED_STEPS)
        self._expected: Expectation | None = None
        self._found = dict.fromkeys(Reason, "")
        self._num_in_a_row = dict.fromkeys(Reason, 0)
        self._patience_steps = dict.fromkeys(Reason, 0)  # under a plan, before it is a reason

    def follow(self, expected: Expectation | None) -> None:
        """Compares with a new plan from now on; None: there is nothing to compare with."""
        self._expected = expected
        self.num_followed = self._num_seen = 0
        self.recent.clear()
        self._found = dict.fromkeys(Reason, "")
        self._num_in_a_row = dict.fromkeys(Reason, 0)

    def see(self, *steps: MeasuredStep, judges: bool) -> None:
        """Another step has followed the plan. Compares those that are known by now.

        Args:
            steps: usually one, the last or the one before; none of one that does not count.
            judges: whether what the plan leads to may be a reason.
        """
        self.num_followed += 1
        for step in steps:
            self._compare(step, judges=judges)

    def _compare(self, step: MeasuredStep, *, judges: bool) -> None:
        expected = self._expected
        self._num_seen += 1
        if expected is None:
            return
        tokens, planned_tokens = tokens_of(step.sizes), tokens_of(expected.sizes)
        is_larger = tokens > planned_tokens > 0
        self._note(Reason.OVER, _over_budget(step, expected))
        if self._num_seen <= _SETTLING_STEPS:
            return
        self._note(Reason.SLOWER, _other_bandwidth(step, expected, 0.0, _LESS_BANDWIDTH))
        self._note(Reason.LARGER, _larger(step) if is_larger else "")
        if tokens == planned_tokens or not tokens or not planned_tokens:
            self.recent.append(step)  # those of other sizes do not show what the plan leads to
            if judges:
                self._note(Reason.UNEXPECTED, self._unexpected(step, expected))

    def take(self) -> dict[Reason, str]:
        """What was found since the last call, in words; empty where nothing was."""
        found, self._found = self._found, dict.fromkeys(Reason, "")
        return found

    def planned(self, reason: Reason | None, *, changed: bool) -> None:
        """Lets a reason that planning again does not remove count only after more and more steps.

        Args:
            reason: that it was for; None: none of these.
            changed: whether another plan came of it.
        """
        if changed and reason is not Reason.UNEXPECTED:
            self._patience_steps = dict.fromkeys(Reason, 0)
        elif reason is not None:
            longer = max(2 * self._patience_steps[reason], _FIRST_PATIENCE_STEPS)
            self._patience_steps[reason] = min(longer, _MOST_PATIENCE_STEPS[reason])

    def _note(self, reason: Reason, found: str) -> None:
        self._num_in_a_row[reason] = self._num_in_a_row[reason] + 1 if found else 0
        lasts = self._num_in_a_row[reason] >= _IN_A_ROW[reason]
        if lasts and self.num_followed > self._patience_steps[reason]:
            self._found[reason] = self._found[reason] or found

    def _unexpected(self, step: MeasuredStep, expected: Expectation) -> str:
        predicted = expected.predicted
        stall_s = step.stall_s or 0.0
        if stall_s > predicted.stall_s + _STALLED * predicted.step_s:
            return f"compute waited {stall_s:.3f} s, the plan says {predicted.stall_s:.3f} s"
        median_s = statistics.median(one.step_s for one in self.recent)
        differs = abs(median_s - predicted.step_s) > _OTHER_TIME * predicted.step_s
        if differs and len(self.recent) == JUDGED_STEPS:
            return f"steps take {median_s:.3f} s, the plan says {predicted.step_s:.3f} s"
        difference_bytes = abs(step.peak_bytes - predicted.peak_bytes)
        if difference_bytes > max(_OTHER_PEAK * predicted.peak_bytes, _LEAST_BYTES):
            return (
                f"activations took {format_size(step.peak_bytes)}, the plan says "
                f"{format_size(predicted.peak_bytes)}"
            )
        # Less urgent than one that is slower: a drive may be fast because the plan leaves it alone.
        return _other_bandwidth(step, expected, _MORE_BANDWIDTH, math.inf)


def _over_budget(step: MeasuredStep, expected: Expectation) -> str:
    budget_bytes = expected.budget_bytes
    most = OVER_BUDGET if expected.on_host else _OVER_BUDGET_OF_DEVICE
    if budget_bytes is None or step.peak_bytes <= budget_bytes * most:
        return ""
    return (
        f"activations took {format_size(step.peak_bytes)}, more than the budget of "
        f"{format_size(budget_bytes)}"
    )


def _larger(step: MeasuredStep) -> str:
    sizes = ", ".join(f"{name} {value}" for name, value in step.sizes.items())
    return f"micro-batches have other sizes: {sizes}"


def _other_bandwidth(step: MeasuredStep, expected: Expectation, least: float, most: float) -> str:
    """Which tier is between so many times as fast as it was; empty: none."""
    for tier in expected.tiers:
        speed, before = step.write_bytes_per_s.get(tier.name), tier.write_bytes_per_s
        if speed is not None and least * before < speed < most * before:
            return (
                f"{tier.name} takes {format_size(speed)}/s, it took {format_size(before)}/s "
                "when the plan was made"
            )
    return ""
