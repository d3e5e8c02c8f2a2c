# SPDX-License-Identifier: Apache-2.0
"""Keeps what libraries print by themselves off standard output: `silent_output`.

`program` puts it around HiGHS, which writes lines of its own now and then, whatever it is told.
They come from below Python, so the file descriptor is what has to point elsewhere. What other
threads print meanwhile is lost too; where that counts, plans are made in a process of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator

_STDOUT = 1
# The process has one standard output: two that redirected it in turn would restore the wrong one.
# Held for as long as a library is silent; nothing else is locked under it.
_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def silent_output() -> Iterator[None]:
    """Nothing that is written to file descriptor 1 in here is seen."""
    library = ctypes.CDLL(None)
    with _one_at_a_time, contextlib.ExitStack() as stack:
        try:
            kept = os.dup(_STDOUT)
        except OSError:  # it is closed: nothing is seen anyway
            yield
            return
        stack.callback(os.close, kept)
        library.fflush(None)  # what was printed before goes where it should
        stack.callback(os.dup2, kept, _STDOUT)
        stack.callback(library.fflush, None)  # while it still goes nowhere
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), _STDOUT)
        yield
