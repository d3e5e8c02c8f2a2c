# SPDX-License-Identifier: Apache-2.0
"""The door with DeepSpeed: ZeRO 1 to 3 on two processes, the same bits, and no parameter moves.

All settings run in one pair of processes (`deepspeed_ranks.py`), whose start is most of the time.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import ConfigurationError, offload_activations
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

pytest.importorskip("transformers", reason="transformers is not installed")
if importlib.util.find_spec("deepspeed") is None:  # its import takes seconds, here for nothing
    pytest.skip("deepspeed is not installed", allow_module_level=True)

SCRIPT = Path(__file__).parent / "deepspeed_ranks.py"
SETTINGS = [
    "zero 1",
    "zero 2",
    "zero 2, accumulating",
    "zero 3",
    "zero 3, weights copied",
    "zero 3, checkpointed",
    "zero 3, bf16",
    "zero 3, optimizer on the host",
    "zero 3, parameters on the host",
    "deepspeed's checkpointing",
]
RARE = {
    "zero 2",
    "zero 3, weights copied",
    "zero 3, checkpointed",
}  # only where --rare is given
# What moves of the model is what moves of it without DeepSpeed.
AS_ALONE = [
    name for name in SETTINGS if not name.endswith(("bf16", "checkpointed", "checkpointing"))
]


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("deepspeed")
    names = [one for one in SETTINGS if one not in RARE or request.config.getoption("--rare")]
    result: dict[str, Any] = run_ranks(SCRIPT, folder, str(folder), *names)
    return result


def rows(settings: list[str]) -> list[Any]:
    return [pytest.param(one, marks=pytest.mark.rare if one in RARE else ()) for one in settings]


@pytest.mark.parametrize("setting", rows(SETTINGS))
def test_every_bit_is_the_same_on_the_engine_and_on_the_model(
    setting: str, found: dict[str, Any]
) -> None:
    assert found[setting]["identical"] == [[True, True], [True, True]]
    assert found[setting]["left"] == 0 and found[setting]["gradients"] > 10
    for steps in found[setting]["bytes"]:
        assert len(steps) == 4 and all(step > 50_000 for step in steps)


@pytest.mark.parametrize("setting", rows(AS_ALONE))
def test_no_gathered_parameter_moves(setting: str, found: dict[str, Any]) -> None:
    assert found[setting]["bytes"] == found["alone"]["bytes"] * 2


@pytest.mark.parametrize("setting", rows(AS_ALONE))
def test_as_much_is_computed_again_as_without_it(setting: str, found: dict[str, Any]) -> None:
    """ZeRO 3 frees a norm's weight before what it made is saved, and has functions in between."""
    assert found[setting]["replayed"] == found["alone"]["replayed"] * 2
    assert found["alone"]["replayed"][0] > 50_000


def test_the_pipeline_engine_is_refused(tmp_path: Path) -> None:
    engine = type("PipelineEngine", (torch.nn.Module,), {})()
    for models in (engine, [torch.nn.Linear(2, 2), engine]):
        with pytest.raises(ConfigurationError, match="PipelineEngine cannot be combined"):
            offload_activations(models, tmp_path)


# -- MLPs over tiles ------------------------------------------------------------------------------

TILED = Path(__file__).parent / "tiled_zero_ranks.py"
TILE = 7  # tokens, of 64; of every other batch the first rank has fewer


@pytest.fixture(scope="module")
def tiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("tiled")
    result: list[dict[str, Any]] = run_ranks(TILED, folder, str(folder))
    return result


@pytest.mark.parametrize(
    "setting", ["zero 3", "as it is", "checkpointed", "parameters on the host"]
)
def test_tiles_train_the_same_within_rounding(setting: str, tiled: list[dict[str, Any]]) -> None:
    for rank in tiled:
        found = rank[setting]
        assert 0 < found["off"] <= 1e-5  # of the way that weights went
        assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-5)
        assert TILE in found["seen"][1] and TILE not in found["seen"][0]
        assert found["heard"][1] == found["heard"][0] == [1.0]  # of its gradient, once a step


def test_tiles_that_come_after_deepspeed_are_refused(tiled: list[dict[str, Any]]) -> None:
    for rank in tiled:
        assert "has parameters that DeepSpeed's ZeRO-3 gathers for each" in rank["refused"]
        assert "set_z3_leaf_modules(model, [LlamaMLP])" in rank["refused"]
