# SPDX-License-Identifier: Apache-2.0
"""`auto` in plain PyTorch: measured, planned and followed by layers, with every bit the same."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import ConfigurationError, Placement, offload_activations
from megatron.offload.activations.placement.plan import Plan, PlannedPart
from megatron.offload.activations.placement.plan_file import load_plans, save_plans
from megatron.offload.activations.saved.scope import name_of_call
from megatron.offload.planner import libraries
from megatron.offload.planner.profile.stage_profile import StageProfile
from megatron.offload.planner.simulator.instructions import KEEP
from megatron.offload.planner.simulator.timeline import Timeline
from megatron.offload.planner.solver.solve import solve
from tests.support import models
from tests.support.same_training import Batch, Training, train

HIDDEN, NUM_LAYERS = 64, 6
LAYERS = [f"blocks.{number}" for number in range(NUM_LAYERS)]


class Stack(models.Stack):
    """Blocks with attention, norms and dropout, and a loss."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, NUM_LAYERS)


def batches(num_steps: int) -> list[Batch]:
    """Noise, other in each step."""
    return [
        {"x": torch.randn(2, 64, HIDDEN, generator=torch.Generator().manual_seed(step))}
        for step in range(num_steps)
    ]


def trained(num_steps: int, directory: Path | None = None, **settings: object) -> Training:
    return train(Stack, batches(num_steps), directory, call=lambda m, b: m(**b), **settings)


def plan_of(placements: Iterable[Placement], layers: Sequence[str] = LAYERS) -> Plan:
    named = zip(layers, placements, strict=True)
    return Plan(
        tuple(PlannedPart(0, name, "layer", placement, 1 << 20) for name, placement in named)
    )


def test_a_plan_is_followed_layer_by_layer_and_recomputation_has_the_same_dropout(
    tmp_path: Path,
) -> None:
    keep, recompute, ssd = Placement.KEEP, Placement.RECOMPUTE, Placement.SSD
    plan_file = tmp_path / "plan.json"
    save_plans(plan_file, [plan_of([ssd, recompute, keep, recompute, ssd, keep])])
    found = trained(4, tmp_path, mode="auto", plan_file=plan_file)
    assert found == trained(4)
    everything = trained(4, tmp_path).statistics[-1]
    for step in found.statistics:
        assert step["recomputed_layers"] == 2
        # What a plan says nothing of, the head here, goes where everything goes without one.
        assert 0.3 < step["offloaded_bytes"] / everything["offloaded_bytes"] < 0.45


def test_the_inputs_of_what_a_plan_recomputes_may_move(tmp_path: Path) -> None:
    plan_file = tmp_path / "plan.json"
    keep, again = Placement.KEEP, Placement.RECOMPUTE
    plan = plan_of([again, again, keep, keep, keep, keep, keep], [*LAYERS, f"{LAYERS[-1]}.after"])
    first, *others = plan.parts
    moved = dataclasses.replace(first, input=Placement.SSD)
    save_plans(plan_file, [dataclasses.replace(plan, parts=(moved, *others))])
    settings = {"mode": "auto", "plan_file": plan_file, "min_bytes": 1}
    found = trained(4, tmp_path, **settings)
    save_plans(plan_file, [plan])
    kept = trained(4, tmp_path, **settings)
    assert found == kept == trained(4)
    input_bytes = 2 * 64 * HIDDEN * 4
    for step, other in zip(found.statistics, kept.statistics, strict=True):
        assert step["recomputed_layers"] == 2
        assert step["offloaded_bytes"] == other["offloaded_bytes"] + input_bytes


