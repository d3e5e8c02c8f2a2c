# SPDX-License-Identifier: Apache-2.0
"""Files that others wrote, or cut short: every reader gives what they say, or one sentence."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.offload import ConfigurationError, cli
from megatron.offload.activations.placement.plan import Plan, PlannedPart, Prediction
from megatron.offload.activations.placement.plan_file import load_plans, plans_to_json
from megatron.offload.activations.placement.plan_table import plan_table
from megatron.offload.activations.placement.policy import Placement
from megatron.offload.activations.stats.memory_parts import KEPT, REST, Moment, StepMemory
from megatron.offload.commands.bench.fio import FioError, parse_sample
from megatron.offload.commands.memory.command import explain_memory
from megatron.offload.commands.report import compare_runs
from megatron.offload.commands.rok.result import Result
from megatron.offload.commands.rok.text import measurements_table, verdict_table
from megatron.offload.commands.training_runs.trainer import read_metrics
from megatron.offload.documents import each_line, from_json, reading
from megatron.offload.integration.torch.measured_run import MeasuredRun
from megatron.offload.planner.profile.stage_profile import StageProfile
from megatron.offload.stats.metrics_file import MetricsFile
from tests.support.processes import ROOT
from tests.support.stages import stage

DEEP = "[" * 100_000
HUGE = "9" * 5000


def _metrics() -> str:
    step = {"loss": 2.5, "step_time_s": 0.25, "peak_activation_bytes": 1 << 20, "grad_norm": None}
    offload = {"written_bytes": 2048, "stall_s": 0.0, "plans": 1}
    lines = [json.dumps({"step": number, **step, "offload": offload}) for number in (1, 2, 3)]
    return "\n".join(lines) + "\n"


def _plan() -> Plan:
    parts = tuple(
        PlannedPart(0, f"decoder.{number}", part, where, 8)
        for number in range(2)
        for part, where in (("attention", Placement.SSD), ("mlp", Placement.KEEP))
    )
    return Plan(parts, predicted=Prediction(1.5, 0.25, 0.125, 1 << 20))


def _report() -> str:
    parts = {KEPT: 100, REST: 20}
    moments = (Moment(0.0, "forward", "decoder.0", parts), Moment(0.5, "", "", parts))
    peak = Moment(0.5, "forward", "decoder.0 mlp", parts, {"decoder.0 mlp": 100})
    step = StepMemory(0, 3, 130, None, peak, moments)
    return step.to_json() + "\n" + step.to_json() + "\n"


def _rok() -> str:
    return (ROOT / "docs/results/rok-150MBps.json").read_text()


def _fio() -> str:
    way = {"io_bytes": 1 << 20, "runtime": 1000}
    job = {"error": 0, "usr_cpu": 1.0, "sys_cpu": 2.0, "job_runtime": 1000}
    return json.dumps({"jobs": [{"read": way, "write": way, **job}]})


def _run() -> str:
    (text,) = MeasuredRun(flags=("--activation-offload", "host")).environment().values()
    return text


def _read_fio(path: Path) -> None:
    parse_sample(path.read_text(errors="replace"))


def _read_run(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_OFFLOAD_RUN", path.read_text(errors="replace").replace("\0", " "))
        MeasuredRun.of_environment()


def _read_plan(path: Path) -> None:
    for plan in load_plans(path).values():
        plan_table(plan)


def _read_rok(path: Path) -> None:
    result = Result.load(path)
    measurements_table(result.measured)
    verdict_table(result.verdicts)


# What a reader reads, and what it does with a file, down to the text that a person sees.
READERS: dict[str, tuple[Callable[[], str], Callable[[Path], Any]]] = {
    "metrics": (_metrics, lambda path: compare_runs([path])),
    "metrics of a run": (_metrics, read_metrics),
    "metrics that a run goes on with": (_metrics, lambda path: MetricsFile(path, 2).close()),
    "plan": (lambda: plans_to_json([_plan()]), _read_plan),
    "profile": (lambda: stage(2).to_json(), StageProfile.load),
    "memory report": (_report, lambda path: explain_memory(path, None)),
    "rok": (_rok, _read_rok),
    "fio": (_fio, _read_fio),
    "environment": (_run, _read_run),
}
NAMES_NO_FILE = ("fio", "environment")


def read(name: str, path: Path, body: bytes) -> str:
    """The sentence that refuses the file; empty: it was read. Any other error is raised."""
    path.write_bytes(body)
    try:
        READERS[name][1](path)
    except (ConfigurationError, FioError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", READERS)
def test_what_was_written_is_read(name: str, tmp_path: Path) -> None:
    assert read(name, tmp_path / "file", READERS[name][0]().encode()) == ""


BODIES = {
    "deep": DEEP.encode(),
    "deep object": ('{"a":' * 100_000).encode(),
    "binary": b"\x89PNG\r\n\x1a\n\xff\xfe\x00\x00",
    "huge number": HUGE.encode(),
    "text": b"hello",
    "list": b"[]",
    "null": b"null",
    "lines": b"null\n5\n",
    "object": b"{}",
    "nan": b"NaN",
    "nothing": b" ",
}


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("name", READERS)
def test_what_is_another_file_is_a_sentence(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    said = read(name, path, BODIES[kind])
    if name == "metrics that a run goes on with":  # lines of others are left out
        assert said == "" and path.read_text() == ""
    elif name != "metrics of a run" and (name, kind) != ("environment", "object"):
        assert said and len(said) < 1000
        assert name in NAMES_NO_FILE or str(path) in said


def _with_other_words(value: Any) -> Iterator[Any]:
    """A JSON value with one of its texts changed, for each; of a list's members for one."""
    if isinstance(value, str):
        yield ""
        yield "x"
        return
    places: Iterable[Any] = value if isinstance(value, dict) else ()
    if isinstance(value, list):
        places = {str(type(one)): place for place, one in enumerate(value)}.values()
    for where in places:
        for other in _with_other_words(value[where]):
            changed = value.copy()
            changed[where] = other
            yield changed


