# SPDX-License-Identifier: Apache-2.0
"""The table of compare_placements.py: which runs are compared with which.

`summarize` is called once all runs are there. Nothing here starts a process or reads a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tabulate import tabulate

from megatron.offload.commands.training_runs.run import (
    Difference,
    Run,
    RunError,
    Variant,
    first_difference,
    paired_ratio,
)
from megatron.offload.commands.training_runs.trainer import PLACEMENT_FLAGS, allocators_of

MIB = 1 << 20


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
        TrialError: An unknown name.
    """
    variants: list[Variant] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        placement, _, allocator = name.partition("@")
        if placement not in PLACEMENT_FLAGS or allocator not in ("", "default", "offload"):
            raise RunError(
                f"unknown placement {name!r}; choose from {', '.join(PLACEMENT_FLAGS)}, "
                "optionally with @default or @offload"
            )
        allocators = [allocator] if allocator else allocators_of(placement, both=both_allocators)
        variants += [Variant(placement, each) for each in allocators]
    if not variants:
        raise RunError("--placements names no placement")
    return list(dict.fromkeys(variants))


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
