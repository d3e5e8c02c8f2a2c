# SPDX-License-Identifier: Apache-2.0
"""Measures the steps of one rank: `StepMeter`. Some of them in detail, for a profile.

The planner puts `step` around every training step. It decides nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.offload.activations.engine import OffloadEngine
from megatron.offload.activations.placement.plan import Plan
from megatron.offload.activations.placement.policy import Placement
from megatron.offload.activations.stats.compute_waits import StepWaits
from megatron.offload.config import OffloadConfig
from megatron.offload.device.clock import Moment
from megatron.offload.device.device import Device
from megatron.offload.errors import ConfigurationError
from megatron.offload.planner.online.drift import MeasuredStep
from megatron.offload.planner.profile.build import Rates, passes_s, profile_of, tier_profiles
from megatron.offload.planner.profile.head_memory import HeadMemory
from megatron.offload.planner.profile.pipeline_schedule import Pass, PipelinePosition
from megatron.offload.planner.profile.profiler import Profiler
from megatron.offload.planner.profile.stage_profile import (
    UNBOUNDED,
    HandsOver,
    StageProfile,
    TierProfile,
    tokens_of,
)
from megatron.offload.stats.memory import PeakMemory
from megatron.offload.tiers.tier import Tier

_REMEMBERED_GAPS = 6
# Of a resident set. A GPU's numbers are those of its allocator, which knows what it has given out.
_SLACK_OF_HOST = 0.15  # docs/results/rok.md, "What the resident set holds"
_LEAST_BUSY_S = 0.1  # of a tier in a step, for its rate to be that step's: less is mostly chance


class StepMeter:
    """Measures time, memory and tiers of a rank's training steps.

    Attributes:
        last: the last step, of those that count and are known: that the device has passed.
        counts: whether the one that has just ended does.
        num_detailed: steps noted in detail since the last profile was made.

    Args:
        config: of the engine.
        engine: counts bytes and waits.
        device: where activations live.
        is_layer_major: the number of micro-batches is among the sizes of a step.
        in_order: whether a step's passes had the order that is planned for: one in another order
            shows nothing of those to come. None: all have.
    """

    def __init__(
        self,
        config: OffloadConfig,
        engine: OffloadEngine,
        device: Device,
        *,
        is_layer_major: bool = False,
        in_order: Callable[[Sequence[Pass]], bool] | None = None,
    ) -> None:
        self._head = HeadMemory(device, self._let_leave, engine.reader.hold_prefetch)
        self.profiler = Profiler(
            device,
            config.min_bytes,
            lambda: engine.waits.number,
            # The resident set of a CPU has too much else in it.
            None if device.is_host or is_layer_major else self._head,
        )
        self.last: MeasuredStep | None = None
        self.counts = False
        self.num_detailed = 0
        self._is_layer_major = is_layer_major
        self._in_order = in_order
        self._moves_inputs = config.recompute_input != "keep"
        self._engine = engine
        self._device = device
        self._peak = PeakMemory(device)
        self._moved: dict[Placement, _Moved] = {}  # by each tier so far
        self._rates: dict[Placement, Rates] = {}  # of the last step
        self._clock = engine.waits.clock
        self._known: list[MeasuredStep] = []  # that the planner has not read
        self._ended: Moment | None = None  # the passes of the last step
        self._left_out_s: list[float] = []  # since then
        self._gaps_s: list[float] = []  # from the end of one step's passes to the next step
        self._detailed_s: list[float] = []  # passes of the steps that the profiler noted
        self._detailed_sizes: dict[str, int] = {}  # of the largest micro-batch in them

    @contextlib.contextmanager
    def step(self, *, detailed: bool) -> Iterator[None]:
        """Measures the passes of a training step, which go on in this context.

        Args:
            detailed: also notes every layer, for `profile`.
        """
        self.pause()
        began = self._clock.now()
        self.profiler.sizes.clear()
        self.profiler.order = None if self._in_order is None else []
        self.counts = False
        if detailed:
            self.profiler.begin_step()
            self._engine.observe(self.profiler)
        self._peak.begin_step()
        well, ended = False, began
        try:
            yield
            ended = self._clock.now()
            well = self._in_order is None or self._in_order(self.profiler.order or ())
        finally:
            self._engine.observe(None)
            if detailed:
                self.profiler.end_step(well=well)
        peak_bytes = self._peak.end_step()
        if well:
            self.counts = True
            seen = _Seen(
                peak_bytes, self._sizes(), self._write_speeds(), self._engine.waits.step, detailed
            )
            if detailed:
                self.num_detailed += 1
                both = self._detailed_sizes, dict(seen.sizes)
                self._detailed_sizes = max(both, key=tokens_of)
            self._clock.tell(began, ended, functools.partial(self._know, seen))
        self._ended, self._left_out_s = self._clock.now(), []

    def _know(self, seen: _Seen, passes_s: float) -> None:
        """The device has passed a step."""
        self.last = self._measured(passes_s, seen)
        self._known.append(self.last)
        if seen.in_detail:
            self._detailed_s.append(passes_s)

    def read(self, *, waits: bool = False) -> list[MeasuredStep]:
        """The steps that have become known since the last call, of those that count.

        Args:
            waits: for the device to pass all that have ended.
        """
        if waits:
            self._clock.wait()
        else:
            self._clock.read()
        known, self._known = self._known, []
        return known

    # What lies between two steps is a part of them: the optimizer's work, and waiting for data.

    def left_out(self) -> contextlib.AbstractContextManager[None]:
        """Around what is no part of a step though it lies between two, such as planning."""
        return self._clock.timed(self._left_out_s.append)

    def pause(self) -> None:
        """Counts no time from now on until the next step."""
        if self._ended is not None:
            self._clock.tell(self._ended, self._clock.now(), self._gap_of(self._left_out_s))
            self._ended = None

    def _gap_of(self, left_out_s: list[float]) -> Callable[[float], None]:
        def hear(seconds: float) -> None:
            gap_s = max(seconds - sum(left_out_s), 0.0)
            self._gaps_s = [*self._gaps_s, gap_s][-_REMEMBERED_GAPS:]

        return hear

    def profile(
        self,
        position: PipelinePosition,
        *,
        recomputes: bool,
        previous: StageProfile | None,
        plan: Plan | None = None,
        hands_over: HandsOver = "layer",
    ) -> StageProfile:
        """Makes the profile of the steps noted in detail, and forgets them.

        Args:
            position: of the stage in its pipeline.
            recomputes: whether its layers may be recomputed.
            previous, plan, hands_over: see `profile_of`.

        Raises:
            ConfigurationError: there was no such step.
        """
        steps, seconds = self.profiler.steps, self._device.seconds_between
        self._clock.wait()
        if not steps:
            raise ConfigurationError(
                "the first steps could not be measured: no step had a backward pass for each of "
                "its forward passes; use --activation-offload ssd, host or tiered"
            )
        fixed_s = self._gap_s
        if position.num_stages == 1:  # else the rest of it is waiting for other stages
            fixed_s += statistics.median(self._detailed_s) - passes_s(steps, seconds)
        profile = profile_of(
            steps,
            position,
            # What the tiers did before they changed no longer counts.
            tier_profiles(self._engine.tiers, self._rates if previous is not None else {}),
            seconds_between=seconds,
            waits_s=self._engine.waits.seconds,
            encodings=self.profiler.encodings,
            step_fixed_s=fixed_s,
            recomputes=recomputes,
            moves_inputs=self._moves_inputs,
            previous=previous,
            plan=plan,
            sizes=self._detailed_sizes,
            inflight_bytes=self._engine.inflight_bytes,
            hands_over=hands_over,
            head_bytes=self._head.num_bytes if previous is None else 0,
            source=f"measured in {len(steps)} step{'' if len(steps) == 1 else 's'}",
        )
        self.forget()
        if self._device.is_host:
            return dataclasses.replace(profile, allocator_slack=_SLACK_OF_HOST)
        return dataclasses.replace(profile, lead_layers=UNBOUNDED)

    @property
    def has_whole_steps(self) -> bool:
        """Whether a step noted in detail had a backward pass for each of its forward passes."""
        return bool(self.profiler.steps)

    def forget(self) -> None:
        """Forgets the steps noted in detail."""
        self.profiler.clear()
        self._engine.waits.forget()
        self.num_detailed = 0
        self._detailed_s.clear()
        self._detailed_sizes = {}

    def tiers(self) -> tuple[TierProfile, ...]:
        """The tiers, as fast as they were in the last step: bytes per second."""
        return tuple(tier_profiles(self._engine.tiers, self._rates))

    @property
    def _gap_s(self) -> float:
        """Without the oldest: in the first one of a run the optimizer makes its state."""
        later_s = self._gaps_s[1:] or self._gaps_s
        return statistics.median(later_s) if later_s else 0.0

    def _let_leave(self) -> None:
        """Waits until what was saved has left."""
        with self._engine.waits.for_room():
            self._engine.wait_for_writes()

    def _waited_s(self, waits: StepWaits | None) -> float | None:
        return None if waits is None else waits.seconds + waits.hook_s

    def _measured(self, passes_s: float, seen: _Seen) -> MeasuredStep:
        return MeasuredStep(
            step_s=passes_s + self._gap_s,
            gap_s=self._gap_s,
            stall_s=self._waited_s(seen.waits),
            peak_bytes=seen.peak_bytes,
            sizes=seen.sizes,
            write_bytes_per_s=seen.write_bytes_per_s,
            in_detail=seen.in_detail,
        )

    def _sizes(self) -> dict[str, int]:
        sizes = dict(self.profiler.sizes)
        if sizes and self._is_layer_major:
            order = self.profiler.order or ()
            sizes["micro_batches"] = len({one.micro_batch for one in order})
        return sizes

    def _write_speeds(self) -> dict[str, float]:
        """Of the tiers that something has reached since the last step."""
        before, tiers = self._moved, self._engine.tiers
        self._moved = {placement: _Moved.by(tier) for placement, tier in tiers.items()}
        since = {
            placement: moved.since(before.get(placement, _Moved()))
            for placement, moved in self._moved.items()
        }
        self._rates = {placement: moved.rates for placement, moved in since.items()}
        return {
            tier.name: tier.write_bytes_per_s
            for tier in self.tiers()
            if since[Placement(tier.name)].written_bytes
        }


class _Seen(NamedTuple):
    """What is known of a step when the host has finished it."""

    peak_bytes: int
    sizes: dict[str, int]
    write_bytes_per_s: dict[str, float]
    waits: StepWaits | None
    in_detail: bool


@dataclass(frozen=True)
class _Moved:
    """What a tier has done, and how long it took. With several drives side by side."""

    written_bytes: int = 0
    write_s: float = 0.0
    read_bytes: int = 0
    read_s: float = 0.0

    @classmethod
    def by(cls, tier: Tier) -> _Moved:
        """Until now."""
        writes, reads = tier.statistics.writes, tier.statistics.reads
        return cls(writes.total_bytes, writes.busy_s, reads.total_bytes, reads.busy_s)

    def since(self, before: _Moved) -> _Moved:
        """The difference."""
        return _Moved(
            self.written_bytes - before.written_bytes,
            self.write_s - before.write_s,
            self.read_bytes - before.read_bytes,
            self.read_s - before.read_s,
        )

    @property
    def rates(self) -> Rates:
        """Bytes a second written and read; None where that was too short to tell."""
        return (
            self.written_bytes / self.write_s if self.write_s >= _LEAST_BUSY_S else None,
            self.read_bytes / self.read_s if self.read_s >= _LEAST_BUSY_S else None,
        )
