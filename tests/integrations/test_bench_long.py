# SPDX-License-Identifier: Apache-2.0
"""The measurement of means against a long sequence's memory, at its smallest size."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from bench import long

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
SCRIPT = Path(__file__).resolve().parents[2] / "tools/bench/long.py"


def run(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """As a user does, whose environment says nothing of where modules are."""
    command = [sys.executable, str(SCRIPT), *argv]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What it printed and wrote: of all ways, which are processes, of DeepSpeed if it is there."""
    folder = tmp_path_factory.mktemp("long")
    sizes = "--tokens 600 --layers 2 --hidden 64 --vocabulary 8192 --turns 1 --json long.json"
    ways = long.WAYS if HAS_DEEPSPEED else long.DEFAULT_WAYS
    ended = run(folder, *sizes.split(), "--ways", ",".join(ways))
    assert ended.returncode in (0, 1), ended.stderr  # which of two small peaks is larger is chance
    return ended.stdout, json.loads((folder / "long.json").read_text())["ways"]


@pytest.mark.slow
def test_a_small_measurement(measured: tuple[str, dict[str, Any]]) -> None:
    assert long.make_parser().parse_args([]).ways == "none,checkpointing,inputs,chunked,tiled"
    printed, every = measured
    ways = {name: one for name, one in every.items() if name in long.DEFAULT_WAYS}
    assert list(ways) == ["none", "checkpointing", "inputs", "chunked", "tiled"]
    losses = [one["losses"] for one in ways.values()]
    assert losses[0] == losses[1] == losses[2], "recomputed"
    for one in losses[3:]:
        assert one == pytest.approx(losses[0], rel=0.01)
    assert ways["chunked"]["peak_bytes"] < ways["none"]["peak_bytes"]
    assert "600 tokens" in printed


@pytest.mark.slow
@pytest.mark.skipif(not HAS_DEEPSPEED, reason="deepspeed is not installed")
def test_deepspeed_comes_to_the_same_losses(measured: tuple[str, dict[str, Any]]) -> None:
    ways = measured[1]
    assert ways["deepspeed"]["losses"] == pytest.approx(ways["none"]["losses"], rel=0.01)
    assert ways["deepspeed"]["losses"] != ways["none"]["losses"]


@pytest.mark.slow
def test_a_way_that_fails_is_told(tmp_path: Path) -> None:
    argv = "--tokens 8 --layers 1 --hidden 64 --ways inputs --directory missing"
    ended = run(tmp_path, *argv.split())
    assert ended.returncode == 2
    assert "inputs: " in ended.stderr and "missing" in ended.stderr
