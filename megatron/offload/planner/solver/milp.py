# SPDX-License-Identifier: Apache-2.0
"""Variables and constraints of a mixed-integer program, and its solution by HiGHS: `Rows`.

`formulation` says what they mean. This scales them and knows the limits of the effort.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from megatron.offload.planner.simulator.arrays import Floats, Ints

_MOST_NODES = 40
_GAP = 0.003


class Rows:
    """Variables and constraints, as they come. Their own units become the matrix's."""

    def __init__(self) -> None:
        self._upper: list[float] = []
        self._units: list[float] = []
        self._is_integer: list[bool] = []
        self._at: list[tuple[int, int, float]] = []
        self._bounds: list[tuple[float, float]] = []

    def variable(
        self, number: int, *, upper: float = np.inf, unit: float = 1.0, is_integer: bool = False
    ) -> Ints:
        """New ones, from zero to `upper`; in the matrix they count units."""
        first = len(self._upper)
        self._upper += [upper / unit] * number
        self._units += [unit] * number
        self._is_integer += [is_integer] * number
        return np.arange(first, first + number)

    def add(self, terms: list[tuple[int, float]], lower: float, upper: float) -> None:
        """A constraint, scaled to its largest factor."""
        in_units = [(int(n), factor * self._units[int(n)]) for n, factor in terms]
        scale = max((abs(factor) for _, factor in in_units), default=1.0) or 1.0
        row = len(self._bounds)
        self._at += [(row, n, factor / scale) for n, factor in in_units if factor]
        self._bounds.append((lower / scale, upper / scale))

    def solve(self, objective: list[tuple[int, float]]) -> Floats | None:
        """The best values, in units; None if there are none, or none soon."""
        costs = np.zeros(len(self._upper))
        for n, factor in objective:
            costs[n] += factor * self._units[n]
        at, column, factors = (np.array(part) for part in zip(*self._at, strict=True))
        shape = (len(self._bounds), len(self._upper))
        matrix = coo_array((factors, (at, column)), shape=shape).tocsr()
        lower, upper = (np.array(part) for part in zip(*self._bounds, strict=True))
        with _silent_output():
            found = milp(
                costs / (np.abs(costs).max() or 1.0),
                integrality=np.array(self._is_integer, int),
                bounds=Bounds(0.0, np.array(self._upper)),
                constraints=LinearConstraint(matrix, lower, upper),
                options={"node_limit": _MOST_NODES, "mip_rel_gap": _GAP},
            )
        values: Floats | None = found.x
        return values


@contextlib.contextmanager
def _silent_output() -> Iterator[None]:
    """Keeps what HiGHS prints off standard output, where commands print theirs.

    With `disp=False` too, one program in some hundreds makes it print a line about itself, below
    Python. What other threads print meanwhile is lost: a training solves in a process of its own.
    """
    library = ctypes.CDLL(None)
    library.fflush(None)  # what was printed before goes where it should
    try:
        before = os.dup(1)
    except OSError:  # it is closed
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        library.fflush(None)  # while it still goes nowhere
        os.dup2(before, 1)
        os.close(before)
