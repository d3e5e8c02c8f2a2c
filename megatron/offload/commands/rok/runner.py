# SPDX-License-Identifier: Apache-2.0
"""Runs the trainings of the curve, round after round: `CurveRunner`.

The first round finds out what the others only repeat: budgets need the peaks of keeping and of
recomputing everything, a suffix needs the profile that `auto` measures. Later rounds run all
strategies in an order that has moved on.

Note [Turns]
A machine that others use as well is faster in one minute than in the next, and trainings that run
one after the other are measured in different minutes. So they may take turns: each runs alone until
it has settled and then waits, and once all wait they take the steps that count in turn, one each.
Steps of one turn are compared. All of them are in memory at once.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

from megatron.offload.activations.placement.plan import Plan
from megatron.offload.activations.placement.plan_file import save_plans
from megatron.offload.activations.placement.policy import Placement
from megatron.offload.commands.rok.strategy import Strategy, budgets_between, fixed_strategies
from megatron.offload.commands.training_runs.run import (
    Run,
    RunError,
    Variant,
    order_of_round,
    settled_steps,
)
from megatron.offload.commands.training_runs.trainer import Trainer, Training, check_room
from megatron.offload.planner.profile.stage_profile import StageProfile
from megatron.offload.planner.solver.baselines import first_moved, suffix_plan, suffix_within
from megatron.offload.sizes import format_size

PROFILE_NAME = "activation-profile-stage0.json"
_MORE_STEPS = 30  # than are wanted: `auto` may plan several times before it settles
_MORE_TURNS = 30  # if it plans again in them
_BEFORE_TURNS = 3  # settled steps of each training: its peak is known then
_BEFORE_TURNS_OF_AUTO = 10  # it looks at so many before it plans again

# Is told about each training: the strategy, its round, how many steps there are.
Watcher = Callable[[Strategy, int, int], object]


class CurveRunner:
    """Runs all trainings of `megatron-offload rok`, round by round.

    Args:
        args: see `arguments`.
        trainer: with the flags that all of them share.
        both_allocators: strategies without offload run with either.
        watch: is told about each training.
        watch_turn: is told about each turn: the round, how many turns were taken in it.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        trainer: Trainer,
        *,
        both_allocators: bool,
        watch: Watcher = lambda strategy, round_, steps: None,
        watch_turn: Callable[[int, int], object] = lambda round_, turns: None,
    ) -> None:
        self.runs: list[Run] = []
        self.failures: dict[Strategy, str] = {}  # why one could not be measured
        # By micro-batch size: that of the first plan, after a round that of the last.
        self.profiles: dict[int, StageProfile] = {}
        self.rule: dict[int, int] = {}  # layers that SSDTrain's rule moves, likewise
        self._args = args
        self._trainer = trainer
        self._both_allocators = both_allocators
        self._watch = watch
        self._watch_turn = watch_turn
        self._strategies: dict[int, list[Strategy]] = {}
        self._waiting: dict[Strategy, Training] = {}  # for the turns of the round

    @property
    def strategies(self) -> list[Strategy]:
        """Those found so far, in the order of tables."""
        return [one for own in self._strategies.values() for one in own]

    @property
    def most_trainings(self) -> int:
        """The most trainings that a round can take, for a progress bar."""
        args = self._args
        budgets = args.budgets if isinstance(args.budgets, int) else len(args.budgets)
        fixed = fixed_strategies(args.strategies, 1, both_allocators=self._both_allocators)
        number = len(fixed)
        number += budgets if "auto" in args.strategies else 0
        number += budgets + 1 if "suffix" in args.strategies else 0
        return number * len(args.micro_batch_sizes)

    def rounds(self) -> Iterator[int]:
        """Runs a round at a time; its number.

        Raises:
            RunError: a strategy without a budget and a plan could not be measured.
        """
        for round_ in range(self._args.rounds):
            for size in self._args.micro_batch_sizes:
                try:
                    if round_ == 0:
                        self._first_round(size)
                    else:
                        own = self._strategies[size]
                        stride = max(len(own) // self._args.rounds, 1)
                        for strategy in order_of_round(own, round_ * stride):
                            self._train(strategy, round_)
                    self._take_turns(round_)
                    self._load_last_profile(size, round_)
                finally:
                    while self._waiting:
                        self._waiting.popitem()[1].end()
            yield round_

    def _first_round(self, size: int) -> None:
        args = self._args
        names = args.strategies
        own = self._strategies[size] = fixed_strategies(
            names, size, both_allocators=self._both_allocators
        )
        for strategy in own:
            self._train(strategy, 0)
        if "auto" not in names:
            return
        allocator = "offload" if self._both_allocators else "default"
        planned = [Strategy("auto", allocator, size, one) for one in self._budgets(size)]
        for strategy in planned:
            self._train(strategy, 0)
        own += planned
        if "suffix" in names and size in self.profiles:
            suffixes = self._suffixes(self.profiles[size], planned)
            for strategy in suffixes:
                self._train(strategy, 0)
            own += suffixes

    def _budgets(self, size: int) -> list[int]:
        args = self._args
        if not isinstance(args.budgets, int):
            return list(args.budgets)
        low, high = (self._peak(name, size) for name in ("recompute", "off"))
        if high <= low:
            raise RunError(
                f"keeping everything took {format_size(high)}, recomputing everything "
                f"{format_size(low)}: there is no budget between them; take a larger model, or "
                "give --budgets as sizes"
            )
        return budgets_between(low, high, args.budgets)

    def _peak(self, name: str, size: int) -> float:
        """The smaller one where there are two allocators."""
        skip = self._args.skip_steps
        peaks: dict[str, list[int]] = {}
        for run in self.runs:
            strategy = run.variant
            assert isinstance(strategy, Strategy)
            if strategy.placement == name and strategy.micro_batch_size == size:
                peaks.setdefault(strategy.allocator, []).append(run.peak_bytes(skip))
        return min(median(own) for own in peaks.values())

    def _suffixes(self, profile: StageProfile, planned: Sequence[Strategy]) -> list[Strategy]:
        """By SSDTrain's rule and for each budget; not those that other strategies are."""
        size, allocator = planned[0].micro_batch_size, planned[0].allocator
        rule = num_moved(suffix_plan(profile))
        self.rule[size] = rule
        numbers = {rule}
        for one in planned:
            assert one.budget_bytes is not None
            numbers.add(num_moved(suffix_within(profile, one.budget_bytes)))
        found = []
        for number in sorted(numbers):
            if 0 < number < len(profile.layers):
                is_rule = number == rule
                strategy = Strategy("suffix", allocator, size, None, number, is_rule)
                save_plans(self._plan_file(strategy), [first_moved(profile, number)])
                found.append(strategy)
        return found

    def _plan_file(self, strategy: Strategy) -> Path:
        folder: Path = self._args.output
        return folder / "plans" / f"{strategy.name}.json"

    def _folder(self, strategy: Strategy, round_: int) -> Path:
        folder: Path = self._args.output
        return folder / "trainings" / f"round{round_ + 1}-{strategy.name}"

    def _train(self, strategy: Strategy, round_: int) -> None:
        """To its end; or, where trainings take turns, until it has settled."""
        args = self._args
        folder = self._folder(strategy, round_)
        enough, in_turns = args.steps, 0
        if args.turns:
            enough = _BEFORE_TURNS_OF_AUTO if strategy.placement == "auto" else _BEFORE_TURNS
            in_turns = args.steps + _MORE_TURNS
        most_alone = args.skip_steps + enough + _MORE_STEPS
        check_room(self._waiting.values(), ", or fewer strategies or budgets")
        with self._noting_failure(strategy), contextlib.ExitStack() as ends:
            training = ends.enter_context(
                self._trainer.start(
                    _title(strategy, round_),
                    [
                        *strategy.flags(
                            self._plan_file(strategy), replay=args.activation_replay == "on"
                        ),
                        *("--train-iters", str(most_alone + in_turns)),
                    ],
                    strategy.allocator,
                    folder,
                    in_turns=args.turns,
                )
            )
            training.run(
                on_steps=lambda number: self._watch(strategy, round_, number),
                enough=lambda steps: (
                    len(settled_steps(steps, args.skip_steps)) >= enough or len(steps) >= most_alone
                ),
            )
            self._note(Run(strategy, round_, training.steps))
            if args.turns:
                self._waiting[strategy] = training
                ends.pop_all()
        profile = folder / PROFILE_NAME
        if profile.exists():
            self.profiles.setdefault(strategy.micro_batch_size, StageProfile.load(profile))

    def _load_last_profile(self, size: int, round_: int) -> None:
        """Of the budget in the middle: a run at either end has seen little of the other."""
        files = [
            self._folder(one, round_) / PROFILE_NAME
            for one in self._strategies[size]
            if one.placement == "auto"
        ]
        found = [file for file in files if file.exists()]
        if found:
            self.profiles[size] = StageProfile.load(found[len(found) // 2])

    def _take_turns(self, round_: int) -> None:
        """See Note [Turns]. Until enough steps of each count; `auto` may plan again."""
        first_turns = {one: len(training.steps) for one, training in self._waiting.items()}
        runs: dict[Strategy, Run] = {}
        for turn in range(self._args.steps + _MORE_TURNS if self._waiting else 0):
            for strategy in order_of_round(list(self._waiting), turn):
                training = self._waiting[strategy]
                with self._noting_failure(strategy):
                    training.step()
                    steps, first = training.steps, first_turns[strategy]
                    runs[strategy] = Run(strategy, round_, steps, first)
            self._watch_turn(round_, turn + 1)
            skip = self._args.skip_steps
            if all(len(run.settled_steps(skip)) >= self._args.steps for run in runs.values()):
                break
        for strategy, run in runs.items():
            self.runs = [one for one in self.runs if (one.variant, one.round) != (strategy, round_)]
            with self._noting_failure(strategy):
                self._note(run)

    def _note(self, run: Run) -> None:
        if not run.settled_steps(self._args.skip_steps):
            name = _title(run.variant, run.round)
            raise RunError(f"{name} had not settled after {len(run.steps)} steps")
        self.runs.append(run)

    @contextlib.contextmanager
    def _noting_failure(self, strategy: Strategy) -> Iterator[None]:
        """Raises RunError on, unless the strategy is one that may not work here."""
        try:
            yield
        except RunError as error:
            if strategy.placement not in ("auto", "suffix"):
                raise
            self.failures.setdefault(strategy, _reason(error))
            if strategy in self._waiting:
                self._waiting.pop(strategy).end()


def _title(strategy: Variant, round_: int) -> str:
    return f"{strategy.name} in round {round_ + 1}"


def _reason(error: RunError) -> str:
    """The line that says why: the trainer's own, or the last one. torchrun's report ends later."""
    lines = str(error).splitlines()
    own = [line for line in lines[1:] if ": error: " in line]
    return (own or lines)[-1].strip().removeprefix("traceback : ")


def num_moved(plan: Plan) -> int:
    """Layers of which something goes to SSDs."""
    return len({(one.chunk, one.layer) for one in plan.parts if one.placement is Placement.SSD})
