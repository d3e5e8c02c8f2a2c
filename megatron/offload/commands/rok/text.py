# SPDX-License-Identifier: Apache-2.0
"""The tables that a person reads: `measurements_table`, `verdict_table`."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from megatron.offload.commands.rok.measurements import MeasuredPoint
from megatron.offload.commands.rok.verdict import Rival, Verdict
from megatron.offload.sizes import MIB

_HEADINGS = (
    "\nbatch",
    "\nstrategy",
    "\nallocator",
    "\ns/step",
    "\n/ keep",
    "tokens\na second",
    "peak\nMiB",
    "planned\ns/step",
    "peak\nMiB",
    "written\nMiB",
    "replayed\nMiB",
    "waits\ns",
)


def measurements_table(measured: Sequence[MeasuredPoint]) -> str:
    """Lays out what was measured, a row for each strategy, in a hundred columns if it can.

    A column is left out that is the same in all rows, for one batch size, or that is empty.
    """
    if not measured:
        return "nothing was measured"
    rows = [_row(one) for one in measured]
    sizes = {one.micro_batch_size for one in measured}
    first = 1 if len(sizes) == 1 else 0
    places = [place for place in range(first, len(_HEADINGS)) if any(row[place] for row in rows)]
    upper, lower = zip(*(_HEADINGS[place].split("\n") for place in places), strict=True)
    shown = [upper, lower, *([row[place] for place in places] for row in rows)]
    return tabulate(shown, tablefmt="plain", disable_numparse=True)


def _row(one: MeasuredPoint) -> Sequence[str]:
    return (
        str(one.micro_batch_size),
        one.strategy.title,
        one.allocator,
        f"{one.step_s:.3f}",
        "" if one.keep_ratio is None else f"{one.keep_ratio:.3f}",
        f"{one.tokens_per_s:,.0f}",
        _mib(one.peak_bytes),
        "" if one.predicted_step_s is None else f"{one.predicted_step_s:.3f}",
        _mib(one.predicted_peak_bytes),
        _mib(one.written_bytes or None),
        _mib(one.replayed_bytes or None),
        f"{one.stall_s:.3f}",
    )


def verdict_table(verdicts: Sequence[Verdict]) -> str:
    """For each batch size the rivals below each other and the budgets side by side."""
    sizes = list(dict.fromkeys(one.micro_batch_size for one in verdicts))
    return "\n\n".join(
        _one_size([one for one in verdicts if one.micro_batch_size == size]) for size in sizes
    )


def _one_size(verdicts: Sequence[Verdict]) -> str:
    first = verdicts[0]
    rows: list[Sequence[str]] = [
        (
            f"batch {first.micro_batch_size}, budgets in MiB",
            *("allocator", "s/step", "MiB"),
            *(f"{one.budget_bytes / MIB:.0f}" for one in verdicts),
        ),
        ("auto", "", "", "s/step", *(_seconds(one.step_s) for one in verdicts)),
        ("", "", "", "MiB", *(_mib(one.peak_bytes) or "-" for one in verdicts)),
    ]
    for number, rival in enumerate(first.rivals):
        cells = (_cell(one.rivals[number]) for one in verdicts)
        step_s, peak = f"{rival.step_s:.3f}", _mib(rival.peak_bytes)
        rows.append((rival.title, rival.allocator, step_s, peak, *cells))
    rows.append(("verdict", "", "", "", *(_word(one) for one in verdicts)))
    notes = [
        "numbers below budgets: time of auto / of the strategy, paired by turn or round; -: no fit"
    ]
    notes += [_sentence(one) for one in verdicts if not one.is_won]
    table = tabulate(rows, tablefmt="plain", disable_numparse=True)
    return "\n".join((table, *notes))


def _cell(rival: Rival) -> str:
    return f"{rival.ratio:.3f}" if rival.fits and rival.ratio is not None else "-"


def _word(verdict: Verdict) -> str:
    if verdict.failure:
        return "FAILED"
    if verdict.lost_to:
        return "LOST"
    return "OVER" if verdict.is_over_budget else "won"


def _sentence(verdict: Verdict) -> str:
    budget = f"with {verdict.budget_bytes / MIB:.0f} MiB auto"
    if verdict.failure:
        return f"{budget} failed: {verdict.failure}"
    reasons = [
        f"is slower than {one.title}@{one.allocator} by {one.ratio - 1:.1%}"
        for one in verdict.lost_to
        if one.ratio is not None
    ]
    if verdict.is_over_budget:
        reasons.append(f"took {_mib(verdict.peak_bytes)} MiB")
    return f"{budget} {' and '.join(reasons)}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"


def _mib(num_bytes: float | None) -> str:
    if num_bytes is None:
        return ""
    return f"{num_bytes / MIB:,.0f}" if num_bytes >= 100 * MIB else f"{num_bytes / MIB:.1f}"
