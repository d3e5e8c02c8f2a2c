# SPDX-License-Identifier: Apache-2.0
"""`megatron-offload tune`: fits of made-up measurements, candidates, the choice, what is refused.

The trainings are those of a script that only writes metrics, but for one test.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.offload import cli
from megatron.offload.commands.training_runs import trainer as trainer_runs
from megatron.offload.commands.training_runs.start import Start
from megatron.offload.commands.tune.candidates import (
    FAILED,
    Candidate,
    Limits,
    Space,
    StepSize,
    best_of,
    neighbours_of,
)
from megatron.offload.commands.tune.fit import fit
from megatron.offload.commands.tune.limits import limits_of
from megatron.offload.commands.tune.runs import undisturbed
from megatron.offload.commands.tune.search import MOST_TRAININGS, search
from megatron.offload.commands.tune.setting import Setting, settings_to_measure
from megatron.offload.commands.tune.step_model import TOO_HIGH, Figures, Measurement, StepModel
from megatron.offload.commands.tune.training_command import TrainingCommand
from megatron.offload.errors import ConfigurationError
from megatron.offload.layer_major.units import units_of
from tests.support.fork_server import ForkedProcess
from tests.support.launch import SCRIPTS, TINY, rank_environment, server

MIB = 1 << 20
LAYERS = 4

TRAINER = """
import argparse, json, sys
parser = argparse.ArgumentParser()
for name in ("micro-batch-size", "global-batch-size", "train-iters", "seq-length"):
    parser.add_argument("--" + name, type=int, default=0)
parser.add_argument("--layer-major-units")
parser.add_argument("--metrics-file")
parser.add_argument("--without", default="")
parser.add_argument("--full-tiers", action="store_true")
parser.add_argument("--wait-for-input", action="store_true")
parser.add_argument("--more-from", type=int, default=10**9)
parser.add_argument("--fails-from", type=int, default=10**9)
args, _ = parser.parse_known_args()
b, m = args.micro_batch_size, args.global_batch_size // args.micro_batch_size
u = 0 if args.layer_major_units == "off" else int(args.layer_major_units)
seconds = m * (0.02 + 0.01 * b) + 0.05 if not u else m * (0.005 + 0.01 * b) + 0.04 + m * u * 0.001
size = (100 + 10 * b + (5 * b * (m - 1) if u else 0)) << 20
if b >= args.more_from:
    size += 50 << 20
if b >= args.fails_from:
    sys.exit("killed")
with open(args.metrics_file, "w") as file:
    for step in range(1, args.train_iters + 1):
        if args.wait_for_input and not sys.stdin.readline():
            break
        first = 10.0 if step <= 2 else 0.0  # the first steps are longer
        values = {
            "step": step,
            "loss": 1.0,
            "step_time_s": seconds + first,
            "tokens_per_s": b * m * args.seq_length / (seconds + first),
            "peak_device_bytes": size,
            "peak_activation_bytes": size,
            "offload": {
                "offloaded_bytes": m * b << 20,
                "rejected_bytes": int(args.full_tiers),
            },
        }
        values.pop(args.without, None)
        print(json.dumps(values), file=file, flush=True)
