# SPDX-License-Identifier: Apache-2.0
"""What tests of behaviour ask for: threads, drives, and an end of what does not end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron.offload.tiers.bandwidth import BandwidthMeter
from tests.support.layer_major import waiting_threads
from tests.support.watchdog import Watchdog


@pytest.fixture
def one_thread_for_each_pass(one_compute_thread: None) -> Iterator[None]:
    """Else each forward pass's thread starts a team of its own; and none of them is left."""
    yield
    assert not waiting_threads()


@pytest.fixture
def equally_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drives count as equally fast, so that each gets its share whatever else the machine does."""
    monkeypatch.setattr(BandwidthMeter, "bytes_per_s", None)


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    one = Watchdog()
    yield one
    one.close()
