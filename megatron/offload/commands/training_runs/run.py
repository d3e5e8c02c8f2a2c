# SPDX-License-Identifier: Apache-2.0
"""One training that was measured, and how two of them compare: `Variant`, `Run`.

Times are compared within a round, or within a turn of it, so that a machine that is slower for a
while slows both. `megatron-offload rok` and the comparisons in `tools/` use it. Nothing here starts
a process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

COMPARED_FIELDS = ("loss", "grad_norm", "model")

_V = TypeVar("_V")


class RunError(Exception):
    """A comparison that cannot be made; the message is the sentence to print."""


@dataclass(frozen=True)
class Variant:
    """A placement with the allocator settings it runs under: "default", "offload" or "tight".

    The last is as "offload", but that freed memory goes back to the system at once: its peaks are
    lower, and its steps slower.
    """

    placement: str
    allocator: str

    @property
    def name(self) -> str:
        """The variant as written in tables and in file names."""
        return f"{self.placement}@{self.allocator}"


def settled_steps(steps: Sequence[dict[str, Any]], skip: int) -> list[dict[str, Any]]:
    """The steps that count: all after the first `skip`; with `auto`, those of its last plan.

    Of these the first does not count, after which the plan was made: it shows the plan's prediction
    but did not follow it; nor do the `skip` steps after that.
    """
    num_plans = steps[-1].get("offload", {}).get("plans") if steps else None
    if num_plans is None:
        return list(steps[skip:])
    if num_plans == 0:
        return []
    followed = [step for step in steps if step["offload"]["plans"] == num_plans]
    return followed[1 + skip :]


@dataclass(frozen=True)
class Run:
    """One training that was measured, and the figures that are drawn from it.

    Attributes:
        round: in which it ran.
        steps: the lines of its metrics.jsonl.
        first_turn: how many steps it took before the trainings of its round began to take turns;
            None: they did not.
        steps_a_turn: of which the last one counts. While others have their turns, an allocator
            gives memory back that it would have had for the next step.
    """

    variant: Variant
    round: int
    steps: list[dict[str, Any]]
    first_turn: int | None = None
    steps_a_turn: int = 1

    def settled_steps(self, skip: int) -> list[dict[str, Any]]:
        """The steps that count: see the function; only those in turns, if turns were taken."""
        settled = settled_steps(self.steps, skip)
        if self.first_turn is None:
            return settled
        in_turns = [one for one in settled if int(one["step"]) > self.first_turn]
        last = self.steps_a_turn - 1
        return [one for one in in_turns if self._in_turns(one) % self.steps_a_turn == last]

    def step_time_s(self, skip: int) -> float:
        """Median time of the steps that count, in seconds."""
        return median(self.step_times_s(skip))

    def step_times_s(self, skip: int) -> list[float]:
        """Times of the steps that count, in seconds, in order."""
        return [step["step_time_s"] for step in self.settled_steps(skip)]

    def times_by_turn(self, skip: int) -> dict[int, float]:
        """Step times in seconds by turn; of a training that took none, its median as turn 0."""
        if self.first_turn is None:
            return {0: self.step_time_s(skip)}
        return {self._turn(step): step["step_time_s"] for step in self.settled_steps(skip)}

    def tokens_per_s(self, skip: int) -> float:
        """Tokens per second: those of a step by the median step time."""
        tokens = (s["tokens_per_s"] * s["step_time_s"] for s in self.settled_steps(skip))
        return median(tokens) / self.step_time_s(skip)

    def peak_bytes(self, skip: int) -> int:
        """The largest activation peak of the first stage in the steps that count, in bytes."""
        return max(step["peak_activation_bytes_rank0"] for step in self.settled_steps(skip))

    def offload_median(self, name: str, skip: int) -> float:
        """The median per step of one of the engine's counters; 0 where offload was off."""
        return median(step.get("offload", {}).get(name, 0) for step in self.settled_steps(skip))

    def _turn(self, step: dict[str, Any]) -> int:
        return self._in_turns(step) // self.steps_a_turn

    def _in_turns(self, step: dict[str, Any]) -> int:
        assert self.first_turn is not None
        return int(step["step"]) - 1 - self.first_turn


@dataclass(frozen=True)
class Difference:
    """The first place where a run differs from the reference."""

    run: str
    step: int
    field: str
    reference: Any
    value: Any

    def __str__(self) -> str:
        return (
            f"{self.run} differs at step {self.step}: {self.field} {self.value!r}, "
            f"expected {self.reference!r}"
        )


def order_of_round(variants: Sequence[_V], round_: int) -> list[_V]:
    """The variants, rotated so that each is first, last and after each other one in turn."""
    shift = round_ % len(variants)
    return [*variants[shift:], *variants[:shift]]


def _same(a: Any, b: Any) -> bool:
    both_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
    return bool(a == b or both_nan)


def first_difference(
    reference: Run, run: Run, *, same_length: bool = True, fields: Sequence[str] = COMPARED_FIELDS
) -> Difference | None:
    """Compares losses, gradient norms and the digest of the weights exactly; no tolerance.

    Args:
        same_length: whether one step more or less is a difference as well.
        fields: of a step, that are compared.
    """
    name = f"{run.variant.name}, round {run.round + 1},"
    for expected, step in zip(reference.steps, run.steps, strict=False):
        for field in fields:
            if not _same(expected.get(field), step.get(field)):
                return Difference(name, step["step"], field, expected.get(field), step.get(field))
    if same_length and len(reference.steps) != len(run.steps):
        shorter = min(len(reference.steps), len(run.steps))
        return Difference(name, shorter + 1, "steps", len(reference.steps), len(run.steps))
    return None


def paired_ratio(runs: Sequence[Run], base: Sequence[Run], skip: int) -> float | None:
    """Step time over that of the fastest base in the same round and turn; the median of all.

    None where no base ran beside.
    """
    ratios = []
    for run in runs:
        peers = [peer.times_by_turn(skip) for peer in base if peer.round == run.round]
        for turn, time_s in run.times_by_turn(skip).items():
            of_turn = [times[turn] for times in peers if turn in times]
            if of_turn:
                ratios.append(time_s / min(of_turn))
    return median(ratios) if ratios else None