"""


def made_up(setting: Setting, per_unit: float = 80.0) -> Figures:
    """A machine that is as linear as the fits."""
    b, m, u = setting.micro_batch_size, setting.micro_batches, setting.units
    away = setting.share_before_last_unit(LAYERS)
    moved = m * (3.0 + 50.0 * b)
    if not u:
        return Figures(m * (0.5 + 0.25 * b) + 0.75, 1000.0 + 200.0 * b, moved, 0.0, moved / m)
    return Figures(
        m * (0.375 + 0.25 * b) + 1.5 + 0.03125 * m * u,
        1000.0 + 10.0 * (m - 1) + per_unit / u + 200.0 * b + b * (m - 1) * (20.0 + 40.0 * away),
        moved,
        0.0,
        moved / m * setting.waiting_micro_batches(LAYERS),
    )


def measurement(setting: Setting, figures: Figures) -> Measurement:
    return Measurement(
        setting, figures.step_s, figures.device_bytes, figures.moved_bytes, 0.0, setting.samples
    )


def model_of(units: Sequence[int], of: Callable[[Setting], Figures] = made_up) -> StepModel:
    settings = settings_to_measure((1, 4), (2, 5), units)
    return StepModel([measurement(one, of(one)) for one in settings], num_layers=LAYERS)


def test_what_is_measured_is_both_sizes_and_both_counts_of_each_order() -> None:
    found = settings_to_measure((1, 4), (2, 5), (0, 2, 3, 4))
    corners = {(size, count) for size in (1, 4) for count in (2, 5)}
    for units in (0, 4):
        own = {(s.micro_batch_size, s.micro_batches) for s in found if s.units == units}
        assert own == corners
    assert {(s.micro_batch_size, s.micro_batches) for s in found if s.units == 2} == {
        (1, 5),
        (4, 5),
    }
    assert len(found) == 10 and [s.samples for s in found] == sorted(s.samples for s in found)


def test_layers_before_the_last_unit_are_counted_as_units_divide_them() -> None:
    for layers in (4, 7, 12):
        for units in range(1, layers + 1):
            of = units_of(range(layers), units)
            early = sum(unit < units - 1 for unit in of.values())
            assert Setting(units, 1, 3).share_before_last_unit(layers) == early / layers
    assert Setting(4, 1, 5).waiting_micro_batches(None) == 1 + 4 * 0.75
    assert Setting(0, 1, 5).waiting_micro_batches(12) == 1


@pytest.mark.parametrize("units", [(0,), (4,), (0, 4), (0, 2, 4)], ids=str)
def test_a_fit_recovers_what_the_measurements_were_made_of(units: tuple[int, ...]) -> None:
    """Beyond what was measured too; between two measured numbers of units as well."""
    per_unit = 80.0 if 2 in units else 0.0  # not to be told from other terms with one number
    model = model_of(units, lambda setting: made_up(setting, per_unit))
    asked = [*units, *([3] if 2 in units else [])]
    for setting in StepSize(1, 64, 16).settings(asked):
        expected, found = made_up(setting, per_unit), model.predict(setting)
        for name in ("step_s", "device_bytes", "moved_bytes", "ssd_bytes"):
            assert math.isclose(getattr(found, name), getattr(expected, name), rel_tol=1e-9), (
                setting,
                name,
            )
    if 0 in units:
        assert model.seconds[False].coefficients == pytest.approx(
            {"1": 0.75, "m": 0.5, "m*b": 0.25}, rel=1e-9
        )
    if units == (0,):
        assert model.device.coefficients["b"] == pytest.approx(200.0)
    if 2 in units:
        expected_terms = {"1": 1.5, "m": 0.375, "m*b": 0.25, "m*u": 0.03125}
        assert model.seconds[True].coefficients == pytest.approx(expected_terms, rel=1e-9)
    if units == (0, 2, 4):
        expected_terms = {"1": 1000, "b": 200, "m-1": 10, "1/u": 80}
        expected_terms |= {"b*(m-1)": 20, "b*(m-1)*away": 40}
        assert model.device.coefficients == pytest.approx(expected_terms, rel=1e-9)


def test_a_coefficient_is_never_negative() -> None:
    """Noise that falls with the size would promise negative memory far away."""
    terms = {"1": lambda s: 1.0, "b": lambda s: float(s.micro_batch_size)}
    found = fit(terms, {Setting(0, 1, 2): 101.0, Setting(0, 4, 2): 99.0})
    assert found.coefficients == pytest.approx({"1": 100.0, "b": 0.0})
    assert fit(terms, {Setting(0, 1, 2): 0.0}).at(Setting(0, 9, 9)) == 0.0


def test_a_relative_fit_is_near_the_short_steps_too() -> None:
    terms = {"m": lambda s: float(s.micro_batches)}
    measured = {Setting(0, 1, 1): 2.0, Setting(0, 1, 100): 100.0}
    assert fit(terms, measured).at(Setting(0, 1, 1)) == pytest.approx(1.0, rel=1e-3)
    assert fit(terms, measured, relative=True).at(Setting(0, 1, 1)) == pytest.approx(1.2)


# -- The search -----------------------------------------------------------------------------------

MARGIN = 0.05


class Machine:
    """Trainings of a made-up machine, and which of them the search has asked for."""

    def __init__(self, of: Callable[[Setting], Figures] = made_up, units: Sequence[int] = (0, 4)):
        self.of, self.units = of, units
        self.asked: list[list[Setting]] = []
        self.fails: set[Setting] = set()

    def measure(self, settings: Sequence[Setting]) -> dict[Setting, Measurement | None]:
        self.asked.append(list(settings))
        return {
            one: None if one in self.fails else measurement(one, self.of(one)) for one in settings
        }

    def search(
        self, budget: float, samples: int = 16, **more: Any
    ) -> tuple[Candidate | None, list[Candidate]]:
        """As `tune` does it, with what it measures first."""
        to_fit = settings_to_measure((1, 4), (2, 5), self.units)
        return search(
            Space(
                StepSize(samples, samples, 16).settings(self.units),
                Limits(device_bytes=budget, ssd_bytes=more.pop("ssd", math.inf)),
                MARGIN,
                tokens_per_sample=8,
            ),
            [measurement(one, self.of(one)) for one in to_fit],
            lambda known: StepModel(known, num_layers=LAYERS),
            self.measure,
            **more,
        )

    @property
    def num_trainings(self) -> int:
        return sum(len(settings) for settings in self.asked)


def fastest(machine: Machine, budget: float, samples: int = 16) -> Setting | None:
    """Of all settings, by what they really take."""
    fit = [
        one
        for one in StepSize(samples, samples, 16).settings(machine.units)
        if machine.of(one).device_bytes * (1 + MARGIN) <= budget
    ]
    return min(fit, key=lambda one: machine.of(one).step_s, default=None)


@pytest.mark.parametrize("budget", range(1000, 8000, 250))
def test_what_is_chosen_was_measured_and_keeps_to_the_budget(budget: int) -> None:
    """On a machine that keeps to the fits it is the fastest of those that do."""
    machine = Machine()
    chosen, found = machine.search(budget, ssd=2000)
    assert len(found) == 9 and machine.num_trainings <= MOST_TRAININGS
    for one in found:
        takes = made_up(one.setting)
        if one.measured is not None:
            assert one.is_possible == (takes.device_bytes * (1 + MARGIN) <= budget)
        elif one.is_possible:
            assert takes.device_bytes * (1 - TOO_HIGH) <= budget * (1 + 1e-9)
        if takes.ssd_bytes > 2000:
            assert "SSD" in one.over
            assert all(one.setting not in settings for settings in machine.asked)
    best = fastest(machine, budget)
    if best is None:
        assert chosen is None
    elif all(made_up(one.setting).ssd_bytes <= 2000 for one in found):
        assert chosen is not None and chosen.setting == best and chosen.measured is not None


def uneven(setting: Setting) -> Figures:
    """Memory that no sum of terms gives: less with some of the larger micro-batches."""
    plain = made_up(setting)
    of_size = {1: 1.0, 2: 1.12, 4: 0.98, 8: 0.9, 16: 0.8}[setting.micro_batch_size]
    return Figures(plain.step_s, plain.device_bytes * of_size, *(0.0, 0.0, 0.0))


@pytest.mark.parametrize("budget", range(1250, 6000, 250))
def test_memory_that_no_fit_gives_is_found_by_measuring(budget: int) -> None:
    machine = Machine(uneven)
    chosen, _ = machine.search(budget)
    best = fastest(machine, budget)
    assert (chosen is None) == (best is None)
    if chosen is not None and best is not None:
        assert uneven(chosen.setting).device_bytes * (1 + MARGIN) <= budget
        assert uneven(chosen.setting).step_s <= uneven(best).step_s / 0.95
    assert machine.num_trainings <= MOST_TRAININGS


def test_a_prediction_that_is_too_low_ends_nothing() -> None:
    """The largest micro-batch takes half as much again; the next one is measured then."""

    def more(setting: Setting) -> Figures:
        plain = made_up(setting)
        factor = 1.5 if setting.micro_batch_size == 16 else 1.0
        return Figures(plain.step_s, plain.device_bytes * factor, 0.0, 0.0, 0.0)

    machine = Machine(more, units=(0,))
    chosen, found = machine.search(4500.0)
    assert machine.asked == [[Setting(0, 16, 1)], [Setting(0, 8, 2)]]
    assert chosen is not None and chosen.setting == Setting(0, 8, 2)
    assert {one.setting: one.over for one in found}[Setting(0, 16, 1)] == ("device memory",)


def test_the_measured_seconds_decide() -> None:
    """Seconds that are off by up to 10 % in the fits are those of the trainings in the end."""
    noise = {1: 1.05, 2: 0.95, 4: 1.0, 8: 1.1, 16: 1.3}

    def noisy(setting: Setting) -> Figures:
        plain = made_up(setting)
        return Figures(
            plain.step_s * noise[setting.micro_batch_size], plain.device_bytes, *(0.0, 0.0, 0.0)
        )

    machine = Machine(noisy, units=(0,))
    chosen, _ = machine.search(1e6)
    assert machine.asked == [[Setting(0, 16, 1)], [Setting(0, 8, 2)]]
    assert chosen is not None and chosen.setting == fastest(machine, 1e6) == Setting(0, 8, 2)


def test_without_a_budget_nothing_more_is_measured() -> None:
    machine = Machine()
    chosen, found = machine.search(math.inf)
    assert machine.asked == [] and chosen is not None
    assert all(one.measured is None for one in found)  # all are compared as they were predicted
    assert chosen.setting == fastest(machine, math.inf)
    checked, _ = machine.search(math.inf, neighbours=True)
    assert checked is not None and checked.setting == chosen.setting
    assert checked.measured is not None and machine.num_trainings > 1


def test_a_training_that_fails_is_not_chosen() -> None:
    machine = Machine(units=(0,))
    machine.fails = {Setting(0, 16, 1)}
    chosen, found = machine.search(1e6)
    assert chosen is not None and chosen.setting == Setting(0, 8, 2)
    assert {one.setting: one.over for one in found}[Setting(0, 16, 1)] == (FAILED,)


def test_the_last_training_is_of_what_takes_the_least() -> None:
    """Rather something slow than nothing: the other ten sizes take more than was predicted."""
    smallest = Setting(0, 1, 240)

    def more(setting: Setting) -> Figures:
        plain = made_up(setting)
        above = 2000.0 if setting.samples == 240 and setting != smallest else 0.0
        return Figures(plain.step_s, 1e5 + plain.device_bytes + above, 0.0, 0.0, 0.0)

    machine = Machine(more, units=(0,))
    chosen, _ = machine.search(1.065e5, samples=240)
    assert machine.num_trainings == MOST_TRAININGS
    assert chosen is not None and chosen.setting == smallest == machine.asked[-1][0]


def candidate(setting: Setting, speed: float, device: float = 1.0, **more: Any) -> Candidate:
    figures = Figures(1.0, device, 0.0, 0.0, more.pop("ssd", 0.0))
    return Candidate(setting, figures, tokens=speed, **more)


def test_of_equally_fast_candidates_the_larger_micro_batch_and_then_less_memory_is_chosen() -> None:
    small, large = Setting(0, 1, 8), Setting(0, 8, 1)

    def chosen(*candidates: Candidate) -> Setting:
        found = {best_of(order) for order in (candidates, candidates[::-1])}
        assert len(found) == 1
        (one,) = found
        assert one is not None
        return one.setting

    assert chosen(candidate(large, 995, 9), candidate(small, 1000, 2)) == large
    assert chosen(candidate(large, 985, 9), candidate(small, 1000, 2)) == small
    # The same size: less device memory, then less room on tiers, then fewer units.
    other = Setting(4, 8, 1)
    assert chosen(candidate(large, 1000, 9), candidate(other, 995, 8)) == other
    assert chosen(candidate(large, 1000, ssd=6.0), candidate(other, 1000, ssd=5.0)) == other
    assert chosen(candidate(large, 1000), candidate(other, 1000)) == large
    over = candidate(large, 9000, over=("device memory",))
    assert chosen(over, candidate(small, 1)) == small and best_of([over]) is None


def test_neighbours_are_the_next_sizes_and_the_other_orders() -> None:
    own = [candidate(Setting(0, size, 24 // size), 100 + size) for size in (1, 2, 4, 8, 12, 24)]
    others = [candidate(Setting(4, size, 24 // size), 90 + size) for size in (1, 2, 4)]
    over = candidate(Setting(0, 6, 4), 106, over=("SSD",))
    found = neighbours_of(own[3], [*own, *others, over])
    assert {one.setting for one in found} == {Setting(0, 4, 6), Setting(0, 12, 2), Setting(4, 4, 6)}
    assert neighbours_of(own[0], own[:2]) == [own[1]]


def test_a_step_of_one_size_is_divided_without_a_rest() -> None:
    found = StepSize(12, 12, 6).settings((0, 4))
    assert {(s.micro_batch_size, s.micro_batches) for s in found} == {
        *((1, 12), (2, 6), (3, 4), (4, 3), (6, 2)),
    }
    # Layer-major only where there is more than one micro-batch.
    assert set(StepSize(2, 2, 4).settings((0, 4))) == {
        *(Setting(0, 1, 2), Setting(0, 2, 1), Setting(4, 1, 2)),
    }
    free = StepSize(5, 9, 100).settings((0,))
    assert all(5 <= one.samples <= 9 for one in free)
    assert {one.samples for one in free if one.micro_batch_size == 1} == {5, 6, 8, 9}
    assert {one.micro_batch_size for one in free} == {1, 2, 3, 4, 6, 8}


# -- The command ----------------------------------------------------------------------------------


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAINER)
    return path


def tune(tmp_path: Path, trainer: Path, own: str, flags: str, name: str = "1") -> int:
    return cli.main(
        [
            *("tune", *own.split(), "--trainings", str(tmp_path / f"trainings{name}"), "--"),
            *(str(trainer), "--seq-length", "16", "--num-layers", "4", *flags.split()),
        ]
    )


def test_the_best_of_a_step_is_found_and_checked(
    tmp_path: Path, trainer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layer-major is faster here and takes more: the budget decides how large a micro-batch is."""
    result, best = tmp_path / "tune.json", tmp_path / "best.txt"
    own = f"--check --json {result} --output {best} --largest-micro-batch-size 8"
    flags = "--global-batch-size 16 --micro-batch-size 3 --device-memory-budget 212MiB"
    assert tune(tmp_path, trainer, own, flags) == 0
    printed = capsys.readouterr().out
    expected = ["--micro-batch-size", "4", "--global-batch-size", "16", "--layer-major-units", "4"]
    assert best.read_text() == " ".join(expected) + "\n"
    assert "left out of what is measured: --global-batch-size 16 --micro-batch-size 3" in printed
    assert printed.index("measuring 8 settings") < printed.index("the other trainings take about")
    assert printed.index("the other trainings take") < printed.index("tokens/s")
    assert "212 MiB of device memory" in printed and "over: device memory" in printed
    values = json.loads(result.read_text())
    assert len(values["measured"]) == 8 and len(values["candidates"]) == 8
    assert values["chosen"]["setting"] == {"units": 4, "micro_batch_size": 4, "micro_batches": 4}
    assert len(values["tried"]) > 1
    for one in values["tried"]:
        assert one["measured"]["step_s"] == pytest.approx(one["predicted"]["step_s"])
        assert one["measured"]["device_bytes"] == pytest.approx(one["predicted"]["device_bytes"])
    (found,) = (one for one in values["tried"] if one["setting"] == values["chosen"]["setting"])
    assert found["measured"]["device_bytes"] * 1.04 <= 212 * MIB
    assert printed.index("and up to 6 more") < printed.index("measuring 1 more")
    assert " chosen\n" in printed


