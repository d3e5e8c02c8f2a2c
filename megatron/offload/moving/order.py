# SPDX-License-Identifier: Apache-2.0
"""Which of what moves is in memory: rules that windows follow and simulations ask.

Pure functions of sizes and numbers, so that a simulation decides as the run does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def first_to_stay(sizes: Sequence[int], room_bytes: int, beside: int = 1) -> int:
    """From which one on buckets stay in memory behind a step that goes through them in order.

    Args:
        sizes: of the buckets, in the order of the step, in bytes.
        room_bytes: that buckets may take in memory.
        beside: of the largest size, that are moved meanwhile.
    """
    room_bytes -= beside * max(sizes, default=0)
    index = len(sizes)
    while index and room_bytes >= sizes[index - 1]:
        room_bytes -= sizes[index - 1]
        index -= 1
    return index


def live_units(
    number: int, direction: int, num_live: int, num_units: int, in_memory: Iterable[int]
) -> tuple[list[int], list[int]]:
    """Units that are wanted when one is used, and those that leave for them.

    Where a direction ends, room is left: what is nearest stays, for the way back.

    Args:
        number: of the unit that is used.
        direction: 1: the next ones come after it, -1: before it.
        num_live: units that may be in memory.
        num_units: of all.
        in_memory: numbers of those that are there, or arriving.

    Returns:
        The wanted ones, in the order of their use, and those that leave.
    """
    ahead = range(number, number + direction * num_live, direction)
    wanted = [n for n in ahead if 0 <= n < num_units]
    others = [n for n in in_memory if n not in wanted]
    others.sort(key=lambda n: abs(n - number))
    return wanted, others[num_live - len(wanted) :]
