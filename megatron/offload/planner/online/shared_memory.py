# SPDX-License-Identifier: Apache-2.0
"""Memory that activations share with what else moves: `SharesMemory`, `divided_budget`.

With both on `auto`, the first plan is made for the budget that makes the fastest step of a few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from megatron.offload.errors import OffloadError
from megatron.offload.planner.online.consensus import RankConsensus


class SharesMemory(Protocol):
    """Takes memory beside activations: the window of an optimizer's states."""

    def budgets(self, activation_bytes: int, given_bytes: int | None) -> Sequence[int]:
        """Budgets for activations to choose among, the largest first; none: nothing to divide.

        Args:
            activation_bytes: that they took at the most in the steps so far.
            given_bytes: that they were given, which is not to be changed.
        """
        ...

    def choose(self, seconds: Sequence[float]) -> int:
        """Which of them makes the fastest step, by what the plans for them take."""
        ...

    def settle(self, number: int, budget_bytes: int) -> None:
        """Takes the budget of that number; activations get so many bytes."""
        ...


def divided_budget(
    beside: SharesMemory,
    consensus: RankConsensus,
    seconds_of: Callable[[Sequence[int]], list[float]],
    *,
    activation_bytes: int,
    given_bytes: int | None,
) -> int | None:
    """The budget of activations, the least of the group; None: there is nothing to divide.

    Args:
        beside: takes the rest.
        consensus: all ranks of the group ask each other, whatever they have found.
        seconds_of: what plans for some budgets take. Raises OffloadError.
        activation_bytes: see `SharesMemory.budgets`.
        given_bytes: likewise.
    """
    budgets = list(beside.budgets(activation_bytes, given_bytes))
    number = 0
    if len(budgets) > 1:
        try:
            number = beside.choose(seconds_of(budgets))
        except OffloadError:
            number = 0  # the plan that follows says why
    own = float(budgets[number]) if budgets else math.inf
    (negative,) = consensus.largest([-own])
    if math.isinf(negative):
        return None
    budget_bytes = int(-negative)
    if budgets:
        beside.settle(number, budget_bytes)
    return budget_bytes
