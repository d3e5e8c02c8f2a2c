# SPDX-License-Identifier: Apache-2.0
"""Replay where the device runs behind the host: what is computed again waits for what it is of."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.offload import Placement, offload_activations
from megatron.offload.activations.placement.plan import Plan, PlannedPart
from megatron.offload.activations.placement.plan_file import save_plans
from megatron.offload.activations.saved.scope import name_after
from tests.support.lag.module import LagModule

DEVICE = "lag"
HIDDEN, TOKENS, STEPS = 64, 128, 4
pytestmark = pytest.mark.usefixtures("accelerator")


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.gate, self.up = (torch.nn.Linear(HIDDEN, 2 * HIDDEN) for _ in range(2))
        self.down = torch.nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        wide = F.silu(self.gate(h)) * self.up(h)
        return x + self.down(wide.double().to(wide.dtype)).tanh()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def noise(seed: int) -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


class WithWideLoss(torch.nn.Module):
    """An output layer, and a loss in twice its bytes: the log-softmax is made of the logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = torch.nn.Sequential(*(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(2)))
        self.head = torch.nn.Linear(HIDDEN, 4 * HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.body(x))
        labels = torch.arange(len(x), device=DEVICE) % logits.shape[1]
        return F.cross_entropy(logits.double(), labels)


def trained(
    directory: Path | None, kind: type[torch.nn.Module] = Model, **settings: Any
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Gradients of some steps, and the counters of the last one."""
    model, found = kind().to(DEVICE), []
    statistics: dict[str, Any] = {}
    handle = None
    if settings:
        handle = offload_activations(model, directory, min_bytes=4096, **settings)
    for seed in range(STEPS):
        model(noise(seed)).backward()
        found += [one.grad.cpu() for one in model.parameters() if one.grad is not None]
        model.zero_grad()
        if handle is not None:
            statistics = handle.statistics
    if handle is not None:
        handle.close()
    return found, statistics


@functools.cache
def usual(kind: type[torch.nn.Module] = Model, **settings: Any) -> list[torch.Tensor]:
    """The same without offload to a tier, to be asked for before the device is late."""
    return trained(None, kind, **settings)[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["keep", "host", "ssd"])
def test_the_bits_are_the_same_however_late_the_device_is(
    mode: str, seed: int, lag: LagModule, tmp_path: Path
) -> None:
    expected = usual()
    _, without = trained(tmp_path, mode="ssd", replay="off")
    lag.set_delays(50, 1500, seed=seed)
    found, counted = trained(tmp_path, mode=mode)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert counted["replayed_bytes"] > 0 and counted["num_replays"] > 0
    assert counted["offloaded_bytes"] < without["offloaded_bytes"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["keep", "host", "ssd"])
def test_so_are_those_of_a_log_softmax_that_is_made_of_logits(
    mode: str, seed: int, lag: LagModule, tmp_path: Path
) -> None:
    expected = usual(WithWideLoss)
    lag.set_delays(50, 1500, seed=seed)
    found, counted = trained(tmp_path, WithWideLoss, mode=mode)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert counted["replayed_bytes"] == TOKENS * 4 * HIDDEN * 8


def test_auto_replays_no_more_where_there_is_room_for_all(lag: LagModule, tmp_path: Path) -> None:
    """The last step is the first one that follows a plan."""
    expected = usual()
    lag.set_delays(50, 1500, seed=0)
    found, counted = trained(tmp_path, mode="auto", memory_budget_bytes="1GiB")
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert (counted["plans"], counted["replayed_bytes"], counted["num_replays"]) == (1, 0, 0)


@pytest.mark.parametrize("seed", range(3))
def test_layers_replay_between_others_that_do_not(
    seed: int, lag: LagModule, tmp_path: Path
) -> None:
    """What others are made of leaves in the first one and stays in the third."""
    expected = usual()
    _, all_replay = trained(tmp_path, mode="keep")
    keep = Placement.KEEP
    each = [(Placement.SSD, True), (keep, False), (keep, True), (keep, False), (keep, False)]
    names = [*(f"layers.{n}" for n in range(4)), name_after("layers.3")]
    lines = [
        PlannedPart(0, name, "layer", placement, 0, replays=replays)
        for name, (placement, replays) in zip(names, each, strict=True)
    ]
    save_plans(tmp_path / "plan.json", [Plan(tuple(lines))])
    lag.set_delays(50, 1500, seed=seed)
    found, counted = trained(tmp_path, mode="auto", plan_file=tmp_path / "plan.json")
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    of_loss = TOKENS * HIDDEN * 4
    assert 2 * counted["replayed_bytes"] + of_loss == all_replay["replayed_bytes"]
    assert counted["offloaded_bytes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["1300KiB", "1000KiB"])
def test_the_bits_are_the_same_under_whatever_a_budget_in_between_asks_for(
    budget: str, lag: LagModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which parts replay, move or are recomputed depends on how late the device happened to be."""
    monkeypatch.setattr(sys.modules[__name__], "STEPS", 14)
    expected, _ = trained(None)
    lag.set_delays(50, 1500, seed=0)
    settings = {"host_budget": "1GiB", "run_directory": tmp_path}
    found, counted = trained(tmp_path, mode="auto", memory_budget_bytes=budget, **settings)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert counted["plans"] >= 2 and counted["kept_bytes"] > 0
    done = ("replayed_bytes", "offloaded_bytes", "recomputed_layers")
    assert sum(counted[name] for name in done) > 0


@pytest.mark.parametrize(
    ("codec", "seed"),
    [
        ("int8", 0),
        pytest.param("int8", 1, marks=pytest.mark.slow),
        pytest.param("int8", 2, marks=pytest.mark.slow),
        ("int4", 0),
    ],
)
@pytest.mark.parametrize("mode", ["keep", "host", "ssd"])
def test_what_a_codec_encodes_is_the_same_however_late_the_device_is(
    mode: str, codec: str, seed: int, lag: LagModule, tmp_path: Path
) -> None:
    expected = usual(mode="keep", codec=codec)
    lag.set_delays(50, 1500, seed=seed)
    found, counted = trained(tmp_path, mode=mode, codec=codec)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert counted["encoded_bytes"] > 0 and counted["replayed_bytes"] > 0


class DropPath(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.empty_like(x).bernoulli_(0.5).div_(0.5)


def test_values_of_noise_are_not_looked_at_which_would_wait_for_the_device(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), DropPath()).to(DEVICE)
    handle = offload_activations(model, tmp_path, min_bytes=4096, mode="ssd")
    model(noise(0)).square().mean().backward()
    assert handle.statistics["replayed_bytes"] == 0
    assert handle.statistics["offloaded_bytes"] >= TOKENS * HIDDEN * 4
    handle.close()
