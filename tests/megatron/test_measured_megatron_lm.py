# SPDX-License-Identifier: Apache-2.0
"""Commands that start Megatron-LM's own pretrain_gpt.py again and again to measure it.

MEGATRON_LM_PATH=/path/to/Megatron-LM pytest tests/megatron/test_measured_megatron_lm.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron.test_unmodified_megatron_lm import MODEL
from tests.support.megatron_lm_checkout import CHECKOUT, environment, needs_a_checkout, offload

pytestmark = needs_a_checkout

PIPELINE = ["torchrun", "--nproc-per-node", "2", "-m", "megatron.offload.launch"]


def command(name: str, directory: Path, *own: str) -> str:
    """What it prints for the pipeline, which leaves no checkpoints."""
    words = [*PIPELINE, str(CHECKOUT / "pretrain_gpt.py"), *MODEL.split()]
    words += ["--pipeline-model-parallel-size", "2", *offload("ssd", directory)]
    done = subprocess.run(
        [sys.executable, "-m", "megatron.offload.cli", name, *own, "--", *words],
        cwd=directory,
        env=dict(environment()),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert not list(directory.glob("iter_*"))
    return done.stdout


def test_report_runs_the_launch_command_twice(tmp_path: Path) -> None:
    (header, off, moved) = command("report", tmp_path, "--steps", "3").splitlines()
    assert header.split()[0] == "run" and off.split()[0] == "off"
    assert off.split()[1] == moved.split()[1] == "3"
    assert off.split()[2] == moved.split()[2] and "identical" in moved  # losses
    assert " 0 B " in off and " MiB " in moved  # written


@pytest.mark.slow
def test_rok_measures_it_in_a_pipeline(tmp_path: Path) -> None:
    own = ["--strategies", "off,recompute,ssd", "--steps", "2", "--output", str(tmp_path / "rok")]
    printed = command("rok", tmp_path, *own)
    assert "pretrain_gpt.py, 8 layers, hidden size 128, sequence length 256" in printed
    assert "differs at step" not in printed
    rows = [line for line in printed.splitlines() if re.match(r"(keep|recompute|ssd) all ", line)]
    assert len(rows) == 5  # those without offload with either allocator
    assert os.path.getsize(tmp_path / "rok" / "rok.png") > 10_000


@pytest.mark.slow
def test_tune_chooses_for_a_pipeline(tmp_path: Path) -> None:
    own = ["--steps", "2", "--seconds", "0", "--micro-batch-sizes", "1,2"]
    printed = command("tune", tmp_path, *own, "--largest-micro-batch-size", "2")
    assert "and up to 6 more, to choose by what was measured" in printed
    last = printed.splitlines()[-1].split()
    assert last[:2] in (["--micro-batch-size", "1"], ["--micro-batch-size", "2"])
    assert last[2:] == ["--global-batch-size", "4", "--layer-major-units", "off"]
