# SPDX-License-Identifier: Apache-2.0
"""What was found as tables for people: `summary_table`, `failures_table`, `page`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tabulate import tabulate

from check.family.cells import FAILED, Cell, Left, Outcome

_WORST_FIRST = (
    Outcome.CRASH,
    Outcome.DIFFERENT,
    Outcome.REFUSED,
    Outcome.SUMS,
    Outcome.IDENTICAL,
    Outcome.NOT_APPLICABLE,
)
_SHORT = {
    Outcome.CRASH: "**crash**",
    Outcome.DIFFERENT: "**different**",
    Outcome.REFUSED: "refused",
    Outcome.SUMS: "sums",
    Outcome.IDENTICAL: "=",
    Outcome.NOT_APPLICABLE: "",
}
_MOST_NOTE = 160


def summary_table(cells: Sequence[Cell], columns: Sequence[str]) -> str:
    """How often each outcome came in each column."""
    counts = Counter((cell.column, cell.outcome) for cell in cells)
    still = Counter(
        cell.column
        for cell in cells
        if cell.outcome in (Outcome.IDENTICAL, Outcome.SUMS) and cell.moved is False
    )
    rows = [
        (column, *(counts[column, outcome] or "" for outcome in Outcome), still[column] or "")
        for column in columns
    ]
    return _table(rows, ("", *(outcome.value for outcome in Outcome), "of them nothing moved"))


def failures_table(cells: Iterable[Cell], outcomes: Iterable[Outcome] = FAILED) -> str:
    """Cells with these outcomes, those with the same note together."""
    wanted, groups = set(outcomes), {}
    for cell in cells:
        if cell.outcome in wanted:
            groups.setdefault((cell.column, cell.outcome, _kind_of(cell.note)), []).append(cell)
    rows = [
        (column, outcome.value, len(group), _names(group), _short(group[0].note))
        for (column, outcome, _), group in sorted(groups.items(), key=lambda one: -len(one[1]))
    ]
    return _table(rows, ("column", "", "cells", "families", "what it says"))


def page(
    cells: Sequence[Cell],
    left: Sequence[Left],
    summary: dict[str, Any],
    columns: Sequence[str],
    facts: dict[str, str],
) -> str:
    """docs/results/families.md.

    Args:
        cells: all.
        left: families that are not compared.
        summary: of both.
        columns: in their order.
        facts: date, command, versions.
    """
    fraction = summary["recompute_identical_fraction"]
    random = ", ".join(summary["random_by_themselves"]) or "none"
    parts = [
        "# Families of transformers",
        "This page is written by the command below. Each family of transformers that builds from a "
        "small configuration of its own class trains two steps with each of our doors and is "
        "compared with the same training without, bit by bit: losses, gradients, weights and "
        "buffers. Defaults are the class's own but for sizes; texts are padded; attention is eager "
        "and sdpa.",
        f"```bash\n{facts['command']}\n```",
        f"{facts['date']}, {facts['versions']}. {summary['families']} families, "
        f"{summary['cases']} trainings with a door: {summary['crashes']} crashes, "
        f"{summary['differences']} differences, {summary['refused']} refused in a sentence. Of the "
        "trainings with recomputation that ran, "
        f"{'none' if fraction is None else f'{100 * fraction:.1f} %'} were recomputed and "
        "identical. Left out because two plain trainings differ: "
        f"{random}.",
        "## Outcomes",
        summary_table(cells, columns),
        "`auto` is tried with one kind of attention; a chunked loss, on causal models alone, is "
        "compared with fp64 beside the loss in one piece. *Identical but for the order of sums*: "
        "[which bits are the same](../layer-major.md#which-bits-are-the-same).",
        "## Crashes and differences",
        failures_table(cells) if summary["crashes"] + summary["differences"] else "None.",
        "## Refused",
        failures_table(cells, [Outcome.REFUSED]) if summary["refused"] else "None.",
        "## Families",
        "`=` identical; `=*` identical, but nothing moved or was recomputed; `sums` identical but "
        "for the order of sums; empty: does not apply. Where kinds of attention differ the worse "
        "one stands.",
        _families_table(cells, columns),
        "## Not compared",
        _table(
            sorted({(one.kind, one.family, _short(one.reason)) for one in _only_left(cells, left)}),
            ("kind", "family", "why"),
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _families_table(cells: Sequence[Cell], columns: Sequence[str]) -> str:
    by_family: dict[tuple[str, str], dict[str, list[Cell]]] = {}
    for cell in cells:
        columns_of = by_family.setdefault((cell.kind, cell.family), {})
        columns_of.setdefault(cell.column, []).append(cell)
    rows = [
        (kind, family, *(_worst(found.get(column, [])) for column in columns))
        for (kind, family), found in by_family.items()
    ]
    return _table(rows, ("kind", "family", *columns))


def _worst(cells: Sequence[Cell]) -> str:
    if not cells:
        return ""
    worst = min(cells, key=lambda cell: _WORST_FIRST.index(cell.outcome))
    still = worst.outcome in (Outcome.IDENTICAL, Outcome.SUMS) and worst.moved is False
    return _SHORT[worst.outcome] + ("*" if still else "")


def _only_left(cells: Sequence[Cell], left: Iterable[Left]) -> Iterable[Left]:
    ran = {cell.family for cell in cells}
    return (one for one in {one.family: one for one in left}.values() if one.family not in ran)


def _kind_of(note: str) -> str:
    """A note without the numbers and names in which those of one kind differ."""
    return "".join("#" if c.isdigit() else c for c in note).replace("##", "#")[:60]


def _names(cells: Sequence[Cell]) -> str:
    names = list(dict.fromkeys(cell.family for cell in cells))
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _short(text: str) -> str:
    text = text.replace("|", "/")
    return text if len(text) <= _MOST_NOTE else f"{text[:_MOST_NOTE]} ..."


def _table(rows: Iterable[Sequence[Any]], headings: Sequence[str]) -> str:
    return str(tabulate(list(rows), headings, tablefmt="github", disable_numparse=True))
