# SPDX-License-Identifier: Apache-2.0
"""A bar on a terminal while a command measures, if tqdm is installed: `progress`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(total: int, what: str, unit: str = "it") -> Iterator[Callable[[], object]]:
    """Gives what is to be called after each of so many pieces."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        print(f"measuring {what} ...", file=sys.stderr)
        yield lambda: None
        return
    with tqdm(
        total=total, desc=f"measuring {what}", unit=unit, leave=False, dynamic_ncols=True
    ) as bar:
        yield bar.update
