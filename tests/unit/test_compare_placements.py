# SPDX-License-Identifier: Apache-2.0
"""tools/compare_placements.py: its arithmetic on hand-made metrics, and runs of a fake trainer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import compare_placements
import pytest
from compare_placements import format_table, parse_placements, summarize

from megatron.offload.commands.training_runs.run import (
    Difference,
    Run,
    RunError,
    Variant,
    first_difference,
    order_of_round,
    paired_ratio,
)

OFF, OFF_SMALL = Variant("off", "default"), Variant("off", "offload")
SSD = Variant("ssd", "offload")


def make_run(
    variant: Variant,
    round_: int,
    times: list[float],
    peak: int = 100,
    losses: list[float] | None = None,
    offload: dict[str, float] | None = None,
) -> Run:
    """A run with the given step times; losses are 3.0, 2.0, ... unless given."""
    losses = losses or [3.0 - i for i in range(len(times))]
    steps: list[dict[str, Any]] = [
        {
            "step": i + 1,
            "loss": loss,
            "grad_norm": loss / 2,
            "step_time_s": time,
            "peak_activation_bytes_rank0": peak,
            "offload": offload or {},
        }
        for i, (time, loss) in enumerate(zip(times, losses, strict=True))
    ]
    return Run(variant, round_, steps)


def test_warm_up_steps_do_not_count() -> None:
    run = make_run(OFF, 0, [90.0, 80.0, 1.0, 3.0, 2.0])
    assert run.step_time_s(skip=2) == 2.0
    run.steps[0]["peak_activation_bytes_rank0"] = 999
    assert run.peak_bytes(skip=2) == 100


def test_time_is_paired_by_round_against_the_faster_off() -> None:
    # The machine is twice as slow in round 1: unpaired medians would show 1.1 / 1 or 4.4 / 2.
    off = [
        make_run(OFF, 0, [1.0]),
        make_run(OFF_SMALL, 0, [1.2]),
        make_run(OFF, 1, [2.4]),
        make_run(OFF_SMALL, 1, [2.0]),
        make_run(OFF, 2, [1.0]),
        make_run(OFF_SMALL, 2, [1.5]),
    ]
    ssd = [make_run(SSD, 0, [1.1]), make_run(SSD, 1, [2.4]), make_run(SSD, 2, [1.3])]
    assert paired_ratio(ssd, off, skip=0) == pytest.approx(1.2)
    assert paired_ratio(ssd, [], skip=0) is None


def test_memory_is_compared_with_the_smaller_off() -> None:
    runs = [
        make_run(OFF, 0, [1.0], peak=200),
        make_run(OFF_SMALL, 0, [1.0], peak=160),
        make_run(SSD, 0, [1.0], peak=40, offload={"written_bytes": 7, "stall_s": 0.5}),
    ]
    rows, differences = summarize([OFF, OFF_SMALL, SSD], runs, skip=0)
    assert [row.peak_ratio for row in rows] == [1.25, 1.0, 0.25]
    assert (rows[2].written_bytes, rows[2].read_bytes, rows[2].stall_s) == (7, 0, 0.5)
    assert differences == []
    assert "identical" in format_table(rows)


CHUNKED = Variant("ssd-chunked", "offload")


@pytest.mark.parametrize(
    ("losses", "num_differences", "shown"),
    [
        ([[3.000042], [3.000042]], 0, "loss to 1.4e-05"),
        ([[3.1], [3.1]], 1, "DIFFERENT"),
        ([[math.nan], [math.nan]], 1, "DIFFERENT"),
        ([[3.00003], [3.00004]], 1, "DIFFERENT"),  # from each other
        ([[3.0], [3.0]], 0, "loss identical"),
    ],
)
def test_a_chunked_loss_is_compared_with_itself_and_within_rounding_with_the_others(
    losses: list[list[float]], num_differences: int, shown: str
) -> None:
    runs = [
        make_run(OFF, 0, [1.0], losses=[3.0]),
        *(make_run(CHUNKED, i, [1.0], losses=one) for i, one in enumerate(losses)),
    ]
    for run in runs[1:]:
        run.steps[-1]["grad_norm"] = 1.4999  # it differs even where no loss does
    rows, differences = summarize([OFF, CHUNKED], runs, skip=0)
    assert len(differences) == num_differences and shown in format_table(rows)


def test_peaks_are_medians_over_rounds() -> None:
    runs = [make_run(OFF, i, [1.0], peak=peak) for i, peak in enumerate((100, 300, 120))]
    rows, _ = summarize([OFF], runs, skip=0)
    assert rows[0].peak_bytes == 120


def test_first_difference_is_exact() -> None:
    reference = make_run(OFF, 0, [1.0] * 3, losses=[3.0, 0.1, 0.5])
    assert first_difference(reference, make_run(SSD, 0, [9.0] * 3, losses=[3.0, 0.1, 0.5])) is None
    last_bit = math.nextafter(0.1, 1.0)
    run = make_run(SSD, 1, [1.0] * 3, losses=[3.0, last_bit, 0.6])
    assert first_difference(reference, run) == Difference(
        "ssd@offload, round 2,", 2, "loss", 0.1, last_bit
    )


def test_gradient_norms_and_weights_are_compared_too() -> None:
    reference, run = make_run(OFF, 0, [1.0, 1.0]), make_run(SSD, 0, [1.0, 1.0])
    run.steps[1]["model"] = "other digest"
    found = first_difference(reference, run)
    assert found is not None and found.field == "model"
    run.steps[0]["grad_norm"] = 7.0
    found = first_difference(reference, run)
    assert found is not None and (found.step, found.field) == (1, "grad_norm")


def test_nan_equals_nan_and_nothing_else() -> None:
    nan = make_run(OFF, 0, [1.0], losses=[math.nan])
    assert first_difference(nan, make_run(SSD, 0, [1.0], losses=[math.nan])) is None
    assert first_difference(nan, make_run(SSD, 0, [1.0], losses=[1.0])) is not None


def test_a_missing_step_is_a_difference() -> None:
    reference, run = make_run(OFF, 0, [1.0, 1.0]), make_run(SSD, 0, [1.0])
    found = first_difference(reference, run)
    assert found is not None and (found.step, found.field) == (2, "steps")


def test_every_variant_takes_every_place_in_the_order() -> None:
    variants = [OFF, OFF_SMALL, SSD]
    orders = [order_of_round(variants, round_) for round_ in range(3)]
    assert all(sorted(order, key=str) == sorted(variants, key=str) for order in orders)
    assert {order[0] for order in orders} == set(variants)


def test_placements_are_expanded_by_allocator() -> None:
    names = [variant.name for variant in parse_placements("off,ssd", both_allocators=True)]
    assert names == ["off@default", "off@offload", "ssd@offload"]
    names = [variant.name for variant in parse_placements("off, ssd", both_allocators=False)]
    assert names == ["off@default", "ssd@default"]
    assert parse_placements("recompute@offload", True) == [Variant("recompute", "offload")]
    for wrong in ("disk", "off@jemalloc", ""):
        with pytest.raises(RunError):
            parse_placements(wrong, both_allocators=True)


FAKE_TRAINER = """
import json, os, sys
from pathlib import Path
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
mode = flags["--activation-offload"]
if WRONG == "exit":
    print("pretrain_gpt.py: error: no such thing")
    sys.exit(2)
