# SPDX-License-Identifier: Apache-2.0
"""`megatron-offload rok`: its flags, budgets and verdicts, and whole runs of a fake trainer."""

from __future__ import annotations

import csv
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from megatron.offload import cli
from megatron.offload.activations.placement.plan_file import load_plans
from megatron.offload.commands.rok import command
from megatron.offload.commands.rok.measurements import measured_points
from megatron.offload.commands.rok.result import Result
from megatron.offload.commands.rok.runner import _reason, num_moved
from megatron.offload.commands.rok.strategy import (
    DEFAULT_STRATEGIES,
    Strategy,
    budgets_between,
    fixed_strategies,
)
from megatron.offload.commands.rok.text import measurements_table, verdict_table
from megatron.offload.commands.rok.throughput import flops_per_token
from megatron.offload.commands.rok.verdict import Verdict, verdicts_of
from megatron.offload.commands.training_runs.run import Run, RunError
from megatron.offload.commands.training_runs.trainer import read_metrics
from megatron.offload.machine.memory_limit import MemoryLimit
from megatron.offload.planner.profile.stage_profile import StageProfile
from megatron.offload.sizes import MIB
from tests.support.processes import ROOT
from tests.support.stages import layer, part, stage, tier

AUTO = Strategy("auto", "offload", 4, 100)
RECOMPUTE = Strategy("recompute", "offload", 4)
SSD = Strategy("ssd", "offload", 4)


def make_run(strategy: Strategy, round_: int, time_s: float, peak: int) -> Run:
    """One step."""
    one = {
        "step": 1,
        "loss": 1.0,
        "step_time_s": time_s,
        "tokens_per_s": 100 / time_s,
        "peak_activation_bytes_rank0": peak,
    }
    return Run(strategy, round_, [one])


def judge(*runs: Run, failures: dict[Strategy, str] | None = None) -> Verdict:
    """The only verdict, with 2 % of noise."""
    strategies = list(dict.fromkeys([AUTO, *(run.variant for run in runs)]))
    measured = measured_points(strategies, runs, 0)  # type: ignore[arg-type]
    (found,) = verdicts_of(strategies, runs, measured, failures or {}, skip=0, noise=0.02)  # type: ignore[arg-type]
    return found


def test_auto_wins_where_what_fits_is_slower() -> None:
    found = judge(
        make_run(AUTO, 0, 1.0, 90), make_run(RECOMPUTE, 0, 1.2, 50), make_run(SSD, 0, 0.5, 101)
    )
    assert found.is_won
    assert [(one.title, one.fits) for one in found.rivals] == [
        ("recompute all", True),
        ("ssd all", False),
    ]
    assert found.rivals[0].ratio == pytest.approx(1 / 1.2)


def test_auto_loses_where_something_that_fits_is_faster() -> None:
    found = judge(make_run(AUTO, 0, 1.03, 90), make_run(SSD, 0, 1.0, 100))
    assert not found.is_won
    assert [one.title for one in found.lost_to] == ["ssd all"]
    assert "LOST" in verdict_table([found])
    assert "auto is slower than ssd all@offload by 3.0%" in verdict_table([found])


def test_a_little_noise_is_allowed() -> None:
    assert judge(make_run(AUTO, 0, 1.019, 90), make_run(SSD, 0, 1.0, 100)).is_won


def test_times_are_paired_by_round() -> None:
    # The machine is slower in the second round; unpaired medians would say 1.5 / 1.
    runs = [make_run(AUTO, n, time_s, 90) for n, time_s in enumerate((1.0, 1.5, 1.9))]
    runs += [make_run(SSD, n, time_s, 90) for n, time_s in enumerate((1.0, 1.5, 0.9))]
    found = judge(*runs)
    assert found.rivals[0].ratio == 1.0 and found.is_won


