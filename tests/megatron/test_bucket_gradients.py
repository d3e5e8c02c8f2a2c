# SPDX-License-Identifier: Apache-2.0
"""Megatron's gradients that leave as their buckets are reduced: the same bits, less memory. Two
ranks share the data (`bucket_gradients_ranks.py`).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.optimizer import clip_grads

from megatron.offload.errors import ConfigurationError
from megatron.offload.integration.megatron import check_model_parameters
from megatron.offload.integration.megatron.bucket_gradients import changes_later
from megatron.offload.integration.megatron.parameters import check_gradients
from megatron.offload.layer_major.config import LayerMajorConfig
from megatron.offload.parameters.config import ParametersConfig
from tests.support.launch import assert_same_bits, run_trainer, train
from tests.support.offload_flags import ssd
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "bucket_gradients_ranks.py"
LAYERS, STEPS, CLIP = 8, 3, 0.5
CASES = [
    f"{dtype} {optimizer} {states}"
    for dtype in ("fp32", "bf16")
    for optimizer in ("sharded", "replicated")
    for states in ("none", "states")
]
FAST = ["bf16 sharded states", "fp32 replicated none"]
FULL = "fp32 sharded none full"
TIED = "fp32 replicated tied"
# A bucket is about a layer of the trainer's tiny model.
BUCKETS = "--overlap-grad-reduce --ddp-bucket-size 40000"
UNITS = "--layer-major-units auto --train-iters 3"
UNPADDED = "--hidden-size 128 --ddp-bucket-size 150000"  # what a checkpoint needs
STATES = "--optimizer-state-offload ssd --optimizer-state-bucket 32KiB --optimizer-state-window 0B"
MOVED = "--parameter-offload ssd --gradient-offload on"

Found = list[dict[str, Any]]  # of each rank, by the case's name


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("ranks")
    results: Found = run_ranks(SCRIPT, folder, str(folder), ",".join([*FAST, FULL, TIED]))
    return results


def assert_is_same(one: dict[str, Any]) -> None:
    """Losses, norms, weights, main weights and states; in a step behind the offload as well."""
    assert one["steps"] and one["tensors"]
    assert one["num_steps"] > STEPS and one["num_tensors"] > 600


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", FAST)
def test_no_bit_changes(name: str, rank: int, found: Found) -> None:
    assert_is_same(found[rank][name])


def test_an_embedding_that_units_share_is_reduced_in_time_behind_them_too(found: Found) -> None:
    """Megatron has counted two additions a step, and then there is one."""
    for of_rank in found:
        assert_is_same(of_rank[TIED])


@pytest.mark.rare
def test_no_bit_changes_in_any_case(tmp_path: Path) -> None:
    for of_rank in run_ranks(SCRIPT, tmp_path, str(tmp_path), ",".join(CASES)):
        for name in CASES:
            assert_is_same(of_rank[name])


def test_gradients_are_clipped_and_that_is_seen(found: Found) -> None:
    """Else their norms, and what they are scaled by while they are away, would not be tried."""
    for of_rank in found:
        assert max(of_rank[FAST[0]]["norms"]) > CLIP


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", FAST)
def test_all_are_away_when_the_optimizer_begins(name: str, rank: int, found: Found) -> None:
    one = found[rank][name]
    assert one["are_away"] and one["num_away"] >= LAYERS


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", FAST)
def test_a_few_units_gradients_are_in_memory(name: str, rank: int, found: Found) -> None:
    """From the first step on: of the unit that runs, of the one that is reduced, and a copy."""
    one = found[rank][name]
    assert one["peak_bytes"] < 4 * one["moving_bytes"] / LAYERS
    assert one["buffers"] == 0  # what Megatron has made is gone


def test_a_full_drive_on_one_rank_changes_nothing(found: Found) -> None:
    for of_rank in found:
        assert_is_same(of_rank[FULL])
    # A rank's part of the gradients.
    assert found[1][FULL]["peak_bytes"] > found[1][FULL]["moving_bytes"] / 2


def test_all_come_back_for_who_looks(found: Found) -> None:
    for of_rank in found:
        one = of_rank[FAST[0]]
        assert one["num_away"] > 0 and one["num_brought"] == one["num_places"]


def test_gradients_that_nobody_has_called_zero_are_an_error(found: Found) -> None:
    for of_rank in found:
        assert "call zero_grad_buffer() of the model" in of_rank[FAST[0]]["forgotten"]


@pytest.mark.rare
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, ""),
        (1, f"--bf16 {STATES}"),
        (2, "--use-distributed-optimizer --bf16"),
        (
            2,
            "--use-distributed-optimizer --num-experts 4 --disable-bias-linear "
            "--expert-model-parallel-size 2",
        ),
        (4, "--use-distributed-optimizer --tensor-model-parallel-size 2 --sequence-parallel"),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    ],
)
def test_no_bit_changes_in_the_trainer(world_size: int, layout: str, tmp_path: Path) -> None:
    flags = f"{layout} {BUCKETS} {UNITS} {ssd(tmp_path)}"
    expected = train(flags, world_size=world_size)
    found = train(flags, MOVED, world_size=world_size)
    assert_same_bits(found, expected, STEPS)


@pytest.mark.rare
@pytest.mark.parametrize("then", [MOVED, ""], ids=["moved", "in memory"])
def test_a_run_goes_on_from_its_checkpoint(then: str, tmp_path: Path) -> None:
    """Evaluated and saved with gradients away."""
    flags = f"--use-distributed-optimizer {BUCKETS} {UNITS} {ssd(tmp_path)} {UNPADDED}"
    flags += " --eval-interval 2 --eval-iters 1"
    whole = train(flags, MOVED, f"--save {tmp_path} --save-interval 2", world_size=2)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2\n")
    rest = train(flags, then, f"--load {tmp_path}", world_size=2)
    assert rest.model == whole.model
    assert rest.values("loss") == whole.values("loss")[2:]


def test_what_megatron_changes_later_stays() -> None:
    """Norms, biases and routers: it adds them up over tensor-parallel ranks."""
    weight, router, bias = torch.empty(4, 4), torch.empty(4, 4), torch.empty(4)
    router.sequence_parallel = True  # type: ignore[attr-defined]
    assert [changes_later(one) for one in (weight, router, bias)] == [False, True, True]


# ------------------------------------------------------------------ what is refused


def test_one_bucket_for_all_is_refused(tmp_path: Path) -> None:
    outcome = run_trainer(f"{UNITS} {ssd(tmp_path)}", MOVED, "--mock-data --validate-only")
    assert outcome.exit_codes == [2]
    assert "--gradient-offload on needs --overlap-grad-reduce" in outcome.errors


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"fp16": True}, "use --bf16"),
        ({"grad_reduce_in_bf16": True}, "drop --grad-reduce-in-bf16"),
        ({"calculate_per_token_loss": True}, "drop --calculate-per-token-loss"),
        ({"log_num_zeros_in_grad": True}, "drop --log-num-zeros-in-grad"),
        ({"check_for_large_grads": True}, "drop --check-for-large-grads"),
        ({"save_wgrads_interval": 10}, "drop --save-wgrads-interval"),
        ({"nccl_ub": True}, "drop --use-nccl-ub"),
        ({"overlap_grad_reduce": False}, "needs --overlap-grad-reduce"),
    ],
    ids=str,
)
def test_what_looks_at_all_gradients_is_refused(
    settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    config = ParametersConfig(mode="ssd", directories=(tmp_path,), gradients="on")
    with pytest.raises(ConfigurationError, match=f"^gradients: .*{sentence}"):
        check_model_parameters(config, SimpleNamespace(**settings))


def test_steps_and_kernels_that_want_all_gradients_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_units = LayerMajorConfig(units="auto")
    check_gradients(SimpleNamespace(), in_units)
    with pytest.raises(ConfigurationError, match="wrapped in Megatron's DistributedDataParallel"):
        check_gradients(None, in_units)
    with pytest.raises(ConfigurationError, match="needs --layer-major-units"):
        check_gradients(SimpleNamespace(), LayerMajorConfig())
    monkeypatch.setattr(clip_grads, "l2_norm_impl", print)
    with pytest.raises(ConfigurationError, match="the norm kernel of Transformer Engine or Apex"):
        check_gradients(SimpleNamespace(), in_units)
