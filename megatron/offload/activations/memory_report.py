# SPDX-License-Identifier: Apache-2.0
"""What the peak of a step is made of, in a file: `MemoryReport`.

The engine begins and ends its steps; a few settled ones are sampled and written, a line each. In
all others there is no sampler to call. `megatron-offload report --memory` reads the file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from megatron.offload.activations.saved.cache import TensorCache
from megatron.offload.activations.stats.memory_parts import StepMemory
from megatron.offload.activations.stats.memory_sampler import MemorySampler
from megatron.offload.activations.step_context import StepContext
from megatron.offload.device.device import Device
from megatron.offload.errors import ConfigurationError
from megatron.offload.stats.trace import path_of_rank

logger = logging.getLogger(__name__)

# The first step finds tables that outlive it, in the second the optimizer's state exists.
NUM_UNSETTLED, NUM_STEPS = 2, 3


class MemoryReport:
    """Samples some steps of one rank and writes what it found.

    Args:
        path: of rank 0; `-rank1` and so on is added before the ending for others.
        rank: global rank.
        device: whose memory is sampled.
        cache: knows all records.
        step: gets a sampler while a step is sampled.

    Attributes:
        planned: with `auto`, gives the plan that a step follows and the profile that it was made
            for, as JSON. While it gives None there is no plan, and no step is sampled.

    Raises:
        ConfigurationError: the file cannot be written.
    """

    def __init__(
        self, path: Path, rank: int, device: Device, cache: TensorCache, step: StepContext
    ) -> None:
        self.path = path_of_rank(path, rank)
        self.planned: Callable[[], tuple[str, str] | None] = _no_plan
        self._rank = rank
        self._device = device
        self._cache = cache
        self._step = step
        self._num_steps = 0
        self._num_left = NUM_STEPS
        self._plan = self._profile = ""  # of the step under way
        try:
            self.path.write_text("")
        except OSError as error:
            raise ConfigurationError(
                f"--activation-memory-report {self.path} cannot be written: {error.strerror}; "
                "give a file in a directory that exists and can be written to"
            ) from None

    def begin_step(self) -> None:
        """A step begins. It is sampled if it is settled and has no other observer."""
        self._num_steps += 1
        if not self._num_left or self._num_steps <= NUM_UNSETTLED or self._step.observer:
            return
        planned = self.planned()
        if planned is not None:
            self._plan, self._profile = planned
            sampler = MemorySampler(self._device, self._cache)
            self._step.sampler = self._step.observer = sampler

    def end_step(self) -> None:
        """Writes what was found of the step."""
        sampler, self._step.sampler = self._step.sampler, None
        if sampler is None:
            return
        if self._step.observer is sampler:
            self._step.observer = None
        self._num_left -= 1
        peak_bytes = sampler.end()
        assert sampler.peak is not None
        found = StepMemory(
            rank=self._rank,
            step=self._num_steps,
            peak_bytes=peak_bytes,
            reusable_bytes=sampler.reusable_bytes,
            reserved_bytes=sampler.reserved_bytes,
            peak=sampler.peak,
            moments=tuple(sampler.moments),
            plan=self._plan,
            profile=self._profile,
            replayed_bytes=self._step.statistics.replayed_bytes,
            unreplayed=self._step.statistics.unreplayed_by_operation,
        )
        try:
            with self.path.open("a") as file:
                file.write(found.to_json() + "\n")
        except OSError as error:  # a disk that is full by now is no reason to end a training
            self._num_left = 0
            logger.warning(
                "activation offload: the memory report %s cannot be written: %s; it ends here",
                self.path,
                error.strerror,
            )


def _no_plan() -> tuple[str, str]:
    """Where nothing is planned."""
    return "", ""
