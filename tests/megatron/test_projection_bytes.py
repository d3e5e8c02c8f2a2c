# SPDX-License-Identifier: Apache-2.0
"""Projected bytes of a layer are those that the engine moves, and plans from them are followed.

On a CPU, so with `fused_kernels=False`: there torch saves dropout masks in the element type, both
halves of a gated unit once more, and four tables of rotary positions a layer. Left out are torch's
own RMSNorm and grouped queries on a CPU, which save copies that no GPU kernel makes (3 of 20 units
of a small LLaMA-like layer).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.offload import cli
from megatron.offload.activations.placement.plan_file import load_plans
from megatron.offload.activations.placement.policy import WHOLE_LAYER, Placement
from megatron.offload.activations.saved.bits import bits_bytes
from megatron.offload.planner.profile.stage_profile import PartProfile
from megatron.offload.planner.projection.hardware import DriveSpec, GpuSpec, Hardware
from megatron.offload.planner.projection.model import Experts, Parallelism, Transformer
from megatron.offload.planner.projection.projection import Projection, project
from tests.support.launch import train

MIN_BYTES = 1024  # statistics of norms and most log-sum-exps of this tiny model are smaller
LAYERS = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "dtype": "fp32"}


def offloaded(tmp_path: Path, *flags: str, world_size: int = 1) -> dict[str, Any]:
    """What the engine counted in the second step of a training with offload."""
    outcome = train(
        "--attention-dropout 0 --train-iters 2",
        f"--activation-offload ssd --activation-offload-dir {tmp_path}",
        f"--activation-offload-io buffered --activation-offload-min-bytes {MIN_BYTES}",
        *flags,
        world_size=world_size,
    )
    counted: dict[str, Any] = outcome.metrics[-1]["offload"]
    return counted


def projected_parts(
    sizes: dict[str, Any], parallel: Parallelism | None = None, **settings: Any
) -> list[PartProfile]:
    """All parts of all layers of the projected model, with these settings of the projection."""
    model: dict[str, Any] = {**LAYERS, "seq_length": 32, **sizes}
    projection = Projection(
        model=Transformer(vocab_size=256, fused_kernels=False, **model),
        parallel=parallel or Parallelism(global_batch_size=4),
        hardware=Hardware(GpuSpec.load("a100"), DriveSpec.load("990-pro")),
        min_bytes=MIN_BYTES,
        **settings,
    )
    return [part for layer in project(projection).layers for part in layer.parts]


@pytest.mark.slow(but="dropout")
@pytest.mark.parametrize(
    ("flags", "sizes", "division"),
    [
        ("--hidden-dropout 0", {}, {}),
        pytest.param(
            "--hidden-dropout 0 --micro-batch-size 2 --seq-length 64",
            {"seq_length": 64},
            {"mbs": 2},
            marks=pytest.mark.rare,
        ),
        ("--hidden-dropout 0.1", {"hidden_dropout": 0.1}, {}),
        pytest.param("--hidden-dropout 0 --bf16", {"dtype": "bf16"}, {}, marks=pytest.mark.rare),
        pytest.param(
            "--hidden-dropout 0 --position-embedding-type rope",
            {"rope": True},
            {},
            marks=pytest.mark.rare,
        ),
        pytest.param("--hidden-dropout 0 --swiglu", {"gated": True}, {}, marks=pytest.mark.rare),
        pytest.param(
            "--hidden-dropout 0 --ffn-hidden-size 160",
            {"ffn": 160},
            {},
            marks=pytest.mark.rare,
        ),
        pytest.param(
            "--hidden-dropout 0 --tensor-model-parallel-size 2",
            {},
            {"tensor": 2},
            marks=pytest.mark.rare,
        ),
        (
            "--hidden-dropout 0 --tensor-model-parallel-size 2 --sequence-parallel",
            {},
            {"tensor": 2, "sequence_parallel": True},
        ),
        ("--hidden-dropout 0 --pipeline-model-parallel-size 2", {}, {"pipeline": 2}),
    ],
    ids=["plain", "larger", "dropout", "bf16", "rope", "gated", "ffn", "TP2", "TP2+SP", "PP2"],
)
def test_projected_bytes_are_what_the_engine_moves(
    tmp_path: Path, flags: str, sizes: dict[str, object], division: dict[str, int]
) -> None:
    ranks = division.get("tensor", 1) * division.get("pipeline", 1)
    measured = offloaded(tmp_path, "--activation-replay off", flags, world_size=ranks)
    sizes, division = dict(sizes), dict(division)
    sizes["ffn_hidden_size"] = sizes.pop("ffn", None)
    parallel = Parallelism(micro_batch_size=division.pop("mbs", 1), global_batch_size=4, **division)
    parts = projected_parts(sizes, parallel)
    passes = parallel.num_micro_batches
    assert measured["offloaded_bytes"] == passes * sum(part.movable_bytes for part in parts)
    assert measured["offloaded_storages"] == passes * sum(part.num_storages for part in parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "sizes", "division"),
    [
        pytest.param("", {}, {}, id="plain"),
        pytest.param("--swiglu", {"gated": True}, {}, id="gated"),
        pytest.param(
            "--tensor-model-parallel-size 2 --sequence-parallel",
            {},
            {"tensor": 2, "sequence_parallel": True},
            id="TP2+SP",
        ),
    ],
)
def test_so_are_those_of_experts(
    tmp_path: Path, flags: str, sizes: dict[str, bool], division: dict[str, int]
) -> None:
    """Those of all together: each has storages of its own, as many tokens as it gets."""
    measured = offloaded(
        tmp_path,
        "--hidden-dropout 0 --activation-replay off --seq-length 256",
        "--num-experts 4 --moe-router-topk 2 --disable-bias-linear",
        flags,
        world_size=division.get("tensor", 1),
    )
    parallel = Parallelism(global_batch_size=4, **division)
    parts = projected_parts({"seq_length": 256, "experts": Experts(4, 2), **sizes}, parallel)
    moved = measured["offloaded_bytes"] / 4
    # The router keeps a few more numbers of each token than its scores.
    assert moved == pytest.approx(sum(part.movable_bytes for part in parts), rel=0.03)


@pytest.mark.slow(but="gated")
@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        pytest.param("--hidden-dropout 0", {}, id="plain"),
        pytest.param("--hidden-dropout 0.1", {"hidden_dropout": 0.1}, id="dropout"),
        pytest.param(
            "--hidden-dropout 0 --position-embedding-type rope", {"rope": True}, id="rope"
        ),
        pytest.param("--hidden-dropout 0 --swiglu", {"gated": True}, id="gated"),
    ],
)
def test_so_is_what_is_replayed(tmp_path: Path, flags: str, sizes: dict[str, object]) -> None:
    measured = offloaded(tmp_path, flags)
    parts = projected_parts(sizes, replay=True)
    moved = sum(part.movable_bytes for part in parts)
    replayed = sum(part.replayed_bytes for part in parts)
    if "hidden_dropout" in sizes:  # here each part's noise is made again of its bits: no GPU has it
        num_values = 32 * int(LAYERS["hidden_size"])
        moved -= len(parts) * (4 * num_values - bits_bytes(num_values))
        replayed += len(parts) * 4 * num_values
    assert measured["offloaded_bytes"] == 4 * moved
    assert measured["offloaded_storages"] == 4 * sum(part.num_storages for part in parts)
    assert measured["replayed_bytes"] == 4 * replayed > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "replay", "flags", "sizes"),
    [
        pytest.param("int8", "off", "", {}, id="int8"),
        pytest.param("int8", "on", "--swiglu", {"gated": True}, id="int8, gated, with replay"),
        pytest.param("int8", "on", "", {}, id="int8, with replay"),
    ],
)
def test_so_is_what_a_codec_encodes(
    tmp_path: Path, codec: str, replay: str, flags: str, sizes: dict[str, object]
) -> None:
    """Of int4 they are not: here a bias is added in an operation of its own, so to a sum."""
    measured = offloaded(
        tmp_path,
        f"--hidden-dropout 0 --activation-codec {codec} --activation-replay {replay}",
        flags,
    )
    parts = projected_parts(sizes, replay=replay == "on", codec=codec)
    assert measured["offloaded_bytes"] == 4 * sum(part.movable_bytes for part in parts)
    assert measured["offloaded_storages"] == 4 * sum(part.num_storages for part in parts)
    again = measured["encoded_bytes"] + measured["replayed_bytes"]
    assert again == 4 * sum(part.replayed_bytes for part in parts)
    assert measured["encoded_bytes"] > 0


@pytest.mark.slow
def test_a_plan_made_before_any_run_is_followed(tmp_path: Path) -> None:
    model = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
    batch = "--micro-batch-size 1 --global-batch-size 4 --vocab-size 256 --hidden-dropout 0"
    bounds = f"--activation-offload-min-bytes {MIN_BYTES}"
    plan = tmp_path / "plan.json"
    goal = "--activation-offload-max-slowdown 3"  # so small a model does little but wait for drives
    line = f"plan --hardware a100 {model} {batch} {bounds} {goal} --output {plan}"
    assert cli.main(line.split()) == 0
    parts = load_plans(plan)[0].parts
    recomputed = [one.part for one in parts if one.placement is Placement.RECOMPUTE]
    assert 0 < len(recomputed) < len(parts)
    outcome = train(
        "--attention-dropout 0 --hidden-dropout 0 --train-iters 2",
        f"--activation-offload auto --activation-offload-plan {plan} {bounds}",
        f"--activation-offload-dir {tmp_path} --activation-offload-io buffered",
    )
    passes = 4
    followed = outcome.metrics[-1]["offload"]
    num_layers = recomputed.count(WHOLE_LAYER)
    assert followed["recomputed_layers"] == passes * num_layers
    assert followed["recomputed_parts"] == passes * (len(recomputed) - num_layers)
