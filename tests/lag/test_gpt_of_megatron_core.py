# SPDX-License-Identifier: Apache-2.0
"""megatron-core's GPT keeps its bits on streams that lag: one stage, and two that talk.

The ranks are processes of their own: megatron-core's CUDA calls are redirected in them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.lag.module import LagModule
from tests.support.ranks import run_ranks

RANK = Path(__file__).parent / "gpt_ranks.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_stages", "modes"),
    [
        pytest.param(1, ["ssd", "ssd, pinned", "host", "tiered"], marks=pytest.mark.rare),
        (2, ["ssd", "tiered", "host, tiles"]),
    ],
)
def test_losses_and_gradients_are_equal(
    lag: LagModule, tmp_path: Path, num_stages: int, modes: list[str]
) -> None:
    directory = tmp_path / "tier"
    directory.mkdir()
    # Fresh: the test accelerator is loaded before anything looks which accelerator there is.
    ranks = run_ranks(RANK, tmp_path, str(directory), *modes, num_ranks=num_stages, fresh=True)
    assert len(ranks) == num_stages
    for rank in ranks:
        assert list(rank) == modes
        for found in rank.values():
            assert not found["differs"]
            assert found["read_bytes"] > 0.5 * found["offloaded_bytes"] > 0
