# SPDX-License-Identifier: Apache-2.0
"""Lets the threads of gloo's process groups finish before a process ends: `wait_until_idle`.

A collective returns before the thread that ran it has let go of its tensors, for which that thread
may need Python. Where Python is ending meanwhile, it ends the thread instead, and C++ ends the
process with SIGABRT after a training that has gone well. It happens where the processors are busy.
"""

from __future__ import annotations

import time
from pathlib import Path

_THREADS = Path("/proc/self/task")
_NUM_LOOKS = 3  # in a row, between which a thread that waits for Python gets it
_BETWEEN_LOOKS_S = 0.005
_PATIENCE_S = 60.0


def wait_until_idle(threads: Path = _THREADS) -> None:
    """Returns when all of gloo's threads sleep; call it last, with no collective under way.

    Does nothing where the system has no /proc. Gives up after a minute: the process then ends as
    it would have.

    Args:
        threads: the directory in which the kernel shows this process's threads.
    """
    deadline_s = time.monotonic() + _PATIENCE_S
    looks = 0
    while looks < _NUM_LOOKS and time.monotonic() < deadline_s:
        looks = 0 if _is_any_busy(threads) else looks + 1
        time.sleep(_BETWEEN_LOOKS_S)


def _is_any_busy(threads: Path) -> bool:
    for stat in threads.glob("*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # the thread has ended
            continue
        _, _, named = text.partition("(")
        name, _, fields = named.rpartition(")")
        if "gloo" in name and fields.split()[0] != "S":
            return True
    return False
