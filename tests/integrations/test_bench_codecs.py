# SPDX-License-Identifier: Apache-2.0
"""The measurement of what a codec changes, at its smallest size."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.slow
def test_a_small_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bench import codecs

    file = tmp_path / "codecs.json"
    argv = "--models llama --layers 2 --hidden 128 --sequence 64 --batch 2 --turns 1 --warm 2"
    argv += f" --batches 2 --min-bytes 4KiB --directory {tmp_path} --json {file}"
    monkeypatch.setattr(sys, "argv", ["codecs.py", *argv.split()])
    exit_code = codecs.main()
    found = json.loads(file.read_text())["models"]["llama"]["int8"]
    assert found["loss_identical"]
    assert 0 < found["gradient_error"] < 0.02 and found["bf16_error"] > 0
    # Of fp32 a quarter is left, and what stays exact.
    assert 0.25 < found["bytes_ratio"] < 0.5 and 0.25 < found["bytes_ratio_without_replay"] < 0.5
    assert exit_code == (0 if found["gradient_error"] <= found["bf16_error"] else 1)
    assert "identical" in capsys.readouterr().out
