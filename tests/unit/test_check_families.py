# SPDX-License-Identifier: Apache-2.0
"""tools/check/families.py: what it takes for the same, what it says of the rest, how it ends."""

from __future__ import annotations

import itertools
import json
import os
import signal
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from check import families as check
from check.family import pool
from check.family.catalogue import Family, chosen, families
from check.family.cells import Cell, Left, Outcome, summary_of
from check.family.columns import COLUMNS, Columns
from check.family.configurations import small_configurations
from check.family.inputs import WayToCall
from check.family.pool import Work, run_families
from check.family.report import page
from check.family.sample import Sample
from check.family.training import Training, first_difference, same_bits
from transformers import LlamaConfig

FAMILY = Family("stack", "causal", "Stack")
IDENTICAL, CRASH = Outcome.IDENTICAL, Outcome.CRASH


def cell(column: str, outcome: Outcome, note: str = "", **more: Any) -> Cell:
    return Cell("llama", "causal", "sdpa", column, outcome, note, **more)


# -- What is told apart -------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """By `mode`: computes, raises, or gives something else when it runs a second time in a step."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.linear = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU())
        self.mode = mode
        self.calls = itertools.count(1)  # which a recomputation does not see

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = next(self.calls)
        if self.mode == "raises" and torch._C._current_graph_task_id() != -1:
            raise ValueError("called in backward")
        scale = number if self.mode == "counts" else 1
        return x + scale * self.linear(x)


class Stack(torch.nn.Module):
    """What transformers' models look like to the tool."""

    def __init__(self, mode: str = "", num_layers: int = 3) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(mode) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return types.SimpleNamespace(loss=x.square().mean())


def sample_of(model: torch.nn.Module) -> Sample:
    way = WayToCall("x", lambda generator: {"x": torch.randn(4, 16, generator=generator)})
    return Sample(FAMILY, "as it is", way, model)


def columns_of(model: torch.nn.Module, directory: Path) -> Columns:
    return Columns(sample_of(model), directory)


@pytest.mark.parametrize("column", ["ssd", "recompute", "parameters", "states", "layer-major"])
def test_a_plain_model_is_identical_and_something_moves(column: str, tmp_path: Path) -> None:
    assert columns_of(Stack(), tmp_path).run(column) == (IDENTICAL, "", True)


def test_a_layer_that_changes_when_it_runs_again_is_different(tmp_path: Path) -> None:
    outcome, note, _ = columns_of(Stack("counts"), tmp_path).run("recompute")
    assert outcome is Outcome.DIFFERENT and note.startswith("the loss of step 2: ")


def test_an_exception_that_is_not_ours_is_a_crash(tmp_path: Path) -> None:
    assert columns_of(Stack("raises"), tmp_path).run("recompute") == (
        CRASH,
        "ValueError: called in backward",
        None,
    )


def test_a_sentence_of_ours_is_a_refusal(tmp_path: Path) -> None:
    outcome, note, _ = columns_of(Stack(), tmp_path).run("chunked loss")
    assert outcome is Outcome.REFUSED and "drop chunked_loss" in note


@pytest.mark.parametrize(("has_sdpa", "number"), [(True, 1), (False, 2)])
def test_auto_is_tried_with_one_kind_of_attention(
    has_sdpa: bool, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Columns, "run", lambda *_: (IDENTICAL, "", True))
    monkeypatch.setattr(Stack, "_supports_sdpa", has_sdpa, raising=False)
    found: list[Any] = []
    work = Work(FAMILY, "eager", ("auto", "ssd"), is_second=True)
    pool.run_sample(sample_of(Stack()), work, tmp_path, found.append)
    assert len([one for one in found if isinstance(one, Cell)]) == number


@pytest.mark.parametrize("column", ["recompute", "parameters", "layer-major", "auto"])
def test_a_model_without_layers_has_nothing_to_be_tried(column: str, tmp_path: Path) -> None:
    outcome, note, _ = columns_of(Stack(num_layers=1), tmp_path).run(column)
    assert outcome is Outcome.NOT_APPLICABLE and "layers" in note.replace("modules", "layers")


def test_bits_are_compared_and_not_values() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.zeros(1)
    assert same_bits(nan, nan.clone()) and not same_bits(zero, -zero)
    assert not same_bits(zero, zero.double()) and not same_bits(zero, torch.zeros(2))
    assert same_bits(torch.tensor(True), torch.tensor(True))


def test_what_differs_is_named() -> None:
    def training(**changes: Any) -> Training:
        one = {"a": torch.ones(2), "b": torch.zeros(2)}
        return Training([[torch.ones(())]], [{**one, **changes}], dict(one), dict(one))

    assert first_difference(training(), training()) == ""
    found = first_difference(training(b=torch.tensor([0.0, 0.5])), training())
    assert found == "step 1: 1 of 2 gradients differ, first b by up to 5.0e-01"
    assert "there in one of them alone: c" in first_difference(
        training(c=torch.ones(1)), training()
    )
    other = training()
    other.weights["a"] = torch.zeros(2)
    assert "1 of 2 weights differ, first a" in first_difference(other, training())


