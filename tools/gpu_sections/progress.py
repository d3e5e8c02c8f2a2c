# SPDX-License-Identifier: Apache-2.0
"""A progress bar on standard error that needs no package: `Progress`."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

_WIDTH = 24
_LINE_EVERY_S = 20.0  # where standard error is a file


class Progress:
    """One line that is drawn over and over; in a file, a line now and then.

    Args:
        name: what makes progress.
        stream: default: standard error.
    """

    def __init__(self, name: str, stream: TextIO | None = None) -> None:
        self._name = name
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._began_s = time.monotonic()
        self._shown_s = float("-inf")

    def show(self, fraction: float, what: str) -> None:
        """How much is done, from 0.0 to 1.0, and what comes next."""
        now_s = time.monotonic()
        if not self._is_terminal and now_s - self._shown_s < _LINE_EVERY_S:
            return
        self._shown_s = now_s
        done = round(min(max(fraction, 0.0), 1.0) * _WIDTH)
        bar = "#" * done + "." * (_WIDTH - done)
        line = f"{self._name:<9} [{bar}] {now_s - self._began_s:4.0f} s {what}"
        if self._is_terminal:
            columns = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\033[K{line[:columns]}")
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()

    def close(self) -> None:
        """Takes the bar off the terminal."""
        if self._is_terminal:
            self._stream.write("\r\033[K")
            self._stream.flush()
