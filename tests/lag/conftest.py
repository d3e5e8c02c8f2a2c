# SPDX-License-Identifier: Apache-2.0
"""What several tests on the test accelerator need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.accelerators import Lag
from tests.support.lag.module import LagModule


@pytest.fixture(scope="module")
def accelerator(loaded_lag: LagModule) -> Iterator[Lag]:
    """The test accelerator, and one thread: kernels of several streams have a core each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Lag(loaded_lag)
    torch.set_num_threads(before)
