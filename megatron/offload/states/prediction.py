# SPDX-License-Identifier: Apache-2.0
"""Predicts the cost of a step whose optimizer states are on tiers: `predict`.

It goes through the buckets as `OptimizerStates.step` does, with a clock instead of a drive: reads
and writes side by side at the rates that the drive has while it does both, the optimizer's work,
and the window. It simulates several steps, because each begins with the memory and the writes that
the previous one left.
"""

from __future__ import annotations

import collections
import statistics
from dataclasses import dataclass

from megatron.offload.moving.order import first_to_stay
from megatron.offload.moving.storage import Where

_NUM_STEPS, _NUM_SETTLING = 6, 2  # steps to simulate; the first of them do not count


@dataclass(frozen=True)
class StatesProfile:
    """What a prediction is made from. Bytes of states, and seconds.

    Attributes:
        bucket_bytes: of each bucket, in the optimizer's order.
        read_bytes_per_s: of the tier, while it also writes.
        write_bytes_per_s: of the tier, while it also reads.
        update_s_per_byte: the optimizer's own work.
        between_s: from the end of one step of the optimizer to the next: forward, backward.
        write_limit_bytes_per_s: the bound on writes that the user has set; None: none.
        prefetch_s: how long before the optimizer's step its first reads may begin.
    """

    bucket_bytes: tuple[int, ...]
    read_bytes_per_s: float
    write_bytes_per_s: float
    update_s_per_byte: float
    between_s: float
    write_limit_bytes_per_s: float | None = None
    prefetch_s: float = 0.0


@dataclass(frozen=True)
class StatesPrediction:
    """A step after the first ones, the mean over both orders of the buckets.

    Attributes:
        step_s: the whole step.
        optimizer_s: the part of it in the optimizer.
        wait_s: the part of that in which the optimizer waits for the tier.
        peak_bytes: most bytes of states in memory.
        between_bytes: peak bytes of states in memory between two steps.
        moved_bytes: read in a step; as many are written.
    """

    step_s: float
    optimizer_s: float
    wait_s: float
    peak_bytes: int
    between_bytes: int
    moved_bytes: float


def predict(profile: StatesProfile, window_bytes: int) -> StatesPrediction:
    """Predicts a step with a window of this size."""
    run = _Run(profile, window_bytes)
    steps = [run.step() for _ in range(_NUM_STEPS)][_NUM_SETTLING:]
    return StatesPrediction(
        step_s=statistics.fmean(one.optimizer_s for one in steps) + profile.between_s,
        optimizer_s=statistics.fmean(one.optimizer_s for one in steps),
        wait_s=statistics.fmean(one.wait_s for one in steps),
        peak_bytes=max(one.peak_bytes for one in steps),
        between_bytes=max(one.between_bytes for one in steps),
        moved_bytes=statistics.fmean(one.moved_bytes for one in steps),
    )


@dataclass(eq=False)
class _Bucket:
    num_bytes: int
    where: Where = Where.ON_TIER
    ends_s: float = 0.0  # when its read ends
    given_s: float = 0.0  # when it was put away


