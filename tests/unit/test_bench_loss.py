# SPDX-License-Identifier: Apache-2.0
"""The measurement of losses, and the picture of two trainings' losses."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from bench import loss as bench
from plot import losses as plot

SMALL = "--tokens 40 --hidden-size 16 --vocab-size 101 --rounds 2"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways run in this process: starting others takes longer than measuring."""

    def in_this_process(name: str, argv: list[str]) -> tuple[dict[str, Any] | None, str]:
        if name == "liger":
            return None, "it is not there"
        return bench.measure(name, bench._parser().parse_args(argv)), ""

    monkeypatch.setattr(bench, "in_a_process", in_this_process)


def test_a_small_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "loss.json"
    ways = "--ways eager,chunked,chunked-mean,liger --chunk-tokens 7"
    assert bench.main([*SMALL.split(), *ways.split(), "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    result = json.loads(file.read_text())
    assert [one["way"] for one in result["ways"]] == ["eager", "chunked", "chunked-mean"]
    assert result["left_out"] == {"liger": "it is not there"}
    assert "liger: not measured: it is not there" in shown and "chunked-mean" in shown
    for one in result["ways"]:
        assert one["seconds"] >= one["fastest_s"] > 0.0
        assert max(one["errors"].values()) < 1e-6


def test_errors_over_the_bound_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(name: str, args: argparse.Namespace) -> dict[str, Any]:
        error = 1e-3 if name == "chunked" else 1e-6
        errors = dict.fromkeys(("loss", "hidden", "weight"), error)
        figures = dict.fromkeys(("seconds", "fastest_s", "cpu_s"), 1.0)
        return {"way": name, **figures, "peak_bytes": 1, "errors": errors}

    monkeypatch.setattr(bench, "measure", measured)
    assert bench.main(["--ways", "eager,chunked"]) == 1
    assert bench.main(["--ways", "eager,chunked-mean"]) == 0


def test_an_unknown_way_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--ways", "slow"])
    assert "there is no way slow; choose of eager" in capsys.readouterr().err


def test_two_trainings_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "own.jsonl", tmp_path / "chunked.jsonl"]
    for file, last in zip(files, (2.0, 2.002), strict=True):
        file.write_text("".join(f'{{"loss": {value}}}\n' for value in (3.0, last)))
    picture = tmp_path / "losses.png"
    assert plot.main([*map(str, files), "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "differ by 1.0e-03" in capsys.readouterr().out


def test_trainings_of_different_lengths_are_not_compared(tmp_path: Path) -> None:
    files = [tmp_path / "own.jsonl", tmp_path / "chunked.jsonl"]
    for number, file in enumerate(files, start=1):
        file.write_text('{"loss": 3.0}\n' * number)
    with pytest.raises(SystemExit):
        plot.main([*map(str, files), "--output", str(tmp_path / "losses.png")])
