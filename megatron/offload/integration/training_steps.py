# SPDX-License-Identifier: Apache-2.0
"""What goes around each step of a training, the same for every integration: `TrainingSteps`.

An integration says where a step begins and ends. Here the planner measures and decides, the
timeline is drawn, and what the steps moved is remembered. What happens inside of a step is the
integration's own.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from megatron.offload.activations.engine import OffloadEngine
from megatron.offload.activations.placement.plan_policy import PlannedPolicy
from megatron.offload.activations.placement.policy import Placement, Policy
from megatron.offload.activations.stats.standstill import Standstill
from megatron.offload.config import OffloadConfig
from megatron.offload.device.device import Device
from megatron.offload.planner.online.consensus import RankConsensus
from megatron.offload.planner.online.planner import Planner
from megatron.offload.planner.online.shared_memory import SharesMemory
from megatron.offload.planner.online.stage import Stage
from megatron.offload.planner.profile.pass_trace import StepTrace
from megatron.offload.planner.profile.profiler import Profiler
from megatron.offload.stats.endurance import Endurance
from megatron.offload.stats.history import StepHistory
from megatron.offload.tiers.wear import WEAR

logger = logging.getLogger(__name__)


class TrainingSteps:
    """An engine, and what measures, plans and remembers the steps that it takes part in.

    Attributes:
        engine: opened here, closed by `close`.
        planner: with `auto`, unless a policy was given.
        profiler: to be told of passes and layers; None: nothing measures them.

    Args:
        config: with offload enabled.
        device: where activations live.
        rank: global rank.
        num_local_ranks: ranks on this machine, which share its memory and its drives.
        reserve_bytes: SSD space to allocate at once.
        policy: chooses placements; default: what `config` says.
        planned: what the planner has to know: the ranks that plan together and the stage. Called
            with `auto` only.
        run_directory: with `auto`, what was measured is written there.
        beside: with `auto`, what else takes memory that the planner divides.

    Raises:
        ConfigurationError: a directory, a budget, the device or the plan's file cannot work.
    """

    def __init__(
        self,
        config: OffloadConfig,
        device: Device,
        *,
        rank: int,
        num_local_ranks: int,
        reserve_bytes: int = 0,
        policy: Policy | None = None,
        planned: Callable[[], tuple[RankConsensus, Stage]],
        run_directory: Path | None = None,
        beside: SharesMemory | None = None,
    ) -> None:
        followed = None
        if config.plans and policy is None:
            policy = followed = PlannedPolicy(config.min_bytes, Placement(config.safe_mode))
        self.engine = OffloadEngine(
            config,
            device,
            rank=rank,
            num_local_ranks=num_local_ranks,
            reserve_bytes=reserve_bytes,
            policy=policy,
        )
        self.planner: Planner | None = None
        self.profiler: Profiler | None = None
        self._trace: StepTrace | None = None
        try:
            if followed is not None:
                self.planner = Planner(
                    config,
                    self.engine,
                    device,
                    followed,
                    *planned(),
                    directory=run_directory,
                    beside=beside,
                )
                self.profiler = self.planner.meter.profiler
                if self.engine.memory_report is not None:
                    self.engine.memory_report.planned = self.planner.explained
            if self.engine.tracer is not None:
                self.profiler = self.profiler or Profiler(device, config.min_bytes, lambda: 0)
                self._trace = StepTrace(
                    self.engine.tracer, self.profiler, device, self.engine.waits
                )
        except BaseException:
            self.engine.close()
            raise
        # One rank of each machine speaks for its drives.
        speaks = rank % num_local_ranks == 0
        rated_bytes = config.drive_endurance_bytes if speaks else None
        self._history = StepHistory(Endurance(rated_bytes, num_local_ranks))
        self._drive_written_bytes = WEAR.written()
        self._ended_s = time.monotonic()
        self._standstill: Standstill | None = None
        if speaks and not config.plans:
            what = "compute" if device.is_host else "the device"
            self._standstill = Standstill(self.engine.waits, what)
        # A user who offloads on a CPU tries it out, or has no choice.
        self._standstill_level = logging.INFO if device.is_host else logging.WARNING

    @contextlib.contextmanager
    def step(self, stationary: Iterable[torch.Tensor]) -> Iterator[None]:
        """Around the passes of a training step, forward and backward. Call `decide` after it.

        Args:
            stationary: tensors that never move. Asked for in each step: optimizers re-point
                parameters into flat buffers of their own.
        """
        self._look_at_last()
        stationary = list(stationary)
        self.engine.exclude(stationary)
        self.engine.note_weights(stationary)
        try:
            measured = contextlib.nullcontext() if self.planner is None else self.planner.measure()
            traced = contextlib.nullcontext() if self._trace is None else self._trace.step()
            with measured, self.engine.step(), traced:
                yield
        finally:
            self._history.add(self.engine.statistics)
            self._count_drive_writes()

    def _look_at_last(self) -> None:
        """Before a step: warns if compute stood still in the first ones."""
        if self._standstill is None:
            return
        self._standstill.begin_step()
        sentence = self._standstill.sentence()
        if sentence is not None:
            logger.log(self._standstill_level, sentence)

    def decide(self) -> None:
        """After a step: with `auto`, the planner may change what is placed where.

        Raises: as `Planner.decide`.
        """
        if self.planner is not None:
            self.planner.decide()

    def pause(self) -> None:
        """Says that what follows until the next step is no training: evaluation, a checkpoint.

        Otherwise the planner counts all time between two steps as a part of them.
        """
        if self.planner is not None:
            self.planner.meter.pause()
        if self._standstill is not None:
            self._standstill.pause()

    def _count_drive_writes(self) -> None:
        before, before_s = self._drive_written_bytes, self._ended_s
        self._drive_written_bytes, self._ended_s = WEAR.written(), time.monotonic()
        self._history.endurance.add_step(WEAR.since(before), self._ended_s - before_s)
        warning = self._history.endurance.warning()
        if warning is not None:
            logger.warning(warning)

    @property
    def statistics(self) -> dict[str, int | float]:
        """Counters of the last step, see `StepStatistics`; empty before the first.

        With `auto` also what was predicted and what was measured, see `Planner.metrics`.
        """
        self.engine.waits.clock.read()
        planned = self.planner.metrics if self.planner is not None else {}
        return {**self._history.last(), **planned}

    def summary(self) -> str:
        """A few lines for the end of a run; empty if there was no step."""
        self.engine.waits.clock.wait()
        return self._history.summary(self.engine.where)

    def close(self) -> None:
        """Waits for transfers and gives memory and disk space back."""
        self.engine.close()
