# SPDX-License-Identifier: Apache-2.0
"""Pictures of the commands: `check_picture` before anything is measured, `figure` to draw in.

matplotlib is imported here alone, when something is drawn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.offload.errors import ConfigurationError
from megatron.offload.packages import check_packages


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
