# SPDX-License-Identifier: Apache-2.0
"""From a few measured runs to the longest that fits: `Curve`, `search`.

Nothing here starts a process.

Note [How a peak grows]
What a step keeps grows with the number of tokens, and with its square where attention keeps scores.
It grows by another rule where a threshold is passed: a loss is computed in chunks, an MLP in tiles,
a storage becomes large enough to move. So a prediction is trusted no further than `_REACH` times
beyond what was measured: until it lies within that, a longer run is measured, and the runs at the
end of the curve count. That run is to keep to the budget even if from here on memory grows with the
square, unless it would be hardly longer than the one before.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron.offload.commands.training_runs.run import RunError

_REACH = 1.5
_STRIDE, _LEAST_STRIDE = 4, 1.5  # a run is so many times as long as the one before
_NEARLY = 1.1  # below a run that failed; nothing in between is tried
_LONGER = 0.02  # a run that should not fit is longer by this part, or by a multiple


@dataclass(frozen=True)
class Measured:
    """A training of one length.

    Attributes:
        number: tokens, samples or layers.
        peak_bytes: of device memory, whatever it holds.
        step_s: of its last step.
        tokens_per_s: likewise.
    """

    number: int
    peak_bytes: int
    step_s: float
    tokens_per_s: float = 0.0


class Curve:
    """Peak memory by length, through the last three runs, or two.

    Args:
        runs: at least two, of different lengths.
    """

    def __init__(self, runs: list[Measured]) -> None:
        ordered = sorted(runs, key=lambda one: one.number)
        self.longest = ordered[-1].number
        before, last = ordered[-2:]
        self._last = last
        self._slope = _slope(before, last)
        self._bend = 0.0
        if len(ordered) > 2:
            bend = (self._slope - _slope(*ordered[-3:-1])) / (last.number - ordered[-3].number)
            self._bend = max(bend, 0.0)  # less than straight is a threshold that was passed
        self._bent_from = before.number

    def peak_bytes(self, number: float) -> float:
        """What a run of this length should take."""
        beyond = number - self._last.number
        bent = self._bend * beyond * (number - self._bent_from)
        return self._last.peak_bytes + self._slope * beyond + bent

    def safe_within(self, budget_bytes: int) -> float:
        """A length that keeps to a budget even if memory grows with its square from here on."""
        last = self._last.number
        if not self._slope:
            return math.inf
        # Of slope * (n - last) * n / last = room, the larger root.
        room = max(budget_bytes - self._last.peak_bytes, 0) / self._slope
        return last / 2 + math.sqrt(last**2 / 4 + room * last)

    def longest_within(self, budget_bytes: int, multiple: int, most: int) -> int:
        """The longest run, a multiple of `multiple`, that keeps to a budget; 0: none does."""
        lengths = range(multiple, most + 1, multiple)
        return multiple * bisect.bisect_right(lengths, float(budget_bytes), key=self.peak_bytes)


def _slope(before: Measured, last: Measured) -> float:
    rise = (last.peak_bytes - before.peak_bytes) / (last.number - before.number)
    return max(rise, 0.0)


@dataclass(frozen=True)
class Found:
    """What a way comes to.

    Attributes:
        runs: by length.
        longest: that should fit; 0: not even the shortest run did. `most` where nothing ends it.
        predicted_bytes: its peak.
        checked: the run of that length; None: not asked for.
        error: how far the first prediction was from the run of its length, as a part of that, also
            where that run took more than the budget and a shorter one was looked for; likewise.
        next_run: a run that is a little longer, and should not fit; likewise.
        failure: what went wrong; empty: nothing.
    """

    runs: list[Measured]
    longest: int
    predicted_bytes: float
    checked: Measured | None = None
    error: float | None = None
    next_run: Measured | None = None
    failure: str = ""


def search(
    measure: Callable[[int], Measured],
    *,
    first: int,
    multiple: int,
    most: int,
    budget_bytes: int,
) -> Found:
    """Measures longer and longer runs, until the longest that fits is within reach of one.

    Args:
        measure: trains with a length; raises RunError where that fails.
        first: the shortest length that is measured, a multiple of `multiple`.
        multiple: lengths are multiples of this.
        most: no longer run is measured or named; a multiple too, larger than `first`.
        budget_bytes: device memory that a run may take.

    Raises:
        RunError: the shortest run failed.
    """
    runs = [measure(first)]
    if runs[0].peak_bytes > budget_bytes:
        return Found(runs, 0, runs[0].peak_bytes, failure=f"{first} do not fit")
    failure, number = "", min(2 * first, most)
    while True:
        try:
            runs.append(measure(number))
        except RunError as error:  # as a rule there was not enough memory
            failure = f"{number:,}: {str(error).splitlines()[-1]}"
            most = number - multiple
        last = runs[-1].number
        if failure and most < last * _NEARLY:
            return Found(runs, last, runs[-1].peak_bytes, failure=failure)
        if failure:
            number = _multiple((last + most) / 2, multiple)
            if number <= last:
                return Found(runs, last, runs[-1].peak_bytes, failure=failure)
            continue
        curve = Curve(runs)
        longest = curve.longest_within(budget_bytes, multiple, most)
        if longest <= last * _REACH or last >= most:
            return Found(runs, longest, curve.peak_bytes(longest))
        far = min(longest / _REACH, last * _STRIDE, curve.safe_within(budget_bytes))
        # Runs of nearly the same length would say little of how memory grows.
        far = max(far, last * _LEAST_STRIDE)
        number = min(max(_multiple(far, multiple), last + multiple), most)


def check(
    found: Found, measure: Callable[[int], Measured], *, multiple: int, budget_bytes: int
) -> Found:
    """Runs the longest that should fit, shorter ones until one does, and one that is longer.

    Args:
        found: from `search`, with a longest run.
        measure, multiple, budget_bytes: as in `search`.
    """
    runs = {one.number: one for one in found.runs}
    length, predicted_bytes, error = found.longest, found.predicted_bytes, None

    def run_of(number: int) -> Measured:
        if number not in runs:
            runs[number] = measure(number)
        return runs[number]

    try:
        while True:
            one = run_of(length)
            if error is None:
                error = predicted_bytes / one.peak_bytes - 1
            if one.peak_bytes <= budget_bytes:
                break
            curve = Curve(list(runs.values()))
            shorter = curve.longest_within(budget_bytes, multiple, length - multiple)
            length = max(shorter, min(runs))
            predicted_bytes = curve.peak_bytes(length)
        found = replace(
            found, longest=length, predicted_bytes=predicted_bytes, checked=one, error=error
        )
        steps = max(round(length * _LONGER / multiple), 1)
        return replace(found, next_run=run_of(length + steps * multiple))
    except RunError as failed:
        return replace(found, error=error, failure=str(failed).splitlines()[-1])


def _multiple(number: float, multiple: int) -> int:
    return max(int(number) // multiple, 1) * multiple