def test_what_fits_into_the_memory_that_auto_took_counts_as_well() -> None:
    found = judge(make_run(AUTO, 0, 2.0, 102), make_run(SSD, 0, 1.0, 102))
    assert [one.title for one in found.lost_to] == ["ssd all"]
    assert not found.is_over_budget


def test_more_memory_than_the_budget_is_no_win() -> None:
    found = judge(make_run(AUTO, 0, 1.0, 103))
    assert found.is_over_budget and not found.is_won
    assert "OVER" in verdict_table([found])


def test_a_budget_that_could_not_be_measured_is_no_win() -> None:
    found = judge(make_run(SSD, 0, 1.0, 100), failures={AUTO: "no plan fits"})
    assert not found.is_won and found.step_s is None
    assert "FAILED" in verdict_table([found])
    assert "no plan fits" in verdict_table([found])


def test_budgets_lie_between_the_ends() -> None:
    assert budgets_between(100 * MIB, 400 * MIB, 2) == [200 * MIB, 300 * MIB]
    assert len(budgets_between(0.0, 70 * MIB, 6)) == 6


def test_strategies_without_offload_run_with_both_allocators_of_a_cpu() -> None:
    names = [one.name for one in fixed_strategies(("off", "ssd", "auto"), 2, both_allocators=True)]
    assert names == ["mb2-off@default", "mb2-off@offload", "mb2-ssd@offload"]
    names = [one.name for one in fixed_strategies(("off", "ssd"), 2, both_allocators=False)]
    assert names == ["mb2-off@default", "mb2-ssd@default"]


# -- The command, with a trainer that trains nothing -----------------------------------------------

# Four layers of 8 MiB, forward 1 s each; the drive takes one in two seconds.
PROFILE = stage(
    layers=tuple(
        layer(f"decoder.{n}", input_bytes=2 * MIB, parts=(part(size=8 * MIB),)) for n in range(4)
    ),
    tiers=(tier(write=4 * MIB, read=64 * MIB),),
    inflight_bytes=512 * MIB,
)
# Keeps take 40 MiB and 1 s, recomputing 12 MiB and 1.3 s, ssd 20 MiB and 1.2 s.
FAKE_TRAINER = """
import json, os, sys
from pathlib import Path
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
def write_profile(text):  # whole: who measures reads it, and ends the training, at any moment
    unfinished = profile.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.replace(profile)
mode = flags["--activation-offload"]
budget = int(flags.get("--activation-memory-budget", 0))
if "--activation-offload-plan" in flags:
    plan = json.loads(Path(flags["--activation-offload-plan"]).read_text())
    kept = [g for g in plan["stages"][0]["parts"] if g["placement"] == "keep"]
    seconds, peak, plans = 1.25, (20 << 20) + (len(kept) << 20), [1] * 99
elif mode == "auto":
    if budget < WRONG.get("least", 0):
        sys.exit("trainer: error: no plan fits")
    seconds, peak, plans = WRONG.get("auto_s", 1.1), budget, [0, 0] + [1] * 99
    profile = Path(flags["--metrics-file"]).parent / "activation-profile-stage0.json"
    write_profile(PROFILE)
elif "--recompute-granularity" in flags:
    seconds, peak, plans = 1.3, 12 << 20, []
else:
    seconds, peak, plans = {"off": (1.0, 40 << 20, []), "ssd": (1.2, 20 << 20, [])}[mode]
batch = int(flags["--micro-batch-size"])
with Path(flags["--metrics-file"]).open("w") as out:
    for number in range(int(flags["--train-iters"])):
        if sys.argv[-1] == "--wait-for-input":
            if not sys.stdin.readline():
                break
            if mode == "auto" and number == WRONG.get("stop"):
                sys.exit("trainer: error: no more")
            with (Path(__file__).parent / "turns").open("a") as turns:
                print(os.getpid(), number, file=turns)
        offload = {"written_bytes": 5}
        if flags.get("--activation-replay") == "on":
            if mode == "off":
                sys.exit("trainer: error: nothing to replay")
            offload["replayed_bytes"] = 7 << 20
        if "profile" in globals():
            sizes = json.dumps({"budget": budget, "steps": number + 1})
            write_profile(PROFILE.replace('"sizes": {}', f'"sizes": {sizes}'))
        if plans:
            offload |= {"plans": plans[number], "predicted_step_s": 1.5,
                        "predicted_peak_bytes": budget}
        print(json.dumps({
            "step": number + 1, "loss": 1.0 + (number == 1 and WRONG.get("loss") == mode),
            "grad_norm": 1.0, "step_time_s": batch * seconds, "tokens_per_s": 1024 / seconds,
            "peak_activation_bytes_rank0": batch * peak if not budget else peak,
            "offload": offload}), file=out, flush=True)
"""


