# SPDX-License-Identifier: Apache-2.0
"""Layer-major steps with experts: what routers keep over micro-batches, and who meets in layers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from megatron.offload import ConfigurationError
from megatron.offload.integration.megatron import process_groups
from megatron.offload.integration.megatron.layer_major import check_layer_major
from megatron.offload.integration.megatron.process_groups import consensus_of
from megatron.offload.layer_major.config import LayerMajorConfig
from tests.megatron.router_ranks import MICRO_BATCHES
from tests.support import launch
from tests.support.launch import Outcome, assert_same_bits, train
from tests.support.offload_flags import auto, ssd

STEPS = 4
UNITS = "--layer-major-units 2"
MOE = (
    f"--num-experts 4 --disable-bias-linear --train-iters {STEPS}"
    " --untie-embeddings-and-output-weights --eval-interval 2 --eval-iters 1"
)

DETERMINED = f"--hidden-dropout 0 --attention-dropout 0 --global-batch-size {2 * MICRO_BATCHES}"


@pytest.fixture
def routers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(launch.SCRIPTS, "routers", Path(__file__).parent / "router_ranks.py")


def noted(outcome: Outcome) -> list[str]:
    return [line for line in outcome.output.splitlines() if line.startswith("NOTED ")]


@pytest.mark.slow
@pytest.mark.usefixtures("routers")
@pytest.mark.parametrize("recomputed", [False, pytest.param(True, marks=pytest.mark.rare)])
def test_what_routers_keep_over_micro_batches_changes_no_bit(
    recomputed: bool, tmp_path: Path
) -> None:
    """The loss over a global batch is another one for each micro-batch that a router sees.

    And validation with gradients leaves those of the step alone.
    """
    flags = f"{ssd(tmp_path)} --activation-recompute-layers 2-3" if recomputed else ""
    one_by_one = train(MOE, flags, model="routers")
    in_units = train(MOE, flags, UNITS, model="routers")
    assert_same_bits(in_units, one_by_one, STEPS)
    lines = noted(in_units)
    assert lines == noted(one_by_one) and len(lines) == 4 * STEPS + STEPS / 2
    assert sum(f"] {MICRO_BATCHES}.0 [" in line for line in lines) == 4 * STEPS
    assert sum(line.endswith("gradients are the same") for line in lines) == STEPS / 2


@pytest.mark.rare
@pytest.mark.usefixtures("routers")
def test_replicas_that_meet_in_layers_count_random_numbers_together() -> None:
    """Rank 1 has drawn another number in the second step, so all count in the third one."""
    one_by_one = train(MOE, DETERMINED, model="routers", world_size=2)
    in_units = train(MOE, DETERMINED, UNITS, model="routers", world_size=2)
    assert "have drawn more or fewer random numbers" in in_units.output
    assert_same_bits(in_units, one_by_one, STEPS)
    assert noted(in_units) == noted(one_by_one)


@pytest.mark.rare
@pytest.mark.usefixtures("routers")
@pytest.mark.parametrize("units", ["", UNITS])
def test_replicas_that_meet_in_layers_plan_together(units: str, tmp_path: Path) -> None:
    """A layer that is recomputed meets in backward again; on all replicas, or on none."""
    flags = f"{MOE} {DETERMINED} --train-iters 6"
    run = tmp_path / "run"
    run.mkdir()
    planned = train(
        flags,
        units,
        auto(tmp_path, "--activation-offload-max-slowdown 1"),
        f"--metrics-file {run / 'metrics.jsonl'}",
        model="routers",
        world_size=2,
        timeout_s=150,
    )
    assert_same_bits(planned, train(flags, model="routers", world_size=2), 6)
    first, other = (run / f"plan1-rank{rank}.json" for rank in range(2))
    assert first.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(
    ("settings", "group"),
    [
        ({}, "TP x CP"),
        ({"num_moe_experts": 4, "expert_tensor_parallel_size": 2}, "TP x DP x CP"),
        ({"test_mode": True}, "TP x DP x CP"),
    ],
    ids=["dense", "experts", "test mode"],
)
def test_who_meets_within_layers(
    settings: dict[str, Any], group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of experts (expert, expert-tensor and data parallel) are parts of the larger one."""

    def data_parallel(*, with_context_parallel: bool) -> str:
        return "TP x DP x CP" if with_context_parallel else "TP x DP"

    monkeypatch.setattr(parallel_state, "get_tensor_and_data_parallel_group", data_parallel)
    monkeypatch.setattr(parallel_state, "get_tensor_and_context_parallel_group", lambda: "TP x CP")
    monkeypatch.setattr(process_groups.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(process_groups, "ProcessGroupConsensus", lambda groups, _: groups)
    assert consensus_of(torch.device("cpu"), SimpleNamespace(**settings)) == [group]


def test_a_loss_over_the_global_batch_needs_micro_batches_in_their_order() -> None:
    settings = SimpleNamespace(
        pipeline_model_parallel_size=1, moe_router_load_balancing_type=["global_aux_loss"]
    )
    alternating = LayerMajorConfig(units=2, order="alternating")
    with pytest.raises(ConfigurationError, match=r"cannot be combined with global_aux_loss"):
        check_layer_major(alternating, settings, boundary="keep")
    check_layer_major(LayerMajorConfig(units=2), settings, boundary="keep")
    settings.moe_router_load_balancing_type = "aux_loss"
    check_layer_major(alternating, settings, boundary="keep")
