# SPDX-License-Identifier: Apache-2.0
"""Layer-major steps as the planner has them: their order, their simulation, which steps count."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import LayerMajor, OffloadConfig, OffloadEngine
from megatron.offload.activations.placement.plan import Prediction
from megatron.offload.activations.placement.policy import Placement
from megatron.offload.device.cpu import CpuDevice
from megatron.offload.integration.engine_passes import EnginePasses
from megatron.offload.integration.torch import layer_major as torch_layer_major
from megatron.offload.planner.online.consensus import SingleRank
from megatron.offload.planner.online.drift import Drift, Expectation, MeasuredStep, Reason
from megatron.offload.planner.online.step_meter import StepMeter
from megatron.offload.planner.online.step_order import StepOrder
from megatron.offload.planner.profile.pipeline_schedule import (
    Pass,
    PipelinePosition,
    layer_major_position,
    pipeline_schedule,
)
from megatron.offload.planner.profile.stage_profile import StageProfile
from megatron.offload.planner.simulator.instructions import FIRST_TIER, RECOMPUTE_LAYER
from megatron.offload.planner.simulator.instructions import KEEP as KEPT
from megatron.offload.planner.simulator.timeline import Timeline
from megatron.offload.planner.solver.solve import solve
from megatron.offload.stats.memory import PeakMemory
from tests.support.models import Block
from tests.support.planned import Run
from tests.support.simulated_trace import trace_of
from tests.support.stages import layer, stage

TWO_UNITS = PipelinePosition(1, 0, 2, 1, "ascending")
KEEP, RECOMPUTE, SSD = Placement.KEEP, Placement.RECOMPUTE, Placement.SSD


# -- The order of passes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_units", "order", "expected"),
    [
        (1, "ascending", "F0.0 B0.0 F1.0 B1.0"),
        (3, "ascending", "F0.0 F1.0 F0.1 F1.1 F0.2 B0.2 F1.2 B1.2 B0.1 B1.1 B0.0 B1.0"),
        (3, "alternating", "F0.0 F1.0 F1.1 F0.1 F0.2 B0.2 F1.2 B1.2 B1.1 B0.1 B0.0 B1.0"),
    ],
)
def test_units_run_all_micro_batches(num_units: int, order: Any, expected: str) -> None:
    passes = pipeline_schedule(PipelinePosition(1, 0, num_units, 1, order), 2)
    found = [f"{'FB'[one.is_backward]}{one.micro_batch}.{one.chunk}" for one in passes]
    assert " ".join(found) == expected


class Recording(EnginePasses):
    """Notes the passes of a step as they run."""

    ran: list[Pass]

    @contextlib.contextmanager
    def forward(self, unit: int, micro_batch: int, *, is_last: bool) -> Iterator[None]:
        self.ran.append(Pass(False, unit, micro_batch))
        yield

    @contextlib.contextmanager
    def backward(self, unit: int, micro_batch: int, *, is_last: bool) -> Iterator[None]:
        self.ran.append(Pass(True, unit, micro_batch))
        yield


class Stack(torch.nn.Module):
    """As few layers as make four units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block(8) for _ in range(5))

    def forward(self, x: torch.Tensor) -> Any:
        for one in self.layers:
            x = one(x)
        return x.sum()


@pytest.mark.parametrize("units", [1, 2, 3, 4])
@pytest.mark.parametrize("alternates", [False, True])
def test_steps_run_in_the_order_that_is_planned_for(
    units: int, alternates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Pass] = []
    monkeypatch.setattr(Recording, "ran", ran, raising=False)
    monkeypatch.setattr(torch_layer_major, "EnginePasses", Recording)
    model, batches = Stack(), [torch.randn(1, 4, 8, requires_grad=True) for _ in range(3)]
    steps = LayerMajor(model, units, alternates=alternates)
    steps.step(batches, model)  # counts random numbers, one micro-batch after the other
    ran.clear()
    steps.step(batches, model)
    position = layer_major_position(steps.units.values(), alternates=alternates)
    assert position.num_chunks == units and ran == pipeline_schedule(position, 3)


# -- The simulation -------------------------------------------------------------------------------


def two_units(**more: Any) -> StageProfile:
    """A layer of 8 bytes in each of two units: a second forward, two backward."""
    return stage(1, **{"position": TWO_UNITS, "micro_batches": 2, **more})


