# SPDX-License-Identifier: Apache-2.0
"""Waiting for what another thread does, with an end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

SOON_S = 30.0  # far longer than anything here takes, also where the machine is busy


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Returns as soon as `condition` holds; the test fails with `what` when it never does."""
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


class HoldsBytes(Protocol):
    """A tier, or a part of one."""

    @property
    def used_bytes(self) -> int:
        """Of blocks that somebody holds."""
        ...


def wait_until_empty(tiers: Iterable[HoldsBytes]) -> None:
    """Returns as soon as no tier has a block.

    Who knows that a transfer has ended may be ahead of the thread that ends it, which holds the
    block until it has noticed: the space is free a moment later, and a leak would stay.
    """
    tiers = list(tiers)
    wait_until(lambda: not any(tier.used_bytes for tier in tiers), "space is kept")
