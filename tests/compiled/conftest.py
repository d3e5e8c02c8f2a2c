# SPDX-License-Identifier: Apache-2.0
"""A fixture of the tests whose activations move inside of compiled graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    """Graphs of no other test are found again, and none is left behind with what it saved."""
    from megatron.offload.integration.torch import compiled_graphs

    torch.compiler.reset()
    yield
    torch.compiler.reset()
    assert not compiled_graphs._saved
