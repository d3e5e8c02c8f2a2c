# SPDX-License-Identifier: Apache-2.0
"""`auto` with layer-major steps in plain PyTorch: planned by units, with every bit the same."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import ConfigurationError, LayerMajor, Placement, offload_activations
from megatron.offload.activations.placement.plan import Plan, PlannedPart
from megatron.offload.activations.placement.plan_file import load_plans, save_plans
from megatron.offload.planner.profile.stage_profile import StageProfile
from tests.support import models
from tests.support.layer_major import one_by_one

HIDDEN, NUM_LAYERS, UNITS, MICRO_BATCHES = 64, 6, 3, 4
UNIT_OF = {f"blocks.{number}": number // 2 for number in range(NUM_LAYERS)}


class Counted(models.Block):
    """A block that counts how often it runs, also in backward."""

    runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counted.runs += 1
        return super().forward(x)


class Stack(models.Stack):
    """Blocks with attention, norms and dropout, and a loss."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, NUM_LAYERS, Counted)


class Trained:
    """Losses and weights of a copy of a model, with dropout, and what each step has counted."""

    def __init__(
        self,
        num_steps: int,
        directory: Path | None = None,
        *,
        units: int | None = UNITS,
        numbers: Iterable[int] = (),
        alternates: bool = False,
        **settings: Any,
    ) -> None:
        model = copy.deepcopy(Stack())
        torch.manual_seed(7)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.losses: list[float] = []
        self.statistics: list[dict[str, float]] = []
        sizes = [*numbers, *[MICRO_BATCHES] * num_steps][:num_steps]
        if directory is None:
            for step, number in enumerate(sizes):
                self._take(one_by_one(model, batches(step, number)), optimizer)
        else:
            with offload_activations(model, directory, min_bytes="1KiB", **settings) as offload:
                steps = LayerMajor(model, units, offload=offload, alternates=alternates)
                for step, number in enumerate(sizes):
                    losses = steps.step(batches(step, number), model)
                    self._take(losses, optimizer)
                    self.statistics.append(dict(offload.statistics))
                self.report = offload.report()
        self.weights = [one.detach() for one in model.parameters()]

    def _take(self, losses: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        self.losses += [float(one) for one in losses]
        optimizer.step()
        optimizer.zero_grad()

    def assert_is(self, other: Trained) -> None:
        assert self.losses == other.losses
        assert all(map(torch.equal, self.weights, other.weights))


def batches(step: int, number: int = MICRO_BATCHES) -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return (torch.randn(2, 64, HIDDEN, generator=draw) for _ in range(number))


def plan_of(placements: Iterable[Placement]) -> Plan:
    named = zip(UNIT_OF.items(), placements, strict=True)
    return Plan(
        tuple(PlannedPart(unit, name, "layer", one, 1 << 20) for (name, unit), one in named)
    )


@pytest.mark.slow
def test_units_are_planned_and_no_bit_changes(tmp_path: Path) -> None:
    """In a process of its own: memory of a CPU is that of the process, with all its tests' heap.

    Its budget has room for what malloc may keep; a budget that has to be met is in
    tests/lag/test_layer_major_steps.py, where the bytes of a device are counted.
    """
    process = multiprocessing.get_context("spawn").Process(target=train_in_units, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0, "what failed is in the output"


def train_in_units(tmp_path: Path) -> None:
    plan_file = tmp_path / "plan.json"
    settings = {"mode": "auto", "memory_budget_bytes": "96MiB", "plan_file": plan_file}
    found = Trained(6, tmp_path, run_directory=tmp_path, **settings)
    found.assert_is(Trained(6))
    # Of the first steps one counts random numbers, two are measured. Later ones may be planned for
    # again: on a CPU memory is what the process has, and a busy machine may lend it more.
    assert [step["plans"] for step in found.statistics][:4] == [0, 0, 0, 1]
    assert found.statistics[-1]["predicted_peak_bytes"] > 0
    planned = {(one.chunk, one.layer) for one in load_plans(plan_file)[0].parts}
    assert {(unit, name) for name, unit in UNIT_OF.items()} <= planned
    assert "unit 0" in found.report and "unit 2" in found.report and "chunk" not in found.report
    profile = StageProfile.load(tmp_path / "activation-profile-stage0.json")
    assert profile.position.units == "ascending" and profile.position.num_chunks == UNITS
    assert profile.num_micro_batches == profile.sizes["micro_batches"] == MICRO_BATCHES
    hidden_states = 2 * 64 * HIDDEN * 4
    assert profile.passed_on_bytes == (hidden_states, hidden_states, 0)
    assert all(one.forward_s > 0 and one.backward_s > 0 for one in profile.layers[:-1])


@pytest.mark.slow
def test_a_plan_is_followed_also_where_a_unit_begins(tmp_path: Path) -> None:
    """A layer that waits for its turn has looked its forward up in the unit before."""
    keep, recompute, ssd = Placement.KEEP, Placement.RECOMPUTE, Placement.SSD
    plan_file = tmp_path / "plan.json"
    everything = Trained(3, tmp_path, mode="ssd").statistics[-1]["offloaded_bytes"]
    for placements in ([ssd, keep, recompute, keep, recompute, ssd], [keep] * 5 + [recompute]):
        save_plans(plan_file, [plan_of(placements)])
        before = Counted.runs
        found = Trained(3, tmp_path, mode="auto", plan_file=plan_file)
        again = placements.count(recompute) * MICRO_BATCHES
        assert Counted.runs - before == 3 * (NUM_LAYERS * MICRO_BATCHES + again)
        found.assert_is(Trained(3))
        assert [step["recomputed_layers"] for step in found.statistics] == [again] * 3
        moved = found.statistics[-1]["offloaded_bytes"] / everything
        assert moved == pytest.approx(placements.count(ssd) / NUM_LAYERS, abs=0.07)


def test_a_plan_for_other_units_is_refused(tmp_path: Path) -> None:
    plan_file = tmp_path / "plan.json"
    save_plans(plan_file, [plan_of([Placement.KEEP] * NUM_LAYERS)])
    with pytest.raises(ConfigurationError, match="plan again for this model"):
        Trained(1, tmp_path, units=2, mode="auto", plan_file=plan_file)


@pytest.mark.slow
def test_steps_that_count_random_numbers_are_not_measured(tmp_path: Path) -> None:
    """As many micro-batches as never before are counted, one after the other."""
    numbers = [2, 3, 3, 2, 2, 3]
    settings = {"mode": "auto", "memory_budget_bytes": "1GiB"}
    found = Trained(8, tmp_path, numbers=numbers, run_directory=tmp_path, **settings)
    found.assert_is(Trained(8, numbers=numbers))
    # The first one warms up. Of the next ones those with three and two are counted again: the third
    # and the fifth are measured.
    assert [step["plans"] for step in found.statistics] == [0, 0, 0, 0, 0, 1, 1, 1]
    profile = StageProfile.load(tmp_path / "activation-profile-stage0.json")
    assert profile.num_micro_batches == profile.sizes["micro_batches"] == 3  # planned for the most


@pytest.mark.slow
def test_a_model_is_planned_for_one_order_of_steps(tmp_path: Path) -> None:
    model, other = Stack(), Stack()
    with (
        offload_activations([model, other], tmp_path, mode="auto") as offload,
        pytest.raises(ConfigurationError, match="give both the same model and layers="),
    ):
        LayerMajor(model, UNITS, offload=offload)
    with offload_activations(model, tmp_path, mode="auto") as offload:
        LayerMajor(model, UNITS, offload=offload)
        LayerMajor(model, UNITS, offload=offload)
        with pytest.raises(ConfigurationError, match="give it the same units"):
            LayerMajor(model, UNITS, offload=offload, alternates=True)
    with offload_activations(model, tmp_path, mode="auto") as offload:
        one_by_one(model, batches(0))
        with pytest.raises(ConfigurationError, match="make LayerMajor before the first step"):
            LayerMajor(model, UNITS, offload=offload)
