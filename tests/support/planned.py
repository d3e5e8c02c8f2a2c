# SPDX-License-Identifier: Apache-2.0
"""A planned run on one rank: two layers in plain torch, a solver that decides what it is told."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch

from megatron.offload import OffloadConfig, OffloadEngine, Placement, Scope
from megatron.offload.activations.placement.plan import Plan, PlannedPart, Prediction
from megatron.offload.activations.placement.plan_policy import PlannedPolicy
from megatron.offload.activations.saved.save_order import SaveOrder
from megatron.offload.device.cpu import CpuDevice
from megatron.offload.errors import InfeasibleBudgetError, OffloadError
from megatron.offload.planner.online.consensus import SingleRank
from megatron.offload.planner.online.drift import MeasuredStep
from megatron.offload.planner.online.planner import Planner
from megatron.offload.planner.online.stage import Stage
from megatron.offload.planner.profile.pipeline_schedule import (
    PipelinePosition,
    pipeline_schedule,
)
from megatron.offload.planner.profile.stage_profile import StageProfile
from tests.support.models import settle

LAYERS = ("decoder.1", "decoder.2")
REFINING_STEPS = 4
ONE_BY_ONE = PipelinePosition(1, 0, 1, 1)
GIB = 1 << 30


class Solver:
    """Stands for `SolverProcess`: decides nothing by itself, remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[StageProfile, int | None, float | None]] = []
        self.placement = Placement.SSD
        self.predicted = Prediction(1.0, 0.0, 0.0, 1 << 20)
        self.smallest_bytes = self.simulated_bytes = 0
        self.simulated_s = 1.0
        self.error: OffloadError | None = None

    def __call__(self) -> Solver:
        return self

    def __enter__(self) -> Solver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def simulates(self, step_s: float) -> None:
        """Steps take so long from now on, also those of the plans that it makes."""
        self.simulated_s = step_s
        self.predicted = dataclasses.replace(self.predicted, step_s=step_s)

    def predict(self, profile: StageProfile, plan: Plan | None) -> Prediction:
        """A plan that it would not make today takes twice as long."""
        is_its_own = plan is None or all(one.placement is self.placement for one in plan.parts)
        step_s = self.simulated_s if is_its_own else 2 * self.simulated_s
        return Prediction(step_s, 0.0, 0.0, profile.transient_bytes + self.simulated_bytes)

    def solve(
        self, profile: StageProfile, *, budget_bytes: int | None, max_slowdown: float | None
    ) -> Plan:
        self.asked.append((profile, budget_bytes, max_slowdown))
        if self.error is not None:
            raise self.error
        parts = [
            PlannedPart(layer.chunk, layer.name, part.name, self.placement, part.movable_bytes)
            for layer in profile.layers
            for part in layer.parts
        ]
        plan = Plan(tuple(parts), predicted=self.predicted)
        if budget_bytes is not None and budget_bytes < self.smallest_bytes:
            raise InfeasibleBudgetError("no plan is so small", self.smallest_bytes, 1.0, plan)
        return plan


class Run:
    """A model of two layers in plain torch, and a planner for it."""

    def __init__(
        self,
        config: OffloadConfig,
        directory: Path | None = None,
        solver: Solver | None = None,
        position: PipelinePosition = ONE_BY_ONE,
    ) -> None:
        self.position = position
        self.solver = solver or Solver()
        policy = PlannedPolicy(config.min_bytes, Placement(config.safe_mode))
        self.engine = OffloadEngine(config, policy=policy)
        units = range(position.num_chunks) if position.units else (0, 0)
        stage = Stage(position, list(zip(units, LAYERS, strict=True)))
        try:
            self.planner = Planner(
                config,
                self.engine,
                CpuDevice(),
                policy,
                SingleRank(),
                stage,
                directory=directory,
                solver=self.solver,  # type: ignore[arg-type]
            )
        except BaseException:
            self.engine.close()
            raise
        torch.manual_seed(1)
        self.model = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in LAYERS)
        self.engine.exclude(self.model.parameters())
        self.tokens = 32
        self.step_s: float | None = 1.0  # what steps seem to take; None: what they take
        self.gap_s: float | None = None  # what of it seems to lie between passes, likewise
        self.stall_s: float | None = None  # and to have been waited for tiers, likewise
        self.peak_bytes: int | None = None  # what of memory steps seem to take, likewise
        measured = self.planner.meter._measured
        self.planner.meter._measured = lambda *metrics: self._seen(measured(*metrics))  # type: ignore[method-assign]
        self.drops_last = False  # the last forward pass of a step has no backward pass
        self.writes_end = False  # before backward, as with a model whose layers take long

    def _seen(self, step: MeasuredStep) -> MeasuredStep:
        names = ("step_s", "gap_s", "stall_s", "peak_bytes")
        told = {name: one for name in names if (one := getattr(self, name)) is not None}
        return dataclasses.replace(step, **told)

    @contextlib.contextmanager
    def _planned(self) -> Iterator[None]:
        with self.planner.measure():
            yield
        self.planner.decide()

    def step(self, *, fails: bool = False) -> None:
        profiler = self.planner.meter.profiler
        with self._planned(), self.engine.step():
            for micro_batch in range(2):
                scope = Scope(0, micro_batch)
                with profiler.forward(0, micro_batch), self.engine.forward(scope) as save_order:
                    x = torch.ones(self.tokens, 2, 64, requires_grad=True) * 1
                    for name, layer in zip(LAYERS, self.model, strict=True):
                        own = dataclasses.replace(scope, layer=name)
                        profiler.begin_layer(own, [x], recomputes=False)
                        y = layer(x).tanh()
                        self.engine.capture(own, [y], [x])
                        profiler.end_layer([y])
                        x = y
                if self.writes_end:
                    settle(self.engine)
                if fails:
                    raise ArithmeticError("the loss is infinite")
                if self.drops_last and micro_batch == 1:
                    break
                with profiler.backward(0, micro_batch), self.engine.backward(save_order):
                    x.sum().backward()

    def step_in_units(self, num_micro_batches: int) -> None:
        """A layer-major step: each layer is a unit."""
        profiler = self.planner.meter.profiler
        made: dict[tuple[int, int], torch.Tensor] = {}
        taken: dict[int, torch.Tensor] = {}  # by the last unit
        orders: dict[tuple[int, int], SaveOrder] = {}
        with self._planned(), self.engine.step():
            for is_backward, unit, number in pipeline_schedule(self.position, num_micro_batches):
                place = unit, number
                if is_backward:
                    with profiler.backward(*place), self.engine.backward(orders[place]):
                        gradient = torch.ones_like(made[place]) if unit else taken[number].grad
                        made[place].backward(gradient)
                    continue
                own = Scope(unit, number, LAYERS[unit])
                with profiler.forward(*place), self.engine.forward(own) as orders[place]:
                    x = made[0, number].detach() if unit else torch.ones(self.tokens, 2, 64)
                    taken[number] = x.requires_grad_()
                    x = x * 1
                    profiler.begin_layer(own, [x], recomputes=False)
                    made[place] = self.model[unit](x).tanh()
                    self.engine.capture(own, [made[place]], [x])
                    profiler.end_layer([made[place]])

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()