class Repeated(Stack):
    """Each block runs twice, as in models whose layers share their weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return x.square().mean()


def repeated(num_steps: int, directory: Path | None = None, **settings: object) -> Training:
    return train(Repeated, batches(num_steps), directory, call=lambda m, b: m(**b), **settings)


def test_each_call_of_a_layer_has_a_place_of_its_own_in_plans(tmp_path: Path) -> None:
    keep, recompute = Placement.KEEP, Placement.RECOMPUTE
    names = [*LAYERS, *(name_of_call(one, 2) for one in LAYERS)]
    placements = [keep] * 6 + [recompute, recompute, keep, keep, keep, keep]
    plan_file = tmp_path / "plan.json"
    save_plans(plan_file, [plan_of(placements, names)])
    found = repeated(4, tmp_path, mode="auto", plan_file=plan_file)
    assert found == repeated(4)
    assert [step["recomputed_layers"] for step in found.statistics] == [2, 2, 2, 2]


@pytest.mark.slow
def test_each_call_of_a_layer_that_runs_twice_is_planned(tmp_path: Path) -> None:
    plan_file = tmp_path / "plan.json"
    settings = {"mode": "auto", "memory_budget_bytes": "1GiB", "plan_file": plan_file}
    assert repeated(6, tmp_path, **settings) == repeated(6)
    planned = [part.layer for part in load_plans(plan_file)[0].parts]
    assert planned[:12] == [*LAYERS, *(name_of_call(one, 2) for one in LAYERS)]


@pytest.mark.slow
@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_plan_that_takes_long_is_said_to_all_who_read_warnings(
    is_compiled: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first one after an installation, before the step that it is made in goes on."""
    (folder := tmp_path / "__pycache__").mkdir()
    if is_compiled:
        (folder / "step.run-1.py311.nbi").touch()
    monkeypatch.setattr(libraries, "_SIMULATOR", tmp_path)
    with caplog.at_level(logging.INFO):
        trained(4, tmp_path, mode="auto", memory_budget_bytes="1GiB")
    said = {one.levelno for one in caplog.records if "planning" in one.getMessage()}
    assert said == {logging.INFO if is_compiled else logging.WARNING}


def test_auto_plans_within_a_budget_and_changes_no_bit(tmp_path: Path) -> None:
    settings = {"mode": "auto", "memory_budget_bytes": "24MiB", "run_directory": tmp_path}
    plan_file = tmp_path / "plan.json"
    found = trained(10, tmp_path, plan_file=plan_file, **settings)
    assert found == trained(10)
    assert [step["plans"] for step in found.statistics[:4]] == [0, 0, 0, 1]
    assert found.statistics[-1]["predicted_peak_bytes"] > 0
    profile = json.loads((tmp_path / "activation-profile-stage0.json").read_text())
    names = [*LAYERS, f"{LAYERS[-1]}.after"]  # the head saves something too
    assert [layer["name"] for layer in profile["layers"]] == names
    assert all(layer["recompute_s"] is not None for layer in profile["layers"][:-1])
    assert [part.layer for part in load_plans(plan_file)[0].parts] == names
    # Such a plan can be followed.
    assert trained(3, tmp_path, mode="auto", plan_file=plan_file) == trained(3)


