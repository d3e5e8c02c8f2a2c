# SPDX-License-Identifier: Apache-2.0
"""The door under DDP, FSDP and tensor parallelism: the same bits, and no parameter moves.

All settings run in one pair of processes (`sharded.py`), whose start is most of the time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

pytest.importorskip("transformers", reason="transformers is not installed")

SCRIPT = Path(__file__).parent / "sharded.py"
SETTINGS = [
    "ddp",
    "ddp, accumulating",
    "ddp, autocast",
    "fsdp2, autocast",
    "fsdp2",
    "fsdp2, not resharded",
    "fsdp2, bf16",
    "fsdp2, parameters on the host",
    "fsdp2, checkpointed",
    "fsdp2, views of data",
    "fsdp2, views of data, slow disk",
    "fsdp2, auto",
    "fsdp1",
    "fsdp1, flat parameters",
    "fsdp1, recomputed",
    "fsdp1, flat parameters, recomputed",
    "fsdp2, recomputed",
    "tensor parallel",
]
# What moves of the model is what moves of it without sharding.
NOT_AS_ALONE = ("autocast", "bf16", "checkpointed", "recomputed", "auto", "tensor parallel")
AS_ALONE = [name for name in SETTINGS if not name.endswith(NOT_AS_ALONE)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sharded")
    result: dict[str, Any] = run_ranks(SCRIPT, folder, str(folder))
    return result


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_bit_is_the_same_whatever_was_first_the_door_or_the_wrapper(
    setting: str, found: dict[str, Any]
) -> None:
    assert found[setting]["identical"] == [[True, True], [True, True]]
    assert found[setting]["left"] == 0
    for steps in found[setting]["bytes"]:
        assert len(steps) == 4 and all(step > 200_000 for step in steps)


@pytest.mark.parametrize("setting", AS_ALONE)
def test_no_parameter_moves_in_any_step(setting: str, found: dict[str, Any]) -> None:
    alone = "alone, views of data" if "views" in setting else "alone"
    assert found[setting]["bytes"] == found[alone]["bytes"] * 2


def test_casts_of_weights_that_stay_in_place_are_made_again(found: dict[str, Any]) -> None:
    assert found["ddp, autocast"]["recast"] > 0 == found["ddp"]["recast"]
    # What FSDP gathers into is known from the second step on.
    assert found["fsdp2, autocast"]["recast"] == found["ddp, autocast"]["recast"]


def test_a_plan_is_followed_under_fsdp(found: dict[str, Any]) -> None:
    assert found["fsdp2, auto"]["recomputed"] == 2
    assert found["fsdp2, auto"]["bytes"][0][0] < found["fsdp2"]["bytes"][0][0] / 2


def test_tensors_that_are_spread_over_ranks_stay(found: dict[str, Any]) -> None:
    assert found["tensor parallel"]["unsupported"] > 0
    assert found["fsdp2"]["unsupported"] == 0


@pytest.mark.rare
def test_four_processes(tmp_path: Path) -> None:
    settings = ["ddp", "fsdp2", "fsdp2, not resharded", "fsdp2, auto"]
    found = run_ranks(SCRIPT, tmp_path, str(tmp_path), *settings, num_ranks=4)
    for setting in settings:
        assert found[setting]["identical"] == [[True, True]] * 4
