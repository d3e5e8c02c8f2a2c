# SPDX-License-Identifier: Apache-2.0
"""What a family did in a column: `Cell`, and what all of them come to: `summary_of`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """Of a training with one of the doors, beside the plain one."""

    IDENTICAL = "identical"  # each bit; of a chunked loss: within rounding
    SUMS = "identical but for the order of sums"  # layer-major steps: docs/layer-major.md
    REFUSED = "refused"  # in a sentence of ours
    CRASH = "crash"  # any other exception, a signal, no end
    DIFFERENT = "different"
    NOT_APPLICABLE = "does not apply"


RAN = {Outcome.IDENTICAL, Outcome.SUMS, Outcome.CRASH, Outcome.DIFFERENT}
FAILED = {Outcome.CRASH, Outcome.DIFFERENT}


@dataclass(frozen=True)
class Cell:
    """One training.

    Attributes:
        family, kind, attention: of the model.
        column: what was tried.
        outcome: what came of it.
        note: the sentence, the exception, what differs; else empty.
        moved: whether the door has done what it is for: bytes have moved, layers were recomputed.
            None: it has not come to that.
        seconds: that it took.
    """

    family: str
    kind: str
    attention: str
    column: str
    outcome: Outcome
    note: str = ""
    moved: bool | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Left:
    """A family that is not compared.

    Attributes:
        family, kind, attention: of it.
        reason: why.
        is_random: two plain trainings of it differ; else it has no small model.
    """

    family: str
    kind: str
    attention: str
    reason: str
    is_random: bool = False


def summary_of(cells: Sequence[Cell], left: Iterable[Left]) -> dict[str, Any]:
    """The numbers that stand at the head of a result."""
    outcomes = Counter(cell.outcome for cell in cells)
    ran = {cell.family for cell in cells}
    recomputed = [cell for cell in cells if cell.column == "recompute" and cell.outcome in RAN]
    identical = [c for c in recomputed if c.outcome is Outcome.IDENTICAL and c.moved]
    kinds = {cell.family: cell.kind for cell in cells}
    random = {one.family for one in left if one.is_random}
    return {
        "families": len(ran),
        "families_of_kind": dict(Counter(kinds.values())),
        "random_by_themselves": sorted(random),
        "not_built": len({one.family for one in left if not one.is_random} - ran - random),
        "cases": sum(outcomes.values()) - outcomes[Outcome.NOT_APPLICABLE],
        "identical": outcomes[Outcome.IDENTICAL],
        "order_of_sums": outcomes[Outcome.SUMS],
        "crashes": outcomes[Outcome.CRASH],
        "differences": outcomes[Outcome.DIFFERENT],
        "refused": outcomes[Outcome.REFUSED],
        "does_not_apply": outcomes[Outcome.NOT_APPLICABLE],
        "nothing_moved": sum(
            cell.outcome in (Outcome.IDENTICAL, Outcome.SUMS) and cell.moved is False
            for cell in cells
        ),
        "recompute_identical_fraction": (
            round(len(identical) / len(recomputed), 4) if recomputed else None
        ),
    }
