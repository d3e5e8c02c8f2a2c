# SPDX-License-Identifier: Apache-2.0
"""tools/check/tune.py judges what was measured; here that is made up."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from check import tune as check

from megatron.offload.commands.tune.setting import Setting, settings_to_measure
from megatron.offload.commands.tune.step_model import Measurement
from megatron.offload.sizes import MIB

SMALL = check.MODELS[0]


def linear(setting: Setting) -> Measurement:
    """A machine that is as linear as the fits; larger micro-batches are faster."""
    others = setting.micro_batches - 1 if setting.units else 0
    return Measurement(
        setting,
        step_s=0.01 * setting.micro_batches * (1.0 + setting.micro_batch_size) + 0.05,
        device_bytes=MIB * (400 + 10 * setting.micro_batch_size + 5 * others),
        moved_bytes=MIB * setting.samples,
        host_share=0.0,
        tokens=128.0 * setting.samples,
    )


def measured(**changes: dict[str, Any]) -> dict[str, Any]:
    """Of the small model; `changes` by the name of a candidate, dashes as underscores."""
    to_fit = settings_to_measure((1, 4), (2, 4), (0, SMALL.layers))
    every = [asdict(linear(one)) for one in check.candidates(SMALL)]
    for one in every:
        one |= changes.get(f"at_{Setting(**one['setting']).name.replace('-', '_')}", {})
    return {"fits": [asdict(linear(one)) for one in to_fit], "candidates": every}


def test_a_machine_that_keeps_to_the_fits_is_tuned_well(tmp_path: Path) -> None:
    file = tmp_path / "tune.json"
    file.write_text(json.dumps({"machine": {}, "measured": {SMALL.name: measured()}}))
    rows = check.judge(SMALL, measured(), 6)
    assert len(rows) == 7 and rows[-1].chosen == rows[-1].best == "1x16-micro-batch-major"
    assert all(not one.broken and (one.share or 0.0) <= 1.0 for one in rows)
    assert rows[-1].holds


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({"device_bytes": 900 * MIB}, True),  # as the judge finds, far more than was promised
        ({"step_s": 9.0}, False),  # and chosen as the fastest
    ],
)
def test_a_choice_that_is_bad_or_breaks_its_promise_fails(
    change: dict[str, Any],
    broken: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(check, "in_a_line", lambda machine: "a machine")
    source, result = tmp_path / "tune.json", tmp_path / "judged.json"
    found = measured(**({} if broken else {"at_1x16_micro_batch_major": change}))
    found["again"] = measured(at_1x16_micro_batch_major=change)["candidates"]
    source.write_text(json.dumps({"machine": {}, "measured": {SMALL.name: found}}))
    assert check.main(["--from", str(source), "--json", str(result)]) == 1
    rows = json.loads(result.read_text())["rows"]
    assert any(row["broken"] == ["1x16-micro-batch-major"] for row in rows) == broken
    assert " !" in capsys.readouterr().out or broken


def test_an_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check.main(["--only", "huge"])
    assert "small, medium, large" in capsys.readouterr().err
