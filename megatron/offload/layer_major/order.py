# SPDX-License-Identifier: Apache-2.0
"""In which order micro-batches take their turns in a unit: `micro_batch_order`.

The schedule runs them in this order, and the simulation of a step relies on it.
"""

from __future__ import annotations

from collections.abc import Sequence


def micro_batch_order(
    turn: int, num_micro_batches: int, *, alternates: bool = False
) -> Sequence[int]:
    """The numbers of the micro-batches in the order in which they run a unit.

    Args:
        turn: counts, from 0, the units' forward passes and then their backward passes; the last
            unit, whose backward passes follow at once, has one turn for both.
        num_micro_batches: of the step.
        alternates: every second turn takes them backwards.
    """
    order = range(num_micro_batches)
    return order[::-1] if alternates and turn % 2 else order
