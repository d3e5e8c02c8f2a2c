# SPDX-License-Identifier: Apache-2.0
"""Parameters that wait on a tier with the distributed optimizer: ranks update shards and gather
units, and no bit is another one. Two ranks share the data (`distributed_parameters_ranks.py`).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.offload.errors import ConfigurationError
from megatron.offload.integration.megatron import check_model_parameters
from megatron.offload.integration.megatron.unit_steps import check_steps_by_units
from megatron.offload.parameters.config import ParametersConfig
from tests.support.launch import assert_same_bits, run_trainer, train
from tests.support.offload_flags import ssd
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "distributed_parameters_ranks.py"
LAYERS, STEPS = 4, 4
TYPES = ("fp32", "bf16")
CASES = [
    f"{dtype} {order} {states}"
    for dtype in TYPES
    for order in ("one-by-one", "layer-major")
    for states in ("none", "states")
]
FAST = ["bf16 one-by-one none", "fp32 layer-major states"]
FULL, INTERRUPTED = "fp32 one-by-one none full", "bf16 one-by-one none interrupted"
SHARDED = "--use-distributed-optimizer --train-iters 4"
STATES = "--optimizer-state-offload ssd --optimizer-state-bucket 32KiB --optimizer-state-window 0B"

MOVED = "--parameter-offload ssd"

Found = list[dict[str, Any]]  # of each rank, by the case's name


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("ranks")
    names = [*FAST, FULL, INTERRUPTED]
    results: Found = run_ranks(SCRIPT, folder, str(folder), ",".join(names))
    return results


def assert_is_same(one: dict[str, Any]) -> None:
    """Losses, norms, weights, main weights and states; in a step behind the offload as well."""
    assert one["steps"] and one["tensors"]
    assert one["num_steps"] > STEPS and one["num_tensors"] > 300


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", FAST)
def test_no_bit_changes(name: str, rank: int, found: Found) -> None:
    assert_is_same(found[rank][name])


@pytest.mark.rare
def test_no_bit_changes_in_any_case(tmp_path: Path) -> None:
    names = [*CASES, "fp16 one-by-one states", "fp16 layer-major none"]
    for of_rank in run_ranks(SCRIPT, tmp_path, str(tmp_path), ",".join(names)):
        for name in names:
            assert_is_same(of_rank[name])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", FAST)
def test_no_more_units_are_in_memory_than_may_live(name: str, rank: int, found: Found) -> None:
    """One more may still be written. The buffer that Megatron has made of them is gone."""
    one = found[rank][name]
    each = one["parameter_bytes"] / LAYERS
    assert 2 * each <= one["peak_bytes"] <= 3 * each
    assert one["buffers"] == 0


def test_shards_of_what_is_away_are_nan(found: Found) -> None:
    for name in FAST:  # the first rank has those of the last layers
        assert found[0][name]["num_shards"] > 0 and found[0][name]["shards"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_and_writes_no_more_than_it_must(rank: int, found: Found) -> None:
    """The first one updates the last layers and a part of the second; the other one the rest."""
    one = found[rank]["bf16 one-by-one none"]
    assert one["unread"] == ([0], [2, 3])[rank]
    each = one["parameter_bytes"] / LAYERS
    # Each once, and the second one when this rank has updated its part as well.
    assert one["written_bytes"] - one["parameter_bytes"] <= 5 * each * STEPS


def test_a_full_drive_on_one_rank_changes_nothing(found: Found) -> None:
    for of_rank in found:
        assert_is_same(of_rank[FULL])
    assert found[1][FULL]["memory_bytes"] == found[1][FULL]["parameter_bytes"]


@pytest.mark.parametrize("while_it", ["updates", "gathers"])
def test_nobody_goes_on_after_a_step_that_ended_in_its_middle(while_it: str, found: Found) -> None:
    errors = ["KeyboardInterrupt", "InterruptedStepError", "InterruptedStepError"]
    for of_rank in found:
        assert of_rank[INTERRUPTED][while_it] == errors


@pytest.mark.rare
def test_a_rank_that_cannot_read_ends_all(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"ranks ended with \[1, 1\]"):
        run_ranks(SCRIPT, tmp_path, str(tmp_path), "fp32 one-by-one none lost")
    said = (tmp_path / "rank1.log").read_text()
    assert "LostStateError: parameters: those of unit" in said and "the drive is gone" in said


@pytest.mark.parametrize(
    ("kind", "then"),
    [
        pytest.param("", MOVED, id="fp32"),
        pytest.param("", "", id="fp32, in memory", marks=pytest.mark.rare),
        pytest.param(STATES, MOVED, id="fp32, states", marks=pytest.mark.rare),
        pytest.param("--bf16", MOVED, id="bf16", marks=pytest.mark.rare),
        pytest.param("--bf16", "", id="bf16, in memory", marks=pytest.mark.rare),
        pytest.param(f"--bf16 {STATES}", MOVED, id="bf16, states", marks=pytest.mark.rare),
    ],
)
def test_a_run_goes_on_from_its_checkpoint(kind: str, then: str, tmp_path: Path) -> None:
    """Evaluated and saved with parameters away."""
    flags = f"{SHARDED} {kind} {ssd(tmp_path)} --eval-interval 2 --eval-iters 1"
    whole = train(flags, MOVED, f"--save {tmp_path} --save-interval 2", world_size=2)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2\n")
    rest = train(flags, then, f"--load {tmp_path}", world_size=2)
    assert rest.model == whole.model
    assert rest.values("loss") == whole.values("loss")[2:]


@pytest.mark.rare
@pytest.mark.parametrize("states", ["", STATES], ids=["none", "states"])
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, ""),
        (1, "--bf16"),
        (2, "--bf16 --overlap-grad-reduce"),
        (2, "--num-experts 4 --disable-bias-linear --expert-model-parallel-size 2"),
        (4, "--tensor-model-parallel-size 2 --sequence-parallel"),
        (
            4,
            "--bf16 --num-layers 8 --pipeline-model-parallel-size 2 "
            "--num-layers-per-virtual-pipeline-stage 2",
        ),
    ],
)
def test_no_bit_changes_in_other_layouts(
    world_size: int, layout: str, states: str, tmp_path: Path
) -> None:
    flags = f"{SHARDED} {layout} {ssd(tmp_path)}"
    expected = train(flags, world_size=world_size)
    found = train(flags, states, MOVED, world_size=world_size)
    assert_same_bits(found, expected, STEPS)


# ------------------------------------------------------------------ what is refused


def test_a_gather_that_overlaps_is_refused(tmp_path: Path) -> None:
    flags = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather {ssd(tmp_path)}"
    outcome = run_trainer(flags, MOVED, "--mock-data --validate-only")
    assert outcome.exit_codes == [2]
    assert "parameters: overlap_param_gather cannot be combined with" in outcome.errors


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"nccl_ub": True}, "it registers the memory"),
        ({"fp8_param_gather": True}, "drop --fp8-param-gather"),
        ({"fp4_param_gather": True}, "drop --fp4-param-gather"),
        ({"optimizer_cpu_offload": True}, "drop --optimizer-cpu-offload"),
        ({"num_distributed_optimizer_instances": 2}, "it has not been tried"),
    ],
    ids=str,
)
def test_what_has_other_memory_is_refused(
    settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    config = ParametersConfig(mode="ssd", directories=(tmp_path,))
    flags = SimpleNamespace(use_distributed_optimizer=True, **settings)
    with pytest.raises(ConfigurationError, match=f"^parameters: .*{sentence}"):
        check_model_parameters(config, flags)
    flags.use_distributed_optimizer = False
    check_model_parameters(config, flags)


@pytest.mark.parametrize(
    ("outer", "inner", "capturable"),
    [
        ("LayerWiseDistributedOptimizer", "AdamW", False),
        ("DistributedOptimizer", "HybridDeviceOptimizer", False),
        ("DistributedOptimizer", "FusedAdam", True),
    ],
)
def test_optimizers_that_are_not_known_are_refused(
    outer: str, inner: str, capturable: bool
) -> None:
    def make(name: str, **attributes: Any) -> Any:
        return type(name, (), attributes)()

    with pytest.raises(ConfigurationError, match="it is not known to update each parameter"):
        check_steps_by_units(make(outer, optimizer=make(inner, capturable=capturable)))
    check_steps_by_units(make("DistributedOptimizer", optimizer=make("AdamW")))
