# SPDX-License-Identifier: Apache-2.0
"""What the peak of a simulated step is made of, by the names of measured ones: `peak_of`.

`Timeline` calls it with the log of a step. A prediction that is wrong shows in which part.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from megatron.offload.activations.saved.scope import Scope
from megatron.offload.activations.stats.memory_parts import (
    AHEAD,
    PARTS,
    RECOMPUTED,
    REPLAYED,
    REST,
    USED,
    WRITING,
    PredictedPeak,
    name_of,
    part_of,
)
from megatron.offload.planner.simulator import rows
from megatron.offload.planner.simulator.arrays import Rows

_PARTS = {
    rows.BEING_WRITTEN: WRITING,
    rows.READ_AHEAD: AHEAD,
    rows.IN_USE: USED,
    rows.RECOMPUTED: RECOMPUTED,
    rows.REPLAYED: REPLAYED,
}


def peak_of(log: Rows, names: Sequence[str], allocator_slack: float, other: float) -> PredictedPeak:
    """Finds the peak in a log and says what it is made of.

    Args:
        log: [rows] of `rows.LOG`, in the order in which they happened.
        names: of the layers.
        allocator_slack: what saved activations take beyond their own bytes, as a part of these.
        other: bytes that are there all the time.
    """
    levels = log["kind"] == rows.LEVEL
    most = float(log["end"][levels].max(initial=0.0))
    last = int(np.argmax(levels & (log["end"] == most)))
    held: collections.Counter[int] = collections.Counter()  # by layer
    doing: collections.Counter[tuple[str, int]] = collections.Counter()  # by part and layer
    before = 0.0
    for kind, _, end, _, where in log[: last + 1].tolist():
        if kind == rows.LEVEL:
            held[where] += end - before
            before = end
        elif kind in _PARTS:
            doing[_PARTS[kind], where] += end
    parts: dict[str, float] = dict.fromkeys(PARTS, 0)
    layers = {}
    for layer, num_bytes in held.items():
        scope = Scope() if layer < 0 else Scope(layer=names[layer])
        of_layer = {part: doing[part, layer] for part in _PARTS.values()}
        parts[part_of(scope)] += num_bytes - sum(of_layer.values())
        for part, some_bytes in of_layer.items():
            parts[part] += some_bytes
        layers[name_of(scope)] = round(num_bytes)
    parts[REST] = np.ceil(most * (1 + allocator_slack)) - most + other
    return PredictedPeak({name: round(one) for name, one in parts.items()}, layers)
