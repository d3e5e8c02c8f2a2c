# SPDX-License-Identifier: Apache-2.0
"""What a trainer's log lines say of its steps: `TrainerFigures`.

The callbacks of trainers tell it where steps begin and end. It measures the peaks and sums up what
the engine counts; it prints nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from megatron.offload.device.open import open_device
from megatron.offload.errors import ConfigurationError
from megatron.offload.sizes import GIB, format_size
from megatron.offload.stats.history import LEFT_ALONE
from megatron.offload.stats.memory import PeakMemory

logger = logging.getLogger(__name__)

# Counters of `StepStatistics` that are logged, each as a mean over optimizer steps.
_MEANS = ("offloaded_bytes", "written_bytes", "read_bytes", "stall_s", "write_wait_s")
# Those of `Planner.metrics`, which are 0 while there is no plan: left out until then.
_OF_AUTO = ("plans", "predicted_peak_bytes", "measured_peak_bytes")


class TrainerFigures:
    """The optimizer steps of a training since its last log line, and all of them together.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory: PeakMemory | None = None
        try:
            self._memory = PeakMemory(open_device(device))
        except (ConfigurationError, OSError) as error:
            logger.warning(
                "activation offload: the peak of memory cannot be read here, so log lines come "
                "without it: %s",
                error,
            )
        self._passes_bytes: int | None = None  # the step's peak up to the end of its backward
        self._sums: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        self._num_steps = 0  # in both of them
        self._last: Mapping[str, int | float] = {}
        self._totals: dict[str, float] = {}  # of the whole training, as what follows
        self._most: dict[str, float] = {}
        self._num_all_steps = 0

    def begin_step(self) -> None:
        """An optimizer step begins: the forward pass of its first micro-batch comes next."""
        self._passes_bytes = None
        if self._memory is not None:
            self._memory.begin_step()

    def end_passes(self) -> None:
        """Its last backward pass has ended; the optimizer has not begun."""
        if self._memory is not None:
            self._passes_bytes = self._memory.end_step()

    def add(self, statistics: Mapping[str, int | float]) -> None:
        """Adds the counters of a micro-batch; empty: nothing is offloaded."""
        self._last = statistics
        names = [*_MEANS, *LEFT_ALONE] if statistics else []
        for name in names:
            self._sums[name] = self._sums.get(name, 0.0) + statistics[name]

    def end_step(self) -> dict[str, int]:
        """The optimizer has stepped.

        Returns:
            The peaks of the step by name, in bytes; empty: memory cannot be read here.
        """
        self._num_steps += 1
        if self._memory is None:
            return {}
        grown = self._memory.end_step() if self._passes_bytes is None else self._passes_bytes
        peaks = {
            "peak_activation_bytes": grown,
            "peak_device_bytes": self._memory.device_bytes(),
        }
        for name, num_bytes in peaks.items():
            self._peaks[name] = max(self._peaks.get(name, 0), num_bytes)
        return peaks

    def take(self) -> dict[str, float]:
        """What a log line says of the steps since the last one; empty if there were none.

        Returns:
            By name, each as `offload/NAME`: traffic and waits as the mean of a step, peaks as the
            largest. Bytes are GiB (2**30 bytes), `NAME_gib`.
        """
        if not self._num_steps:
            return {}
        of_auto = {name: self._last[name] for name in _OF_AUTO if self._last.get(name)}
        if "predicted_peak_bytes" not in of_auto:
            of_auto.pop("measured_peak_bytes", None)
        means = {name: self._sums[name] / self._num_steps for name in _MEANS if name in self._sums}
        found = means | self._peaks | of_auto
        self._settle()
        return {f"offload/{_in_gib(name)}": _value(name, one) for name, one in found.items()}

    def closing(self) -> str:
        """One line for the end of a training: what its steps moved and saved, or why nothing."""
        self._settle()
        if not self._num_all_steps:
            return "activation offload: the training ended before its first step did"
        mean = {name: one / self._num_all_steps for name, one in self._totals.items()}
        parts = []
        if moved := mean.get("offloaded_bytes"):
            waited_s = mean["stall_s"] + mean["write_wait_s"]
            parts.append(
                f"{format_size(moved)} left device memory in each step, which waited "
                f"{waited_s:.3f} s for them"
            )
        elif mean:
            parts.append("nothing left device memory")
        parts += [
            f"peak {name} memory {format_size(self._most[key])}"
            for name in ("activation", "device")
            if (key := f"peak_{name}_bytes") in self._most
        ]
        stayed = {name: mean[name] for name in LEFT_ALONE if mean.get(name)}
        if stayed:
            largest = max(stayed, key=lambda one: stayed[one])
            parts.append(f"{format_size(stayed[largest])} stayed {LEFT_ALONE[largest]}")
        return f"activation offload: {'; '.join(parts)}"

    def _settle(self) -> None:
        """Adds the steps since the last line to those of the whole training."""
        for name, one in self._sums.items():
            self._totals[name] = self._totals.get(name, 0.0) + one
        for name, one in self._peaks.items():
            self._most[name] = max(self._most.get(name, 0), one)
        self._num_all_steps += self._num_steps
        self._sums, self._peaks, self._num_steps = {}, {}, 0


def _in_gib(name: str) -> str:
    return f"{name.removesuffix('_bytes')}_gib" if name.endswith("_bytes") else name


def _value(name: str, value: float) -> float:
    """With four digits: trainers print what they are given."""
    return float(f"{value / GIB if name.endswith('_bytes') else value:.4g}")
