# SPDX-License-Identifier: Apache-2.0
"""How the ranks that compute parts of the same layers come to the same plan: `RankConsensus`.

The planner asks; integrations know the groups (`integration/megatron/process_groups.py`). All
ranks must ask the same things in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from megatron.offload.activations.placement.plan import Plan
from megatron.offload.errors import ConfigurationError, OffloadError
from megatron.offload.planner.profile.numbers import with_numbers
from megatron.offload.planner.profile.stage_profile import StageProfile


class RankConsensus(Protocol):
    """What the ranks of a group tell each other.

    Attributes:
        period_steps: how often they ask whether to plan again: asking may wait for the device.
    """

    period_steps: int

    def means(self, values: Sequence[float]) -> list[float]:
        """Mean of each value over the group, with the same bits on all its ranks."""
        ...

    def largest(self, values: Sequence[float]) -> list[float]:
        """Largest of each value in the group."""
        ...

    def of_all(self, value: Any) -> list[Any]:
        """The values of all ranks of the run, not of the group alone."""
        ...


class SingleRank:
    """Consensus of a single process, which has no other rank to ask."""

    period_steps = 1

    def means(self, values: Sequence[float]) -> list[float]:
        """The values themselves, as there is no other rank."""
        return list(values)

    def largest(self, values: Sequence[float]) -> list[float]:
        """The values themselves, as there is no other rank."""
        return list(values)

    def of_all(self, value: Any) -> list[Any]:
        """The value of this rank, as there is no other."""
        return [value]


def agreed_profile(profile: StageProfile, consensus: RankConsensus) -> StageProfile:
    """The profile that all ranks of a group plan with: mean seconds and rates, largest sizes."""
    seconds: list[float] = []
    sizes: list[float] = []

    def collect(_: str, number: float) -> float:
        (seconds if isinstance(number, float) else sizes).append(number)
        return number

    with_numbers(collect, profile)
    means = iter(consensus.means(seconds))
    largest = iter(consensus.largest([float(size) for size in sizes]))  # exact below 2^53
    return with_numbers(
        lambda _, number: next(means) if isinstance(number, float) else int(next(largest)), profile
    )


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
