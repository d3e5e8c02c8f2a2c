# SPDX-License-Identifier: Apache-2.0
"""`tools/check/estimate_against_runs.py`: it trains, measures and compares."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from check import estimate_against_runs


@pytest.mark.slow
def test_a_training_takes_what_is_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A small one, where what the process does beside tensors is a larger part."""
    path = tmp_path / "estimate.json"
    sizes = ["--layers", "2", "--hidden", "256", "--sequence", "256", "--batch", "4"]
    flags = [*sizes, "--models", "llama", "--ways", "plain", "--steps", "3", "--tolerance", "0.2"]
    monkeypatch.setattr(
        sys,
        "argv",
        ["estimate_against_runs.py", *flags, "--directory", str(tmp_path), "--json", str(path)],
    )
    assert estimate_against_runs.main() == 0, capsys.readouterr()
    (run,) = json.loads(path.read_text())["runs"]
    assert run["model"] == "llama" and run["peak_bytes"] > run["held_bytes"] > 30_000_000
    assert sum(run["kinds"].values()) == pytest.approx(run["device_bytes"], abs=10)


def test_a_model_that_is_not_known_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["estimate_against_runs.py", "--models", "nope"])
    with pytest.raises(SystemExit):
        estimate_against_runs.main()
    assert "unknown: nope" in capsys.readouterr().err
