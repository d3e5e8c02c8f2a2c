# SPDX-License-Identifier: Apache-2.0
"""Linear fits whose coefficients are bytes or seconds, so never negative: `fit`.

Knows nothing of what is fitted; the terms are in `step_model.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.offload.commands.tune.setting import Setting

_SAME = 1e-9  # of the measured values: two fits that close are equally good


@dataclass(frozen=True)
class Fit:
    """A sum of terms, each with a coefficient of 0 or more.

    Attributes:
        coefficients: by the name of the term, all of them.
    """

    coefficients: Mapping[str, float]
    terms: Mapping[str, Callable[[Setting], float]]

    def at(self, setting: Setting) -> float:
        """The value for a setting."""
        return sum(
            coefficient * self.terms[name](setting)
            for name, coefficient in self.coefficients.items()
            if coefficient
        )


def fit(
    terms: Mapping[str, Callable[[Setting], float]],
    measured: Mapping[Setting, float],
    *,
    relative: bool = False,
) -> Fit:
    """The sum of terms that is nearest to what was measured, of those without a negative one.

    The terms are few, so every choice of them is tried. Of choices that are equally near the one
    with the fewest terms is taken, so what the measurements cannot tell apart is one term.

    Args:
        terms: by name.
        measured: bytes or seconds, by setting.
        relative: an error counts as a part of the value, so that short steps count like long ones.
    """
    settings = list(measured)
    values = np.array([measured[one] for one in settings], dtype=np.float64)
    columns = {name: np.array([float(of(one)) for one in settings]) for name, of in terms.items()}
    weights = 1.0 / np.maximum(np.abs(values), 1e-300) if relative else np.ones_like(values)
    scale = float(np.linalg.norm(values * weights))
    best, best_error = dict.fromkeys(terms, 0.0), scale
    for number in range(1, len(terms) + 1):
        for names in itertools.combinations(terms, number):
            found = _solved([columns[name] * weights for name in names], values * weights)
            if found is None:
                continue
            coefficients, error = found
            if error < best_error - _SAME * scale:
                best = dict.fromkeys(terms, 0.0) | dict(zip(names, coefficients, strict=True))
                best_error = error
    return Fit(best, terms)


def _solved(columns: Sequence[np.ndarray], values: np.ndarray) -> tuple[list[float], float] | None:
    """Coefficients and the length of what is left; None: not unique, or one is negative."""
    lengths = [float(np.linalg.norm(one)) for one in columns]
    if not all(lengths):
        return None
    matrix = np.stack([one / length for one, length in zip(columns, lengths, strict=True)], axis=1)
    solution, _, rank, _ = np.linalg.lstsq(matrix, values, rcond=1e-9)
    if rank < len(columns) or min(solution) < 0.0:
        return None
    error = float(np.linalg.norm(values - matrix @ solution))
    coefficients = [float(one) / length for one, length in zip(solution, lengths, strict=True)]
    return coefficients, error