def rok(tmp_path: Path, *flags: str, wrong: dict[str, Any] | None = None) -> int:
    """The command's exit code; files are in `out`."""
    trainer = tmp_path / "trainer.py"
    profile = PROFILE.to_json()
    trainer.write_text(f"WRONG, PROFILE = {wrong or {}!r}, {profile!r}\n{FAKE_TRAINER}")
    # Not random tokens: the fake reads its flags in pairs.
    common = ["--trainer", str(trainer), "--data-path", "none", "--micro-batch-sizes", "1"]
    common += ["--activation-offload-dir", str(tmp_path / "ssd"), "--output", str(tmp_path / "out")]
    try:
        return cli.main(["rok", *common, "--rounds", "1", "--steps", "1", *flags])
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("megatron.offload.commands.training_runs.trainer._POLL_S", 0.005)


@pytest.fixture
def no_frontier(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the planner would predict for nine budgets is not asked for."""
    monkeypatch.setattr(command, "predicted_frontier", lambda *args: [])


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a measurement of two rounds prints, and its folder."""
    folder = tmp_path_factory.mktemp("curve")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setattr("torch.cuda.is_available", lambda: False)
        flags = ("--budgets", "3", "--rounds", "2", "--no-turns", "--check")
        assert rok(folder, *flags) == 0
    return printed.getvalue(), folder / "out"


def test_a_curve_has_all_strategies_and_what_the_planner_predicts(curve: tuple[str, Path]) -> None:
    printed, out = curve
    result = Result.load(out / "rok.json")
    assert [one.budget_bytes for one in result.verdicts] == [n * MIB for n in (19, 26, 33)]
    assert result.passes and not result.differences
    # At 19 MiB only recomputation fits.
    assert {one.title for one in result.verdicts[0].rivals if one.fits} == {
        "recompute all",
        "recompute, inputs on ssd",
        "selective recompute",
    }
    assert {one.placement for one in result.measured} == {*DEFAULT_STRATEGIES}
    assert len(result.frontier) >= 5
    assert "auto, 19 MiB" in printed and "TBA's rule sends the first" in printed


@pytest.mark.slow
def test_the_middle_budgets_last_profile_predicts_all_budgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: dict[int, StageProfile] = {}
    monkeypatch.setattr(command, "predicted_frontier", lambda own, _: used.update(own) or [])
    assert rok(tmp_path, "--strategies", "off,recompute,auto", "--budgets", "3") == 0
    middle = 26 * MIB
    folder = tmp_path / "out" / "trainings" / f"round1-mb1-auto-{middle}@offload"
    num_steps = len(read_metrics(folder / "metrics.jsonl"))
    assert used[1].sizes == {"budget": middle, "steps": num_steps}


def test_strategies_with_offload_replay_if_that_is_asked_for(
    tmp_path: Path, no_frontier: None, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--strategies", "off,ssd,recompute", "--no-turns", "--activation-replay", "on")
    assert rok(tmp_path, *flags) == 0
    found = Result.load(tmp_path / "out" / "rok.json").measured
    replayed = {one.placement: one.replayed_bytes for one in found}
    assert replayed == {"off": 0, "ssd": 7 * MIB, "recompute": 0}
    assert " replayed" in capsys.readouterr().out
    (other := tmp_path / "other").mkdir()
    assert rok(other, "--strategies", "off,recompute", "--no-turns") == 0
    assert " replayed" not in capsys.readouterr().out  # a column without a value


@pytest.mark.usefixtures("no_frontier")
def test_a_training_command_of_a_user_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = tmp_path / "trainer.py"
    trainer.write_text(f"WRONG, PROFILE = {{}}, {PROFILE.to_json()!r}\n{FAKE_TRAINER}")
    own = [
        "--output",
        str(tmp_path / "out"),
        "--strategies",
        "off,recompute,ssd,auto",
        "--no-turns",
    ]
    own += ["--budgets", "2", "--rounds", "1", "--steps", "1"]
    words = ["python", str(trainer), "--num-layers", "4", "--micro-batch-size", "1", "--lr", "1"]
    words += ["--activation-offload", "host", "--activation-offload-dir", str(tmp_path / "ssd")]
    words += ["--parameter-offload", "host", "--gradient-offload", "on", "--layer-major-units", "4"]
    words += ["--activation-offload-min-bytes", "1KiB", "--recompute-granularity", "selective"]
    assert cli.main(["rok", *own, "--", *words, "--train-iters", "7"]) == 0
    printed = capsys.readouterr().out
    assert "not looked at, but passed on: --lr\n" in printed
    assert "\ntrainer.py, 4 layers\n" in printed
    left_out = next(line for line in printed.splitlines() if line.startswith("left out"))
    own_flags = ("--micro-batch-size 1", "--activation-offload host", "--train-iters 7")
    for flag in (*own_flags, "--gradient-offload on", "--layer-major-units 4"):
        assert flag in left_out
    result = Result.load(tmp_path / "out" / "rok.json")
    assert [one.micro_batch_size for one in result.measured] == [1] * len(result.measured)
    assert {one.placement for one in result.measured} == {"off", "recompute", "ssd", "auto"}
    log = next((tmp_path / "out").glob("trainings/*-ssd@*/output.log")).read_text().splitlines()[0]
    shared = "--parameter-offload host --activation-offload-min-bytes 1KiB"
    assert f"--lr 1 {shared} --eval-iters 0 --log-interval 1" in log
    assert f"--activation-offload-dir {tmp_path}/ssd" in log and "selective" not in log


def test_of_a_training_that_failed_its_own_sentence_is_shown() -> None:
    report = "x ended with exit code 1 after 0 steps; the end of log:\n  rank : 0\n"
    sentence = "megatron.offload.launch: error: no plan fits into 4 MiB"
    assert _reason(RunError(f"{report}  traceback : {sentence}\n=====")) == sentence
    assert _reason(RunError(f"{report}killed")) == "killed"


@pytest.mark.parametrize(
    ("own", "launcher", "flags", "sentence"),
    [
        ("--script x.py", "python", "", "rok measures one thing at a time"),
        ("--strategies suffix,auto", "torchrun --nproc-per-node 2",
         "--pipeline-model-parallel-size 2", "suffix is a plan for one pipeline stage"),
        ("--turns", "torchrun --nproc-per-node 2", "", "--turns works with one process"),
        ("", "python", "--activation-offlod ssd", "did you mean --activation-offload?"),
        ("", "python", "--activation-offload-dir /a,/b", "with one directory for activations"),
        ("", "python", "--offload-settings SETTINGS", "give the flags themselves"),
    ],
)  # fmt: skip
def test_a_training_command_that_cannot_be_measured_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    own: str,
    launcher: str,
    flags: str,
    sentence: str,
) -> None:
    trainer = tmp_path / "trainer.py"
    trainer.write_text("raise SystemError")
    (settings := tmp_path / "offload.toml").write_text('activations = "host"')
    flags = flags.replace("SETTINGS", str(settings))
    words = [*launcher.split(), str(trainer), *flags.split()]
    assert cli.main(["rok", "--output", str(tmp_path / "out"), *own.split(), "--", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_the_csv_has_a_line_for_each(curve: tuple[str, Path]) -> None:
    out = curve[1]
    rows = list(csv.DictReader((out / "rok.csv").open()))
    result = Result.load(out / "rok.json")
    assert [one.placement for one in result.measured] == [row["placement"] for row in rows]
    auto = [row for row in rows if row["placement"] == "auto"]
    assert [float(row["step_s"]) for row in auto] == [1.1] * 3
    assert [int(row["budget_bytes"]) for row in auto] == [n * MIB for n in (19, 26, 33)]
    assert {row["num_rounds"] for row in rows} == {"2"}
    assert auto[0]["predicted_step_s"] == "1.5" and rows[0]["predicted_step_s"] == ""
    assert float(auto[0]["keep_ratio"]) == pytest.approx(1.1)


def test_a_point_has_the_spread_of_its_steps() -> None:
    strategy = Strategy("ssd", "offload", 1)

    def run_of(round_: int, *times_s: float) -> Run:
        steps = [make_run(strategy, round_, seconds, 1).steps[0] for seconds in times_s]
        return Run(strategy, round_, steps)

    rounds = [run_of(0, 9.0, 1.0, 2.0, 3.0), run_of(1, 9.0, 5.0, 4.0)]
    (point,) = measured_points([strategy], rounds, skip=1)
    assert (point.fast_step_s, point.slow_step_s) == (2.0, 4.0)
    (alone,) = measured_points([strategy], [run_of(0, 1.0)], skip=0)
    assert alone.fast_step_s is alone.slow_step_s is None


def test_the_table_has_peaks_where_nothing_was_planned() -> None:
    run = make_run(SSD, 0, 1.0, 300 * MIB)
    table = measurements_table(measured_points([SSD], [run], 0))
    assert "peak" in table and "300" in table and "planned" not in table


def test_a_result_without_measurements_is_shown_and_drawn(
    curve: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All trainings may have failed."""
    values = json.loads((curve[1] / "rok.json").read_text())
    bare = tmp_path / "rok.json"
    bare.write_text(json.dumps(values | {"figures": [], "verdicts": [], "frontier": []}))
    assert cli.main(["rok", "--redraw", str(bare)]) == 0
    assert "nothing was measured" in capsys.readouterr().out


def test_operations_are_those_of_the_model_that_the_flags_describe() -> None:
    """Of two layers of 64: projections, an MLP, logits of 100 words, half of the scores."""
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3"
    weights = 2 * (4 * 64 * 64 + 8 * 64 * 64) + 100 * 64
    expected = 6 * (weights + 2 * 32 * 64)
    assert flops_per_token([*flags.split(), "--vocab-size", "100"]) == expected
    assert flops_per_token([*flags.split(), "--vocab-size=100"]) == expected
    assert flops_per_token(flags.split()) is None  # a tokenizer says how many words there are


def test_it_is_drawn_and_drawn_again(
    curve: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed, out = curve
    assert (out / "rok.svg").read_text().lstrip().startswith("<?xml")
    assert (out / "rok.png").read_bytes().startswith(b"\x89PNG")
    again = tmp_path / "rok.json"
    again.write_text((out / "rok.json").read_text())
    assert cli.main(["rok", "--redraw", str(again)]) == 0
    assert (tmp_path / "rok.png").read_bytes() == (out / "rok.png").read_bytes()
    assert printed.startswith(capsys.readouterr().out.rstrip())


def test_suffixes_are_plans_of_their_own(curve: tuple[str, Path]) -> None:
    out = curve[1]
    result = Result.load(out / "rok.json")
    suffixes = [one for one in result.measured if one.placement == "suffix"]
    assert suffixes
    for one in suffixes:
        (plan,) = load_plans(out / "plans" / f"{one.strategy.name}.json").values()
        assert num_moved(plan) == one.num_moved
        assert one.is_rule is (one.num_moved == result.rule[1])
        placements = [line.placement.value for line in plan.parts]
        assert placements == ["ssd"] * num_moved(plan) + ["keep"] * (4 - num_moved(plan))


def test_every_round_runs_everything_in_another_order(curve: tuple[str, Path]) -> None:
    runs = json.loads((curve[1] / "rok.json").read_text())["runs"]
    orders = [
        [json.dumps(one["strategy"]) for one in runs if one["round"] == round_] for round_ in (0, 1)
    ]
    assert len(orders[0]) == len(set(orders[0])) >= 10
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]


@pytest.mark.slow
@pytest.mark.usefixtures("no_frontier")
def test_on_a_cpu_trainings_take_turns_once_all_have_settled(tmp_path: Path) -> None:
    names = "off,recompute,auto"
    flags = ("--budgets", "2", "--strategies", names, "--steps", "4", "--check")
    assert rok(tmp_path, *flags) == 0
    steps = [line.split() for line in (tmp_path / "turns").read_text().splitlines()]
    # One after the other at first; then four turns, in each of them a step of each.
    own = list(dict.fromkeys(pid for pid, _ in steps))
    assert len(own) == 6  # two of them with two allocators
    alone, turns = steps[: -4 * len(own)], steps[-4 * len(own) :]
    assert [pid for pid, _ in alone] == sorted((pid for pid, _ in alone), key=own.index)
    orders = [[pid for pid, _ in turns[n : n + 6]] for n in range(0, 24, 6)]
    assert orders == [own[n:] + own[:n] for n in range(4)]
    runs = json.loads((tmp_path / "out" / "rok.json").read_text())["runs"]
    assert len(runs) == 6 and all(len(one["steps"]) == one["first_turn"] + 4 for one in runs)
    result = Result.load(tmp_path / "out" / "rok.json")
    assert result.passes and [one.num_rounds for one in result.measured] == [1] * 6


@pytest.mark.slow
@pytest.mark.usefixtures("no_frontier")
def test_a_training_that_fails_in_turns_is_a_loss_and_the_rest_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--budgets", "1", "--strategies", "off,recompute,auto", "--check")
    assert rok(tmp_path, *flags, wrong={"stop": 14}) == 1
    assert "auto failed: trainer: error: no more" in capsys.readouterr().out


@pytest.mark.slow
def test_batch_sizes_have_budgets_of_their_own(tmp_path: Path) -> None:
    names = "off,recompute,auto"
    assert rok(tmp_path, "--micro-batch-sizes", "1,2", "--budgets", "1", "--strategies", names) == 0
    result = Result.load(tmp_path / "out" / "rok.json")
    assert [(one.micro_batch_size, one.budget_bytes) for one in result.verdicts] == [
        (1, 26 * MIB),
        (2, 52 * MIB),
    ]
    assert {one.micro_batch_size for one in result.frontier} == {1, 2}


@pytest.mark.slow
@pytest.mark.usefixtures("no_frontier")
def test_losing_gives_exit_code_1_only_where_it_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--strategies", "off,recompute,ssd,auto", "--budgets", "1")
    wrong = {"auto_s": 1.24}
    assert rok(tmp_path, *flags, wrong=wrong) == 0
    assert "auto is slower than ssd all@offload by 3.3%" in capsys.readouterr().out
    assert rok(tmp_path, *flags, "--check", "--output", str(tmp_path / "2"), wrong=wrong) == 1
    more = ("--noise", "0.05", "--output", str(tmp_path / "3"))
    assert rok(tmp_path, *flags, "--check", *more, wrong=wrong) == 0


@pytest.mark.usefixtures("no_frontier")
def test_another_loss_gives_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--strategies", "off,ssd", "--check")
    assert rok(tmp_path, *flags, wrong={"loss": "ssd"}) == 1
    assert "mb1-ssd@offload, round 1, differs at step 2: loss" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("no_frontier")
def test_a_budget_without_a_plan_is_a_loss_and_the_rest_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rok(tmp_path, "--budgets", "3", "--check", wrong={"least": 20 * MIB}) == 1
    result = Result.load(tmp_path / "out" / "rok.json")
    assert [one.is_won for one in result.verdicts] == [False, True, True]
    assert "with 19 MiB auto failed: trainer: error: no plan fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--strategies", "off,tape"], "unknown strategy 'tape'"),
        (["--strategies", ","], "no strategy"),
        (["--strategies", "off,suffix"], "add auto"),
        (["--strategies", "off,auto"], "add both"),
        (["--budgets", "0"], "the smallest value is 1"),
        (["--budgets", "much"], "not a size"),
        (["--micro-batch-sizes", "2,x"], "'x' is not a whole number"),
        (["--activation-offload-write-limit", "0"], "lets nothing through"),
        (["--trainer", "nowhere.py"], "no trainer at nowhere.py"),
        (["--redraw", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_flags_end_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert rok(tmp_path, *flags) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it_is_not_written_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rok.json").write_text("{}")
    assert rok(tmp_path) == 2
    assert "is not empty" in capsys.readouterr().err
    assert cli.main(["rok", "--redraw", str(tmp_path / "out" / "rok.json")]) == 2
    assert "is no rok.json" in capsys.readouterr().err


@pytest.mark.usefixtures("no_frontier")
def test_sizes_may_be_given_instead_of_a_number(tmp_path: Path) -> None:
    assert rok(tmp_path, "--strategies", "auto", "--budgets", "30MiB,20MiB") == 0
    result = Result.load(tmp_path / "out" / "rok.json")
    assert [one.budget_bytes for one in result.verdicts] == [20 * MIB, 30 * MIB]
    assert all(one.keep_ratio is None for one in result.measured)


def test_no_budget_lies_between_equal_peaks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = tmp_path / "small.py"
    trainer.write_text(FAKE_TRAINER.replace("40 << 20", "9 << 20").replace("WRONG", "{}"))
    assert rok(tmp_path, "--trainer", str(trainer)) == 2
    assert "there is no budget between them" in capsys.readouterr().err


@pytest.mark.rare
def test_the_trainer_itself(tmp_path: Path) -> None:
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64"
    flags += " --strategies ssd --rounds 1 --steps 2 --skip-steps 1 --micro-batch-sizes 2"
    places = ["--activation-offload-dir", str(tmp_path / "ssd"), "--output", str(tmp_path / "out")]
    assert cli.main(["rok", *flags.split(), *places]) == 0
    (point,) = Result.load(tmp_path / "out" / "rok.json").measured
    assert point.step_s > 0 and point.tokens_per_s > 0


@pytest.mark.usefixtures("no_frontier")
def test_trainings_that_do_not_fit_side_by_side_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "megatron.offload.commands.training_runs.trainer.memory_limit",
        lambda: MemoryLimit(1 << 40, MIB, "all", 1 << 40),
    )
    assert rok(tmp_path, "--strategies", "off") == 2
    errors = capsys.readouterr().err
    assert "1 MiB of memory are left" in errors and "--no-turns" in errors
    assert rok(tmp_path, "--strategies", "off", "--no-turns", "--output", str(tmp_path / "2")) == 0


@pytest.mark.parametrize(
    "file", sorted((ROOT / "docs/results").glob("rok-150*.json")), ids=lambda file: file.stem
)
def test_a_result_of_an_earlier_release_can_be_read(file: Path) -> None:
    result = Result.load(file)
    assert len(result.measured) > 10 and result.title
