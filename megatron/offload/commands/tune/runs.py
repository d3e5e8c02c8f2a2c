# SPDX-License-Identifier: Apache-2.0
"""Runs trainings to measure settings, one after the other or in turns: `Runs`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from megatron.offload.commands.training_runs.run import RunError, order_of_round
from megatron.offload.commands.training_runs.trainer import (
    Steps,
    Trainer,
    Training,
    allocators_of,
    check_room,
)
from megatron.offload.commands.tune.setting import Setting
from megatron.offload.commands.tune.step_model import Measurement
from megatron.offload.sizes import format_size

_MOST_STEPS = 200  # that count, of a training with short ones


@dataclass(frozen=True)
class HowLong:
    """How long each training is.

    Attributes:
        skip_steps: that do not count for seconds: the first.
        steps: at least so many that do.
        seconds: and as many as take so long.
    """

    skip_steps: int
    steps: int
    seconds: float

    @property
    def most_steps(self) -> int:
        """A training ends by itself after these."""
        return self.skip_steps + max(self.steps, _MOST_STEPS)

    def is_enough(self, steps: Steps) -> bool:
        """Whether a training has shown enough."""
        counted = steps[self.skip_steps :]
        return len(counted) >= self.steps and (
            sum(step["step_time_s"] for step in counted) >= self.seconds
        )

    def expected_s(self, step_s: float) -> float:
        """Seconds of all steps of a training whose steps take so long."""
        return max(self.steps * step_s, self.seconds) + self.skip_steps * step_s


@dataclass(frozen=True)
class Duration:
    """How long a training took, to say how long others will.

    Attributes:
        start_s: until its first step began, and after its last.
        step_s: of a step.
    """

    start_s: float
    step_s: float

    def of_others(self, settings: Sequence[Setting], this: Setting, how_long: HowLong) -> float:
        """Seconds that others should take, steps in proportion to their tokens."""
        steps = (self.step_s * one.samples / this.samples for one in settings)
        return sum(self.start_s + how_long.expected_s(step_s) for step_s in steps)


class Runs:
    """Runs trainings with one setting each.

    Args:
        trainer: with the flags of the command.
        how_long: each is.
        folder: for their output.
        data_parallel_size: copies of the model.
        mode: of activation offload.
        both_allocators: on a CPU, where offload runs with an allocator of its own.
        whole_memory: a budget is to be kept, for which activations alone say nothing.
        watch: is told about each step: the setting, how many there are.
    """

    def __init__(
        self,
        trainer: Trainer,
        how_long: HowLong,
        folder: Path,
        *,
        data_parallel_size: int,
        mode: str,
        both_allocators: bool,
        whole_memory: bool,
        watch: Callable[[Setting, int], object] = lambda setting, steps: None,
    ) -> None:
        self.first: tuple[Setting, Duration] | None = None  # to say how long others take
        self._trainer = trainer
        self._how_long = how_long
        self._folder = folder
        self._data_parallel_size = data_parallel_size
        self._mode = mode
        self._allocator = allocators_of(mode, both=both_allocators)[0]
        self._whole_memory = whole_memory
        self._watch = watch
        self._waiting: dict[Setting, Training] = {}

    def measure(self, setting: Setting) -> Measurement:
        """Runs one training.

        Raises:
            RunError: it failed, or its metrics do not say enough.
        """
        began_s = time.monotonic()
        with self._start(setting, in_turns=False) as training:
            training.run(lambda number: self._watch(setting, number), self._how_long.is_enough)
        return self._measured(setting, training, began_s)

    def settle(self, setting: Setting) -> None:
        """Starts a training that is to take turns, and waits for its first steps.

        Raises:
            RunError: it failed, or another one beside those that wait would not fit.
        """
        check_room(self._waiting.values(), "")
        began_s = time.monotonic()
        training = self._start(setting, in_turns=True)
        self._waiting[setting] = training
        training.run(
            lambda number: self._watch(setting, number),
            lambda steps: len(steps) > self._how_long.skip_steps,
        )
        self._measured(setting, training, began_s)

    def take_turns(self) -> dict[Setting, Measurement]:
        """All that have settled take a step each, again and again, until each has shown enough.

        So a machine that is slower for a while slows all of them.

        Raises:
            RunError: one failed.
        """
        for turn in range(self._how_long.most_steps):
            if all(self._how_long.is_enough(one.steps) for one in self._waiting.values()):
                break
            for setting in order_of_round(list(self._waiting), turn):
                self._waiting[setting].step()
                self._watch(setting, len(self._waiting[setting].steps))
        found = {one: self._measured(one, t, 0.0) for one, t in self._waiting.items()}
        self.end()
        return found

    def end(self) -> None:
        """Ends the trainings that wait."""
        while self._waiting:
            self._waiting.popitem()[1].end()

    def _start(self, setting: Setting, *, in_turns: bool) -> Training:
        flags = [
            *setting.flags(self._data_parallel_size),
            *("--train-iters", str(self._how_long.most_steps + self._how_long.skip_steps)),
            *("--eval-iters", "0", "--log-interval", "1"),
        ]
        folder = self._folder / setting.name
        return self._trainer.start(setting.name, flags, self._allocator, folder, in_turns=in_turns)

    def _measured(self, setting: Setting, training: Training, began_s: float) -> Measurement:
        steps, skip = training.steps, self._how_long.skip_steps
        if len(steps) <= skip:
            raise RunError(f"{setting.name} ended after {len(steps)} steps, which are too few")
        found = measurement_of(
            setting, steps, skip, mode=self._mode, whole_memory=self._whole_memory
        )
        if self.first is None:
            in_steps_s = sum(step["step_time_s"] for step in steps)
            start_s = max(time.monotonic() - began_s - in_steps_s, 0.0)
            self.first = setting, Duration(start_s, found.step_s)
        return found


def undisturbed(seconds: Sequence[float]) -> float:
    """The mean of the faster half: other work of the machine, in the slower half, is no part of a
    step."""
    faster = sorted(seconds)[: -(-len(seconds) // 2)]
    return sum(faster) / len(faster)


def measurement_of(
    setting: Setting, steps: Steps, skip_steps: int, *, mode: str, whole_memory: bool
) -> Measurement:
    """What a training's metrics say; see `Runs`.

    Raises:
        RunError: not enough.
    """
    name = "peak_device_bytes" if "peak_device_bytes" in steps[0] else "peak_activation_bytes"
    if name not in steps[0] or (whole_memory and name != "peak_device_bytes"):
        raise RunError(
            f"the metrics of {setting.name} have no peak_device_bytes, the device memory of a "
            "whole step, which a --device-memory-budget is compared with; have the script write "
            "it, or drop the budget"
        )
    counted = steps[skip_steps:]

    def middle(counter: str) -> float:
        return median(step.get("offload", {}).get(counter, 0) for step in counted)

    rejected = max(step.get("offload", {}).get("rejected_bytes", 0) for step in steps)
    if rejected:
        raise RunError(
            f"in {setting.name} {format_size(rejected)} of a step found no room on the tiers and "
            "stayed in device memory, so memory cannot be predicted; give more room with "
            "--activation-offload-host-budget or --activation-offload-dir, or smaller "
            "--micro-batch-sizes"
        )
    host_share = float(mode == "host")
    if mode == "tiered":
        in_host = middle("host_written_bytes")
        host_share = in_host / ((in_host + middle("written_bytes")) or 1.0)
    return Measurement(
        setting,
        step_s=undisturbed([step["step_time_s"] for step in counted]),
        device_bytes=max(step[name] for step in steps),
        moved_bytes=middle("offloaded_bytes"),
        host_share=host_share,
        tokens=round(median(step["tokens_per_s"] * step["step_time_s"] for step in counted)),
    )
