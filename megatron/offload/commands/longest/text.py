# SPDX-License-Identifier: Apache-2.0
"""What a person reads, and what a program does: `as_text`, `as_json`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from tabulate import tabulate

from megatron.offload.commands.longest.search import Found
from megatron.offload.commands.longest.ways import WAYS
from megatron.offload.sizes import format_size

UNITS = {"sequence": "tokens", "batch": "samples", "layers": "layers"}


def as_text(found: Mapping[str, Found], *, by: str, budget_bytes: int, most: int) -> str:
    """A table with a row for each way, compared with the first that fits at all."""
    unit = UNITS[by]
    first = next((one.longest for one in found.values() if one.longest), 0)
    rows = [_row(WAYS[name].title, one, first, budget_bytes, most) for name, one in found.items()]
    headings = ["", unit, "", "peak, predicted", "measured", "s/step of", "tokens/s", ""]
    table = tabulate(rows, headings, tablefmt="github", disable_numparse=True)
    heading = f"The most {unit} in {format_size(budget_bytes)} of device memory, all that it holds:"
    return f"{heading}\n\n{table}"


def _row(title: str, one: Found, first: int, budget_bytes: int, most: int) -> list[str]:
    if not one.runs:
        return [title, "-", "", "", "", "", "", one.failure]
    timed = one.checked or one.runs[-1]
    speed = [f"{timed.step_s:.2f} ({timed.number:,})", f"{timed.tokens_per_s:,.0f}"]
    if not one.longest:
        return [title, "-", "", format_size(one.runs[0].peak_bytes), "", *speed, one.failure]
    more = "or more" if one.longest == most else ""
    return [
        title,
        f"{one.longest:,} {more}".strip(),
        f"{one.longest / first:.2f} x",
        format_size(one.predicted_bytes),
        "" if one.checked is None else format_size(one.checked.peak_bytes),
        *speed,
        "; ".join(filter(None, (*_checked(one, budget_bytes), one.failure))),
    ]


def _checked(one: Found, budget_bytes: int) -> Iterator[str]:
    if one.error is not None:
        yield f"prediction {one.error:+.1%}"
    if one.next_run is not None:
        fits = ", which fit too" if one.next_run.peak_bytes <= budget_bytes else ""
        yield f"{one.next_run.number:,} take {format_size(one.next_run.peak_bytes)}{fits}"


def as_json(
    found: Mapping[str, Found], *, by: str, budget_bytes: int, facts: Mapping[str, Any]
) -> str:
    """All figures; bytes and seconds."""
    ways = {name: asdict(one) for name, one in found.items()}
    values = {"machine": facts, "by": by, "budget_bytes": budget_bytes, "ways": ways}
    return json.dumps(values, indent=1) + "\n"
