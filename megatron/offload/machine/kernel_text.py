# SPDX-License-Identifier: Apache-2.0
"""Text of the kernel's files in `/proc` and `/sys`: `kernel_text`, the one way to read it.

Names in it (of mount points, groups, processes, disks) are bytes that any user may choose, and need
not be UTF-8. As paths they work again; as text they show which bytes they were.
"""

from __future__ import annotations

from pathlib import Path


def kernel_text(path: Path) -> str:
    """All of the file. Raises OSError: there is no such file, or it cannot be read."""
    return path.read_text(encoding="utf-8", errors="surrogateescape")
