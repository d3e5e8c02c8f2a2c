# SPDX-License-Identifier: Apache-2.0
"""Runs trainings to measure settings, one after the other: `measure`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from megatron.offload.commands.training_runs.run import RunError
from megatron.offload.commands.training_runs.trainer import Steps, Trainer, allocators_of
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
        tokens: of a step.
    """

    start_s: float
    step_s: float
    tokens: float

    def of_others(self, settings: list[Setting], this: Setting, how_long: HowLong) -> float:
        """Seconds that others should take, steps in proportion to their tokens."""
        steps = (self.step_s * one.samples / this.samples for one in settings)
        return sum(self.start_s + how_long.expected_s(step_s) for step_s in steps)


def measure(
    trainer: Trainer,
    setting: Setting,
    how_long: HowLong,
    folder: Path,
    *,
    data_parallel_size: int,
    mode: str,
    both_allocators: bool,
    whole_memory: bool,
    on_steps: Callable[[int], object] = lambda number: None,
) -> tuple[Measurement, Duration]:
    """Runs one training.

    Args:
        trainer: with the flags of the command.
        folder: made for its output.
        mode: of activation offload.
        both_allocators: on a CPU, where offload runs with an allocator of its own.
        whole_memory: a budget is to be kept, for which activations alone say nothing.

    Raises:
        RunError: it failed, or its metrics do not say enough.
    """
    flags = [
        *setting.flags(data_parallel_size),
        *("--train-iters", str(how_long.most_steps)),
        *("--eval-iters", "0", "--log-interval", "1"),
    ]
    began_s = time.monotonic()
    allocator = allocators_of(mode, both=both_allocators)[0]
    steps = trainer.train(
        setting.name, flags, allocator, folder, on_steps=on_steps, enough=how_long.is_enough
    )
    if len(steps) <= how_long.skip_steps:
        raise RunError(f"{setting.name} ended after {len(steps)} steps, which are too few")
    measurement = measurement_of(
        setting, steps, how_long.skip_steps, mode=mode, whole_memory=whole_memory
    )
    in_steps_s = sum(step["step_time_s"] for step in steps)
    start_s = max(time.monotonic() - began_s - in_steps_s, 0.0)
    return measurement, Duration(start_s, measurement.step_s, measurement.tokens)


def measurement_of(
    setting: Setting, steps: Steps, skip_steps: int, *, mode: str, whole_memory: bool
) -> Measurement:
    """What a training's metrics say; see `measure`.

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
        step_s=median(step["step_time_s"] for step in counted),
        device_bytes=max(step[name] for step in steps),
        moved_bytes=middle("offloaded_bytes"),
        host_share=host_share,
        tokens=round(median(step["tokens_per_s"] * step["step_time_s"] for step in counted)),
    )
