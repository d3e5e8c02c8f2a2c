# SPDX-License-Identifier: Apache-2.0
"""The recompute-offload-keep picture of a comparison: `draw`.

x: peak of activation memory, y: speed beside keeping everything, as in SSDTrain (arXiv 2408.10013).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.offload.commands.plan.comparison import PlanComparison
from megatron.offload.errors import ConfigurationError

GIB = 1 << 30
_MARKERS = {
    "keep all": "s",
    "recompute all": "^",
    "recompute, inputs on ssd": "X",
    "ssd all": "D",
    "host all": "v",
    "TBA's suffix": "P",
}


def check_picture(flag: str, path: Path) -> None:
    """Whether the picture that a flag asks for could be drawn. Raises ConfigurationError."""
    if path.suffix not in (".png", ".svg"):
        raise ConfigurationError(f"{flag} {path} is no picture; end its name in .png or .svg")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigurationError(
            f"{flag} needs matplotlib, which is not installed; pip install matplotlib, or leave it "
            "out and take the figures from --json"
        ) from None


def draw(comparison: PlanComparison, path: Path) -> None:
    """Draws the curve and the strategies into a file. Raises OSError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    keep_s = comparison.keep.step_s
    points = sorted((one.peak_bytes / GIB, keep_s / one.step_s) for _, one in comparison.curve)
    axes.plot(*zip(*points, strict=True), "o-", color="tab:blue", label="plans, by budget")
    for name, one in comparison.strategies.items():
        if one is None or name == "this plan":
            continue
        place = (one.peak_bytes / GIB, keep_s / one.step_s)
        axes.plot(*place, _MARKERS.get(name, "x"), markersize=9, label=name)
    _label(axes, comparison)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _label(axes: Any, comparison: PlanComparison) -> None:
    axes.set_xlabel("peak activation memory, GiB")
    axes.set_ylabel("speed, relative to keeping everything")
    axes.set_title(comparison.profile.source, fontsize=10)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.1)
    axes.grid(alpha=0.3)
    axes.legend()
