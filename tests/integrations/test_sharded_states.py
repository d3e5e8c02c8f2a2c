# SPDX-License-Identifier: Apache-2.0
"""Optimizer states move under DDP and FSDP too, and torch's sharded checkpoints have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "sharded_states.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sharded-states")
    result: dict[str, Any] = run_ranks(SCRIPT, folder, str(folder))
    return result


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2", "fsdp1"])
def test_every_bit_is_the_same_across_a_sharded_checkpoint(
    wrapper: str, found: dict[str, Any]
) -> None:
    assert [identical for _, identical in found[wrapper]] == [True, True]
    assert all(number >= 24 for number, _ in found[wrapper])
