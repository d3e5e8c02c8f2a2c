# SPDX-License-Identifier: Apache-2.0
"""How a storage is spread over drives: `stripe`. The SSD tier calls it for every write.

All parts should end at the same moment. With b_i the bandwidth of drive i and q_i the bytes that
wait there, the part of drive i is max(0, b_i T - q_i), with T such that the parts add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron.offload.sizes import MIB

MIN_STRIPE_BYTES = 4 * MIB  # a smaller part costs an operation and saves no time


class Lane(NamedTuple):
    """A drive for the striping: its speed, and the bytes that wait for it."""

    bytes_per_s: float | None  # measured; None: not yet
    queued_bytes: int


def stripe(num_bytes: int, lanes: Sequence[Lane], granule: int) -> list[int]:
    """Divides a storage among drives so that all end together: bytes for each, in order.

    The parts add up; each but the last is a multiple of `granule`.

    Args:
        num_bytes: of the storage.
        lanes: at least one. A drive not measured yet counts as the mean of the measured ones.
        granule: that offsets in the files are multiples of.
    """
    if len(lanes) == 1:
        return [num_bytes]
    measured = [lane.bytes_per_s for lane in lanes if lane.bytes_per_s]
    usual = sum(measured) / len(measured) if measured else 1.0
    speeds = [lane.bytes_per_s or usual for lane in lanes]
    queued = [lane.queued_bytes for lane in lanes]
    chosen = list(range(len(lanes)))
    while True:
        parts = _level(num_bytes, speeds, queued, chosen)
        smallest = min(chosen, key=lambda index: parts[index])
        if len(chosen) == 1 or parts[smallest] >= MIN_STRIPE_BYTES:
            break
        chosen.remove(smallest)
    whole = [int(part) // granule * granule for part in parts]
    whole[chosen[-1]] += num_bytes - sum(whole)  # so that each part begins at a whole granule
    return whole


def _level(
    num_bytes: int, speeds: Sequence[float], queued: Sequence[int], chosen: Sequence[int]
) -> list[float]:
    """The parts of the chosen lanes that make them all end together; 0 for the others.

    A lane whose queue alone takes longer gets a part below 0.
    """
    end_s = (num_bytes + sum(queued[i] for i in chosen)) / sum(speeds[i] for i in chosen)
    return [
        speeds[index] * end_s - queued[index] if index in chosen else 0.0
        for index in range(len(speeds))
    ]
