# SPDX-License-Identifier: Apache-2.0
"""The page of `report --html`: what is in it, for whole runs, cut ones and odd names."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from megatron.offload import cli
from megatron.offload.commands.html_report import timelines

pytest.importorskip("matplotlib", reason="matplotlib is not installed")


def _run(folder: Path, num_steps: int, **offload: Any) -> Path:
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            line = {
                "step": step,
                "loss": 2.5 - step,
                "step_time_s": 0.25 * step,
                "peak_activation_bytes": 3 << 30,
                "peak_device_bytes": 5 << 30,
                "offload": {"written_bytes": 1 << 20, "read_bytes": 1 << 20, **offload},
            }
            print(json.dumps(line), file=file)
    return folder


def _pictures(page: str) -> str:
    """All text in the page's one picture, which is well-formed."""
    assert page.count("<svg") == 1
    picture = page[page.index("<svg") : page.index("</svg>") + len("</svg>")]
    root = ElementTree.fromstring(picture)
    comments = [line for line in picture.splitlines() if line.strip().startswith("<!--")]
    assert root.tag.endswith("svg")
    return "\n".join(comments)


def test_a_page_has_the_table_and_a_picture_of_each_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = {"plans": 2, "predicted_step_s": 0.5, "predicted_peak_bytes": 2 << 30}
    folders = [_run(tmp_path / "without", 3), _run(tmp_path / "a<b", 4, **plans)]
    trace = folders[0] / "trace.json"
    trace.write_text('[\n{"pid": 0, "ph": "M", "name": "process_name"}\n]')
    (folders[0] / "plan.json").write_text('{"version": 3}')
    page = tmp_path / "page.html"
    assert cli.main(["report", *map(str, folders), "--html", str(page)]) == 0
    table = capsys.readouterr().out
    assert [line.split()[0] for line in table.splitlines()] == ["run", "without", "a<b"]
    text = page.read_text()
    assert "<td>without" in text and "a&lt;b" in text and "a<b" not in text.partition("<svg")[0]
    drawn = _pictures(text)
    for title in (
        "step time, s",
        "time that compute waited for reads, s",
        "peak activation memory, GiB",
        "peak of the whole device, GiB",
        "written to SSDs in a step, MiB",
        "read from SSDs in a step, MiB",
    ):
        assert f"<!-- {title} -->" in drawn
    assert "without" in drawn and "planned" in drawn
    assert "plan 2: expected 0.500 s and 2048 MiB at most, the last step took 1.000 s" in text
    assert str(trace) in text and "plan.json" not in text


def test_runs_without_steps_and_of_one_step_are_drawn(tmp_path: Path) -> None:
    folders = [_run(tmp_path / "none", 0), _run(tmp_path / "one", 1)]
    page = tmp_path / "page.html"
    assert cli.main(["report", *map(str, folders), "--html", str(page)]) == 0
    assert "one" in _pictures(page.read_text())
    assert "Plans of auto" not in page.read_text()


def test_the_page_is_for_files_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["report", "--html", str(tmp_path / "page.html"), "--memory", "x"])
    assert "--html is for the files of runs" in capsys.readouterr().err


def test_timelines_are_found_beside_metrics(tmp_path: Path) -> None:
    folder = _run(tmp_path / "run", 1)
    (folder / "trace.rank1.json").write_text('[{"ph": "X"}]')
    (folder / "other.json").write_text("{}")
    assert timelines([folder / "metrics.jsonl"]) == [folder / "trace.rank1.json"]
