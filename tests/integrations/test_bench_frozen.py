# SPDX-License-Identifier: Apache-2.0
"""`tools/bench/frozen.py` on small models: its file, its summary, its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("peft", reason="peft is not installed")

from bench import frozen


@pytest.mark.slow
def test_a_small_measurement(tmp_path: Path) -> None:
    file = tmp_path / "frozen.json"
    arguments = ["--parts", "prefix", "--batches", "2", "--epochs", "2", "--layers", "3"]
    arguments += ["--tokens", "16"]
    code = frozen.main([*arguments, "--frozen", "2", "--json", str(file)])
    summary = json.loads(file.read_text())["summary"]
    assert summary["identical"] is True
    assert set(summary) == {"identical", "epoch_speedup", "first_epoch_ratio"}
    is_met = all(frozen.TARGETS[key](value) for key, value in summary.items())
    assert code == (0 if is_met else 1)
    details = json.loads(file.read_text())["details"]
    assert set(details) == {"ordered", "shuffled", "again"}
    assert details["shuffled"]["hit_rows"] == [0, 8] and details["again"]["first_step_hits"] == 4
