# SPDX-License-Identifier: Apache-2.0
"""Trainings that are measured: which of their steps count, and when they are ended."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.offload.commands.training_runs.run import (
    Run,
    RunError,
    Variant,
    paired_ratio,
    settled_steps,
)
from megatron.offload.commands.training_runs.trainer import Trainer, allocators_of
from tests.support.processes import finish, start_python


def step(
    number: int, plans: int | None = None, time_s: float = 1.0, peak: int = 1
) -> dict[str, Any]:
    offload = {} if plans is None else {"offload": {"plans": plans}}
    return {
        "step": number,
        "step_time_s": time_s,
        "tokens_per_s": 10 / time_s,
        "peak_activation_bytes_rank0": peak,
        **offload,
    }


def test_without_a_plan_all_steps_but_the_first_count() -> None:
    steps = [step(n) for n in range(1, 6)]
    assert [one["step"] for one in settled_steps(steps, 2)] == [3, 4, 5]
    assert settled_steps([], 2) == []


def test_with_auto_only_steps_that_followed_the_last_plan_count() -> None:
    # Three are measured, the first plan lasts for four, the second is made after step 8.
    plans = [0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2]
    steps = [step(n, one) for n, one in enumerate(plans, start=1)]
    assert [one["step"] for one in settled_steps(steps, 2)] == [11, 12]
    assert settled_steps(steps[:2], 0) == []
    assert settled_steps(steps[:9], 2) == []


def test_figures_of_a_run_are_those_of_steps_that_count() -> None:
    before = [step(n, 0, time_s=9.0, peak=99) for n in range(3)]
    after = [
        step(n, 1, time_s=time_s, peak=n) for n, time_s in enumerate([8.0, 7.0, 2.0, 1.0, 4.0])
    ]
    run = Run(Variant("auto", "offload"), 0, [*before, *after])
    assert run.step_time_s(skip=1) == 2.0
    assert run.tokens_per_s(skip=1) == 5.0
    assert Run(run.variant, 0, run.steps[:-1]).tokens_per_s(skip=1) == 10 / 1.5
    assert run.peak_bytes(skip=1) == 4


def test_steps_of_one_turn_are_compared() -> None:
    """The machine is slow in the second turn, and one training needed two steps more before it."""
    one = [step(n, time_s=time_s) for n, time_s in enumerate([9.0, 9.0, 9.0, 2.0, 6.0, 2.0], 1)]
    other = [step(n, time_s=time_s) for n, time_s in enumerate([9.0, 1.0, 3.0, 1.0], 1)]
    runs = Run(Variant("a", "offload"), 0, one, 3), Run(Variant("b", "offload"), 0, other, 1)
    assert paired_ratio([runs[0]], [runs[1]], skip=1) == 2.0
    assert runs[0].times_by_turn(skip=1) == {0: 2.0, 1: 6.0, 2: 2.0}
    assert runs[0].step_time_s(skip=1) == 2.0
    # What has planned again in the turns is compared from then on.
    late = [step(n, plans, time_s=n) for n, plans in enumerate([1, 1, 1, 2, 2], 1)]
    assert Run(Variant("auto", "offload"), 0, late, 2).times_by_turn(skip=0) == {2: 5}


def test_of_several_steps_of_a_turn_the_last_counts() -> None:
    steps = [step(n, time_s=n, peak=n % 2 * 9) for n in range(1, 8)]
    run = Run(Variant("a", "offload"), 0, steps, 3, steps_a_turn=2)
    assert run.times_by_turn(skip=1) == {0: 5.0, 1: 7.0}
    assert run.step_time_s(skip=1) == 6.0
    assert Run(run.variant, 0, steps[:-1], 2, 2).times_by_turn(skip=1) == {0: 4.0, 1: 6.0}
    assert Run(run.variant, 0, steps[:-1], 2, 2).peak_bytes(skip=1) == 0


def test_without_turns_rounds_are_compared() -> None:
    runs = [Run(Variant("a", "offload"), n, [step(1, time_s=2.0 + n)]) for n in range(2)]
    base = [Run(Variant("b", "offload"), n, [step(1, time_s=1.0 + n)]) for n in range(1, 3)]
    assert paired_ratio(runs, base, skip=0) == 1.5
    assert paired_ratio(runs, base[1:], skip=0) is None


def test_what_runs_with_which_allocator() -> None:
    assert allocators_of("selective", both=True) == ["default", "offload"]
    assert allocators_of("auto", both=True) == ["offload"]
    assert allocators_of("off", both=False) == allocators_of("ssd", both=False) == ["default"]


# Writes some steps, and then does nothing for a long time.
IDLE = """
import json, sys, time
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open(flags["--metrics-file"], "w") as file:
    for number in range(int(flags["--steps"])):
        print(json.dumps({"step": number + 1}), file=file, flush=True)
    time.sleep(60)
