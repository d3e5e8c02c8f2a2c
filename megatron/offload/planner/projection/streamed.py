# SPDX-License-Identifier: Apache-2.0
"""Projected steps whose parameters wait in host memory or on SSDs: `StreamedProjection`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.offload.layer_major.units import units_of
from megatron.offload.planner.profile.stage_profile import LayerProfile, StageProfile
from megatron.offload.planner.projection.projection import GRADIENT_BYTES, Projection, project
from megatron.offload.planner.projection.states import ProjectedStates
from megatron.offload.planner.simulator.streamed_step import (
    GRADIENTS,
    KEPT,
    PARAMETERS,
    StreamedCost,
    StreamedStep,
    UnitWork,
    simulate,
)


@dataclass(frozen=True)
class StreamedProjection:
    """A run of one pipeline stage whose layers' parameters stream.

    Attributes:
        of: model, division and hardware, without them.
        parameters_on: the tier's name, `host` or `ssd`.
        num_units: of layer-major steps; None, and in other steps: each layer is one.
        live_units: in memory at a time.
        recomputes: layers keep their inputs alone.
        activations_on: the tier of these, or of all that layers keep; None: device memory.
        boundary_on: the tier of what waits between units; None: device memory.
        divided: parameters and gradients are divided among data-parallel ranks, as ZeRO-3 does.
        gradients_leave: those of layers wait there too, in layer-major steps.
    """

    of: Projection
    parameters_on: str
    num_units: int | None = None
    live_units: int = 2
    recomputes: bool = True
    activations_on: str | None = None
    boundary_on: str | None = None
    divided: bool = False
    gradients_leave: bool = False

    def cost(self, micro_batches: int, *, layer_major: bool) -> ScheduleCost:
        """What a step of so many micro-batches costs."""
        of, step = self.of, self.step(micro_batches, layer_major=layer_major)
        passes, profile = simulate(step, layer_major=layer_major), self._profile
        tokens = micro_batches * of.parallel.micro_batch_size * of.parallel.data
        tokens *= of.model.seq_length
        streamed_bytes = sum(unit.parameter_bytes for unit in step.units)
        stays = of.states_on == "off"
        optimizer_s, moved_bytes = profile.step_fixed_s + passes.all_in_s, 0
        if not stays:  # they come and go with the parameters that they are for
            states = ProjectedStates(
                num_bytes=int(of.state_bytes) + streamed_bytes // step.shares,
                window_bytes=of.states_window_bytes,
                tier=of.hardware.tier(of.states_on),
                read_beside_bytes=passes.gradient_bytes,
                update_s=profile.step_fixed_s,
                between_s=passes.passes_s,
                tokens=tokens,
            ).predicted
            optimizer_s, moved_bytes = states.optimizer_s, int(states.moved_bytes)
        layer, element_bytes = profile.layers[0], of.model.element_bytes
        gradients_stay = int(of.parameters * GRADIENT_BYTES / step.shares) - passes.gradient_bytes
        peak = dict(passes.peak) | {
            GRADIENTS: gradients_stay + self._gradients_at_once(step, passes),
            "parameters outside of layers": int(of.parameters * element_bytes) - streamed_bytes,
            "optimizer states": int(of.state_bytes) * stays,
            "working memory": profile.transient_bytes
            + (_saved(layer) - layer.input_bytes) * self.recomputes,
        }
        if stays:
            peak[PARAMETERS] = streamed_bytes
        return ScheduleCost(
            micro_batches, tokens, passes, optimizer_s, profile.step_fixed_s, moved_bytes, peak
        )

    def _gradients_at_once(self, step: StreamedStep, passes: StreamedCost) -> int:
        """The most of those that leave: in the passes, or of live units in the optimizer's step."""
        live_bytes = self.live_units * max(unit.gradient_bytes for unit in step.units)
        return max(passes.peak.get(GRADIENTS, 0), live_bytes)

    def step(self, micro_batches: int, *, layer_major: bool) -> StreamedStep:
        """What a step of so many micro-batches is made of."""
        of, profile = self.of, self._profile
        parameter_bytes = of.model.layer_parameters * of.model.element_bytes // of.parallel.tensor
        shares = of.parallel.data if self.divided else 1
        gradient_bytes = of.model.layer_parameters * GRADIENT_BYTES // of.parallel.tensor // shares
        layers = range(len(profile.layers))
        unit_of = units_of(layers, self.num_units if layer_major else None)
        units = [UnitWork(0, 0.0, 0.0)] * (unit_of[layers[-1]] + 1)
        for number, layer in enumerate(profile.layers):
            kept, moved = self._activations(layer)
            again_s = (layer.recompute_s or 0.0) if self.recomputes else layer.replay_s
            backward_s = layer.backward_s + again_s
            leaving = gradient_bytes * (self.gradients_leave and layer_major)
            work = UnitWork(parameter_bytes, layer.forward_s, backward_s, kept, moved, leaving)
            units[unit_of[number]] = _sum(units[unit_of[number]], work)
        units[0] = _sum(units[0], UnitWork(0, profile.before_s[0], profile.backward_after_s[0]))
        head = UnitWork(0, profile.after_s[0], profile.backward_before_s[0])
        units[-1] = _sum(units[-1], head._replace(kept_bytes=profile.pass_fixed_bytes[0]))
        gpu = of.hardware.gpu
        return StreamedStep(
            units=tuple(units),
            micro_batches=micro_batches,
            parameters_on=of.hardware.tier(self.parameters_on),
            activations_on=of.hardware.tier(self.activations_on) if self.activations_on else None,
            live_units=self.live_units,
            boundary_bytes=profile.layers[0].input_bytes,
            boundary_on=of.hardware.tier(self.boundary_on) if self.boundary_on else None,
            inflight_bytes=profile.inflight_bytes,
            updates_all=of.states_on == "off",
            shares=shares,
            gather_bytes_per_s=gpu.nvlink_bytes_per_s * gpu.assumed.nvlink,
        )

    @functools.cached_property
    def _profile(self) -> StageProfile:
        return project(dataclasses.replace(self.of, states_on="off"))

    def _activations(self, layer: LayerProfile) -> tuple[int, int]:
        """Bytes that stay and that move, of a layer's activations."""
        whole, movable = _saved(layer), layer.movable_bytes
        if self.recomputes:
            whole, movable = layer.input_bytes, layer.movable_input_bytes
        moved = movable if self.activations_on else 0
        return whole - moved, moved