with Path(flags["--metrics-file"]).open("w") as out:
    for step in range(1, int(flags["--train-iters"]) + 1):
        loss = 5.0 / step + (1e-12 if WRONG == mode else 0.0)
        peak = 10 if mode == "ssd" else 100
        line = {"step": step, "loss": loss, "grad_norm": 1.0, "step_time_s": 0.5,
                "peak_activation_bytes_rank0": peak,
                "environment": dict(os.environ)}
        print(json.dumps(line), file=out)
"""


def compare(tmp_path: Path, wrong: str, *more: str) -> int:
    """The tool's exit code with a trainer that differs where `wrong` says."""
    trainer = tmp_path / "trainer.py"
    trainer.write_text(f"WRONG = {wrong!r}\n{FAKE_TRAINER}")
    # Not --mock-data: the fake reads its flags in pairs.
    flags = ["--trainer", str(trainer), "--data-path", "none", "--rounds", "2"]
    flags += ["--train-iters", "3"]
    flags += ["--extra-args=--seed 7", "--json", str(tmp_path / "out.json")]
    flags += ["--work-dir", str(tmp_path / "work")]
    flags += ["--activation-offload-dir", str(tmp_path / "offload"), *more]
    try:
        return compare_placements.main(flags)
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code


def test_a_whole_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_placements.torch.cuda, "is_available", lambda: False)
    assert compare(tmp_path, "") == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["identical"]
    assert len(result["runs"]) == 2 * 6
    # Off and recomputation with both allocators.
    assert [row["peak_ratio"] for row in result["summary"]] == [1.0, 1.0, 1.0, 1.0, 0.1, 0.1]
    flags = {row["variant"]["placement"]: row["variant"]["flags"] for row in result["summary"]}
    assert flags["off"] == ["--activation-offload", "off"]
    assert flags["recompute-ssd"][:4] == [
        *("--activation-offload", "ssd"),
        *("--recompute-granularity", "full"),
    ]
    expected = [
        (name, value.replace(f"{compare_placements.ROOT}/", ""))  # as the file has paths
        for name, value in compare_placements.allocator_environment().items()
    ]
    for run in result["runs"]:
        default = run["variant"]["allocator"] == "default"
        environment = run["steps"][0]["environment"]
        assert all((environment.get(n) == value) is not default for n, value in expected)
    assert "--seed 7" in " ".join(result["trainer_flags"])
    assert result["machine"]["cores"] >= 1


