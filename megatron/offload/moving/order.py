# SPDX-License-Identifier: Apache-2.0
"""Which buckets and units are in memory: rules that windows follow and simulations call.

Pure functions of sizes and numbers, so that a simulation decides as the run does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def first_to_stay(sizes: Sequence[int], room_bytes: int, beside: int = 1) -> int:
    """Index of the first bucket that stays in memory after a step through the buckets in order.

    Args:
        sizes: bytes of the buckets, in the order of the step.
        room_bytes: that buckets may take in memory.
        beside: number of buckets, of the largest size, that are moved at the same time.
    """
    room_bytes -= beside * max(sizes, default=0)
    index = len(sizes)
    while index and room_bytes >= sizes[index - 1]:
        room_bytes -= sizes[index - 1]
        index -= 1
    return index


def most_together(sizes: Sequence[int], number: int) -> int:
    """The most bytes that so many buckets in a row take, in either direction.

    Args:
        sizes: bytes of the buckets, in the order of a step.
        number: of buckets, or all if there are fewer.
    """
    last = max(len(sizes) - number, 0)
    return max(sum(sizes[begin : begin + number]) for begin in range(last + 1))


def live_units(
    number: int, direction: int, num_live: int, num_units: int, in_memory: Iterable[int]
) -> tuple[list[int], list[int]]:
    """The units that are wanted when one is used, and the units that leave for them.

    Near the last unit of a direction fewer are wanted: the nearest others stay, for the way back.

    Args:
        number: of the unit that is used.
        direction: 1: units with larger numbers come next, -1: with smaller ones.
        num_live: units that may be in memory.
        num_units: units in all.
        in_memory: numbers of the units that are in memory or being read.

    Returns:
        The wanted units, in the order of their use, and the units that leave.
    """
    ahead = range(number, number + direction * num_live, direction)
    wanted = [n for n in ahead if 0 <= n < num_units]
    others = [n for n in in_memory if n not in wanted]
    others.sort(key=lambda n: abs(n - number))
    return wanted, others[num_live - len(wanted) :]
