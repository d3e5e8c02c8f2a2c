# SPDX-License-Identifier: Apache-2.0
"""`megatron-offload longest`: the search, its flags, what it prints and draws."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.offload import cli
from megatron.offload.commands.longest.picture import draw
from megatron.offload.commands.longest.search import Curve, Found, Measured, check, search
from megatron.offload.commands.longest.text import as_json, as_text
from megatron.offload.commands.longest.ways import DEFAULT_WAYS, WAYS
from megatron.offload.commands.training_runs.run import RunError

MIB = 1 << 20
BUDGET_BYTES = 4000 * MIB


def linear(number: int) -> float:
    return 300 * MIB + number * 0.9 * MIB


def square(number: int) -> float:
    return 300 * MIB + number * 0.1 * MIB + number**2 * 300


def in_chunks(number: int) -> float:
    """Less for each token from a threshold on."""
    return 300 * MIB + (min(number, 2048) * 0.4 + max(number - 2048, 0) * 0.02) * MIB


def a_room(number: int) -> float:
    """As much as a window, and all beyond it."""
    return 300 * MIB + max(number * 0.05 - 200, 0) * MIB


def runs_of(peak_bytes: Callable[[int], float]) -> tuple[Callable[[int], Measured], list[int]]:
    asked: list[int] = []

    def measure(number: int) -> Measured:
        asked.append(number)
        return Measured(number, int(peak_bytes(number)), number / 1000)

    return measure, asked


@pytest.mark.parametrize("peak_bytes", [linear, square, in_chunks, a_room])
def test_the_longest_is_found_and_no_run_takes_more_than_the_budget(peak_bytes) -> None:
    measure, asked = runs_of(peak_bytes)
    found = search(measure, first=512, multiple=64, most=1 << 22, budget_bytes=BUDGET_BYTES)
    true = max(n for n in range(64, 1 << 19, 64) if peak_bytes(n) <= BUDGET_BYTES)
    assert abs(found.longest - true) <= 64 and not found.longest % 64
    assert found.predicted_bytes == pytest.approx(peak_bytes(found.longest), rel=0.001)
    assert max(map(peak_bytes, asked)) <= BUDGET_BYTES and len(asked) == len(set(asked)) < 10
    assert asked == [one.number for one in found.runs]
    assert found.longest <= 1.5 * asked[-1]


def test_no_two_runs_are_of_nearly_the_same_length() -> None:
    measure, asked = runs_of(lambda number: 300 * MIB + number * 1.7 * MIB)
    search(measure, first=512, multiple=64, most=1 << 22, budget_bytes=BUDGET_BYTES)
    assert all(later >= 1.45 * before for before, later in itertools.pairwise(asked))


def test_what_does_not_fit_at_all_is_measured_once() -> None:
    measure, asked = runs_of(linear)
    found = search(measure, first=8192, multiple=64, most=1 << 22, budget_bytes=BUDGET_BYTES)
    assert asked == [8192] and found.longest == 0 and "8192 do not fit" in found.failure


def test_it_ends_at_the_most_that_was_asked_for() -> None:
    measure, asked = runs_of(lambda number: 300.0 * MIB)
    found = search(measure, first=512, multiple=64, most=4096, budget_bytes=BUDGET_BYTES)
    assert found.longest == 4096 and max(asked) <= 4096
    assert "4,096 or more" in as_text(
        {"none": found}, by="sequence", budget_bytes=BUDGET_BYTES, most=4096
    )


@pytest.mark.parametrize("multiple", [4, 512])
def test_a_first_length_below_a_multiple_is_no_trap(multiple: int) -> None:
    measure, asked = runs_of(lambda number: 300 * MIB + number * 20 * MIB)
    found = search(measure, first=multiple, multiple=multiple, most=1 << 14, budget_bytes=1 << 40)
    assert found.longest == 1 << 14 and asked == sorted(set(asked))
    assert not any(number % multiple for number in asked)


def fails_from(limit: int, asked: list[int]) -> Callable[[int], Measured]:
    def measure(number: int) -> Measured:
        asked.append(number)
        if number >= limit:
            raise RunError("out of\nmemory")
        return Measured(number, 300 * MIB + number, 1.0)

    return measure


@pytest.mark.parametrize("limit", [1000, 3000, 20000])
def test_what_fails_does_not_fit_and_what_ran_counts(limit: int) -> None:
    asked: list[int] = []
    measure = fails_from(limit, asked)
    found = search(measure, first=512, multiple=64, most=1 << 22, budget_bytes=BUDGET_BYTES)
    assert limit / 1.2 < found.longest < limit and found.failure.endswith(": memory")
    assert len(asked) == len(set(asked)) < 14
    with pytest.raises(RunError):
        search(fails_from(1, []), first=512, multiple=64, most=1 << 22, budget_bytes=BUDGET_BYTES)


def test_a_checked_length_has_run_within_the_budget() -> None:
    guess, _ = runs_of(linear)
    found = search(guess, first=512, multiple=64, most=1 << 22, budget_bytes=BUDGET_BYTES)
    measure, asked = runs_of(lambda number: linear(number) * 1.04)
    checked = check(found, measure, multiple=64, budget_bytes=BUDGET_BYTES)
    assert checked.error == pytest.approx(1 / 1.04 - 1, abs=1e-3)
    assert checked.checked is not None and checked.checked.peak_bytes <= BUDGET_BYTES
    assert checked.longest == checked.checked.number < found.longest
    assert checked.predicted_bytes == pytest.approx(checked.checked.peak_bytes, rel=0.02)
    assert checked.predicted_bytes <= BUDGET_BYTES, "of the shorter length"
    assert checked.next_run is not None and len(asked) == len(set(asked))
    assert not {one.number for one in found.runs} & {*asked}, "no length is measured twice"
    row = text_of(checked)
    assert "-3.8%" in row and "which fit too" not in row
    less, _ = runs_of(lambda number: linear(number) * 0.9)
    checked = check(found, less, multiple=64, budget_bytes=BUDGET_BYTES)
    assert checked.longest == found.longest and "which fit too" in text_of(checked)


def test_a_longer_run_that_fails_leaves_what_was_checked() -> None:
    measure, _ = runs_of(linear)
    found = search(measure, first=512, multiple=64, most=1 << 22, budget_bytes=BUDGET_BYTES)
    checked = check(found, fails_from(found.longest + 1, []), multiple=64, budget_bytes=1 << 40)
    assert checked.checked is not None and checked.error is not None and checked.next_run is None
    assert "prediction +" in text_of(checked) and "; memory" in text_of(checked)


def text_of(found: Found) -> str:
    return as_text({"none": found}, by="sequence", budget_bytes=BUDGET_BYTES, most=1 << 22)


def test_a_bend_downwards_counts_for_nothing_and_one_upwards_counts() -> None:
    runs = [Measured(1, 10, 1.0), Measured(2, 20, 1.0), Measured(4, 24, 1.0)]
    assert Curve(runs).peak_bytes(8) == 24 + 4 * 2
    runs = [Measured(n, n * n, 1.0) for n in (1, 2, 4)]
    assert Curve(runs).peak_bytes(8) == 64


def found_by(peak_bytes: Callable[[int], float]) -> Found:
    measure, _ = runs_of(peak_bytes)
    return search(measure, first=512, multiple=64, most=1 << 22, budget_bytes=BUDGET_BYTES)


def test_the_table_the_json_and_the_picture_have_all_ways(tmp_path: Path) -> None:
    base = found_by(linear)
    found = {
        "none": Found(
            base.runs,
            base.longest,
            base.predicted_bytes,
            checked=Measured(base.longest, round(base.predicted_bytes / 1.02), 4.0, 1024.0),
            error=0.02,
            next_run=Measured(base.longest + 64, BUDGET_BYTES + MIB, 4.1),
        ),
        "tiled": found_by(in_chunks),
        "ssd": Found([], 0, 0.0, failure="it failed"),
    }
    text = as_text(found, by="sequence", budget_bytes=BUDGET_BYTES, most=1 << 22)
    rows = text.splitlines()[4:]
    assert [row.split("|")[1].strip() for row in rows] == [WAYS[name].title for name in found]
    assert (
        "4,096" in rows[0]
        and "1,024 " in rows[0]
        and "prediction +2.0%; 4,160 take 3.907 GiB" in rows[0]
    )
    ratio = found["tiled"].longest / 4096
    assert f"{ratio:.2f} x" in rows[1] and "it failed" in rows[2]
    values = json.loads(
        as_json(found, by="sequence", budget_bytes=BUDGET_BYTES, facts={"gpu": None})
    )
    assert values["ways"]["none"]["error"] == pytest.approx(0.02, abs=1e-4)
    assert values["ways"]["tiled"]["longest"] == found["tiled"].longest
    draw(found, tmp_path / "p.svg", by="sequence", budget_bytes=BUDGET_BYTES)
    drawn = (tmp_path / "p.svg").read_text()
    assert WAYS["tiled"].title in drawn and WAYS["ssd"].title not in drawn


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "give one of --script and --hardware"),
        (["--script", "a.py", "--hardware", "h100"], "give one of --script and --hardware"),
        (["--hardware", "h100"], "--hardware needs a model as well; give --num-layers"),
        (["--hardware", "h100", "--seq-length", "9"], "--seq-length: what --by sequence looks fo"),
        (["--hardware", "h100", "--by", "batch", "--micro-batch-size", "2"], "--by batch looks"),
        (["--hardware", "h100", "--by", "layers", "--num-layers", "2"], "--by layers looks for"),
        (["--hardware", "h100", "--first", "9", "--steps", "9"], "--first, --steps: of no use"),
        (["--hardware", "h100", "--pipeline-stage", "9"], "--pipeline-stage: of no use"),
        (["--script", __file__, "--script-args", "{N}", "--num-layers", "2"], "--num-layers: for"),
        (["--script", __file__, "--script-args", "{N}", "--ssds", "2"], "--ssds: for --hardware"),
        (["--script", __file__, "--script-args", "{N} '"], "No closing quotation"),
        (["--script", __file__, "--script-args", "{N}", "--steps", "1"], "give 2 or more"),
        (["--hardware", "h100", "--check"], "--check trains, and with --hardware nothing runs"),
        (["--hardware", "h100", "--ways", "script"], "the way script trains"),
        (["--script", "missing.py"], "there is no script missing.py"),
        (["--script", __file__], "has no {N}, which stands for the tokens"),
        (["--script", __file__, "--script-args", "{N}", "--most", "512"], "no more than the sho"),
        (["--script", __file__, "--script-args", "{N}", "--plot", "a.txt"], "is no picture"),
    ],
)
def test_what_cannot_be_measured_is_said(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["longest", "--device-memory-budget", "1GiB", *flags]) == 2
    assert sentence in capsys.readouterr().err


def test_a_script_needs_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["longest", "--script", __file__, "--script-args", "{N}"]) == 2
    assert "give --device-memory-budget" in capsys.readouterr().err


WITHOUT_LAYERS = (
    *("longest", "--hardware", "h100", "--bf16", "--kernels", "eager"),
    *("--hidden-size", "4096", "--ffn-hidden-size", "14336", "--num-attention-heads", "32"),
    *("--group-query-attention", "--num-query-groups", "8", "--swiglu", "--vocab-size", "128256"),
    *("--normalization", "RMSNorm", "--position-embedding-type", "rope"),
    *("--untie-embeddings-and-output-weights", "--hidden-dropout", "0"),
    *("--attention-dropout", "0", "--optimizer-state-offload", "host"),
)
LLAMA_8B = (*WITHOUT_LAYERS, "--num-layers", "32")


@pytest.mark.parametrize("by", ["sequence", "batch"])
def test_each_step_against_memory_makes_more_fit_on_a_gpu(
    by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = [] if by == "sequence" else ["--seq-length", "2048"]
    command = [*LLAMA_8B, "--by", by, *lengths, "--json", str(tmp_path / "found.json")]
    assert cli.main(command) == 0
    assert "weights, gradients and states (44.87 GiB) included" in capsys.readouterr().out
    values = json.loads((tmp_path / "found.json").read_text())
    assert list(values["ways"]) == list(DEFAULT_WAYS)
    longest = [one["longest"] for one in values["ways"].values()]
    assert longest == sorted(longest) and longest[0] > 0
    assert longest[-1] > 5 * longest[1]
    for one in values["ways"].values():
        assert 0.9 * values["budget_bytes"] < one["predicted_bytes"] <= values["budget_bytes"]


def test_layers_are_counted_with_their_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*WITHOUT_LAYERS, "--by", "layers", "--seq-length", "4096", "--ways", "checkpointing"]
    assert cli.main([*command, "--json", str(tmp_path / "found.json")]) == 0
    (one,) = json.loads((tmp_path / "found.json").read_text())["ways"].values()
    assert 40 < one["longest"] < 60  # of 1.22 GiB each, in what the head leaves of 74.5 GiB


def test_layers_are_multiples_of_the_pipelines_stages(capsys: pytest.CaptureFixture[str]) -> None:
    command = [*WITHOUT_LAYERS, "--by", "layers", "--seq-length", "4096", "--ways", "none"]
    assert cli.main([*command, "--pipeline-model-parallel-size", "4"]) == 0
    row = capsys.readouterr().out.splitlines()[-1]
    assert int(row.split("|")[2].replace(",", "")) % 4 == 0


def test_small_layers_have_a_longest_too(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "4"]
    command = ["longest", "--hardware", "h100", "--bf16", *sizes, "--ways", "ssd,inputs"]
    assert cli.main([*command, "--device-memory-budget", "8GiB"]) == 0
    rows = capsys.readouterr().out.splitlines()[-2:]
    assert all(int(row.split("|")[2].replace(",", "")) > 1024 for row in rows)


def test_tokens_a_second_are_of_all_micro_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for samples in (1, 4):
        command = [*LLAMA_8B, "--ways", "checkpointing", "--global-batch-size", str(samples)]
        assert cli.main([*command, "--json", str(tmp_path / "found.json")]) == 0
        (one,) = json.loads((tmp_path / "found.json").read_text())["ways"].values()
        last = one["runs"][-1]
        found.append(last["tokens_per_s"])
        assert last["tokens_per_s"] * last["step_s"] == pytest.approx(samples * one["longest"])
    assert found[1] > found[0]


def test_a_way_without_its_tier_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*LLAMA_8B, "--ways", "checkpointing-host,inputs", "--ssds", "0"]) == 2
    rows = capsys.readouterr().out.splitlines()[-2:]
    assert "there is no host to move to" in rows[0] and "there is no ssd to move to" in rows[1]


def test_ways_have_names_that_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(DEFAULT_WAYS) < set(WAYS)
    with pytest.raises(SystemExit):
        cli.main(["longest", "--device-memory-budget", "1GiB", "--ways", "none,other"])
    assert "unknown way 'other'; choose from none, checkpointing" in capsys.readouterr().err