def predict(profile: StageProfile, *placements: Placement) -> Prediction:
    """With one placement for each layer."""
    timeline = Timeline(profile)
    of_plan = {KEEP: KEPT, RECOMPUTE: RECOMPUTE_LAYER, SSD: FIRST_TIER}
    chosen = timeline.choices.all(0)
    for place, (begin, end) in zip(placements, timeline.choices.spans, strict=True):
        chosen[begin:end] = of_plan[place]
    return timeline.predict(timeline.choices.plan(chosen))


def test_early_units_hold_all_micro_batches_and_the_last_one_holds_one() -> None:
    assert predict(two_units(), KEEP, KEEP) == Prediction(12.0, 0.0, 0.0, 2 * 8 + 8)
    usual = stage(2, micro_batches=2)
    assert predict(usual, KEEP, KEEP) == Prediction(12.0, 0.0, 0.0, 8 + 8)


def test_all_micro_batches_of_a_long_step_are_simulated() -> None:
    profile = stage(3, position=PipelinePosition(1, 0, 4, 1, "ascending"), micro_batches=200)
    kept = predict(profile, *[KEEP] * 12)
    assert kept == Prediction(200 * 12 * 3.0, 0.0, 0.0, 200 * 9 * 8 + 3 * 8)
    assert kept == Timeline(profile, all_micro_batches=True).predict(
        Timeline(profile).choices.plan(Timeline(profile).choices.all(0))
    )


def test_what_moves_is_read_back_pass_by_pass() -> None:
    # 0-2 F0 F1 of the first unit, each written in the second after it. 2-8 the last unit, one
    # micro-batch after the other. From 8 on each backward pass of the first unit begins with a
    # second in which its layer is read. Peak: a layer that is written, and the one that runs.
    expected = Prediction(14.0, 2.0, 0.0, 2 * 8, 2 * 8, 2 * 8)
    assert predict(two_units(), SSD, KEEP) == expected
    # The last unit's backward follows at once: its write is cancelled before it has begun.
    assert predict(two_units(), KEEP, SSD) == Prediction(12.0, 0.0, 0.0, 2 * 8 + 8)


def test_what_is_recomputed_holds_the_inputs_of_all_micro_batches() -> None:
    # Of each micro-batch of the first unit the input's two bytes, and all bytes of the last unit.
    recomputed = predict(two_units(), RECOMPUTE, KEEP)
    assert recomputed == Prediction(14.0, 0.0, 2.0, 2 * 2 + 8)


def test_hidden_states_and_their_gradients_wait_between_two_units() -> None:
    profile = two_units(passed_on_bytes=(3, 0))
    # While the last unit runs a micro-batch, that one's hidden states are its own activations; of
    # the other there are the hidden states (or, later, the gradient).
    assert predict(profile, KEEP, KEEP).peak_bytes == 2 * 8 + 8 + 3
    timeline = Timeline(profile)
    memory = trace_of(timeline, timeline.choices.plan(timeline.choices.all(0))).memory
    at = dict(memory)  # the last one at each second
    assert at == {
        0.0: 8,
        1.0: 8 + 3 + 8,
        2.0: 2 * 8 + 2 * 3 - 3 + 8,  # the last unit begins
        5.0: 2 * 8 + 3 + 8,  # a gradient waits, and the other hidden states have been taken
        8.0: 2 * 8 + 2 * 3 - 3,  # the first gradient is taken
        10.0: 8,
        12.0: 0,
    }


