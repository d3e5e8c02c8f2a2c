# SPDX-License-Identifier: Apache-2.0
"""The recompute-offload-keep picture of a comparison: `draw`.

x: peak of activation memory, y: speed beside keeping everything, as in SSDTrain (arXiv 2408.10013).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.offload.commands.drawing import figure
from megatron.offload.commands.plan.comparison import PlanComparison

GIB = 1 << 30
_MARKERS = {
    "keep all": "s",
    "recompute all": "^",
    "recompute, inputs on ssd": "X",
    "ssd all": "D",
    "host all": "v",
    "TBA's suffix": "P",
}


def draw(comparison: PlanComparison, path: Path) -> None:
    """Draws the curve and the strategies into a file. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with figure(path, figsize=(7, 4.5), layout="constrained") as (_, axes):
        _draw(axes, comparison)
        _label(axes, comparison)


def _draw(axes: Any, comparison: PlanComparison) -> None:
    keep_s = comparison.keep.step_s
    points = sorted((one.peak_bytes / GIB, keep_s / one.step_s) for _, one in comparison.curve)
    axes.plot(*zip(*points, strict=True), "o-", color="tab:blue", label="plans, by budget")
    for name, one in comparison.strategies.items():
        if one is None or name == "this plan":
            continue
        place = (one.peak_bytes / GIB, keep_s / one.step_s)
        axes.plot(*place, _MARKERS.get(name, "x"), markersize=9, label=name)


def _label(axes: Any, comparison: PlanComparison) -> None:
    axes.set_xlabel("peak activation memory, GiB")
    axes.set_ylabel("speed, relative to keeping everything")
    axes.set_title(comparison.profile.source, fontsize=10)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.1)
    axes.grid(alpha=0.3)
    axes.legend()