@dataclass(frozen=True)
class ScheduleCost:
    """A projected step.

    Attributes:
        tokens: of all ranks.
        passes: forward and backward.
        optimizer_s: its work, and what of its traffic backward does not hide.
        update_s: of that, the work.
        optimizer_bytes: states and parameters that it reads; it writes as many.
        peak: device memory by term; their most, as if they came at one time.
    """

    micro_batches: int
    tokens: int
    passes: StreamedCost
    optimizer_s: float
    update_s: float
    optimizer_bytes: int
    peak: Mapping[str, int]

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.passes.passes_s + self.optimizer_s

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return self.tokens / self.step_s

    @property
    def moved_bytes(self) -> int:
        """Read and written by this rank's tiers in a step."""
        passes = self.passes
        parameters = passes.read_bytes + passes.all_in_bytes + passes.written_bytes
        twice = passes.activation_bytes + passes.gradient_bytes + self.optimizer_bytes
        return parameters + 2 * twice + passes.boundary_bytes

    @property
    def waits_s(self) -> dict[str, float]:
        """Seconds of the step in which nothing computes, by what it waits for."""
        waits = self.passes.waits_s
        return {
            "parameters": waits[PARAMETERS],
            "activations": waits[KEPT],
            "gradients": waits[GRADIENTS],
            "optimizer": self.optimizer_s - self.update_s,
        }

    @property
    def peak_bytes(self) -> int:
        """Device memory."""
        return sum(self.peak.values())


def pays_from(pairs: Sequence[tuple[ScheduleCost, ScheduleCost]], by: float = 0.01) -> int | None:
    """Tokens of a step from which on layer-major is faster by more than this part; None: never.

    Args:
        pairs: one after the other and layer-major, with more and more micro-batches.
        by: of the layer-major step's time.
    """
    slower = [
        number for number, (one, two) in enumerate(pairs) if one.step_s <= two.step_s * (1 + by)
    ]
    first = slower[-1] + 1 if slower else 0
    return pairs[first][0].tokens if first < len(pairs) else None


def _saved(layer: LayerProfile) -> int:
    return sum(part.movable_bytes + part.resident_bytes for part in layer.parts)


def _sum(one: UnitWork, other: UnitWork) -> UnitWork:
    return UnitWork(*(a + b for a, b in zip(one, other, strict=True)))  # type: ignore[arg-type]