@pytest.mark.slow
def test_trainings_may_take_turns(
    tmp_path: Path, trainer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "tune.json"
    own = f"--turns --units off --steps 3 --seconds 0 --json {result}"
    assert tune(tmp_path, trainer, own, "--global-batch-size 8") == 0
    assert "in turns" in capsys.readouterr().out
    for folder in (tmp_path / "trainings1" / "fit").iterdir():  # none was ahead of the others
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2 + 3
    seconds = [one["step_s"] for one in json.loads(result.read_text())["measured"]]
    assert seconds == pytest.approx([0.11, 0.17, 0.17, 0.29])


def test_steps_that_something_held_up_do_not_count() -> None:
    assert undisturbed([3.0, 1.0, 90.0, 2.0]) == 1.5
    assert undisturbed([5.0, 1.0, 3.0]) == 2.0 and undisturbed([7.0]) == 7.0


def test_what_was_predicted_too_low_is_said_and_not_chosen(
    tmp_path: Path, trainer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The largest micro-batch takes more than the first runs could show."""
    flags = "--global-batch-size 16 --device-memory-budget 190MiB --more-from 8"
    own = "--units off --largest-micro-batch-size 8"
    assert tune(tmp_path, trainer, own, flags) == 0
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if line.endswith("over: device memory"))
    assert row.split()[:3] == ["8", "2", "off"] and "230 MiB" in row and "241.5 MiB" in row
    assert "--micro-batch-size 4 --global-batch-size 16 --layer-major-units off" in printed


def test_what_runs_out_of_memory_while_it_is_measured_ends_nothing(
    tmp_path: Path, trainer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = "--units off --largest-micro-batch-size 8"
    flags = "--global-batch-size 16 --device-memory-budget 190MiB --fails-from 8"
    assert tune(tmp_path, trainer, own, flags) == 0
    printed = capsys.readouterr().out
    assert "not chosen: 2x8-micro-batch-major ended with exit code 1" in printed
    assert "--micro-batch-size 4 --global-batch-size 16 --layer-major-units off" in printed


@pytest.mark.parametrize(
    ("flags", "added"),
    [
        ("--device-memory-budget 20MiB", "4MiB"),  # no less
        ("--device-memory-budget 799MiB", "8MiB"),
        ("--device-memory-budget 801MiB", "16MiB"),
        ("--device-memory-budget 20MiB --activation-offload-min-bytes 9MiB", "16MiB"),
        ("--device-memory-budget 20GiB", "256MiB"),
        ("--device-memory-budget 30GiB", None),  # the default is as good
        ("--device-memory-budget 799MiB --activation-offload-inflight 9MiB", None),
        ("--device-memory-budget 799MiB --activation-offload off", None),
        ("", None),
        ("--activation-replay on", None),
    ],
)
def test_what_may_be_in_flight_is_a_small_part_of_the_budget(
    tmp_path: Path, flags: str, added: str | None
) -> None:
    words = ["--activation-offload", "ssd", "--activation-offload-dir", str(tmp_path)]
    words += flags.split()
    command = TrainingCommand.of([str(SCRIPTS["gpt"]), *words])
    expected = ["--activation-offload-inflight", added] if added else []
    assert command.added == expected and command.flags == [*words, *expected]


def test_the_choice_comes_with_the_bound_that_it_was_measured_with(
    tmp_path: Path, trainer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best, result = tmp_path / "best.txt", tmp_path / "tune.json"
    flags = f"--global-batch-size 4 --activation-offload ssd --activation-offload-dir {tmp_path}"
    flags += " --device-memory-budget 799MiB"
    own = f"--units off --output {best} --json {result}"
    assert tune(tmp_path, trainer, own, flags) == 0
    printed, flag = capsys.readouterr().out, "--activation-offload-inflight 8MiB"
    assert f"added to what is measured and to the choice: {flag}\n" in printed
    assert best.read_text() in printed and best.read_text().endswith(f"units off {flag}\n")
    assert json.loads(result.read_text())["conditions"]["added"] == flag.split()
    logs = list((tmp_path / "trainings1").glob("*/*/output.log"))
    assert {log.parts[-3] for log in logs} == {"fit", "more"}
    assert all(f" {flag} " in log.read_text().splitlines()[0] for log in logs)


def test_tokens_of_a_step_may_be_free(
    tmp_path: Path, trainer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = "--tokens-per-step 64-128 --units off --micro-batch-sizes 1,2"
    assert tune(tmp_path, trainer, own, "") == 0
    assert "--micro-batch-size 8 --global-batch-size 8" in capsys.readouterr().out
    assert tune(tmp_path, trainer, "--tokens-per-step 3-4 --units off", "", "2") == 2
    assert "a sample of each rank together has 16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("own", "flags", "sentence"),
    [
        ("--units off", "", "give --tokens-per-step MIN-MAX"),
        ("", "--global-batch-size 8 --activation-offload auto", "plans for itself"),
        ("", "--global-batch-size 8 --activation-offload nowhere", "is not understood"),
        ("", "--global-batch-size 8 --activation-offload ssd", "--activation-offload-dir DIR"),
        (
            "--units auto --processes 2",
            "--global-batch-size 8 --pipeline-model-parallel-size 2",
            "one pipeline stage; leave --units out",
        ),
        (
            "--processes 2",
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
            "interleaved stages keep in memory; drop --num-layers-per-virtual-pipeline-stage",
        ),
        ("", "--global-batch-size 8 --pipeline-model-parallel-size 2", "1 processes are not a"),
        ("", "--global-batch-size 8 --activation-offlod ssd", "did you mean --activation-offload?"),
        (
            "",
            "--global-batch-size 8 --optimizer-state-offload auto --optimizer-state-dir x",
            "fills what activations leave",
        ),
        ("--units 5", "--global-batch-size 8", "the model has 4 layers"),
        ("--units 4", "--global-batch-size 1", "layer-major steps need two micro-batches"),
        (
            "--units auto",
            "--global-batch-size 8 --recompute-granularity full",
            "--activation-recompute-layers",
        ),
        ("--processes 3", "--global-batch-size 8 --tensor-model-parallel-size 2", "3 processes"),
        ("--processes 2 --turns", "--global-batch-size 8", "--turns works with one process"),
        ("--processes 2", "--global-batch-size 7", "cannot be divided by the 2 ranks"),
        (
            "--units off",
            "--global-batch-size 8 --device-memory-budget 64MiB",
            "needs 115.5 MiB of device memory; raise --device-memory-budget",
        ),
        (
            "--units off",
            "--global-batch-size 8 --device-memory-budget 1GiB --without peak_device_bytes",
            "have no peak_device_bytes",
        ),
        ("--units off", "--global-batch-size 8 --full-tiers", "found no room on the tiers"),
        ("--units off", "--global-batch-size 8 --more-from no", "ended with exit code 2"),
    ],
)
def test_what_cannot_be_tuned_is_said_in_a_sentence(
    tmp_path: Path,
    trainer: Path,
    own: str,
    flags: str,
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tune(tmp_path, trainer, own, flags) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "after --"),
        (["nothing.py"], "there is no script nothing.py"),
        ([str(SCRIPTS["gpt"].with_suffix(".sh"))], "starts Python scripts"),
    ],
    ids=["nothing", "no script", "a shell script"],
)
def test_a_command_without_a_script_is_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match="activation offload: ") as refused:
        TrainingCommand.of(words)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("launcher", "start", "words"),
    [
        ("python", Start(), ""),
        ("torchrun", Start(expects_rank=True), ""),
        (
            "torchrun --nnodes=1 --nproc_per_node 4 --master-port 29501",
            Start(4, expects_rank=True),
            "-m torch.distributed.run --standalone --nproc-per-node=4",
        ),
        (
            "torchrun --nnodes 1:1 --nproc-per-node 8",
            Start(8, expects_rank=True),
            "-m torch.distributed.run --standalone --nproc-per-node=8",
        ),
        (
            "N=1 python3 -u -m torch.distributed.run --nproc-per-node=2 -m megatron.offload.launch",
            Start(2, "megatron.offload.launch", True, {"N": "1"}),
            "-m torch.distributed.run --standalone --nproc-per-node=2 -m megatron.offload.launch",
        ),
        (
            "python -m megatron.offload.launch",
            Start(1, "megatron.offload.launch"),
            "-m megatron.offload.launch",
        ),
    ],
)
def test_a_whole_launch_command_is_started_on_this_machine(
    trainer: Path, launcher: str, start: Start, words: str
) -> None:
    command = TrainingCommand.of(
        [*launcher.split(), str(trainer), "--lr", "1", "--num-layers", "4"]
    )
    assert (command.start, command.script) == (start, trainer)
    assert command.flags == ["--lr", "1", "--num-layers", "4"] and command.passed_on == ["--lr"]
    started = command.start.command(trainer, ["--lr", "1"])
    assert started == [sys.executable, *words.split(), str(trainer), "--lr", "1"]
    environment = command.start.environment()
    assert environment.get("N") == start.variables.get("N")
    alone = start.processes == 1 and launcher != "python"
    assert ("MASTER_PORT" in environment) == (environment.get("RANK") == "0") == alone


@pytest.mark.parametrize(
    ("launcher", "processes", "sentence"),
    [
        (
            "srun --ntasks-per-node 1 torchrun",
            None,
            "begins with srun; leave out what comes before",
        ),
        ("torchrun --nnodes 2 --nproc-per-node 8", None, "has --nnodes 2; give a division that"),
        ("torchrun --nproc-per-node gpu", None, "--nproc-per-node gpu are; give a number"),
        ("torchrun --nproc-per-node 2", 4, "contradict each other; drop --processes"),
        ("python -m accelerate.commands.launch", None, "no -m accelerate.commands.launch before"),
        ("torchrun -m --nproc-per-node 8 megatron.offload.launch", None, "is not understood"),
    ],
)
def test_a_launcher_that_tune_cannot_start_is_refused(
    trainer: Path, launcher: str, processes: int | None, sentence: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        TrainingCommand.of([*launcher.split(), str(trainer)], processes)
    assert sentence in str(refused.value)


@pytest.mark.parametrize("stages", [2, 4])
def test_a_pipeline_waits_for_its_ends_and_holds_a_micro_batch_for_each_stage(stages: int) -> None:
    """What no measured step has: other sizes, and fewer micro-batches than stages."""

    def of(setting: Setting) -> Figures:
        b, m = setting.micro_batch_size, setting.micro_batches
        held = min(m, stages)
        moved = m * (3.0 + 50.0 * b)
        return Figures(
            (m + stages - 1) * (0.5 + 0.25 * b) + 0.75,
            1000.0 + 10.0 * b * held,
            *(moved, 0.0, moved / m * held),
        )

    known = settings_to_measure((1, 4), (stages // 2, 2 * stages), (0,))  # as `tune` does
    model = StepModel([measurement(one, of(one)) for one in known], num_stages=stages)
    for one in (Setting(0, 2, 8), Setting(0, 8, 16), Setting(0, 16, 1)):
        found, expected = model.predict(one), of(one)
        assert found.step_s == pytest.approx(expected.step_s)
        assert found.ssd_bytes == pytest.approx(expected.ssd_bytes)
        assert found.device_bytes == pytest.approx(expected.device_bytes)
    # Without the term for the ends the fit would not be exact.
    flat = StepModel([measurement(one, of(one)) for one in known])
    assert abs(flat.predict(Setting(0, 16, 2)).step_s - of(Setting(0, 16, 2)).step_s) > 0.1


@pytest.mark.slow
def test_a_pipeline_is_started_by_torchrun_and_chosen_by_what_was_measured(
    tmp_path: Path, trainer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = "import os, sys\nif os.environ['RANK'] != '0':\n    sys.exit()\n"
    trainer.write_text(others + TRAINER)
    result = tmp_path / "tune.json"
    own = ["--trainings", str(tmp_path / "trainings"), "--json", str(result)]
    own += ["--steps", "1", "--seconds", "0", "--largest-micro-batch-size", "4"]
    words = ["torchrun", "--nproc-per-node", "2", str(trainer), "--seq-length", "16"]
    words += [
        "--num-layers",
        "4",
        "--global-batch-size",
        "4",
        "--pipeline-model-parallel-size",
        "2",
    ]
    assert cli.main(["tune", *own, "--", *words]) == 0
    printed = capsys.readouterr().out
    assert "and up to 6 more, to choose by what was measured" in printed
    assert printed.endswith("--micro-batch-size 4 --global-batch-size 4 --layer-major-units off\n")
    values = json.loads(result.read_text())
    assert len(values["measured"]) == 4 and values["tried"]
    log = next((tmp_path / "trainings").glob("*/*/output.log")).read_text()
    assert "torch.distributed.run --standalone --nproc-per-node=2" in log.splitlines()[0]


def test_limits_are_those_of_the_flags_and_the_room_there_is(tmp_path: Path) -> None:
    script = str(SCRIPTS["gpt"])
    drives = f"{tmp_path}/a,{tmp_path}/b"
    flags = ["--activation-offload", "tiered", "--activation-offload-dir", drives]
    flags += ["--activation-offload-host-budget", "5MiB", "--device-memory-budget", "7MiB"]
    one, two = (limits_of(TrainingCommand.of([script, *flags]), ranks) for ranks in (1, 2))
    assert (one.device_bytes, one.host_bytes) == (7 * MIB, 5 * MIB)
    assert one.ssd_bytes == pytest.approx(2 * two.ssd_bytes, rel=0.1)
    flags += ["--activation-offload-ssd-budget", "3MiB"]
    assert limits_of(TrainingCommand.of([script, *flags]), 1).ssd_bytes == 3 * MIB
    nothing = limits_of(TrainingCommand.of([script]), 1)
    assert nothing == Limits(math.inf, math.inf, math.inf)


class _Forked(ForkedProcess):
    """As `Trainer` uses a process."""

    stdin = None

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


@pytest.mark.slow
def test_the_trainer_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes come from the fork server, which has imported everything once."""

    def start(command: list[str], *, stdout: Any, **more: Any) -> _Forked:
        output = Path(stdout.name)
        started = server().start(command[1:], rank_environment({}), output, output)
        return _Forked(server(), started.pid)

    in_place_of = {name: getattr(subprocess, name) for name in ("PIPE", "DEVNULL", "STDOUT")}
    monkeypatch.setattr(trainer_runs, "subprocess", SimpleNamespace(Popen=start, **in_place_of))
    best, result = tmp_path / "best.txt", tmp_path / "tune.json"
    (tmp_path / "ssd").mkdir()
    own = "--tokens-per-step 64-128 --units off --micro-batch-sizes 1,2 --micro-batches 1,2"
    own += f" --no-turns --steps 2 --seconds 0 --skip-steps 1 --output {best} --json {result}"
    flags = f"{TINY} --activation-offload ssd --activation-offload-dir {tmp_path}/ssd"
    flags += " --activation-offload-min-bytes 1KiB --device-memory-budget 8GiB"
    words = ["tune", *own.split(), "--trainings", str(tmp_path / "trainings"), "--"]
    assert cli.main([*words, str(SCRIPTS["gpt"]), *flags.split()]) == 0
    assert best.read_text().startswith("--micro-batch-size ")
    assert best.read_text() in capsys.readouterr().out
    values = json.loads(result.read_text())
    for one in values["measured"]:  # tensors of a micro-batch grow with its samples, all of them
        size, count = (one["setting"][name] for name in ("micro_batch_size", "micro_batches"))
        # Bits of noise end with a byte of their own, in 8 storages of a micro-batch of any size.
        first_bytes = values["measured"][0]["moved_bytes"] - 8
        assert one["moved_bytes"] == (first_bytes * size + 8) * count
        assert one["tokens"] == size * count * 32 and one["device_bytes"] > 64 * MIB
