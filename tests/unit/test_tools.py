# SPDX-License-Identifier: Apache-2.0
"""Every script in tools/ starts from a checkout: what it imports is there, and its help is read."""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path

import pytest
from check.train_on_slow_disk import Lane

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    path for path in (ROOT / "tools").rglob("*.py") if '__name__ == "__main__"' in path.read_text()
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_help_says_what_a_script_does(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As `python SCRIPT` does: what is beside a script is found first.
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
    monkeypatch.setattr(os, "execve", lambda *_: None)  # to start again with the allocator
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(script), run_name="__main__")
    assert stop.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_there_are_scripts() -> None:
    assert {
        "hooks.py",
        "families.py",
        "placements.py",
        "compare_placements.py",
        "gpu_check.py",
    } <= {path.name for path in SCRIPTS}


def test_a_slow_lane_takes_as_long_as_its_bytes_at_its_rate() -> None:
    lane = Lane()
    lane.wait(1 << 40)  # nothing at first
    lane.bytes_per_s = 1e6
    began = time.monotonic()
    for _ in range(3):
        lane.wait(10_000)
    assert time.monotonic() - began >= 0.03
