# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the benchmark: `Round`, `MeasuredPoint`, and the ratios that sum points up.

`command.py` fills points in and hands them on as plain values. Nothing here measures or prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from megatron.offload.commands.bench.arguments import (
    HEADLINE_BLOCK_BYTES,
    MAX_CPU_RATIO,
    MIN_BANDWIDTH_RATIO,
)
from megatron.offload.commands.bench.sample import Sample

OPERATIONS = ("write", "read", "mixed")
HOW_COMPUTED = (
    "Ratios are what the tier reached over what the reference did within a round, median over the "
    "rounds, for blocks of 4 MiB in order at --headline-depth. Bandwidth: bytes of both directions "
    "over wall time, above 1 is faster. cpu: processor seconds for each byte, below 1 is cheaper; "
    "cpu_ratio is the largest of the three operations. null: not measured or not compared."
)


@dataclass(frozen=True)
class Round:
    """The tier and what it is compared with, right after each other."""

    ours: Sample
    reference: Sample | None


@dataclass(frozen=True)
class MeasuredPoint:
    """All rounds of one operation with one block size and depth."""

    tier: str
    reference: str | None
    block_bytes: int
    depth: int
    operation: str
    rounds: list[Round] = field(default_factory=list)

    def compared(self, value: str) -> dict[str, float | None]:
        """`value`, a property of `Sample`: median of our rounds, median of the reference's rounds,
        median of the rounds' own ratios of ours to the reference's."""
        pairs = [
            (getattr(each.ours, value), getattr(each.reference, value))
            for each in self.rounds
            if each.reference
        ]
        ratios = [ours / theirs for ours, theirs in pairs if theirs]
        return {
            "ours": median(getattr(each.ours, value) for each in self.rounds),
            "reference": median(theirs for _, theirs in pairs) if pairs else None,
            "ratio": median(ratios) if ratios else None,
        }

    def as_result(self) -> dict[str, Any]:
        """Plain values, for JSON, the table and the picture."""
        values = {value: self.compared(value) for value in ("gbps", "cpu_s_per_gb")}
        return asdict(self) | values


def headline(points: Sequence[MeasuredPoint], tier: str, depth: int) -> dict[str, float | None]:
    """A tier's ratios at 4 MiB blocks and one depth; see `HOW_COMPUTED`."""
    chosen = {
        point.operation: point
        for point in points
        if (point.tier, point.block_bytes, point.depth) == (tier, HEADLINE_BLOCK_BYTES, depth)
    }
    name = next((point.reference for point in chosen.values() if point.reference), "fio")

    def ratios(value: str) -> list[float | None]:
        found = (chosen.get(operation) for operation in OPERATIONS)
        return [point.compared(value)["ratio"] if point else None for point in found]

    bandwidth, cpu = ratios("gbps"), ratios("cpu_s_per_gb")
    known = [ratio for ratio in cpu if ratio is not None]
    result = {
        f"{op}_ratio_to_{name}": ratio for op, ratio in zip(OPERATIONS, bandwidth, strict=True)
    }
    result[f"cpu_ratio_to_{name}"] = max(known) if len(known) == len(OPERATIONS) else None
    for operation, ratio in zip(OPERATIONS, cpu, strict=True):
        result[f"{operation}_cpu_ratio_to_{name}"] = ratio
    return result


def shortfalls(ratios: dict[str, float | None]) -> list[str]:
    """What `--require` complains about: one sentence for each ratio that is missing or bad."""
    complaints = []
    for name, ratio in ratios.items():
        if ratio is None:
            complaints.append(f"{name} was not measured")
        elif "cpu_" in name and ratio > MAX_CPU_RATIO:
            complaints.append(f"{name} is {ratio:.3f}, expected at most {MAX_CPU_RATIO}")
        elif "cpu_" not in name and ratio < MIN_BANDWIDTH_RATIO:
            complaints.append(f"{name} is {ratio:.3f}, expected at least {MIN_BANDWIDTH_RATIO}")
    return complaints
