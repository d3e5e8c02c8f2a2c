# SPDX-License-Identifier: Apache-2.0
"""`auto` plans for layers that are inside of a compiled graph."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import ConfigurationError, Placement, offload_activations
from megatron.offload.activations.placement.plan import Plan, PlannedPart
from megatron.offload.activations.placement.plan_file import load_plans, save_plans
from megatron.offload.activations.saved.scope import name_after, name_of_call
from tests.support.compiled import HIDDEN, Stack, assert_same, batch, trained, without_offload

BLOCKS = [f"blocks.{number}" for number in range(3)]
BUDGET = {"mode": "auto", "memory_budget_bytes": "1GiB"}


pytestmark = pytest.mark.usefixtures("compiled_anew")


class Twice(Stack):
    """Its blocks run one after the other, and then once more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return x.square().mean()


class Shares(Stack):
    """Its first block makes what all others use, and backward uses with the last one first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.blocks[0](self.first(x))
        x = shared
        for block in self.blocks[1:]:
            x = block(x * shared)
        return x.square().mean()


def plan_file(path: Path, placements: dict[str, Placement]) -> Path:
    lines = (PlannedPart(0, name, "layer", one, 1 << 20) for name, one in placements.items())
    save_plans(path, [Plan(tuple(lines))])
    return path


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("aot_eager", Stack),
        pytest.param("aot_eager", Twice, marks=pytest.mark.slow),
        ("aot_eager", Shares),
        pytest.param("inductor", Stack, marks=pytest.mark.rare),
        pytest.param("inductor", Twice, marks=pytest.mark.rare),
        pytest.param("inductor", Shares, marks=pytest.mark.slow),
    ],
)
def test_each_call_of_a_layer_is_measured_and_planned(
    backend: str, kind: Any, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    settings = {**BUDGET, "run_directory": tmp_path, "plan_file": file}
    lengths = (32,) * 5
    found = trained(tmp_path, backend, kind=kind, lengths=lengths, **settings)
    assert_same(found, without_offload(len(lengths), backend, kind))
    assert [step["plans"] for step in found[1]] == [0, 0, 0, 1, 1]
    calls = [*BLOCKS, *(name_of_call(one, 2) for one in BLOCKS)] if kind is Twice else BLOCKS
    profile = json.loads((tmp_path / "activation-profile-stage0.json").read_text())
    layers = {one["name"]: one for one in profile["layers"]}
    assert [one for one in layers if one in calls] == calls
    assert not {*layers} - {*calls, *map(name_after, ("", *calls))}
    assert all(min(layers[one]["forward_s"], layers[one]["backward_s"]) > 0 for one in calls)
    assert all(one["recompute_s"] is None for one in layers.values())
    saved = [part for one in layers.values() for part in one["parts"]]
    assert sum(one["movable_bytes"] for one in saved) == found[1][0]["offloaded_bytes"]
    assert profile["sizes"] == {"sequence_length": 2, "micro_batch_size": 32}
    assert [one.layer for one in load_plans(file)[0].parts] == [*layers]


def test_a_plan_is_followed_layer_by_layer(tmp_path: Path) -> None:
    everything = trained(tmp_path, offload_layers="0-2")[1][0]["offloaded_bytes"]
    torch.compiler.reset()
    second = trained(tmp_path, offload_layers="1")[1][0]["offloaded_bytes"]
    torch.compiler.reset()
    assert 0 < second < everything
    keep = Placement.KEEP
    placements = {name_after(""): keep, **dict.fromkeys(BLOCKS, keep), name_after(BLOCKS[2]): keep}
    placements |= dict.fromkeys(map(name_after, BLOCKS), keep)
    file = plan_file(tmp_path / "plan.json", {**placements, BLOCKS[1]: Placement.SSD})
    found = trained(tmp_path, mode="auto", plan_file=file, settled=True)
    assert_same(found, without_offload())
    assert [step["offloaded_bytes"] for step in found[1]] == [second] * 3
    assert all(step["kept_bytes"] > 0 for step in found[1])


@pytest.mark.slow
def test_calls_of_one_layer_have_places_of_their_own(tmp_path: Path) -> None:
    calls = [*BLOCKS, *(name_of_call(one, 2) for one in BLOCKS)]
    keep = dict.fromkeys([*map(name_after, ("", *calls)), *calls], Placement.KEEP)
    moved = []
    for call in (BLOCKS[0], name_of_call(BLOCKS[0], 2)):
        file = plan_file(tmp_path / "plan.json", {**keep, call: Placement.SSD})
        torch.compiler.reset()
        found = trained(tmp_path, kind=Twice, mode="auto", plan_file=file)
        moved.append(found[1][0]["offloaded_bytes"])
    assert min(moved) > 0
    assert_same(found, without_offload(kind=Twice))
    every = trained(tmp_path, kind=Twice, offload_layers="0")[1][0]["offloaded_bytes"]
    assert sum(moved) == every


def test_a_plan_that_recomputes_is_refused(tmp_path: Path) -> None:
    file = plan_file(tmp_path / "plan.json", dict.fromkeys(BLOCKS, Placement.RECOMPUTE))
    model = Stack().eval()
    compiled: Any = torch.compile(model, backend="aot_eager")
    settings: dict[str, Any] = {"mode": "auto", "plan_file": file, "inside_graphs": True}
    refused = pytest.raises(ConfigurationError, match="cannot recompute layers inside of compiled")
    with offload_activations(model, tmp_path, min_bytes=1024, **settings), refused:
        compiled(batch(0))


@pytest.mark.parametrize("is_compiled", [True, False])
def test_the_losses_of_two_passes_are_added(is_compiled: bool, tmp_path: Path) -> None:
    def run(directory: Path | None) -> list[torch.Tensor]:
        model = Stack().eval()
        call: Any = torch.compile(model, backend="aot_eager") if is_compiled else model
        offload = None
        if directory is not None:
            settings: dict[str, Any] = {**BUDGET, "inside_graphs": is_compiled}
            offload = offload_activations(model, directory, min_bytes=1024, **settings)
        for step in range(5):
            model.zero_grad()
            (call(batch(step)) - call(batch(step + 5))).backward()
        if offload is not None:
            assert offload.statistics["plans"] == 1
            offload.close()
        return [one.grad for one in model.parameters() if one.grad is not None]

    found = run(tmp_path)
    torch.compiler.reset()
    assert all(map(torch.equal, found, run(None)))


def one_by_one(directory: Path | None, **settings: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """With dropout. Layers are compiled before and after the call of the door."""
    model = Stack().train()
    model.blocks[0].compile(backend="aot_eager")
    offload = None
    if directory is not None:
        offload = offload_activations(model, directory, min_bytes=1024, **settings)
    for block in model.blocks[1:]:
        block.compile(backend="aot_eager")
    statistics = []
    for step in range(5):
        torch.manual_seed(step)
        model.zero_grad()
        loss = model(batch(step))
        loss.backward()
        statistics.append(offload.statistics if offload is not None else {})
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    if offload is not None:
        offload.close()
        model(batch(0))
    return [loss, *gradients], statistics


@functools.cache
def one_by_one_alone() -> list[torch.Tensor]:
    torch.compiler.reset()
    return one_by_one(None)[0]


@pytest.mark.parametrize("inside_graphs", [False, True])
def test_layers_that_are_compiled_one_by_one_are_measured_by_their_calls(
    inside_graphs: bool, tmp_path: Path
) -> None:
    settings = {**BUDGET, "run_directory": tmp_path, "inside_graphs": inside_graphs}
    found, statistics = one_by_one(tmp_path, **settings)
    assert all(map(torch.equal, found, one_by_one_alone()))
    assert [step["plans"] for step in statistics] == [0, 0, 0, 1, 1]
    profile = json.loads((tmp_path / "activation-profile-stage0.json").read_text())
    layers = {one["name"]: one for one in profile["layers"]}
    assert {*BLOCKS} <= {*layers}
    assert all(layers[one]["input_bytes"] == 2 * 32 * HIDDEN * 4 for one in BLOCKS)


@pytest.mark.parametrize("inside_graphs", [False, True])
def test_layers_that_are_compiled_one_by_one_can_be_recomputed(
    inside_graphs: bool, tmp_path: Path
) -> None:
    settings = {"recompute_layers": "0-1", "inside_graphs": inside_graphs}
    found, statistics = one_by_one(tmp_path, **settings)
    assert all(map(torch.equal, found, one_by_one_alone()))
    assert [step["recomputed_layers"] for step in statistics] == [2] * 5
    every = one_by_one(tmp_path, inside_graphs=inside_graphs)[1]
    assert statistics[-1]["offloaded_bytes"] < every[-1]["offloaded_bytes"]
