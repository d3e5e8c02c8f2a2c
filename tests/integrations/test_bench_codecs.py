# SPDX-License-Identifier: Apache-2.0
"""The measurement of what a codec changes, at its smallest size."""

from __future__ import annotations

import json
import operator
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
    by_codec = json.loads(file.read_text())["models"]["llama"]
    # Of fp32 a quarter is left, or an eighth of what is no sum, and what stays exact.
    for codec, most, left in (("int8", 0.02, 0.25), ("fp8", 0.1, 0.25), ("int4", 0.2, 0.2)):
        found = by_codec[codec]
        assert found["loss_identical"]
        assert 0 < found["gradient_error"] < most and found["bf16_error"] > 0
        for ratio in (found["bytes_ratio"], found["bytes_ratio_without_replay"]):
            assert left < ratio < 0.5
    assert by_codec["int4"]["bytes_ratio"] < by_codec["int8"]["bytes_ratio"]
    assert by_codec["fp8"]["gradient_error"] > by_codec["int8"]["gradient_error"]
    limits = (codecs.limit_of(codec, found) for codec, found in by_codec.items())
    errors = (found["gradient_error"] for found in by_codec.values())
    assert exit_code == (0 if all(map(operator.le, errors, limits)) else 1)
    assert "identical" in capsys.readouterr().out


@pytest.mark.slow
def test_small_trainings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bench import codec_training

    file = tmp_path / "trainings.json"
    argv = "--seeds 2 --steps 8 --pretraining 8 --epochs 1 --hidden 64 --sequence 64 --layers 1"
    monkeypatch.setattr(sys, "argv", ["codec_training.py", *argv.split(), "--json", str(file)])
    assert codec_training.main() in (0, 1)
    found = json.loads(file.read_text())
    for name, kinds in (("fine-tuning", 4), ("from scratch", 5)):
        runs, differences = found[name]["runs"], found[name]["differences"]
        assert len(runs) == len(differences) == kinds
        assert differences["exact"]["largest"] == 0
        for codec in ("int8", "int4"):  # gradients differ, a little
            assert 0 < differences[codec]["largest"] < 0.1
    assert len(set(found["from scratch"]["runs"]["exact"])) == 2  # of two initialisations
    assert "standard error" in capsys.readouterr().out
