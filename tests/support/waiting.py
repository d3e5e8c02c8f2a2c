# SPDX-License-Identifier: Apache-2.0
"""Waiting for what another thread does, with an end."""

from __future__ import annotations

import time
from collections.abc import Callable

SOON_S = 10.0  # far longer than anything here takes, also where the machine is busy


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Returns as soon as `condition` holds; the test fails with `what` when it never does."""
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)
