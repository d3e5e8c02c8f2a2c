# SPDX-License-Identifier: Apache-2.0
"""`megatron-offload report --memory`: its tables, what was predicted beside them, its picture."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes

from megatron.offload import cli
from megatron.offload.activations.placement.plan_file import plans_to_json
from megatron.offload.activations.stats.memory_parts import (
    BETWEEN,
    KEPT,
    OUTSIDE,
    PARTS,
    REST,
    WRITING,
    Moment,
    StepMemory,
)
from megatron.offload.commands.memory.command import predicted_peak
from megatron.offload.planner.simulator.timeline import Timeline
from tests.support.stages import stage

MIB = 1 << 20


def moment(time_s: float, phase: str, **sizes: int) -> Moment:
    """With sizes in MiB."""
    parts = dict.fromkeys(PARTS, 0)
    names = {"kept": KEPT, "outside": OUTSIDE, "writing": WRITING, "rest": REST}
    parts |= {names[name]: size * MIB for name, size in sizes.items()}
    return Moment(time_s, phase, "decoder.1" if phase else "", parts)


def step(**changes: object) -> StepMemory:
    """Its peak is 10 MiB of a layer and others, and one more between samples."""
    moments = (
        moment(0.0, ""),
        moment(0.5, "forward", kept=4, writing=1, outside=3, rest=2),
        moment(1.0, "backward", kept=2, rest=-1),
        moment(2.0, ""),
    )
    layers = {"decoder.1 attention": 1 * MIB, "decoder.1 mlp": 3 * MIB, "decoder.2": MIB}
    layers |= {"outside of layers": 3 * MIB} | {f"decoder.{n}": n for n in range(3, 9)}
    values = {
        "rank": 1,
        "step": 3,
        "peak_bytes": 11 * MIB,
        "reusable_bytes": None,
        "peak": replace(moments[1], layers=layers),
        "moments": moments,
    }
    return StepMemory(**{**values, **changes})  # type: ignore[arg-type]


def report(tmp_path: Path, *steps: StepMemory, picture: Path | None = None) -> int:
    path = tmp_path / "m.jsonl"
    path.write_text("".join(one.to_json() + "\n" for one in steps))
    drawn = [] if picture is None else ["--picture", str(picture)]
    return cli.main(["report", "--memory", str(path), *drawn])


def test_the_largest_peak_is_explained_from_its_largest_part_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(tmp_path, step(step=4, peak_bytes=MIB), step()) == 0
    heading, parts, layers = capsys.readouterr().out.rstrip("\n").split("\n\n")
    assert heading.splitlines() == [
        "rank 1, most device memory above the state before the step: step 4 1 MiB, step 3 11 MiB",
        "step 3 after 0.500 s, in a forward pass, at decoder.1:",
    ]
    assert [line.split("  ")[0] for line in parts.splitlines()] == [
        "what", KEPT, OUTSIDE, REST, WRITING, BETWEEN, "together",
    ]  # fmt: skip
    shares = [line.split()[-2] for line in parts.splitlines()[1:]]
    assert shares == ["36", "27", "18", "9", "9", "100"] and "predicted" not in parts
    assert parts.splitlines()[-1].split() == ["together", "11", "MiB", "100", "%"]
    # The five that have most, their parts together.
    assert [line.split("  ")[0] for line in layers.splitlines()] == [
        "layer", "decoder.1", "outside of layers", "decoder.2", "decoder.8", "decoder.7",
    ]  # fmt: skip
    assert layers.splitlines()[1].split("  ")[-1].strip() == "attention 1 MiB, mlp 3 MiB"


def test_what_was_predicted_stands_beside_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = stage(3, pass_fixed_bytes=(MIB,), transient_bytes=5 * MIB, allocator_slack=0.5)
    timeline = Timeline(profile)
    plan = timeline.choices.plan(timeline.choices.all(0))
    planned = step(plan=plans_to_json([plan]), profile=profile.to_json())
    predicted = predicted_peak(planned)
    assert predicted == timeline.explain_peak(plan)
    assert report(tmp_path, planned) == 0
    _, parts, layers = capsys.readouterr().out.rstrip("\n").split("\n\n")
    said = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in parts.splitlines()}
    assert said == {
        "what": "predicted",
        KEPT: "24 B",
        OUTSIDE: "1 MiB",
        REST: "5.5 MiB",  # an allocator's fragments too
        WRITING: "0 B",
        BETWEEN: "9 %",  # no prediction: a simulation has no samples
        "together": "6.5 MiB",
    }
    said = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in layers.splitlines()}
    assert said["decoder.1"] == said["decoder.2"] == "8 B" and said["outside of layers"] == "1 MiB"


@pytest.mark.parametrize(
    ("reserved_bytes", "words"), [(None, ""), (9 * MIB, "of 9 MiB reserved in all, ")]
)
def test_a_peak_between_passes_and_an_allocators_reserve_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reserved_bytes: int | None, words: str
) -> None:
    empty = step(peak=moment(0.25, ""), peak_bytes=0, reusable_bytes=5 * MIB)
    if reserved_bytes is not None:
        empty = replace(empty, reserved_bytes=reserved_bytes)
    assert report(tmp_path, empty) == 0
    heading, parts, reserve = capsys.readouterr().out.rstrip("\n").split("\n\n")
    assert heading.endswith("step 3 after 0.250 s, between two passes:")
    assert len(parts.splitlines()) == 2 and "together" in parts  # there is nothing of any part
    assert (
        reserve == f"Beside these the allocator held 5 MiB for reuse, {words}fragments among them."
    )


def test_what_replay_computes_again_is_said_where_there_is_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = {"Addmm": 2 * MIB, "Bmm": 3 * MIB}
    report(tmp_path, step(replayed_bytes=4 * MIB, unreplayed=made))
    wanted = "4 MiB of 9 MiB computed again; most of the rest: 3 MiB of Bmm, 2 MiB of Addmm."
    assert wanted in capsys.readouterr().out
    report(tmp_path, step(unreplayed=made))
    assert "computed again" not in capsys.readouterr().out


def test_a_step_is_drawn_stacked_in_the_order_of_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacked: list[tuple[list[str], list[list[float]]]] = []
    plot = Axes.stackplot

    def noted(axes: Axes, times: Any, *layers: Any, **how: Any) -> Any:
        stacked.append((how["labels"], *layers))
        return plot(axes, times, *layers, **how)

    monkeypatch.setattr(Axes, "stackplot", noted)
    picture = tmp_path / "step.png"
    assert report(tmp_path, step(), picture=picture) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    # In MiB; below zero nothing can be stacked.
    assert stacked == [
        (
            [KEPT, OUTSIDE, WRITING, REST],
            [[0, 4, 2, 0], [0, 3, 0, 0], [0, 1, 0, 0], [0, 2, 0, 0]],
        )
    ]


def test_what_cannot_be_read_or_drawn_ends_with_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", "--memory", str(tmp_path / "missing")]) == 2
    assert "missing: No such file" in capsys.readouterr().err
    assert report(tmp_path, step(), picture=tmp_path / "nowhere" / "step.png") == 2
    assert "No such file" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report(tmp_path, step(), picture=tmp_path / "step.png") == 2
    assert "--picture needs matplotlib, which is not installed" in capsys.readouterr().err
    for wrong in (["--memory", "m", "metrics.jsonl"], ["metrics.jsonl", "--picture", "p.png"], []):
        with pytest.raises(SystemExit):
            cli.main(["report", *wrong])
        assert "--memory" in capsys.readouterr().err


def test_without_a_step_there_is_nothing_to_explain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(tmp_path) == 2
    assert "has no step yet" in capsys.readouterr().err
