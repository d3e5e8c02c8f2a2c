# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of compare_placements.py: which runs are compared with which, and the table.

`summarize` is called once all runs are there. Nothing here starts a process or reads a file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tabulate import tabulate

MIB = 1 << 20
PLACEMENTS = ("off", "recompute", "ssd", "host", "tiered", "keep")
COMPARED_FIELDS = ("loss", "grad_norm", "model")


class ComparisonError(Exception):
    """The comparison cannot be made; the message is the sentence to print."""


@dataclass(frozen=True)
class Variant:
    """A placement with the allocator settings it runs under: "default" or "offload"."""

    placement: str
    allocator: str

    @property
    def name(self) -> str:
        """As written in the table and in file names."""
        return f"{self.placement}@{self.allocator}"


@dataclass(frozen=True)
class Run:
    """One finished training: the lines of its metrics.jsonl."""

    variant: Variant
    round: int
    steps: list[dict[str, Any]]

    def step_time_s(self, skip: int) -> float:
        """Median step time without the first `skip` steps."""
        return median(step["step_time_s"] for step in self.steps[skip:])

    def peak_bytes(self, skip: int) -> int:
        """Largest activation peak of the first stage without the first `skip` steps."""
        return max(step["peak_activation_bytes_rank0"] for step in self.steps[skip:])

    def offload_median(self, name: str, skip: int) -> float:
        """Median per step of a figure of the offload engine; 0 where it was off."""
        return median(step.get("offload", {}).get(name, 0) for step in self.steps[skip:])


@dataclass(frozen=True)
class Difference:
    """The first place where a run differs from the reference."""

    run: str
    step: int
    field: str
    reference: Any
    value: Any

    def __str__(self) -> str:
        return (
            f"{self.run} differs at step {self.step}: {self.field} {self.value!r}, "
            f"expected {self.reference!r}"
        )


@dataclass(frozen=True)
class Row:
    """The figures of one variant over all rounds."""

    variant: Variant
    identical: bool
    step_time_s: float
    time_ratio: float | None  # to the faster off, paired by round
    peak_bytes: float
    peak_ratio: float | None  # to the smaller off
    written_bytes: float
    read_bytes: float
    stall_s: float


def parse_placements(text: str, both_allocators: bool) -> list[Variant]:
    """Variants from "off,recompute,ssd"; "off@default" names a single one.

    Raises:
        ComparisonError: An unknown name.
    """
    variants: list[Variant] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        placement, _, allocator = name.partition("@")
        if placement not in PLACEMENTS or allocator not in ("", "default", "offload"):
            raise ComparisonError(
                f"unknown placement {name!r}; choose from {', '.join(PLACEMENTS)}, "
                "optionally with @default or @offload"
            )
        if allocator:
            allocators = [allocator]
        elif not both_allocators:
            allocators = ["default"]
        elif placement in ("off", "recompute"):
            allocators = ["default", "offload"]
        else:
            allocators = ["offload"]
        variants += [Variant(placement, each) for each in allocators]
    if not variants:
        raise ComparisonError("--placements names no placement")
    return list(dict.fromkeys(variants))


def order_of_round(variants: Sequence[Variant], round_: int) -> list[Variant]:
    """The variants, rotated so that each is first, last and after each other one in turn."""
    shift = round_ % len(variants)
    return [*variants[shift:], *variants[:shift]]


def _same(a: Any, b: Any) -> bool:
    both_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
    return bool(a == b or both_nan)


def first_difference(reference: Run, run: Run) -> Difference | None:
    """Compares losses, gradient norms and the digest of the weights exactly; no tolerance."""
    name = f"{run.variant.name}, round {run.round + 1},"
    for expected, step in zip(reference.steps, run.steps, strict=False):
        for field in COMPARED_FIELDS:
            if not _same(expected.get(field), step.get(field)):
                return Difference(name, step["step"], field, expected.get(field), step.get(field))
    if len(reference.steps) != len(run.steps):
        shorter = min(len(reference.steps), len(run.steps))
        return Difference(name, shorter + 1, "steps", len(reference.steps), len(run.steps))
    return None


def paired_ratio(runs: Sequence[Run], base: Sequence[Run], skip: int) -> float | None:
    """Median over rounds of step time / fastest base of the same round; None without a base."""
    ratios = []
    for run in runs:
        peers = [peer.step_time_s(skip) for peer in base if peer.round == run.round]
        if peers:
            ratios.append(run.step_time_s(skip) / min(peers))
    return median(ratios) if ratios else None


def summarize(
    variants: Sequence[Variant], runs: Sequence[Run], skip: int
) -> tuple[list[Row], list[Difference]]:
    """The table's rows, and the first difference of each run that differs from the first run.

    The reference is the first `off` run, or the first run where `off` is not compared.
    """
    off = [run for run in runs if run.variant.placement == "off"]
    reference = (off or list(runs))[0]
    differences = [diff for run in runs if (diff := first_difference(reference, run))]
    off_peaks = [
        median(run.peak_bytes(skip) for run in off if run.variant == variant)
        for variant in {run.variant for run in off}
    ]
    rows = []
    for variant in variants:
        own = [run for run in runs if run.variant == variant]
        peak = median(run.peak_bytes(skip) for run in own)
        rows.append(
            Row(
                variant=variant,
                identical=all(first_difference(reference, run) is None for run in own),
                step_time_s=median(run.step_time_s(skip) for run in own),
                time_ratio=paired_ratio(own, off, skip),
                peak_bytes=peak,
                peak_ratio=peak / min(off_peaks) if off_peaks and min(off_peaks) else None,
                written_bytes=median(run.offload_median("written_bytes", skip) for run in own),
                read_bytes=median(run.offload_median("read_bytes", skip) for run in own),
                stall_s=median(run.offload_median("stall_s", skip) for run in own),
            )
        )
    return rows, differences


def format_table(rows: Sequence[Row]) -> str:
    """The table that is printed."""

    def ratio(value: float | None) -> str:
        return "" if value is None else f"{value:.3f}"

    return tabulate(
        [
            (
                row.variant.placement,
                row.variant.allocator,
                "identical" if row.identical else "DIFFERENT",
                f"{row.step_time_s:.3f}",
                ratio(row.time_ratio),
                f"{row.peak_bytes / MIB:,.1f}",
                ratio(row.peak_ratio),
                f"{row.written_bytes / MIB:,.1f}",
                f"{row.read_bytes / MIB:,.1f}",
                f"{row.stall_s:.3f}",
            )
            for row in rows
        ],
        headers=(
            "placement",
            "allocator",
            "loss, grad norm",
            "step s",
            "/ off",
            "peak MiB",
            "/ off",
            "written MiB/step",
            "read MiB/step",
            "stall s/step",
        ),
        disable_numparse=True,
        colalign=("left", "left", "left", *["right"] * 7),
    )