def test_a_budget_takes_memory_from_early_units() -> None:
    """What fits one micro-batch after the other does not fit those of a whole step."""
    layers = [layer(f"decoder.{n}", n // 2, recompute_s=None) for n in range(6)]
    position = PipelinePosition(1, 0, 3, 1, "ascending")
    in_units = stage(layers=tuple(layers), position=position, micro_batches=4)
    usual = stage(
        layers=tuple(layer(f"decoder.{n}", recompute_s=None) for n in range(6)), micro_batches=4
    )
    budget_bytes = 6 * 8
    assert set(solve(usual, budget_bytes=budget_bytes).placements.values()) == {KEEP}
    plan = solve(in_units, budget_bytes=budget_bytes)
    moved = [one.chunk for one in plan.parts if one.placement is SSD]
    assert set(moved) == {0, 1} and len(moved) >= 3  # all that is kept of a unit is 4 x 8 bytes
    assert plan.predicted is not None and plan.predicted.peak_bytes <= budget_bytes


# -- Steps that count -----------------------------------------------------------------------------


class Others(SingleRank):
    """The answers of another rank, and what was asked."""

    def __init__(self, *, kept: bool) -> None:
        self.kept = kept
        self.asked: list[str] = []

    def largest(self, values: Sequence[float]) -> list[float]:
        self.asked.append("group")
        return [max(one, float(not self.kept)) for one in values]

    def of_all(self, value: Any) -> list[Any]:
        self.asked.append("all")
        return [value, self.kept]


def one_after_the_other(num_micro_batches: int) -> list[Pass]:
    return [
        Pass(backward, unit, number)
        for number in range(num_micro_batches)
        for backward, units in ((False, (0, 1)), (True, (1, 0)))
        for unit in units
    ]


@pytest.mark.parametrize("by_all", [False, True])
def test_a_step_counts_if_it_ran_unit_by_unit_on_all_ranks(by_all: bool) -> None:
    in_units = pipeline_schedule(TWO_UNITS, 3)
    alone = StepOrder(TWO_UNITS, SingleRank())
    assert alone.was_kept(in_units, by_all=by_all)
    assert not alone.was_kept(one_after_the_other(3), by_all=by_all)
    assert not alone.was_kept(in_units[:-1], by_all=by_all)
    assert alone.was_kept(one_after_the_other(1), by_all=by_all)  # of one it is the same
    for kept in (False, True):
        others = Others(kept=kept)
        order = StepOrder(TWO_UNITS, others)
        assert order.was_kept(in_units, by_all=by_all) is kept
        assert not order.was_kept(one_after_the_other(3), by_all=by_all)
        assert others.asked == ["all" if by_all else "group"] * 2


def test_a_step_in_another_order_leaves_what_was_measured(tmp_path: Path) -> None:
    config = OffloadConfig(mode="auto", directories=(tmp_path,), memory_budget_bytes=1 << 30)
    engine = OffloadEngine(config)
    order = StepOrder(TWO_UNITS, SingleRank())
    meter = StepMeter(
        config,
        engine,
        CpuDevice(),
        is_layer_major=True,
        in_order=lambda passes: order.was_kept(passes, by_all=True),
    )

    def step(passes: Sequence[Pass]) -> None:
        with meter.step(detailed=True):
            meter.profiler.sizes["sequence_length"] = 16
            for is_backward, unit, number in passes:
                around = meter.profiler.backward if is_backward else meter.profiler.forward
                with around(unit, number):
                    pass

    step(pipeline_schedule(TWO_UNITS, 3))
    seen = meter.last
    assert seen is not None and meter.counts and meter.num_detailed == 1
    assert seen.sizes == {"sequence_length": 16, "micro_batches": 3}
    step(one_after_the_other(3))
    assert meter.last is seen and not meter.counts and meter.num_detailed == 1
    assert len(meter.profiler.steps) == 1
    engine.close()


def test_more_micro_batches_are_a_reason_to_plan_again() -> None:
    def sizes(micro_batches: int) -> dict[str, int]:
        return {"sequence_length": 8, "micro_batch_size": 2, "micro_batches": micro_batches}

    drift = Drift()
    drift.follow(Expectation(Prediction(1.0, 0.0, 0.0, 100), sizes(4), (), None))
    for number in (4, 4, 3, 5, 5):
        drift.see(MeasuredStep(1.0, 0.0, 100, sizes(number)), judges=True)
    found = {reason: text for reason, text in drift.take().items() if text}
    assert list(found) == [Reason.LARGER] and "micro_batches 5" in found[Reason.LARGER]


def test_a_plan_after_a_step_over_the_budget_is_for_its_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"mode": "auto", "min_bytes": 1, "memory_budget_bytes": 1000}
    run = Run(OffloadConfig(directories=(tmp_path,), **settings), position=TWO_UNITS)
    monkeypatch.setattr(PeakMemory, "end_step", lambda _: 1000)
    for _ in range(3):
        run.step_in_units(2)
    (first,) = [profile for profile, _, _ in run.solver.asked]
    assert first.num_micro_batches == first.sizes["micro_batches"] == 2
    assert [one.chunk for one in first.layers] == [0, 1]
    assert first.passed_on_bytes == (32 * 2 * 64 * 4, 0)
    monkeypatch.setattr(PeakMemory, "end_step", lambda _: 2000)
    run.step_in_units(3)
    again = run.solver.asked[-1][0]
    assert run.planner.num_plans == 2
    assert again.num_micro_batches == again.sizes["micro_batches"] == 3
    run.engine.close()
