# SPDX-License-Identifier: Apache-2.0
"""A file on a disk without room, `FULL_DISK`, and what is said of it: `one_warning_about`."""

from __future__ import annotations

from pathlib import Path

import pytest

FULL_DISK = Path("/dev/full")

needs_full_disk = pytest.mark.skipif(not FULL_DISK.exists(), reason=f"needs {FULL_DISK}")


def one_warning_about(words: str, caplog: pytest.LogCaptureFixture) -> str:
    """The one line of the log that has these words; there has to be one and no more."""
    (told,) = (line for line in caplog.messages if words in line)
    return told