"""


def make_trainer(tmp_path: Path, script: str, **more: Any) -> Trainer:
    file = tmp_path / "trainer.py"
    file.write_text(script)
    return Trainer(file, [], tmp_path, **more)


def test_a_training_is_ended_once_it_has_shown_enough(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, IDLE)
    told: list[int] = []
    began = time.monotonic()
    steps = trainer.train(
        "this one",
        ["--steps", "3"],
        "default",
        tmp_path / "run",
        on_steps=told.append,
        enough=lambda steps: len(steps) == 3,
    )
    assert [one["step"] for one in steps] == [1, 2, 3] and told[-1] == 3
    assert time.monotonic() - began < 50  # it would have slept for longer


def test_a_training_that_does_nothing_has_failed(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, IDLE, patience_s=0.1)
    with pytest.raises(RunError, match=r"this one did nothing for 0 s after 0 steps"):
        trainer.train("this one", ["--steps", "0"], "default", tmp_path / "run")


def test_a_training_that_fails_is_quoted(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "print('no such thing')\nraise SystemExit(3)")
    with pytest.raises(RunError, match=r"exit code 3 after 0 steps(.|\n)*no such thing"):
        trainer.train("this one", [], "default", tmp_path / "run")
    assert str(Path(sys.executable)) in (tmp_path / "run" / "output.log").read_text()


# Takes a step for each line that it reads.
WAITING = """
import json, sys
with open(sys.argv[sys.argv.index("--metrics-file") + 1], "w") as file:
    for number, line in enumerate(sys.stdin, 1):
        if number == 4:
            sys.exit("broken")
        print(json.dumps({"step": number}), file=file, flush=True)
"""


def test_a_training_in_turns_takes_a_step_when_it_is_told_to(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, WAITING)
    with trainer.start("this one", [], "default", tmp_path / "run", in_turns=True) as training:
        assert training.step() and len(training.steps) == 1
        stat, deadline = Path(f"/proc/{training._process.pid}/stat"), time.monotonic() + 10
        while stat.read_text().split()[2] != "T":  # no processor time while others have their turn
            assert time.monotonic() < deadline, "it is not stopped"
            time.sleep(0.01)
        training.run(enough=lambda steps: len(steps) == 3)
        assert len(training.steps) == 3
        with pytest.raises(RunError, match=r"exit code 1 after 3 steps(.|\n)*broken"):
            training.step()


def test_a_training_that_waits_for_its_turn_can_be_ended(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, WAITING)
    training = trainer.start("this one", [], "default", tmp_path / "run", in_turns=True)
    training.step()
    training.end()
    assert training._process.returncode is not None and training.resident_bytes == 0


def test_a_training_that_waits_for_its_turn_ends_with_whoever_started_it(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(WAITING)
    dispatcher = start_python(
        """
        import sys, time
        from pathlib import Path
        from megatron.offload.commands.training_runs.trainer import Trainer

        folder = Path(sys.argv[1])
        trainer = Trainer(folder / "trainer.py", [], folder)
        training = trainer.start("this one", [], "default", folder / "run", in_turns=True)
        training.step()
        print(training._process.pid, flush=True)
        time.sleep(60)
        """,
        tmp_path,
    )
    assert dispatcher.stdout is not None
    status = Path(f"/proc/{int(dispatcher.stdout.readline())}/status")
    dispatcher.kill()
    finish(dispatcher)
    deadline = time.monotonic() + 10
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.01)
