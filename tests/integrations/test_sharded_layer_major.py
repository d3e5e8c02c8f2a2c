# SPDX-License-Identifier: Apache-2.0
"""Layer-major steps of models that FSDP2 has sharded: gathered once a pass, the same bits.

All settings run in one pair of processes (`sharded_layer_major.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "sharded_layer_major.py"
MICRO_BATCHES = 8
SETTINGS = ["layers and root", "offload", "boundary", "bf16", "tied, together", "tied, bf16"]
SCENARIOS = ["other random numbers", "after errors", "accumulating", "root around"]
MORE = [
    "auto",
    "recomputed",
    "checkpointed",
    "not resharded",
    "parameters on the host",
    "embedding and output alone",
    "embedding and output together",
    "layers together",
    "layers only",
    "sharded after LayerMajor",
    "prefetching",
    "frozen",
]
ON_FOUR_RANKS = ["layers and root", "hybrid", "two-dimensional", "resharded to fewer"]
LAYERS = [f"layers.{number}.norm.weight" for number in range(6)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sharded")
    result: dict[str, Any] = run_ranks(
        SCRIPT, folder, str(folder), *SETTINGS, *SCENARIOS, num_ranks=2
    )
    return result


def assert_same(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        assert one["same"] == ["losses", "gradients", "weights", "random"]
        assert one["settings"], "what the user has set of FSDP is not as before"


def assert_gathered_once_a_pass(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        ours, usual = one["gathered"]
        assert ours.keys() == usual.keys() != set()
        assert all(count <= usual[name] / MICRO_BATCHES for name, count in ours.items())
        assert one["reduced"][0] == one["reduced"][1] != {}


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_bit_is_that_of_a_loop_over_micro_batches(
    setting: str, found: dict[str, Any]
) -> None:
    assert_same(found[setting])


@pytest.mark.parametrize("setting", SETTINGS)
def test_parameters_are_gathered_and_gradients_reduced_once(
    setting: str, found: dict[str, Any]
) -> None:
    assert_gathered_once_a_pass(found[setting])


def test_the_last_unit_is_gathered_once_for_both_passes(found: dict[str, Any]) -> None:
    """Three units of two layers. What the root has itself stays for the whole step."""
    ours, usual = found["layers and root"][0]["gathered"]
    once, twice = ["embedding.weight", *LAYERS[4:]], LAYERS[:4]
    assert ours == {**dict.fromkeys(once, 1), **dict.fromkeys(twice, 2)}
    assert usual == {"embedding.weight": MICRO_BATCHES, **dict.fromkeys(LAYERS, 2 * MICRO_BATCHES)}


def test_only_one_unit_and_the_root_have_gradients_that_wait(found: dict[str, Any]) -> None:
    """Of six layers those of one unit, and the root's: nearly half of the whole model's."""
    ours, usual = found["layers and root"][0]["unreduced"]
    assert 0 < ours < usual / 2


def test_activations_move_and_what_waits_between_units_where_that_is_to_move(
    found: dict[str, Any],
) -> None:
    """Of gradients those that wait; hidden states are saved by the next layer too."""
    moved = found["offload"][0]["moved"]
    assert found["boundary"][0]["moved"] > moved > 1_000_000


def test_all_ranks_count_random_numbers_when_one_must(found: dict[str, Any]) -> None:
    """Whether the bits are the same, and how often the first layer was gathered, of each step."""
    counting, usual = MICRO_BATCHES + 1, 2
    for steps in found["other random numbers"]:
        assert steps == [[True, counting], [False, usual], [True, counting], [True, usual]]


def test_a_step_after_one_that_failed_is_as_ever(found: dict[str, Any]) -> None:
    for results in found["after errors"]:
        if hasattr(FSDPState, "_reset_iter_state"):
            assert results == [True] * 6
        else:  # torch 2.10
            assert len(results) == 1
            assert "a step has failed, and FSDP of PyTorch" in results[0]


def test_a_user_who_reduces_nothing_is_heard(found: dict[str, Any]) -> None:
    for was_reduced, is_same, times in found["accumulating"]:
        assert not was_reduced and is_same and times == 1


def test_a_root_around_the_model_is_refused(found: dict[str, Any]) -> None:
    for sentence in found["root around"]:
        assert sentence.startswith("layer-major steps: FSDP's root is a module around")


@pytest.mark.rare
@pytest.mark.parametrize(("num_ranks", "settings"), [(2, MORE), (4, ON_FOUR_RANKS)])
def test_more_ways_to_shard(num_ranks: int, settings: list[str], tmp_path: Path) -> None:
    found = run_ranks(SCRIPT, tmp_path, str(tmp_path), *settings, num_ranks=num_ranks)
    for setting in settings:
        assert_same(found[setting])
        assert_gathered_once_a_pass(found[setting])
    for one in found.get("auto", ()):
        assert one["plans"] > 0
    for one in found.get("embedding and output alone", ()):
        reductions = list(one["reduced"][0])  # in the order of the first
        assert (reductions[0], reductions[-1]) == ("output.weight", "embedding.weight")
        assert one["gathered"][0]["output.weight"] == 1
