# SPDX-License-Identifier: Apache-2.0
"""The recompute-offload-keep picture of a comparison: `draw`.

x: peak of activation memory, y: speed beside keeping everything, as in SSDTrain (arXiv 2408.10013).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.offload.commands.drawing import GRAY, begin_near, figure, look_of
from megatron.offload.commands.plan.comparison import (
    BOTH_ALL,
    ENCODE_ALL,
    REPLAY_ALL,
    PlanComparison,
)
from megatron.offload.sizes import GIB

# The strategies of a comparison, as `rok` calls them.
_STRATEGIES = {
    "keep all": "off",
    "recompute all": "recompute",
    "recompute, inputs on ssd": "recompute-ssd",
    "recompute, inputs on host": "recompute-host",
    "ssd all": "ssd",
    "host all": "host",
    "TBA's suffix": "suffix",
    **dict.fromkeys((REPLAY_ALL, ENCODE_ALL, BOTH_ALL), "replay"),
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
    replays = bool(comparison.curve_without_replay)
    label = "plans with replay, by budget" if replays else "plans, by budget"
    axes.plot(*zip(*points, strict=True), "o-", color=look_of("auto").color, label=label)
    if replays:
        without = comparison.curve_without_replay
        plain = sorted((one.peak_bytes / GIB, keep_s / one.step_s) for _, one in without)
        axes.plot(*zip(*plain, strict=True), "o--", color=GRAY, label="plans without replay")
        _mark_goal(axes, comparison)
    for name, one in comparison.strategies.items():
        if one is None or name not in _STRATEGIES:
            continue
        place = (one.peak_bytes / GIB, keep_s / one.step_s)
        color, marker = look_of(_STRATEGIES[name])
        axes.plot(*place, marker, color=color, markersize=9, label=name)


def _mark_goal(axes: Any, comparison: PlanComparison) -> None:
    """The plans for the goal that was asked for, with replay and without, by their peaks."""
    keep_s = comparison.keep.step_s
    for one, color, which, above in (
        (comparison.predicted, look_of("auto").color, "with replay", 9),
        (comparison.without_replay, GRAY, "without", -30),
    ):
        if one is None:
            continue
        place = one.peak_bytes / GIB, keep_s / one.step_s
        axes.plot(*place, "*", color=color, markersize=14, label=f"plan for the goal, {which}")
        axes.annotate(
            f"{one.peak_bytes / GIB:.1f} GiB",
            place,
            (0, above),
            textcoords="offset points",
            color=color,
        )


def _label(axes: Any, comparison: PlanComparison) -> None:
    keep_s = comparison.keep.step_s
    curves = (*comparison.curve, *comparison.curve_without_replay)
    drawn = [*(one for _, one in curves), *filter(None, comparison.strategies.values())]
    axes.set_xlabel("peak activation memory, GiB")
    axes.set_ylabel("speed, relative to keeping everything")
    axes.set_title(comparison.profile.source, fontsize=10)
    axes.set_xlim(left=0)
    begin_near(axes, [keep_s / one.step_s for one in drawn])
    axes.grid(alpha=0.3)
    axes.legend()
