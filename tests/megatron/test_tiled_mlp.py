# SPDX-License-Identifier: Apache-2.0
"""Megatron's MLPs over tiles of tokens: as close to fp64 as its own, whatever the layout, and its
own again when it is off. How tiles are computed: tests/unit/test_tiled_mlp.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import assert_auto_changes_no_bit, assert_same_bits, train, train_once
from tests.support.offload_flags import ssd
from tests.support.ranks import run_ranks

SCRIPT = Path(__file__).parent / "tiled_mlp_ranks.py"
MOST = 1.5  # times the error of Megatron's own MLP
TILED = "--activation-tiled-mlp 7"
TP2 = "--tensor-model-parallel-size 2"


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(SCRIPT, tmp_path_factory.mktemp("tiled"))
    return found


@pytest.mark.slow
def test_the_error_against_fp64_is_that_of_megatrons_own(of_ranks: dict[str, Any]) -> None:
    """In fp32 and bf16, gated or not, fused or not, TP1, TP2 and TP2 with sequence parallelism."""
    cases = of_ranks["cases"]
    assert len(cases) == 6 + 12
    for case, found in cases.items():
        for name, error in found["tiled"].items():
            assert error <= MOST * max(found["usual"][name], 2.0**-24), (case, name, found)
        names = {"linear_fc1.weight", "linear_fc2.weight"}
        if "gelu" in case:
            names |= {"linear_fc1.bias", "linear_fc2.bias"}
        assert found["heard"] == dict.fromkeys(names, 1), case
        assert found["differs"] and found["checkpointed"] and found["restored"], case


@pytest.mark.slow
def test_what_would_be_wrong_is_refused(of_ranks: dict[str, Any]) -> None:
    refused = of_ranks["refused"]
    for kind, layer in (("pre-hook", 1), ("hook", 2), ("backward hook", 1)):
        assert f"mlp has hooks on linear_fc{layer}, which would be called" in refused[kind]
    assert "mlp has a hook on the gradient of linear_fc2.weight" in refused["gradient"]
    assert "computes linear_fc1 with " in refused["layer"]
    assert "Other, not with megatron's ColumnParallelLinear" in refused["layer"]
    assert refused["own hook"] == ""


@pytest.mark.slow
def test_passes_that_do_not_train_are_left_alone(of_ranks: dict[str, Any]) -> None:
    trains = {"training": False, "checkpointed": False}
    assert of_ranks["whole"] == {**trains, "scaled": True, "evaluated": True}


# ------------------------------------------------------------------ whole trainings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout", "world_size"),
    [
        ("gpt", "--pipeline-model-parallel-size 2", 2),
        ("gpt", f"{TP2} --sequence-parallel --swiglu --disable-bias-linear --bf16", 2),
        pytest.param("gpt", "--use-distributed-optimizer", 2, marks=pytest.mark.rare),
        ("bert", TP2, 2),
        pytest.param("t5", "--bf16", 1, marks=pytest.mark.rare),
    ],
    ids=["GPT-PP2", "GPT-TP2+SP-swiglu-bf16", "GPT-DP2", "BERT-TP2", "T5-bf16"],
)
def test_a_training_is_the_same_within_rounding_and_with_offload_bit_for_bit(
    model: str, layout: str, world_size: int, tiny: dict[str, str], tmp_path: Path
) -> None:
    more: dict[str, Any] = {"model": model, "world_size": world_size}
    if model != "gpt":
        more["tiny"] = tiny[model]
    flags = f"{layout} --train-iters 3"
    own, tiled = train(flags, **more), train(flags, TILED, **more)
    again = "--activation-recompute-layers 1 --activation-recompute-input ssd"
    offloaded = train(flags, TILED, ssd(tmp_path), again, **more)
    first, close = (1e-3, 2e-2) if "bf16" in layout else (1e-5, 1e-4)
    for name in ("loss", "grad_norm"):
        own_values, values = own.values(name), tiled.values(name)
        assert values[0] == pytest.approx(own_values[0], rel=first), name
        assert values == pytest.approx(own_values, rel=close), name
    assert tiled.model != own.model  # it is another order of sums: tiles were computed
    assert_same_bits(offloaded, tiled, 3)
    assert min(step["offloaded_bytes"] for step in offloaded.values("offload")) > 0


@pytest.mark.slow
def test_a_long_tile_is_no_tile(tmp_path: Path) -> None:
    flags = "--train-iters 3"
    assert_same_bits(train(flags, "--activation-tiled-mlp auto"), train_once(flags), 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        "--activation-offload-granularity operation",
        "--recompute-granularity selective --recompute-modules core_attn",
        "--layer-major-units 2",
    ],
)
def test_the_bits_of_tiles_are_the_same_whatever_else_is_on(settings: str, tmp_path: Path) -> None:
    units = settings if "units" in settings else ""  # their order of sums is another one
    tiled = train_once("--train-iters 3", TILED, units)
    assert_same_bits(train("--train-iters 3", TILED, ssd(tmp_path), settings), tiled, 3)


@pytest.mark.rare
def test_auto_plans_around_it_and_changes_no_bit(tmp_path: Path) -> None:
    assert_auto_changes_no_bit(TILED, tmp_path)


@pytest.mark.slow
def test_parameters_may_move_beside_it(tmp_path: Path) -> None:
    tiled = train("--train-iters 3", TILED)
    flags = f"--parameter-offload ssd --parameter-offload-dir {tmp_path}"
    moved = train("--train-iters 3", TILED, ssd(tmp_path), flags)
    assert_same_bits(moved, tiled, 3)
