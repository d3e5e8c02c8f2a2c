# SPDX-License-Identifier: Apache-2.0
"""A run that was saved and resumed equals an uninterrupted one, bit by bit, dropout included."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import TINY, Outcome, run_trainer, train


def resume_in_the_middle(directory: Path, *flags: str, world_size: int = 1) -> Outcome:
    """Trains to step 2, saves, and goes on to step 4; one metrics file for both."""
    metrics = f"--metrics-file {directory}/metrics.jsonl"
    train(*flags, metrics, f"--save {directory} --train-iters 2", world_size=world_size)
    return train(*flags, metrics, f"--load {directory} --train-iters 4", world_size=world_size)


def assert_bit_identical(resumed: Outcome, whole: Outcome) -> None:
    for name in ("step", "loss", "grad_norm"):
        assert resumed.values(name) == whole.values(name), name
    assert resumed.model == whole.model


def test_resumed_run_is_bit_identical_on_one_rank(tmp_path: Path, one_process: Outcome) -> None:
    assert_bit_identical(resume_in_the_middle(tmp_path), one_process)


@pytest.mark.parametrize(
    "flags",
    [
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "--use-distributed-optimizer --bf16",
    ],
    ids=["fp32-overlapped", "bf16"],
)
def test_resumed_run_is_bit_identical_with_the_distributed_optimizer(
    tmp_path: Path, flags: str
) -> None:
    whole = train(flags, "--train-iters 4", world_size=2)
    assert_bit_identical(resume_in_the_middle(tmp_path, flags, world_size=2), whole)


def test_exit_interval_ends_the_run_and_saves(tmp_path: Path) -> None:
    outcome = train(f"--train-iters 4 --exit-interval 3 --save {tmp_path}")
    assert outcome.values("step") == [1, 2, 3]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3\n"


def test_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    train(f"--train-iters 1 --save {tmp_path}")
    outcome = run_trainer(TINY, f"--load {tmp_path} --train-iters 2 --swiglu")
    assert outcome.exit_codes == [2]
    assert outcome.errors.splitlines()[-1].startswith("pretrain_gpt.py: error: --load: ")
    assert "was made with" in outcome.errors
