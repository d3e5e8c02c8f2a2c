# SPDX-License-Identifier: Apache-2.0
"""What this process has written to its drives, for all purposes: `WEAR`.

Each drive adds what it has written. Reports of a drive's life read it: activations, optimizer
states, parameters and gradients wear the same flash. It knows no rating and no time.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping
from pathlib import Path


class Wear:
    """Bytes written by directory, since the process began."""

    def __init__(self) -> None:
        self._written: collections.Counter[str] = collections.Counter()
        # Protects the counts. Held for an addition; nothing else is taken under it.
        self._lock = threading.Lock()

    def add(self, directory: Path, num_bytes: int) -> None:
        """Adds bytes that were written to the drive of a directory."""
        with self._lock:
            self._written[str(directory)] += num_bytes

    def written(self) -> dict[str, int]:
        """Bytes by directory, until now."""
        with self._lock:
            return dict(self._written)

    def since(self, before: Mapping[str, int]) -> dict[str, int]:
        """Bytes by directory that were written since `written` returned `before`."""
        grown = ((name, count - before.get(name, 0)) for name, count in self.written().items())
        return {name: count for name, count in grown if count}


WEAR = Wear()
