# SPDX-License-Identifier: Apache-2.0
"""How many threads compute in tests of behaviour that ask for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.layer_major import waiting_threads


@pytest.fixture
def one_compute_thread() -> Iterator[None]:
    """Small matrices: more threads only wait for each other, and for the I/O threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread_for_each_pass(one_compute_thread: None) -> Iterator[None]:
    """Else each forward pass's thread starts a team of its own; and none of them is left."""
    yield
    assert not waiting_threads()
