# SPDX-License-Identifier: Apache-2.0
"""What a person reads: `measured_table`, `candidates_table`, `tried_table`, `duration_text`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tabulate import tabulate

from megatron.offload.commands.tune.candidates import Candidate, Limits, Space
from megatron.offload.commands.tune.setting import Setting
from megatron.offload.commands.tune.step_model import Measurement, StepModel
from megatron.offload.sizes import format_size

_SETTING = ("micro-batch size", "micro-batches", "units")


def measured_table(measured: Sequence[Measurement], model: StepModel) -> str:
    """What was measured, beside what the fits say of it."""
    rows = [
        (
            *_setting(one.setting),
            f"{one.step_s:.3f}",
            f"{model.predict(one.setting).step_s:.3f}",
            format_size(one.device_bytes),
            format_size(model.predict(one.setting).device_bytes),
            _size(one.moved_bytes),
        )
        for one in measured
    ]
    headings = (*_SETTING, "s/step", "fit", "device memory", "fit", "moved/step")
    return _table(headings, rows)


def candidates_table(
    candidates: Sequence[Candidate], best: Candidate | None, *, most_rows: int
) -> str:
    """The fastest candidates, those among them that exceed a limit marked."""
    shown = list(candidates[:most_rows])
    if best is not None and best not in shown:
        shown = [*shown[:-1], best]
    rows = [
        (
            *_setting(one.setting),
            f"{one.tokens:,.0f}",
            f"{one.predicted.step_s:.3f}",
            f"{one.tokens_per_s:,.0f}",
            format_size(one.predicted.device_bytes),
            _size(one.predicted.host_bytes),
            _size(one.predicted.ssd_bytes),
            _size(one.predicted.moved_bytes),
            "best" if one == best else "" if one.is_possible else f"over: {', '.join(one.over)}",
        )
        for one in shown
    ]
    headings = (
        *(*_SETTING, "tokens/step", "s/step", "tokens/s"),
        *("device memory", "host", "SSD", "moved/step", ""),
    )
    more = len(candidates) - len(shown)
    return _table(headings, rows) + (f"\nand {more} slower ones" if more > 0 else "")


def tried_table(
    tried: Sequence[tuple[Candidate, Measurement]], chosen: Setting | None, space: Space
) -> str:
    """Predictions beside what trainings of them took."""
    rows = []
    for one, found in tried:
        with_margin = found.device_bytes * (1.0 + space.memory_margin)
        over = "over: device memory" if with_margin > space.limits.device_bytes else ""
        rows.append(
            (
                *_setting(one.setting),
                f"{one.predicted.step_s:.3f}",
                f"{found.step_s:.3f}",
                f"{one.tokens_per_s:,.0f}",
                f"{one.tokens / found.step_s:,.0f}",
                format_size(one.predicted.device_bytes),
                format_size(found.device_bytes),
                format_size(with_margin),
                "chosen" if one.setting == chosen else over,
            )
        )
    headings = (
        *(*_SETTING, "s/step\npredicted", "\nmeasured", "tokens/s\npredicted", "\nmeasured"),
        *("device memory\npredicted", "\nmeasured", "\nand margin", ""),
    )
    return _table(headings, rows)


def limits_text(limits: Limits) -> str:
    """The limits that there are, for people."""
    parts = [
        f"{format_size(value)} of {name}"
        for name, value in (
            ("device memory", limits.device_bytes),
            ("host memory", limits.host_bytes),
            ("SSD", limits.ssd_bytes),
        )
        if value < math.inf
    ]
    return ", ".join(parts) if parts else "none"


def duration_text(seconds: float) -> str:
    """`about 40 s`, `about 3 min`."""
    if seconds < 90:
        return f"about {max(seconds, 1):.0f} s"
    return f"about {seconds / 60:.0f} min"


def settings_text(settings: Sequence[Setting]) -> str:
    """What will be measured, a line for each order."""
    lines = []
    for units in sorted({one.units for one in settings}):
        pairs = ", ".join(
            f"{one.micro_batches} x {one.micro_batch_size}"
            for one in settings
            if one.units == units
        )
        order = f"layer-major, {units} units" if units else "one micro-batch after the other"
        lines.append(f"  {order}: {pairs}")
    return "\n".join(lines)


def _setting(one: Setting) -> tuple[str, str, str]:
    return str(one.micro_batch_size), str(one.micro_batches), str(one.units or "off")


def _size(num_bytes: float) -> str:
    return format_size(num_bytes) if num_bytes else "-"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    alignment = ["right"] * (len(headings) - 1) + ["left" if not headings[-1] else "right"]
    return tabulate(
        rows, headings, tablefmt="plain", disable_numparse=True, colalign=alignment
    ).rstrip()
