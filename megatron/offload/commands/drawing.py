# SPDX-License-Identifier: Apache-2.0
"""Pictures of the commands: `check_picture` before anything is measured, `figure` to draw in.

A strategy looks the same in every picture: `look_of`. Words beside points cover no others:
`label_points`. matplotlib is imported here alone, when something is drawn.
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


class Label(NamedTuple):
    """Words beside a point, whose place is in the units of the axes."""

    x: float
    y: float
    words: str
    color: str = "black"


# Of all pictures. Colours of Okabe and Ito, which colour-blind people can tell apart; their
# brightness differs too.
BLACK, GRAY = "#000000", "#999999"
BLUE, SKY, GREEN = "#0072B2", "#56B4E9", "#009E73"
RED, ORANGE, PINK = "#D55E00", "#E69F00", "#CC79A7"
YELLOW = "#F0E442"
PALETTE = (BLUE, RED, GREEN, PINK, ORANGE, SKY, BLACK)  # for what has no look of its own
_LOOKS = {
    "off": Look(BLACK, "s"),
    "keep": Look(BLACK, "h"),
    "replay": Look(BLACK, "p"),
    "recompute": Look(RED, "^"),
    "recompute-ssd": Look(RED, "X"),
    "recompute-host": Look(RED, "v"),
    "selective": Look(ORANGE, "v"),
    "ssd": Look(BLUE, "D"),
    "ssd-no-replay": Look(BLUE, "d"),
    "ssd-chunked": Look(BLUE, "*"),
    "host": Look(SKY, "<"),
    "tiered": Look(SKY, ">"),
    "suffix": Look(PINK, "P"),
    "auto": Look(GREEN, "o"),
}


def look_of(strategy: str) -> Look:
    """How the points of a strategy look; its name is that of `rok --strategies`."""
    return _LOOKS[strategy]


def begin_near(axes: Any, values: Sequence[float]) -> None:
    """Lets the y axis begin below the least of the values, and says so if that is not 0."""
    if not values:
        return
    least, most = min(values), max(values)
    margin = max(0.35 * (most - least), 0.06 * most)
    bottom = max(0.0, least - margin)
    axes.set_ylim(bottom, most + margin)
    if bottom > 0:
        said = "the y axis does not begin at 0"
        axes.annotate(said, (0.01, 0.015), xycoords="axes fraction", fontsize=7)


# Where words may stand, in points from their own: beside it, above and below, further away.
_PLACES = tuple(
    (x, y)
    for far in (1, 2, 3)
    for x, y in (
        *((0, 7 * far), (0, -7 * far), (7 * far, 0), (-7 * far, 0)),
        *((7 * far, 5 * far), (-7 * far, 5 * far), (7 * far, -5 * far), (-7 * far, -5 * far)),
    )
)
_SIDES = {-1: "right", 0: "center", 1: "left"}
_HEIGHTS = {-1: "top", 0: "center", 1: "bottom"}


def label_points(drawn: Any, axes: Any, labels: Sequence[Label], taken: Sequence[Any] = ()) -> None:
    """Writes words beside points, where they cover no point, line or other words, if they can.

    Call it when all else is drawn and the axes have their limits.

    Args:
        drawn: the figure.
        axes: of the points.
        labels: words and their points.
        taken: other points (x, y) that are not to be covered.
    """
    from matplotlib.transforms import Bbox

    if not labels:
        return
    drawn.draw_without_rendering()  # a layout moves axes when they are drawn
    renderer = drawn.canvas.get_renderer()
    pixels = axes.transData.transform([*((one.x, one.y) for one in labels), *taken])
    boxes = [Bbox.from_extents(x - 7, y - 7, x + 7, y + 7) for x, y in pixels]
    for line in axes.get_lines():
        if line.get_linestyle() != "None":
            path = line.get_path().transformed(line.get_transform()).interpolated(12)
            boxes += [Bbox.from_extents(x - 2, y - 2, x + 2, y + 2) for x, y in path.vertices]
    for one in labels:
        texts: list[tuple[int, int, Any, Any]] = []
        for x, y in _PLACES:
            aligned = {"ha": _SIDES[(x > 0) - (x < 0)], "va": _HEIGHTS[(y > 0) - (y < 0)]}
            style = {"fontsize": 7, "color": one.color, "textcoords": "offset points"}
            text = axes.annotate(one.words, (one.x, one.y), (x, y), **style, **aligned)
            box = text.get_window_extent(renderer)
            overlaps = sum(box.overlaps(other) for other in boxes)
            is_cut = not axes.bbox.contains(*box.min) or not axes.bbox.contains(*box.max)
            texts.append((overlaps + is_cut, len(texts), text, box))
            if not overlaps and not is_cut:
                break
        *_, best, box = min(texts, key=lambda found: found[:2])
        for *_, text, _ in texts:
            if text is not best:
                text.remove()
        boxes.append(box)


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
