# SPDX-License-Identifier: Apache-2.0
"""Pictures of the commands: `check_picture` before anything is measured, `figure` to draw in.

A strategy looks the same in every picture: `look_of`. matplotlib is imported here alone, when
something is drawn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.offload.errors import ConfigurationError
from megatron.offload.packages import check_packages


class Look(NamedTuple):
    """The colour and the marker of a strategy's points."""

    color: str
    marker: str


# Colours of Okabe and Ito, which colour-blind people can tell apart; markers differ as well.
_LOOKS = {
    "off": Look("#000000", "s"),
    "keep": Look("#000000", "h"),
    "replay": Look("#000000", "p"),
    "recompute": Look("#D55E00", "^"),
    "recompute-ssd": Look("#D55E00", "X"),
    "recompute-host": Look("#D55E00", "v"),
    "selective": Look("#E69F00", "v"),
    "ssd": Look("#0072B2", "D"),
    "ssd-no-replay": Look("#0072B2", "d"),
    "ssd-chunked": Look("#0072B2", "*"),
    "host": Look("#56B4E9", "<"),
    "tiered": Look("#56B4E9", ">"),
    "suffix": Look("#CC79A7", "P"),
    "auto": Look("#009E73", "o"),
}


def look_of(strategy: str) -> Look:
    """How the points of a strategy look; its name is that of `rok --strategies`."""
    return _LOOKS[strategy]


def begin_near(axes: Any, values: Sequence[float]) -> None:
    """Lets the y axis begin below the least of the values, and says so if that is not 0."""
    least, most = min(values), max(values)
    margin = max(0.35 * (most - least), 0.06 * most)
    bottom = max(0.0, least - margin)
    axes.set_ylim(bottom, most + margin)
    if bottom > 0:
        said = "the y axis does not begin at 0"
        axes.annotate(said, (0.01, 0.015), xycoords="axes fraction", fontsize=7)


def check_picture(flag: str, path: Path) -> None:
    """Whether the picture that a flag asks for could be drawn. Raises ConfigurationError."""
    if path.suffix not in (".png", ".svg"):
        raise ConfigurationError(f"{flag} {path} is no picture; end its name in .png or .svg")
    check_packages(flag, "matplotlib")


@contextlib.contextmanager
def figure(*paths: Path, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[Any]:
    """A figure and its axes to draw in, of which there is one or an array; written at the end.

    Args:
        paths: of the files, PNG or SVG by their names.
        rows: of axes.
        columns: of axes.
        options: of `pyplot.subplots`.

    Raises:
        OSError: a file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    drawn, axes = plt.subplots(rows, columns, **options)
    try:
        yield drawn, axes
        for path in paths:
            drawn.savefig(path, dpi=120)
    finally:
        plt.close(drawn)
