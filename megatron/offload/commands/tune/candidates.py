# SPDX-License-Identifier: Apache-2.0
"""The settings to choose from, and the best of them: `Space`, `best_of`, `neighbours_of`.

A candidate is *possible* as long as nothing that it takes is known to be over its limit. Which of
them are measured, and when one is chosen, is in `search.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron.offload.commands.tune.setting import Setting
from megatron.offload.commands.tune.step_model import (
    NOISE,
    TOO_HIGH,
    Figures,
    Measurement,
    StepModel,
)

MEMORY_MARGIN = 0.05  # the default; of measured device memory, see `Space`
FAILED = "its training failed"  # in place of the name of a limit


@dataclass(frozen=True)
class Limits:
    """What a rank may take; infinite where the user has given no limit.

    Attributes:
        device_bytes: of device memory, with weights and states.
        host_bytes: of host memory, for activations.
        ssd_bytes: of SSD space, likewise.
    """

    device_bytes: float = math.inf
    host_bytes: float = math.inf
    ssd_bytes: float = math.inf


@dataclass(frozen=True)
class Candidate:
    """A setting with what it takes.

    Attributes:
        predicted: what the fits say.
        tokens: of a step, of all ranks.
        measured: what a training of it took; None: there was none.
        over: names of the limits that it exceeds, or that its training failed; none: it is
            possible.
    """

    setting: Setting
    predicted: Figures
    tokens: float
    measured: Measurement | None = None
    over: tuple[str, ...] = ()

    @property
    def is_possible(self) -> bool:
        """Whether it is not known to exceed a limit."""
        return not self.over

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second, measured or else predicted."""
        return self.tokens / (self.measured or self.predicted).step_s

    @property
    def device_bytes(self) -> float:
        """Device memory, measured or else predicted."""
        return (self.measured or self.predicted).device_bytes


@dataclass(frozen=True)
class StepSize:
    """How many samples a step may have on a rank.

    Attributes:
        least: and `most`, both included.
        largest_micro_batch_size: that is tried.
    """

    least: int
    most: int
    largest_micro_batch_size: int

    def settings(self, units: Iterable[int]) -> list[Setting]:
        """All settings to choose from.

        A step of one size: every micro-batch size that divides it. Else sizes and numbers about
        half an octave apart, and the least and the most of each.
        """
        largest = min(self.most, self.largest_micro_batch_size)
        if self.least == self.most:
            pairs = [
                (size, self.most // size) for size in range(1, largest + 1) if self.most % size == 0
            ]
        else:
            pairs = [
                (size, count)
                for size in _steps_up_to(largest)
                for count in _counts(-(-self.least // size), self.most // size)
            ]
        # With one micro-batch both orders are the same step.
        return [
            Setting(one, size, count)
            for one in units
            for size, count in pairs
            if not one or count > 1
        ]


@dataclass(frozen=True)
class Space:
    """All settings to choose from, and what each is held against.

    Attributes:
        limits: of a rank.
        memory_margin: of device memory: a part of what was measured, by which another training of
            the same may take more.
        tokens_per_sample: of a rank's samples, times the ranks that have samples of their own.
    """

    settings: Sequence[Setting]
    limits: Limits
    memory_margin: float
    tokens_per_sample: float

    def candidates(
        self, model: StepModel, measured: Mapping[Setting, Measurement | None]
    ) -> list[Candidate]:
        """The settings with what they take, the fastest first.

        Args:
            measured: those that have been; None: the training failed.
        """
        found = []
        for setting in self.settings:
            predicted, known = model.predict(setting), measured.get(setting)
            device_bytes = (
                known.device_bytes * (1.0 + self.memory_margin)
                if known is not None
                else predicted.device_bytes * (1.0 - TOO_HIGH)
            )
            over = (
                (FAILED, setting in measured and known is None),
                ("device memory", device_bytes > self.limits.device_bytes),
                ("host memory", predicted.host_bytes > self.limits.host_bytes),
                ("SSD", predicted.ssd_bytes > self.limits.ssd_bytes),
            )
            names = tuple(name for name, is_over in over if is_over)
            tokens = setting.samples * self.tokens_per_sample
            found.append(Candidate(setting, predicted, tokens, known, names))
        return sorted(found, key=lambda one: (-one.tokens_per_s, *_modesty(one)))


def best_of(candidates: Sequence[Candidate]) -> Candidate | None:
    """The possible one with the most tokens a second; None: none is possible.

    Of those within `NOISE` of the fastest the one with the largest micro-batch: short runs measure
    worst what each micro-batch takes however small it is, and that is never less than zero. Then
    the one that takes the least device memory, the least room on tiers, the fewest units.
    """
    possible = [one for one in candidates if one.is_possible]
    if not possible:
        return None
    enough = max(one.tokens_per_s for one in possible) * (1.0 - NOISE)
    return min(
        (one for one in possible if one.tokens_per_s >= enough),
        key=lambda one: (-one.setting.micro_batch_size, *_modesty(one)),
    )


def neighbours_of(best: Candidate, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Possible candidates that a wrong prediction would most easily have put behind the best one.

    The fastest with the next smaller and the next larger micro-batch size in the same order, and
    the fastest of every other number of units.
    """
    possible = sorted(
        (one for one in candidates if one.is_possible and one != best),
        key=lambda one: (-one.tokens_per_s, *_modesty(one)),
    )
    own = best.setting
    sizes = {one.setting.micro_batch_size for one in possible if one.setting.units == own.units}
    near = {
        (own.units, max((size for size in sizes if size < own.micro_batch_size), default=0)),
        (own.units, min((size for size in sizes if size > own.micro_batch_size), default=0)),
    }
    found: list[Candidate] = []
    seen: set[tuple[int, int]] = set()
    for one in possible:
        units, size = one.setting.units, one.setting.micro_batch_size
        key = (units, size if units == own.units else 0)
        if key not in seen and (units != own.units or key in near):
            seen.add(key)
            found.append(one)
    return found


def _modesty(one: Candidate) -> tuple[float, float, Setting]:
    return (
        one.device_bytes,
        one.predicted.host_bytes + one.predicted.ssd_bytes,
        one.setting,
    )


def _steps_up_to(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12 and so on."""
    found = {1} | {factor << power for power in range(most.bit_length()) for factor in (2, 3)}
    return sorted(one for one in found if one <= most)


def _counts(least: int, most: int) -> list[int]:
    """The least, the most, and those between."""
    between = [one for one in _steps_up_to(most) if one >= least]
    return sorted({*between, *([least, most] if least <= most else [])})
