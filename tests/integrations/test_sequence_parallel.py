# SPDX-License-Identifier: Apache-2.0
"""The door where sequences are divided among ranks: DeepSpeed's Ulysses, on two gloo processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("deepspeed", reason="deepspeed is not installed")

SCRIPT = Path(__file__).parent / "ulysses_ranks.py"
SETTINGS = ("ssd", "host", "no replay", "recomputed")
TOKENS = 64


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ulysses")
    result: dict[str, Any] = run_ranks(SCRIPT, folder, str(folder))
    return result


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_under_ulysses_all_ranks_have_the_same_bits(found: dict[str, Any], setting: str) -> None:
    assert found[setting]["identical"] == [True, True]
    assert all(found[setting]["bytes"]), "something moves in each step"
    assert found[setting]["left"] == 0


@pytest.mark.slow
def test_sequences_were_divided_and_attention_saw_all_of_them(found: dict[str, Any]) -> None:
    of_one, together = found["loss"]
    assert together == pytest.approx(of_one, rel=1e-5)
    assert found["lengths"] == [TOKENS]


@pytest.mark.slow
def test_what_moves_is_that_of_a_share_and_of_exchanged_heads(found: dict[str, Any]) -> None:
    with_replay, without = found["ssd"]["bytes"], found["no replay"]["bytes"]
    assert with_replay[1:] == [with_replay[1]] * (len(with_replay) - 1)
    assert abs(with_replay[-1] - without[-1]) < 0.2 * without[-1], "moved, or computed again"
    assert found["recomputed"]["bytes"][-1] < 0.3 * without[-1]