# -- Configurations -----------------------------------------------------------------------------


def test_a_small_configuration_has_the_defaults_but_for_sizes() -> None:
    way, small = next(small_configurations(LlamaConfig))
    changed = {
        name
        for name, value in LlamaConfig().to_dict().items()
        if small.to_dict()[name] != value and value is not None
    }
    assert way == "fixed" and small.use_cache and small.num_hidden_layers == 3
    assert changed == {
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "max_position_embeddings", "head_dim", "num_key_value_heads"),
    }


def test_families_of_all_kinds_are_found_and_others_refused() -> None:
    assert {one.kind for one in families().values()} == {
        *("causal", "seq2seq", "vision", "audio", "multimodal")
    }
    assert [one.name for one in chosen(["t5", "llama"])] == ["llama", "t5"]
    with pytest.raises(ValueError, match="no family lama"):
        chosen(["lama"])


# -- Processes ----------------------------------------------------------------------------------


def found_by(
    run: Callable[..., None], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], list[str]]:
    """What two families' processes tell in which `run` runs."""
    monkeypatch.setattr(pool, "run_here", run)
    works = [Work(FAMILY, "sdpa", ("a", "b", "c")), Work(FAMILY, "eager", ("a",))]
    found: list[Any] = []
    ended: list[str] = []
    run_families(
        works,
        directory,
        processes=2,
        timeout_s=600,
        tell=found.append,
        ended=lambda work: ended.append(work.attention),
    )
    assert not list(directory.iterdir())
    return found, sorted(ended)


def trying(at_b: Callable[[], None]) -> Callable[..., None]:
    def run(work: Work, directory: Path, tell: Callable[[Any], None]) -> None:
        (directory / "moved").write_text("left behind")
        for column in work.columns:
            tell(column)
            if column == "b":
                at_b()
            tell(work.cell(column, IDENTICAL, ""))

    return run


def in_order(found: list[Any]) -> list[tuple[str, Outcome]]:
    return [(one.column, one.outcome) for one in found if one.attention == "sdpa"]


def test_a_process_that_dies_costs_its_column_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, ended = found_by(trying(lambda: os._exit(9)), tmp_path, monkeypatch)
    assert ended == ["eager", "sdpa"]
    assert in_order(found) == [("a", IDENTICAL), ("b", CRASH), ("c", IDENTICAL)]
    assert any("exit code 9" in one.note for one in found)


def test_a_process_that_hangs_is_ended_and_costs_its_column_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_s = 0.0
    hear = pool._Process.hear

    def hear_and_wait(self: Any, *args: Any) -> Any:
        nonlocal late_s
        again = hear(self, *args)
        if self._column == "b" and again is None:
            late_s += 1000.0  # nobody has to wait for it
        return again

    monotonic = pool.time.monotonic
    monkeypatch.setattr(pool._Process, "hear", hear_and_wait)
    clock = types.SimpleNamespace(monotonic=lambda: monotonic() + late_s)
    monkeypatch.setattr(pool, "time", clock)
    found, _ = found_by(trying(signal.pause), tmp_path, monkeypatch)
    assert in_order(found) == [("a", IDENTICAL), ("b", CRASH), ("c", IDENTICAL)]
    assert any("did not end within 600 s" in one.note for one in found)


def test_a_model_that_cannot_be_prepared_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(work: Work, directory: Path, tell: Callable[[Any], None]) -> None:
        tell("")
        if work.attention == "sdpa":
            os._exit(7)
        raise RuntimeError("no such thing")

    found, ended = found_by(run, tmp_path, monkeypatch)
    assert ended == ["eager", "sdpa"] and all(isinstance(one, Left) for one in found)
    assert {one.reason for one in found} == {
        "its process ended with exit code 7",
        "the tool itself: RuntimeError: no such thing",
    }


# -- What it comes to ---------------------------------------------------------------------------


def test_a_summary_counts_cells_and_really_recomputed_layers() -> None:
    cells = [
        cell("ssd", IDENTICAL, moved=True),
        cell("recompute", IDENTICAL, moved=True),
        cell("recompute", IDENTICAL, moved=False),
        cell("recompute", CRASH),
        cell("recompute", Outcome.DIFFERENT, moved=True),
        cell("recompute", Outcome.REFUSED),
        cell("layer-major", Outcome.SUMS, moved=True),
        cell("auto", Outcome.NOT_APPLICABLE),
    ]
    left = [
        Left("reformer", "causal", "sdpa", "differs", is_random=True),
        Left("bit", "vision", "sdpa", "too large"),
        Left("llama", "causal", "eager", "no eager"),
    ]
    found = summary_of(cells, left)
    assert found["families"] == 1 and found["cases"] == 7 and found["not_built"] == 1
    assert found["random_by_themselves"] == ["reformer"]
    assert (found["crashes"], found["differences"], found["refused"]) == (1, 1, 1)
    assert found["nothing_moved"] == 1
    assert found["recompute_identical_fraction"] == 0.25
    assert summary_of([], [])["recompute_identical_fraction"] is None


