# SPDX-License-Identifier: Apache-2.0
"""Whether a run still is as its plan took it to be: `Drift`.

The planner shows it every step. It compares and remembers; what follows is the planner's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.offload.config import MIB, format_size
from megatron.offload.placement.plan import Prediction
from megatron.offload.planner.profile.interpolation import tokens_of
from megatron.offload.planner.profile.stage_profile import TierProfile

_PATIENCE = 2  # steps in a row that must differ: one may have been disturbed
_PATIENCE_WITH_SMALLER = 32  # where sizes vary from step to step, a plan is for the larger ones
_OTHER_TIME = 0.1  # of the predicted step, up or down, in the median of some steps
JUDGED_STEPS = 8  # for it: fewer may be those of a slow moment
_STALLED = 0.1  # of the predicted step, beyond the predicted stall
_LESS_BANDWIDTH, _MORE_BANDWIDTH = 0.5, 2.0  # of the tier's, as it was when the plan was made
_OTHER_PEAK = 0.1  # of the predicted peak, up or down
_LEAST_BYTES = 4 * MIB  # a smaller difference of peaks is the allocator's
OVER_BUDGET = 1.02  # a resident set is known to a page or so, and the allocator rounds


@dataclass(frozen=True)
class MeasuredStep:
    """One step as it was."""

    step_s: float
    stall_s: float
    peak_bytes: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    write_bytes_per_s: Mapping[str, float] = field(default_factory=dict)  # by tier


class Drift:
    """Compares steps with one plan.

    Args:
        predicted: of the plan.
        sizes: of the micro-batches that it was made for.
        tiers: as this rank has measured them for it; the plan counts on the mean of a group, in
            which drives may differ.
        budget_bytes: that it keeps to; None: no budget.
        usual: times the predicted step, what it takes where planning again changed nothing.
    """

    def __init__(
        self,
        predicted: Prediction,
        sizes: Mapping[str, int],
        tiers: Sequence[TierProfile],
        budget_bytes: int | None,
        usual: float = 1.0,
    ) -> None:
        self._predicted = predicted
        self._sizes = dict(sizes)
        self._tiers = tiers
        self._budget_bytes = budget_bytes
        self._usual = usual
        self._num_causes = self._num_effects = self._num_smaller = 0  # in a row

    def over_budget(self, step: MeasuredStep) -> str:
        """Why memory has to be saved at once; empty: it has not."""
        budget_bytes = self._budget_bytes
        if budget_bytes is None or step.peak_bytes <= budget_bytes * OVER_BUDGET:
            return ""
        return (
            f"activations took {format_size(step.peak_bytes)}, more than the budget of "
            f"{format_size(budget_bytes)}"
        )

    def cause(self, step: MeasuredStep) -> str:
        """What the plan was made from and is no longer so, for some steps now; empty: all is."""
        reason = self._cause(step)
        self._num_causes = self._num_causes + 1 if reason else 0
        return reason if self._num_causes >= _PATIENCE else ""

    def smaller(self, step: MeasuredStep) -> str:
        """What it was made for and has not been seen for many steps now; empty: all was."""
        is_smaller = tokens_of(step.sizes) < tokens_of(self._sizes)
        self._num_smaller = self._num_smaller + 1 if is_smaller and step.sizes else 0
        return _other_sizes(step) if self._num_smaller >= _PATIENCE_WITH_SMALLER else ""

    def is_comparable(self, step: MeasuredStep) -> bool:
        """Whether the step shows what the plan led to: its micro-batches have the plan's sizes."""
        return not step.sizes or not self._sizes or dict(step.sizes) == self._sizes

    def effect(self, step: MeasuredStep, recent_s: Sequence[float]) -> str:
        """What it led to and was not expected, for some steps now; empty: all was.

        Args:
            step: the last one that is comparable.
            recent_s: what it and those before it took, `JUDGED_STEPS` of them or fewer.
        """
        reason = self._effect(step, recent_s)
        self._num_effects = self._num_effects + 1 if reason else 0
        return reason if self._num_effects >= _PATIENCE else ""

    def _cause(self, step: MeasuredStep) -> str:
        is_smaller = tokens_of(step.sizes) < tokens_of(self._sizes)
        if not self.is_comparable(step) and not is_smaller:
            return _other_sizes(step)
        return self._other_bandwidth(step, 0.0, _LESS_BANDWIDTH)

    def _effect(self, step: MeasuredStep, recent_s: Sequence[float]) -> str:
        expected = self._predicted
        predicted_s = expected.step_s * self._usual
        if step.stall_s > expected.stall_s + _STALLED * predicted_s:
            return f"compute waited {step.stall_s:.3f} s, the plan says {expected.stall_s:.3f} s"
        median_s = statistics.median(recent_s)
        differs = abs(median_s - predicted_s) > _OTHER_TIME * predicted_s
        if differs and len(recent_s) == JUDGED_STEPS:
            return f"steps take {median_s:.3f} s, the plan says {expected.step_s:.3f} s"
        difference_bytes = abs(step.peak_bytes - expected.peak_bytes)
        if difference_bytes > max(_OTHER_PEAK * expected.peak_bytes, _LEAST_BYTES):
            return (
                f"activations took {format_size(step.peak_bytes)}, the plan says "
                f"{format_size(expected.peak_bytes)}"
            )
        # No cause: a drive may be fast because the plan leaves it alone.
        return self._other_bandwidth(step, _MORE_BANDWIDTH, math.inf)

    def _other_bandwidth(self, step: MeasuredStep, least: float, most: float) -> str:
        """Which tier is between so many times as fast as it was; empty: none."""
        for tier in self._tiers:
            speed = step.write_bytes_per_s.get(tier.name)
            expected = tier.write_bytes_per_s
            if speed is not None and least * expected < speed < most * expected:
                return (
                    f"{tier.name} takes {format_size(speed)}/s, it took "
                    f"{format_size(expected)}/s when the plan was made"
                )
        return ""


def _other_sizes(step: MeasuredStep) -> str:
    sizes = ", ".join(f"{name} {value}" for name, value in step.sizes.items())
    return f"micro-batches have other sizes: {sizes}"