class _Run:
    """Steps of an optimizer, on a clock of its own. The words are those of `OptimizerStates`."""

    def __init__(self, profile: StatesProfile, window_bytes: int) -> None:
        self._profile = profile
        self._window_bytes = window_bytes
        self._buckets = [_Bucket(size) for size in profile.bucket_bytes]
        self._memory_bytes = 0
        self._writes: collections.deque[_Bucket] = collections.deque()  # one after the other
        self._writes_from_s = 0.0  # when the first of them may start
        self._read_until_s = 0.0  # when the last read ends; reads run one after the other too
        self._now_s = 0.0
        self._goes_up = False

    def step(self) -> StatesPrediction:
        """Simulates forward and backward, then the optimizer."""
        profile = self._profile
        self._go_on_until(self._now_s + max(profile.between_s - profile.prefetch_s, 0.0))
        self._goes_up = not self._goes_up
        buckets = self._buckets if self._goes_up else self._buckets[::-1]
        if profile.prefetch_s:
            self._read_ahead(collections.deque(b for b in buckets if b.where is Where.ON_TIER))
            self._go_on_until(self._now_s + profile.prefetch_s)
        between_bytes = self._memory_bytes
        began_s, waited_s = self._now_s, 0.0
        stays = first_to_stay([one.num_bytes for one in buckets], self._window_bytes)
        moved_bytes, peak_bytes = 0, self._memory_bytes
        ahead = collections.deque(buckets)
        for index, bucket in enumerate(buckets):
            is_away = bucket.where in (Where.ON_TIER, Where.READING)
            moved_bytes += bucket.num_bytes * is_away
            self._read_ahead(ahead)
            waited_s -= self._now_s
            self._bring(bucket, ahead)
            waited_s += self._now_s
            while ahead and ahead[0].where is not Where.ON_TIER:
                ahead.popleft()
            peak_bytes = max(peak_bytes, self._memory_bytes)
            self._go_on_until(self._now_s + bucket.num_bytes * profile.update_s_per_byte)
            if index < stays:
                bucket.where, bucket.given_s = Where.WRITING, self._now_s
                self._writes.append(bucket)
        optimizer_s = self._now_s - began_s
        return StatesPrediction(0.0, optimizer_s, waited_s, peak_bytes, between_bytes, moved_bytes)

    def _read_ahead(self, ahead: collections.deque[_Bucket]) -> None:
        while ahead:
            self._take_back(ahead[0])
            if ahead[0].where is Where.ON_TIER:
                if self._memory_bytes + ahead[0].num_bytes > self._window_bytes:
                    return
                self._begin_read(ahead[0])
            ahead.popleft()

    def _bring(self, bucket: _Bucket, ahead: collections.deque[_Bucket]) -> None:
        self._take_back(bucket)
        if bucket.where is Where.ON_TIER:
            while self._memory_bytes + bucket.num_bytes > self._window_bytes and self._writes:
                self._go_on_until(max(self._now_s, self._first_write()[1]))
            self._begin_read(bucket)
        if bucket.where is Where.READING:
            while self._writes and self._first_write()[1] < bucket.ends_s:
                self._go_on_until(max(self._now_s, self._first_write()[1]))
                self._read_ahead(ahead)  # the write has made room
            self._go_on_until(max(self._now_s, bucket.ends_s))
            bucket.where = Where.IN_MEMORY

    def _take_back(self, bucket: _Bucket) -> None:
        if bucket.where is not Where.WRITING:
            return
        if bucket is self._writes[0] and self._first_write()[0] < self._now_s:
            self._writes_from_s = self._after(bucket, self._first_write()[0])
        self._writes.remove(bucket)
        bucket.where = Where.IN_MEMORY

    def _begin_read(self, bucket: _Bucket) -> None:
        self._memory_bytes += bucket.num_bytes
        seconds = bucket.num_bytes / self._profile.read_bytes_per_s
        self._read_until_s = max(self._read_until_s, self._now_s) + seconds
        bucket.where, bucket.ends_s = Where.READING, self._read_until_s

    def _first_write(self) -> tuple[float, float]:
        """When the first write begins and ends."""
        first = self._writes[0]
        begin_s = max(self._writes_from_s, first.given_s)
        return begin_s, begin_s + first.num_bytes / self._profile.write_bytes_per_s

    def _after(self, bucket: _Bucket, began_s: float) -> float:
        """When the next write may begin."""
        rate = self._profile.write_bytes_per_s
        limit = self._profile.write_limit_bytes_per_s or rate
        return began_s + bucket.num_bytes / min(rate, limit)

    def _go_on_until(self, then_s: float) -> None:
        """Moves the clock; writes that end meanwhile make room."""
        while self._writes and self._first_write()[1] <= then_s:
            first = self._writes[0]
            self._writes_from_s = self._after(first, self._first_write()[0])
            self._writes.popleft()
            first.where = Where.ON_TIER
            self._memory_bytes -= first.num_bytes
        self._now_s = then_s


def best_window(
    profile: StatesProfile, most_bytes: int, *, within: float = 0.01
) -> tuple[int, StatesPrediction]:
    """The smallest window whose step is slower than that of the largest by at most `within`.

    Args:
        profile: of the states.
        most_bytes: what states may take; the window is at least two buckets anyway.
        within: fraction of the step's time.
    """
    sizes = windows(profile, most_bytes)
    limit_s = predict(profile, sizes[-1]).step_s * (1 + within)
    low, high = 0, len(sizes) - 1  # a larger window is never slower
    while low < high:
        middle = (low + high) // 2
        if predict(profile, sizes[middle]).step_s <= limit_s:
            high = middle
        else:
            low = middle + 1
    return sizes[low], predict(profile, sizes[low])


def windows(profile: StatesProfile, most_bytes: int) -> list[int]:
    """Windows to choose among: from two buckets to `most_bytes`, or to what can be used."""
    largest = max(profile.bucket_bytes, default=0)
    useful_bytes = sum(profile.bucket_bytes) + largest  # one is moved beside those that stay
    most_bytes = max(min(most_bytes, useful_bytes), 2 * largest)
    return [*range(2 * largest, most_bytes, max(largest, 1)), most_bytes]


def hiding_factor(profile: StatesProfile, found: StatesPrediction, cost: float = 0.05) -> float:
    """How many times the tokens a step needs for states to cost at most this fraction of it.

    The time to move states does not depend on tokens; the time of layers is proportional to them.
    At most 1: the step is long enough already.
    """
    own_s = sum(profile.bucket_bytes) * profile.update_s_per_byte
    extra_s = found.optimizer_s - own_s
    return extra_s / (cost * max(profile.between_s + own_s, 1e-9))
