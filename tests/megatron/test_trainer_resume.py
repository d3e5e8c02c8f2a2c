# SPDX-License-Identifier: Apache-2.0
"""A run that was saved and resumed equals an uninterrupted one, bit by bit, dropout included."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launch import TINY, Outcome, run_trainer, train


@pytest.mark.slow
def test_prolonged_run_is_bit_identical_on_one_rank(tmp_path: Path, one_process: Outcome) -> None:
    metrics = f"--metrics-file {tmp_path}/metrics.jsonl"  # one file for both parts
    train(metrics, f"--save {tmp_path} --train-iters 2")
    resumed = train(metrics, f"--load {tmp_path} --train-iters 4")
    for name in ("step", "loss", "grad_norm"):
        assert resumed.values(name) == one_process.values(name), name
    assert resumed.model == one_process.model


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(
            "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
            id="fp32-overlapped",
        ),
        pytest.param("--use-distributed-optimizer --bf16", id="bf16", marks=pytest.mark.rare),
    ],
)
def test_resumed_run_is_bit_identical_with_the_distributed_optimizer(
    tmp_path: Path, flags: str
) -> None:
    save = f"--save {tmp_path} --save-interval 2"
    whole = train(flags, save, "--train-iters 4", world_size=2)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2\n")
    resumed = train(flags, f"--load {tmp_path} --train-iters 4", world_size=2)
    assert resumed.values("step") == [3, 4]
    assert resumed.values("loss") == whole.values("loss")[2:]
    assert resumed.values("grad_norm") == whole.values("grad_norm")[2:]
    assert resumed.model == whole.model


@pytest.mark.slow
def test_exit_interval_ends_the_run_and_saves(tmp_path: Path) -> None:
    outcome = train(f"--train-iters 4 --exit-interval 3 --save {tmp_path}")
    assert outcome.values("step") == [1, 2, 3]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3\n"


@pytest.mark.slow
def test_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    train(f"--train-iters 1 --save {tmp_path}")
    outcome = run_trainer(TINY, f"--load {tmp_path} --train-iters 2 --swiglu")
    assert outcome.exit_codes == [2]
    assert outcome.errors.splitlines()[-1].startswith("pretrain_gpt.py: error: --load: ")
    assert "was made with" in outcome.errors
