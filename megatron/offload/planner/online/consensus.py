# SPDX-License-Identifier: Apache-2.0
"""How the ranks that compute parts of the same layers come to the same plan: `RankConsensus`.

The planner asks; integrations know the groups (`integration/megatron/process_groups.py`). All
ranks must ask the same things in the same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from megatron.offload.errors import ConfigurationError, OffloadError
from megatron.offload.placement.plan import Plan
from megatron.offload.planner.profile.stage_profile import StageProfile


class RankConsensus(Protocol):
    """What the ranks of a group tell each other.

    Attributes:
        period_steps: how often they ask whether to plan again: asking may wait for the device.
    """

    period_steps: int

    def means(self, values: Sequence[float]) -> list[float]:
        """Of each value the mean over the group, the same bits on all its ranks."""
        ...

    def largest(self, values: Sequence[float]) -> list[float]:
        """Of each value the largest in the group."""
        ...

    def of_all(self, value: Any) -> list[Any]:
        """The values of all ranks of the run, not of the group alone."""
        ...


class SingleRank:
    """Of one process that need not ask."""

    period_steps = 1

    def means(self, values: Sequence[float]) -> list[float]:
        """See `RankConsensus`."""
        return list(values)

    def largest(self, values: Sequence[float]) -> list[float]:
        """See `RankConsensus`."""
        return list(values)

    def of_all(self, value: Any) -> list[Any]:
        """See `RankConsensus`."""
        return [value]


def agreed_profile(profile: StageProfile, consensus: RankConsensus) -> StageProfile:
    """The profile that all ranks of a group plan with: mean seconds and rates, largest sizes."""
    seconds: list[float] = []
    sizes: list[int] = []
    _walk(profile, seconds, sizes)
    means = consensus.means(seconds)
    largest = consensus.largest([float(size) for size in sizes])  # exact below 2^53
    return _rebuilt(profile, iter(means), iter(largest))


def check_same(plan: Plan, consensus: RankConsensus) -> None:
    """Raises OffloadError if the ranks of the group have decided differently."""
    digest = float(plan.digest())
    high, negative_low = consensus.largest([digest, -digest])
    if high != -negative_low:
        raise OffloadError(
            f"the ranks that share the layers of stage {plan.stage} have come to different plans, "
            "and recomputing different layers would stop them for ever; train with "
            "--activation-offload-plan FILE or another --activation-offload mode, and report this"
        )


def raise_first(messages: Iterable[str | None]) -> None:
    """Raises ConfigurationError, the same on all ranks, if there was one on any."""
    for message in messages:
        if message is not None:
            raise ConfigurationError(message)


def _walk(value: Any, seconds: list[float], sizes: list[int]) -> None:
    """Collects every number, always in the same order."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _walk(getattr(value, field.name), seconds, sizes)
    elif isinstance(value, tuple):
        for one in value:
            _walk(one, seconds, sizes)
    elif isinstance(value, float):
        seconds.append(value)
    elif isinstance(value, int):
        sizes.append(value)


def _rebuilt(value: Any, seconds: Any, sizes: Any) -> Any:
    """The same with other numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = {
            field.name: _rebuilt(getattr(value, field.name), seconds, sizes)
            for field in dataclasses.fields(value)
        }
        return dataclasses.replace(value, **values)
    if isinstance(value, tuple):
        parts = [_rebuilt(one, seconds, sizes) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, float):
        return next(seconds)
    return int(next(sizes)) if isinstance(value, int) else value
