# SPDX-License-Identifier: Apache-2.0
"""tools/bench/states_overlap.py on the test accelerator: what it writes, no times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench import states_overlap as bench

from megatron.offload.states.optimizer_slice import OptimizerSlice
from tests.support.lag.module import LagModule

SMALL = ["--layers", "4", "--layer-ms", "0.1", "--read-ms", "1", "--iterations", "1"]


def test_a_small_measurement(
    lag: LagModule, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "states.json"
    assert bench.main([*SMALL, "--json", str(file)]) == 0
    assert "ssd, serial" in capsys.readouterr().out
    rows = {row["row"]: row for row in json.loads(file.read_text())["rows"]}
    assert all(row["identical"] for row in rows.values())
    assert rows["off"]["drive_s"] == rows["host"]["drive_s"] == 0
    assert rows["ssd, serial"]["drive_s"] == pytest.approx(4 * 2 * 0.001)
    assert 0 < rows["ssd, half of it in the window"]["drive_s"] < rows["ssd, serial"]["drive_s"]


def test_weights_that_differ_are_an_error(
    lag: LagModule, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = OptimizerSlice.step

    def wrong(self: OptimizerSlice, params: Any, states: Any) -> Any:
        if params[0].numel() > 10_000:  # a smaller one is of the trial, which would see it
            params[0].mul_(0.5)
        return right(self, params, states)

    monkeypatch.setattr(OptimizerSlice, "step", wrong)
    assert bench.main(SMALL) == 1
    assert "NO" in capsys.readouterr().out