@pytest.mark.parametrize("name", ["plan", "profile", "memory report", "rok", "fio", "environment"])
def test_a_word_that_is_another_is_read_or_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    text = READERS[name][0]()
    documents = text.splitlines() if name == "memory report" else [text]
    num_refused = 0
    for changed in _with_other_words([json.loads(one) for one in documents]):
        body = "".join(f"{json.dumps(one)}\n" for one in changed)
        num_refused += bool(read(name, tmp_path / "file", body.encode()))
    assert num_refused or name in (*NAMES_NO_FILE, "memory report")  # its words are names


def _changed(value: Any, draw: st.DrawFn) -> Any:
    """A JSON value with another one in some place of it, or without one."""
    if isinstance(value, (dict, list)) and value and draw(st.integers(0, 5)):
        where = draw(st.sampled_from(list(value) if isinstance(value, dict) else range(len(value))))
        if not draw(st.integers(0, 5)):
            changed = value.copy()
            del changed[where]
            return changed
        changed = value.copy()
        changed[where] = _changed(value[where], draw)
        return changed
    return draw(
        st.sampled_from([None, True, "", "x", -1, 0, 10**18, 10**30, 1e308, -1e308, [], {}, [[]]])
        | st.sampled_from([float("nan"), float("inf"), "1", "decoder.0", [1], {"a": {}}])
        | st.integers()
        | st.text(max_size=5)
    )


@st.composite
def mutated(draw: st.DrawFn, text: str) -> bytes:
    """A file that was cut, overwritten in part, or says something else."""
    way = draw(st.sampled_from(["cut", "bytes", "values", "values", "values"]))
    if way == "cut":
        return text.encode()[: draw(st.integers(0, len(text)))]
    if way == "bytes":
        body = bytearray(text.encode())
        at = draw(st.integers(0, len(body) - 1))
        new = draw(st.binary(min_size=1, max_size=4))
        body[at : at + len(new)] = new
        return bytes(body)
    try:
        values = [json.loads(text)]
    except ValueError:  # JSON lines
        values = [json.loads(line) for line in text.splitlines()]
    at = draw(st.integers(0, len(values) - 1))
    for _ in range(draw(st.integers(1, 3))):
        values[at] = _changed(values[at], draw)
    return "".join(json.dumps(value) + "\n" for value in values).encode()


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_file_that_others_changed_is_read_or_refused_in_a_sentence(
    name: str, data: st.DataObject, tmp_path: Path
) -> None:
    text = READERS[name][0]()
    if len(text) > 20_000:
        values = json.loads(text)  # a few of each will do
        short = {k: v[:2] if isinstance(v, list) else v for k, v in values.items()}
        text = json.dumps(short)
    read(name, tmp_path / "file", data.draw(mutated(text)))


@pytest.mark.parametrize("name", ["metrics", "memory report"])
@pytest.mark.parametrize("length", [1, 10, -1])
def test_a_last_line_that_was_cut_short_is_left_out_with_a_warning(
    name: str, length: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = READERS[name][0]().encode()
    line = whole.split(b"\n")[0]
    with caplog.at_level(logging.WARNING):
        assert read(name, tmp_path / "file", whole + line[:length]) == ""
    assert "file: the last line was cut short" in caplog.text
    # In the middle of a file it is no accident.
    said = read(name, tmp_path / "file", line[:length] + b"\n" + whole)
    assert f"{tmp_path / 'file'} is not a" in said and "line 1 (" in said


def test_a_last_line_without_its_end_counts_if_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b"1\n2\n3")
    assert each_line(path, "numbers", "write some", from_json) == [1, 2, 3]


def test_a_line_ends_where_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_text('"a\u2028b"\n"c\u0085d"\n')
    assert each_line(path, "words", "write some", from_json) == ["a\u2028b", "c\u0085d"]


def test_metrics_of_another_trainer_say_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for line, reason in [
        ({"step": 1, "loss": 2.0}, "missing required field `step_time_s`"),
        ({"loss": 2.0, "step_time_s": 1, "peak_activation_bytes": 1}, "missing.*`step`"),
        ({"step": 1, "loss": "2", "step_time_s": 1, "peak_activation_bytes": 1}, "`str`"),
        ({"step": 1, "loss": 2, "step_time_s": -1, "peak_activation_bytes": 1}, "step_time_s is"),
    ]:
        path.write_text(json.dumps(line) + "\n")
        with pytest.raises(ConfigurationError, match=rf"metrics.jsonl: line 1 \(.*{reason}"):
            compare_runs([path])


def test_what_our_own_code_does_wrong_is_no_sentence_about_a_file() -> None:
    with pytest.raises(AssertionError), reading("FILE is no plan", "give one"):
        raise AssertionError
    missing = r"FILE is no plan \('x' is missing\); give one"
    with pytest.raises(ConfigurationError, match=missing), reading("FILE is no plan", "give one"):
        raise KeyError("x")


@pytest.mark.parametrize("kind", ["deep", "binary", "huge number", "list"])
@pytest.mark.parametrize(
    "command",
    [
        ["report", "{}"],
        ["report", "--memory", "{}"],
        ["rok", "--redraw", "{}"],
        ["plan", "--profile", "{}"],
    ],
    ids=lambda command: " ".join(command[:-1]),
)
def test_commands_end_with_a_sentence_and_exit_code_2(
    command: list[str], kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(BODIES[kind])
    assert cli.main([part.format(path) for part in command]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-offload: error: ") and str(path) in line
