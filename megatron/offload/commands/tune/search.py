# SPDX-License-Identifier: Apache-2.0
"""Which candidates are measured, and which one is chosen: `search`.

Without a memory budget a prediction is enough. With one, only a candidate that was measured is
chosen: the best of those that may keep to the budget is measured, the fits are made again with what
it took, and so on until the best is one that was measured. A candidate that was not measured is
given the benefit of the doubt, `TOO_HIGH`; what was measured has to leave a margin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from megatron.offload.commands.tune.candidates import Candidate, Space, best_of, neighbours_of
from megatron.offload.commands.tune.setting import Setting
from megatron.offload.commands.tune.step_model import Measurement, StepModel

MOST_TRAININGS = 6  # that a search measures

Measured = dict[Setting, Measurement | None]  # None: the training failed


def search(
    space: Space,
    to_fit: Sequence[Measurement],
    model_of: Callable[[Sequence[Measurement]], StepModel],
    measure: Callable[[Sequence[Setting]], Mapping[Setting, Measurement | None]],
    *,
    neighbours: bool = False,
) -> tuple[Candidate | None, list[Candidate]]:
    """Chooses.

    Args:
        to_fit: what the first fits are made of.
        model_of: makes them.
        measure: runs trainings; None: one failed.
        neighbours: of the best are measured too.

    Returns:
        The choice and all candidates, the fastest first. The choice is None if nothing that was
        measured keeps to the limits.
    """
    measured: Measured = {one.setting: one for one in to_fit}
    measures = neighbours or space.limits.device_bytes < math.inf
    left = MOST_TRAININGS
    while True:
        model = model_of([one for one in measured.values() if one is not None])
        # Measured seconds are only compared with predicted ones if the best is to be measured too.
        candidates = space.candidates(model, measured if measures else {})
        best = best_of(candidates)
        if best is None or not measures:
            return best, candidates
        sure = best_of([one for one in candidates if one.measured])
        wanted = [best, *(neighbours_of(best, candidates) if neighbours else [])]
        if left == 1 and sure is None:  # rather something slow than nothing
            wanted = sorted(candidates, key=lambda one: (len(one.over), one.device_bytes))
        settings = [one.setting for one in wanted if one.setting not in measured][:left]
        if not settings:
            return sure, candidates
        measured.update(measure(settings))
        left -= len(settings)
