# SPDX-License-Identifier: Apache-2.0
"""What a user sees of a run: the metrics file, the output, and an early end when a rank dies."""

from __future__ import annotations

import json
import math
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.launch import TINY, Outcome, Run, train
from tests.support.processes import ROOT

pytestmark = pytest.mark.slow

FIELDS = {
    "step",
    "loss",
    "grad_norm",
    "step_time_s",
    "tokens_per_s",
    "peak_activation_bytes",
    "peak_activation_bytes_rank0",
    "peak_device_bytes",
    "learning_rate",
    "offload",
}


def test_metrics_hold_one_object_per_step(one_process: Outcome) -> None:
    assert one_process.values("step") == [1, 2, 3, 4]
    for record in one_process.metrics[:-1]:
        assert set(record) == FIELDS
    assert set(one_process.metrics[-1]) == FIELDS | {"model"}
    for record in one_process.metrics:
        assert math.isfinite(record["loss"]) and record["grad_norm"] > 0
        assert math.isclose(record["tokens_per_s"] * record["step_time_s"], 4 * 32)
        assert record["offload"] == {}


def test_output_says_once_that_the_cpu_runtime_is_on(one_process: Outcome) -> None:
    assert one_process.output.count("CPU runtime on") == 1
    assert "median step time" in one_process.output
    assert "Warning" not in one_process.output


def test_validation_and_tensorboard_do_not_change_training(
    tmp_path: Path, one_process: Outcome
) -> None:
    outcome = train(
        f"--train-iters 4 --eval-interval 2 --eval-iters 2 --tensorboard-dir {tmp_path}"
    )
    assert outcome.output.count("validation at step") == 2
    assert outcome.values("loss") == one_process.values("loss")
    assert outcome.model == one_process.model


def test_dead_rank_ends_the_run_within_seconds() -> None:
    endless = "--train-iters 1000000 --pipeline-model-parallel-size 2"
    with Run(TINY, endless, world_size=2) as run:
        run.wait_for_step(2)
        run.processes[1].kill()
        killed_at = time.monotonic()
        outcome = run.wait()
    assert time.monotonic() - killed_at < 40  # `Run` alone gives others a while
    assert all(code != 0 for code in outcome.exit_codes)


def test_it_may_wait_for_a_line_before_each_step(tmp_path: Path, one_process: Outcome) -> None:
    metrics = tmp_path / "metrics.jsonl"
    command = [sys.executable, str(ROOT / "examples/pretrain_gpt.py"), *shlex.split(TINY)]
    done = subprocess.run(
        [*command, "--train-iters", "4", "--wait-for-input", "--metrics-file", str(metrics)],
        input="\n\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    assert losses == one_process.values("loss")[:2], done.stderr


def test_whoever_interrupts_a_run_sees_what_it_did() -> None:
    # A shell's background jobs ignore it, and so would what they start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with Run(TINY, "--train-iters 100000", fresh=True) as run:
        signal.signal(signal.SIGINT, before)
        while len(run.metrics()) < 3:
            assert run.processes[0].poll() is None
            time.sleep(0.05)
        run.processes[0].send_signal(signal.SIGINT)
        outcome = run.wait()
    assert outcome.exit_codes == [130]
    assert "Traceback" not in outcome.output
    assert f"1 to {len(outcome.metrics)}" in outcome.output and "median step time" in outcome.output