@pytest.mark.parametrize(("device", "visible"), [("cpu", ""), ("cuda", None)])
def test_the_trainer_sees_no_gpu_where_a_cpu_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, visible: str | None
) -> None:
    monkeypatch.setattr(compare_placements.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compare_placements, "machine_facts", lambda _: {})
    monkeypatch.setattr(compare_placements, "in_a_line", lambda _: "a machine")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # what it was is put back afterwards
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert compare(tmp_path, "", "--device", device, "--placements", "off,ssd") == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert len(result["summary"]) == (3 if device == "cpu" else 2)  # off on both allocators
    for run in result["runs"]:
        assert run["steps"][0]["environment"].get("CUDA_VISIBLE_DEVICES") == visible


def test_a_different_loss_gives_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(tmp_path, "ssd", "--placements", "off@default,ssd") == 1
    output = capsys.readouterr().out
    assert "DIFFERENT" in output
    assert "differs at step 1: loss" in output


def test_a_failing_trainer_is_quoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(tmp_path, "exit") == 2
    error = capsys.readouterr().err
    assert "off@default in round 1 ended with exit code 2" in error
    assert "no such thing" in error


@pytest.mark.parametrize(
    "flags, complaint",
    [
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--train-iters", "2"], "above --skip-steps"),
        (["--placements", "tape"], "unknown placement 'tape'"),
        (["--trainer", "nowhere.py"], "trainer not found"),
        (["--json", "nowhere/out.json"], "no such folder"),
        (["--device", "cuda"], "torch sees no CUDA device; use --device cpu"),
    ],
)
def test_bad_flags(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    complaint: str,
) -> None:
    monkeypatch.setattr(compare_placements.torch.cuda, "is_available", lambda: False)
    assert compare(tmp_path, "", *flags) == 2
    assert complaint in capsys.readouterr().err
