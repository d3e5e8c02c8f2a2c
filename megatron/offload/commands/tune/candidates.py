# SPDX-License-Identifier: Apache-2.0
"""The settings to choose from, and the choice: `candidates_of`, `best_of`, `neighbours_of`.

A candidate is *promised* when everything that it should take is within its limit. Only promised
ones are ever chosen or run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.offload.commands.tune.setting import Setting
from megatron.offload.commands.tune.step_model import NOISE, Figures, StepModel


@dataclass(frozen=True)
class Limits:
    """What a rank may take; infinite where nobody has said.

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
    """A setting with what it should take.

    Attributes:
        predicted: what the fits say.
        promised_device_bytes: device memory that it should not exceed; the budget is compared with
            this.
        tokens: of a step, of all ranks.
        over: names of the limits that it exceeds; none: it is promised.
    """

    setting: Setting
    predicted: Figures
    promised_device_bytes: float
    tokens: float
    over: tuple[str, ...] = ()

    @property
    def is_promised(self) -> bool:
        """Whether it keeps to all limits."""
        return not self.over

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second that it should reach."""
        return self.predicted.tokens_per_s(self.tokens)


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


def candidates_of(
    settings: Iterable[Setting],
    model: StepModel,
    limits: Limits,
    *,
    margin: float,
    tokens_per_sample: float,
) -> list[Candidate]:
    """The settings with what they should take, the fastest first.

    Args:
        margin: of device memory: a part of what is predicted that has to be left.
        tokens_per_sample: of a rank's samples, times the ranks that have samples of their own.
    """
    found = []
    for setting in settings:
        predicted = model.predict(setting)
        promised_bytes = model.promised_device_bytes(setting, margin)
        over = (
            ("device memory", promised_bytes > limits.device_bytes),
            ("host memory", predicted.host_bytes > limits.host_bytes),
            ("SSD", predicted.ssd_bytes > limits.ssd_bytes),
        )
        found.append(
            Candidate(
                setting,
                predicted,
                promised_bytes,
                setting.samples * tokens_per_sample,
                tuple(name for name, is_over in over if is_over),
            )
        )
    return sorted(found, key=lambda one: (-one.tokens_per_s, *_modesty(one)))


def best_of(candidates: Sequence[Candidate]) -> Candidate | None:
    """The promised one with the most tokens a second; None: none is promised.

    Of those within `NOISE` of the fastest the one with the largest micro-batch: what each takes
    however small it is, is what short runs see worst, and it can only be more than nothing. Then
    the one that takes the least device memory, the least room on tiers, the fewest units.
    """
    promised = [one for one in candidates if one.is_promised]
    if not promised:
        return None
    enough = max(one.tokens_per_s for one in promised) * (1.0 - NOISE)
    return min(
        (one for one in promised if one.tokens_per_s >= enough),
        key=lambda one: (-one.setting.micro_batch_size, *_modesty(one)),
    )


def neighbours_of(best: Candidate, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Promised candidates that a wrong prediction would most easily have put behind the best one.

    The fastest with the next smaller and the next larger micro-batch size in the same order, and
    the fastest of every other number of units.
    """
    promised = sorted(
        (one for one in candidates if one.is_promised and one != best),
        key=lambda one: (-one.tokens_per_s, *_modesty(one)),
    )
    own = best.setting
    sizes = {one.setting.micro_batch_size for one in promised if one.setting.units == own.units}
    near = {
        (own.units, max((size for size in sizes if size < own.micro_batch_size), default=0)),
        (own.units, min((size for size in sizes if size > own.micro_batch_size), default=0)),
    }
    found: list[Candidate] = []
    seen: set[tuple[int, int]] = set()
    for one in promised:
        units, size = one.setting.units, one.setting.micro_batch_size
        key = (units, size if units == own.units else 0)
        if key not in seen and (units != own.units or key in near):
            seen.add(key)
            found.append(one)
    return found


def _modesty(one: Candidate) -> tuple[float, float, Setting]:
    return (
        one.promised_device_bytes,
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
