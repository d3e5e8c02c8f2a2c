# SPDX-License-Identifier: Apache-2.0
"""The measurement of what offload costs the thread that launches operations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench import launch as bench
from bench import launch_account
from bench.launch_account import MOVING, Account, Clock, Layer, calibrated

from megatron.offload.activations.capture.hooks import SavedTensorHooks

ROUNDING = 1e-9  # relative: a sum of means is a mean of sums


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways run in this process: starting others takes longer than measuring."""

    def in_this_process(way: str, argv: list[str], checkout: Path = bench.ROOT) -> dict[str, Any]:
        assert way == "door"
        return bench.figures(bench.train_door(bench.make_parser().parse_args(argv)))

    monkeypatch.setattr(bench, "in_a_process", in_this_process)


def test_a_small_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, unpack = tmp_path / "launch.json", SavedTensorHooks.unpack
    argv = f"--ways door --steps 2 --layers 2 --mode host --dir {tmp_path} --json {file}".split()
    exit_code = bench.main(argv)
    assert SavedTensorHooks.unpack is unpack  # as before
    found = json.loads(file.read_text())["ways"]["door"]
    assert found["steps"] == 2 and found["samples"] == 2  # layers of a step; the other is the CPU's
    assert found["tensors_per_layer"] > found["storages_per_layer"] >= 4
    assert found["forwarded_fraction"] == 0.0 and found["step_s_without"] > 0.0
    for name in ("us_per_layer", "us_per_storage", "processor_us_per_storage"):
        spreads = found[name]
        assert spreads.pop("walk")["mean"] == 0.0  # of the other way
        for one in spreads.values():
            assert 0.0 < one["first_quartile"] <= one["median"] <= one["third_quartile"]
        both_ways = sum(spreads[part]["mean"] for part in bench.BOTH_WAYS)
        assert spreads["both ways"]["mean"] == pytest.approx(both_ways, rel=ROUNDING)
        all_of_it = both_ways + spreads["layers"]["mean"]
        assert spreads["all"]["mean"] == pytest.approx(all_of_it, rel=ROUNDING)
    storage = found["us_per_storage"]["both ways"]
    assert exit_code == (0 if storage["median"] <= bench.MOST_US else 1)
    assert f"{storage['median']:.1f}" in capsys.readouterr().out


def test_a_layer_is_divided_by_its_own_storages() -> None:
    layers = [Layer(), Layer()]
    for one, num_storages in zip(layers, (2, 4), strict=True):
        one.num_storages = num_storages
        one.spent_ns.update(pack=16_000, unpack=8_000)
    found = bench.by_part(layers, lambda one: one.num_storages)
    assert found["pack"]["mean"] == 6.0 and found["unpack"]["median"] == 3.0
    assert found["all"]["first_quartile"] == 7.5 and found["all"]["third_quartile"] == 10.5
    assert found["submit"]["mean"] == 0.0


def test_nested_time_counts_once_and_for_the_inner_part() -> None:
    now = [0]
    account = Account(Clock(lambda: now[0]))

    def spend(amount: int) -> None:
        now[0] += amount

    inner = account.timed("submit", lambda: spend(5), lambda: "one")

    def outer() -> None:
        spend(2)
        inner()
        spend(1)

    account.timed("pack", outer, lambda: "one")()
    assert account.take()["one"].spent_ns == {"pack": 3, "submit": 5}


def test_what_the_clock_costs_is_left_out() -> None:
    now = [0]

    def look() -> int:
        now[0] += 10  # each look at the clock takes as long
        return now[0]

    clock = calibrated(look)
    assert clock[1:] == pytest.approx((10, 10), rel=0.01)  # a share of the loop's
    account = Account(clock)

    def spend(amount: int) -> None:
        now[0] += amount

    inner = account.timed("submit", lambda: spend(5), lambda: "one")
    account.timed("pack", lambda: (spend(2), inner()), lambda: "one")()
    assert account.take()["one"].spent_ns == pytest.approx({"pack": 2, "submit": 5}, abs=0.1)


def test_an_unknown_way_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--ways", "window"])
    assert "there is no way window; choose of door, megatron" in capsys.readouterr().err


def test_threads_that_start_transfers_and_those_of_drives_are_told_apart(tmp_path: Path) -> None:
    launch_account._moving_s[MOVING] = 60.0  # of a measurement before, in the same process
    argv = f"--steps 2 --layers 2 --mode ssd --dir {tmp_path} --way door"
    found = bench.figures(bench.train_door(bench.make_parser().parse_args(argv.split())))
    spent_us = found["others_us_per_layer"]
    assert all(spent_us[name] > 0 for name in ("starts transfers", "I/O", MOVING))
    of_storages = found["others_us_per_storage"] * found["storages_per_layer"]
    assert sum(spent_us.values()) == pytest.approx(of_storages)


def test_rounds_of_two_checkouts_take_turns_and_are_compared_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base, file, order = tmp_path / "before", tmp_path / "launch.json", []
    took = {bench.ROOT: iter([1.0, 6.0, 2.0]), base: iter([4.0, 8.0, 4.0])}

    def in_a_process(way: str, argv: list[str], checkout: Path) -> dict[str, Any]:
        order.append(checkout)
        us = next(took[checkout])
        return {
            "processor_us_per_layer": {"all": {"median": us}},
            "others_us_per_layer": {"I/O": 2 * us},
        }

    monkeypatch.setattr(bench, "in_a_process", in_a_process)
    argv = f"--ways door --base {base} --rounds 3 --json {file} --dir {tmp_path}".split()
    assert bench.main(argv) == 0
    assert order == [base, bench.ROOT, bench.ROOT, base, base, bench.ROOT]
    found = json.loads(file.read_text())["compared"]["door"]
    assert found["launches"] == {
        "us_per_layer": 2.0,
        "us_per_layer_of_base": 4.0,
        "ratio": 0.5,
        "ratios": [0.25, 0.75, 0.5],
    }
    assert found["I/O"]["ratio"] == 0.5 and found["I/O"]["us_per_layer"] == 4.0
    assert "0.25 to 0.75" in capsys.readouterr().out