class FirstFrozen(Stack):
    """What comes before the trained layers is frozen, so it has no backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.blocks[:2].requires_grad_(False)


def test_layers_before_all_trained_ones_have_no_backward_pass(tmp_path: Path) -> None:
    def tuned(num_steps: int, directory: Path | None = None, **settings: object) -> Training:
        given = batches(num_steps)
        return train(FirstFrozen, given, directory, call=lambda m, b: m(**b), **settings)

    settings = {"mode": "auto", "memory_budget_bytes": "16MiB", "run_directory": tmp_path}
    found = tuned(8, tmp_path, **settings)
    assert found == tuned(8)
    assert found.statistics[-1]["plans"] >= 1
    profile = json.loads((tmp_path / "activation-profile-stage0.json").read_text())
    frozen, others = profile["layers"][:2], profile["layers"][2:NUM_LAYERS]
    assert [layer["name"] for layer in frozen] == LAYERS[:2]
    for layer in frozen:
        assert layer["forward_s"] > 0 and layer["backward_s"] == 0
        assert not any(part["movable_bytes"] for part in layer["parts"])
    assert all(layer["backward_s"] > 0 for layer in others)


def test_the_inputs_of_recomputed_layers_may_move(tmp_path: Path) -> None:
    lists = {"recompute_layers": "0-5", "min_bytes": 1}
    moved = trained(4, tmp_path, recompute_input="ssd", **lists)
    kept = trained(4, tmp_path, **lists)
    assert moved == kept == trained(4)
    input_bytes = 2 * 64 * HIDDEN * 4
    for step, other in zip(moved.statistics, kept.statistics, strict=True):
        assert step["recomputed_layers"] == other["recomputed_layers"] == NUM_LAYERS
        assert step["offloaded_bytes"] == other["offloaded_bytes"] + NUM_LAYERS * input_bytes


@pytest.mark.slow
def test_what_was_recomputed_while_it_was_measured_is_known_from_before(tmp_path: Path) -> None:
    """A disk that is far too slow: later plans still know the bytes of recomputed layers."""
    found = trained(
        14,
        tmp_path,
        mode="auto",
        max_slowdown="3",
        write_bytes_per_s="2MB/s",
        inflight_bytes="1MiB",
    )
    assert found == trained(14)
    recomputed = [step["recomputed_layers"] for step in found.statistics]
    assert recomputed[0] == 0 and recomputed[-1] > 0
    assert found.statistics[-1]["plans"] >= 2


def test_a_timeline_shows_the_layers(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trained(2, tmp_path, trace_file=trace)
    names = {event.get("name") for event in json.loads(trace.read_text())}
    assert {*LAYERS, "backward micro-batch 0", f"{LAYERS[-1]} backward"} <= names


def test_the_report_shows_the_plan(tmp_path: Path) -> None:
    plan_file = tmp_path / "plan.json"
    save_plans(plan_file, [plan_of([Placement.KEEP] * 5 + [Placement.SSD])])
    model = Stack()
    with offload_activations(model, tmp_path, mode="auto", plan_file=plan_file) as offload:
        model(**batches(1)[0]).backward()
        said = offload.report()
    assert "activation plan of stage 0" in said and "blocks.5" in said


def test_a_plan_of_another_model_is_refused(tmp_path: Path) -> None:
    plan_file = tmp_path / "plan.json"
    save_plans(plan_file, [Plan((PlannedPart(0, "blocks.0", "layer", Placement.SSD, 1),))])
    with pytest.raises(ConfigurationError, match=r"model has layer blocks\.1"):
        trained(1, tmp_path, mode="auto", plan_file=plan_file)


def test_a_plan_that_divides_layers_is_refused(tmp_path: Path) -> None:
    """As those of Megatron's models do; here nothing would follow such a line."""
    plan_file, plan = tmp_path / "plan.json", plan_of([Placement.KEEP] * len(LAYERS))
    parts = tuple(dataclasses.replace(one, part="mlp") for one in plan.parts[:1])
    save_plans(plan_file, [dataclasses.replace(plan, parts=(*parts, *plan.parts[1:]))])
    with pytest.raises(ConfigurationError, match=r"has mlp of blocks\.0, .* are placed as a whole"):
        trained(1, tmp_path, mode="auto", plan_file=plan_file)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"recompute_layers": "1-6"}, "recompute_layers names layer 6"),
        ({"offload_layers": "5,9"}, "offload_layers names layer 9"),
        ({"recompute_layers": "encoder.all"}, r"recompute_layers names layer encoder\.all"),
    ],
)
def test_layers_that_are_not_there_are_refused(
    settings: dict[str, str], words: str, tmp_path: Path
) -> None:
    there = r", and the layers are blocks\.0 to blocks\.5; numbers are those in the names"
    with pytest.raises(ConfigurationError, match=words + there):
        trained(1, tmp_path, mode="ssd", **settings)


@pytest.mark.parametrize(
    ("named", "words"), [("0.*", "and 0.a has none in its name"), ("Stack", "and the model itself")]
)
def test_layers_without_numbers_are_not_said_to_be_missing(
    named: str, words: str, tmp_path: Path
) -> None:
    model = torch.nn.Sequential(torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4)}))
    with pytest.raises(
        ConfigurationError, match="recompute_layers names layers by numbers, " + words
    ):
        offload_activations(
            Stack() if named == "Stack" else model,
            tmp_path,
            layers=[named],
            recompute_layers="all",
        )


def test_a_model_without_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no modules that repeat"):
        offload_activations(torch.nn.Linear(4, 4), tmp_path, mode="auto")