@pytest.mark.parametrize(
    ("outcome", "code"),
    [(IDENTICAL, 0), (Outcome.REFUSED, 0), (CRASH, 1), (Outcome.DIFFERENT, 1), (None, 2)],
)
def test_the_exit_code_says_what_was_found(
    outcome: Outcome | None,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(works: list[Work], directory: Path, **given: Any) -> None:
        assert [(work.attention, work.is_second) for work in works] == [
            ("sdpa", False),
            ("eager", True),
        ]
        for work in works:
            if outcome is None:
                given["tell"](work.left("no text"))
            else:
                given["tell"](work.cell("ssd", outcome, "a | b: 12"))
            given["ended"](work)

    monkeypatch.setattr(check, "run_families", run)
    monkeypatch.setattr(check, "load", lambda: None)
    result, written = tmp_path / "a.json", tmp_path / "a.md"
    argv = ["--only", "llama", "--columns", "ssd,auto", "--json", str(result)]
    before = torch.get_num_threads()
    try:
        assert check.main([*argv, "--markdown", str(written)]) == code
    finally:
        torch.set_num_threads(before)
    found = json.loads(result.read_text())
    assert found["summary"]["families"] == (0 if outcome is None else 1)
    assert [row["outcome"] for row in found["rows"]] == ([] if outcome is None else [outcome] * 2)
    assert f"transformers {check.transformers.__version__}" in written.read_text()
    said = capsys.readouterr()
    assert ("a | b: 12" in said.out.replace("/", "|")) == (code == 1)
    assert ("no text" in said.err) == (code == 2)


def test_a_page_has_a_row_for_each_family_with_the_worse_attention() -> None:
    cells = [
        cell("ssd", IDENTICAL, moved=True),
        Cell("llama", "causal", "eager", "ssd", CRASH, "ValueError: a|b"),
        cell("recompute", IDENTICAL, moved=False),
        Cell("vit", "vision", "sdpa", "ssd", Outcome.REFUSED, "do it otherwise"),
    ]
    left = [Left("bit", "vision", "sdpa", "too large"), Left("vit", "vision", "eager", "no eager")]
    facts = {"date": "today", "command": "tools/check/families.py", "versions": "torch 2"}
    text = page(cells, left, summary_of(cells, left), COLUMNS, facts)
    rows = [line.replace(" ", "") for line in text.splitlines()]
    assert "|causal|llama|**crash**||=*||||||" in rows
    assert "|vision|vit|refused||||||||" in rows
    assert "|vision|bit|toolarge|" in rows and not any("noeager" in row for row in rows)
    assert any("ValueError:a/b" in row for row in rows)
    assert any("dootherwise" in row.replace("it", "") for row in rows)


def test_unknown_columns_and_families_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--columns", "ssds"], ["--only", "lama"]):
        with pytest.raises(SystemExit) as stop:
            check.main(argv)
        assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "no column ssds" in said and "no family lama" in said


def test_a_run_that_was_cut_goes_on_with_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[tuple[str, str]]] = []

    def run(works: list[Work], directory: Path, **given: Any) -> None:
        asked.append([(work.family.name, work.attention) for work in works])
        for number, work in enumerate(works):
            given["tell"](work.cell("ssd", IDENTICAL, ""))
            if number == 2 and len(asked) == 1:
                raise KeyboardInterrupt
            given["ended"](work)

    monkeypatch.setattr(check, "run_families", run)
    monkeypatch.setattr(check, "load", lambda: None)
    result = tmp_path / "a.json"
    argv = ["--only", "llama,t5", "--columns", "ssd", "--json", str(result), "--resume"]
    before = torch.get_num_threads()
    try:
        with pytest.raises(KeyboardInterrupt):
            check.main(argv)
        assert check.main(argv) == 0
        with pytest.raises(SystemExit) as stop:
            check.main([*argv[:2], "--columns", "ssd,auto", *argv[4:]])
    finally:
        torch.set_num_threads(before)
    assert len(asked[0]) == 4 and asked[1] == asked[0][2:]
    rows = json.loads(result.read_text())["rows"]
    assert sorted((row["family"], row["attention"]) for row in rows) == sorted(asked[0])
    assert stop.value.code == 2 and "has the columns ['ssd']" in capsys.readouterr().err
