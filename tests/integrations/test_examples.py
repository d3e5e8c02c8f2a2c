# SPDX-License-Identifier: Apache-2.0
"""The examples for transformers and FSDP2, started by their scripts with an interpreter given."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


def output_of(example: str, directory: Path, *flags: str) -> str:
    pytest.importorskip("transformers", reason="transformers is not installed")
    done = subprocess.run(
        [ROOT / f"examples/{example}/train.sh", "--directory", directory, *flags],
        cwd=ROOT,
        env={
            **os.environ,
            "MEGATRON_OFFLOAD_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def offloaded_mib(output: str) -> float:
    """Of a step, from the summary at the end."""
    found = re.search(r"^  offloaded +([\d.]+) MiB", output, re.MULTILINE)
    assert found, output
    return float(found[1])


def test_a_qwen_with_adapters_trains_the_same_with_transformers_trainer(tmp_path: Path) -> None:
    size = ("--family", "qwen3", "--lora", "--layers", "2", "--tokens", "256", "--steps", "5")
    off = output_of("huggingface", tmp_path, *size, "--mode", "off")
    ssd = output_of("huggingface", tmp_path, *size)
    losses = [re.findall(r"'(?:train_)?loss': '([\d.]+)'", text) for text in (off, ssd)]
    assert len(losses[0]) == 2 and losses[0] == losses[1]
    assert "offload/offloaded_gib" in ssd and offloaded_mib(ssd) > 10


def test_two_ranks_of_fsdp2_train_the_same(tmp_path: Path) -> None:
    size = ("--layers", "2", "--tokens", "256", "--steps", "3")
    off = output_of("fsdp2", tmp_path, *size, "--mode", "off")
    ssd = output_of("fsdp2", tmp_path, *size)
    losses = [re.findall(r"^step +\d+  loss ([\d.]+)", text, re.MULTILINE) for text in (off, ssd)]
    assert len(losses[0]) == 3 and losses[0] == losses[1]
    assert offloaded_mib(ssd) > 5