def test_layers_that_nobody_calls_are_refused_after_the_first_step(tmp_path: Path) -> None:
    def call(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return model.get_submodule("first")(batch["x"]).square().mean()

    with pytest.raises(ConfigurationError, match="none of the 6 layers was called"):
        train(Stack, batches(2), tmp_path, call=call, mode="auto")


class Gated(torch.nn.Module):
    """A norm and a gated unit: what the norm and the gate give is cheap."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.gate = torch.nn.Linear(HIDDEN, 2 * HIDDEN)
        self.linear = torch.nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = torch.nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        gated: torch.Tensor = torch.nn.functional.silu(self.gate(y)) * self.linear(y)
        return x + self.down(gated)


class GatedStack(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Gated() for _ in range(NUM_LAYERS))


def profiled(directory: Path, **settings: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """One layer of the profile of the first steps, and statistics of the last of them."""
    (directory / "activation-profile-stage0.json").unlink(missing_ok=True)
    found = train(
        GatedStack,
        batches(4),
        directory,
        call=lambda m, b: m(**b),
        **{"mode": "auto", "memory_budget_bytes": "1GiB", "run_directory": directory, **settings},
    )
    assert found == train(GatedStack, batches(4), call=lambda m, b: m(**b))
    profile = json.loads((directory / "activation-profile-stage0.json").read_text())
    return profile["layers"][2]["parts"][0], found.statistics[2]


def test_the_profile_has_what_is_replayed_and_its_seconds(tmp_path: Path) -> None:
    settings = {"min_bytes": 2048}
    without, _ = profiled(tmp_path, replay="off", **settings)
    part, step = profiled(tmp_path, **settings)
    tokens, size = 2 * 64, 4 * HIDDEN
    # Of the norm its result; of the gate `silu(gate)` and the product.
    assert part["replayed_bytes"] == tokens * size * (1 + 2 + 2)
    assert step["replayed_bytes"] == NUM_LAYERS * part["replayed_bytes"]
    assert part["replay_extra_bytes"] == 2 * tokens * size
    assert part["movable_bytes"] + part["replayed_bytes"] == without["movable_bytes"]
    assert part["resident_bytes"] == without["resident_bytes"] + 2 * size  # copies of the norm's
    assert part["only_for_replay_bytes"] == 2 * size
    assert part["replay_s"] > 0 == without["replay_s"] == without["replayed_bytes"]


def gated(num_steps: int, directory: Path | None = None, **settings: object) -> Training:
    return train(GatedStack, batches(num_steps), directory, call=lambda m, b: m(**b), **settings)


def test_where_there_is_room_for_all_nothing_is_replayed(tmp_path: Path) -> None:
    """The first plan, and the second one, which has measured steps that replay nothing."""
    settings = {"mode": "auto", "min_bytes": 2048, "memory_budget_bytes": "1GiB"}
    found = gated(13, tmp_path, run_directory=tmp_path, **settings)
    assert found == gated(13)
    assert found.statistics[-1]["plans"] >= 2
    replayed = [step["replayed_bytes"] for step in found.statistics]
    of_layer = 2 * 64 * 4 * HIDDEN * (1 + 2 + 2)
    assert replayed == [NUM_LAYERS * of_layer] * 3 + [0] * 10
    # The second plan could have replayed.
    profile = StageProfile.load(tmp_path / "activation-profile-stage0.json")
    assert [one.replayed_bytes for one in profile.layers[:NUM_LAYERS]] == [of_layer] * NUM_LAYERS
    assert all(one.replay_s > 0 for one in profile.layers[:NUM_LAYERS])


def test_where_there_is_room_for_some_these_do_not_replay(tmp_path: Path) -> None:
    settings = {"mode": "auto", "min_bytes": 2048}
    gated(4, tmp_path, run_directory=tmp_path, memory_budget_bytes="1GiB", **settings)
    profile = StageProfile.load(tmp_path / "activation-profile-stage0.json")
    layers = tuple(dataclasses.replace(one, recompute_s=None) for one in profile.layers)
    profile = dataclasses.replace(profile, tiers=(), layers=layers)
    timeline = Timeline(profile)
    most = timeline.keep_all().peak_bytes
    least = timeline.predict(timeline.choices.plan(timeline.choices.all(KEEP))).peak_bytes
    plan = solve(profile, budget_bytes=(most + least) // 2)
    planned = {one.layer: one.replays for one in plan.parts if one.placement is Placement.KEEP}
    num_replaying = sum(planned[layer] for layer in LAYERS)
    assert 0 < num_replaying < NUM_LAYERS
    save_plans(tmp_path / "plan.json", [plan])
    found = gated(4, tmp_path, plan_file=tmp_path / "plan.json", **settings)
    assert found == gated(4)
    for step in found.statistics:
        assert step["replayed_bytes"] == num_replaying * profile.layers[0].replayed_bytes
        assert step["recomputed_layers"] == step["offloaded_bytes"] == 0
