# SPDX-License-Identifier: Apache-2.0
"""`estimate_against_runs.py` trains and compares, `estimate_against_gpu.py` compares with GPUs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from check import estimate_against_gpu, estimate_against_runs

from megatron.offload.commands.estimate.saved import MOVE
from megatron.offload.commands.estimate.step import Pass
from megatron.offload.integration import tiled_mlps

_GPUS = Path(__file__).resolve().parents[2] / "docs/results/gpu"
as_version_5 = pytest.mark.skipif(
    estimate_against_gpu.transformers.__version__.startswith("4."),
    reason="the GPUs ran version 5; without a cache 4 makes a mask of all pairs of tokens",
)


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


@as_version_5
@pytest.mark.slow(but="h200-5")
@pytest.mark.parametrize(("gpu", "least"), [("h100", 25), ("h200", 5)])
def test_estimates_are_within_a_tenth_of_what_gpus_took(gpu: str, least: int) -> None:
    """Each training that gpu_day.py measured and `estimate` knows."""
    day = json.loads((_GPUS / gpu / "results.json").read_text())
    found = list(estimate_against_gpu.compare(day))
    assert len(found) >= least
    assert not [one for one in found if abs(one.error) > 0.1]


@as_version_5
def test_so_are_those_of_tiles_as_they_were_when_gpus_ran_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MLPs alone ran over tiles then, and no norms."""
    monkeypatch.setattr(tiled_mlps, "_norms", lambda model: iter(()))
    tiles = Pass(MOVE, checkpoints=True, chunks_loss=True, tiles_mlps=True)
    monkeypatch.setattr(estimate_against_gpu, "_PASSES", {"tiled_host": tiles})
    day = json.loads((_GPUS / "h100" / "results.json").read_text())
    found = list(estimate_against_gpu.compare(day))
    assert [one.name for one in found] == ["long/32768 tiled_host", "long/65536 tiled_host"]
    assert all(abs(one.error) < 0.04 for one in found)


def test_a_day_without_such_a_training_is_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"machine": "one", "results": {}}))
    assert estimate_against_gpu.main([str(path)]) == 2
    assert "has no training that estimate knows" in capsys.readouterr().err
