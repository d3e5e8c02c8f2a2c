# SPDX-License-Identifier: Apache-2.0
"""Gradients of layers that leave when their unit's backward is over: the same bits, less memory."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.offload import (
    LayerMajor,
    offload_parameters,
)
from megatron.offload.device.open import open_device
from megatron.offload.layer_major.units import params_by_unit
from megatron.offload.parameters import gradients as gradients_file
from megatron.offload.parameters.offloaded_gradient import bucket_of
from megatron.offload.tiers.file import UnlinkedFile
from tests.behaviour.test_layer_major_steps import HIDDEN, LAYERS, VOCABULARY, Language
from tests.support.training import moving

MICRO_BATCHES = 8


@pytest.fixture(autouse=True)
def weights_leave_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is smaller together, as in a model that is not that small."""
    monkeypatch.setattr(gradients_file, "ALONE_BYTES", 1 << 12)


class Recomputed(Language):
    """Recomputes its layers, and scales what each has made by a parameter of the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(HIDDEN))

    def run(self, layer: torch.nn.Module, x: torch.Tensor) -> Any:
        return checkpoint(layer, x, use_reentrant=False)

    def loss(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return super().loss(x * self.scale, tokens)


def batches_of(step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randint(VOCABULARY, (2, 16), generator=draw) for _ in range(MICRO_BATCHES)]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, foreach=False)


def fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


class Trained:
    """A model after some steps.

    Args:
        directory: for whatever moves; None: nothing does.
        make: the model.
        optimizer: of it, and `clip`, the norm of its gradients at most.
        in_units: of a layer-major step; None: one micro-batch after the other.
        calls: steps of micro-batches before one of the optimizer.
        streams_beside: what moves beside parameters; without "states" the optimizer has all
            parameters in memory.
        settings: of the parameters.
    """

    def __init__(
        self,
        directory: Path | None,
        make: Callable[[], torch.nn.Module] = Language,
        optimizer: Callable[[Any], torch.optim.Optimizer] = fused,
        *,
        clip: float | None = None,
        in_units: int | None = LAYERS,
        calls: int = 1,
        streams_beside: tuple[str, ...] = ("states",),
        steps: int = 2,
        **settings: Any,
    ) -> None:
        model = make()
        steps_by = optimizer(model.parameters())
        self.used: list[tuple[int, torch.Tensor]] = []
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.resident_bytes: list[int] = []
        torch.manual_seed(7)
        streams: set[str] = set()
        if directory is not None:
            streams |= {"parameters", *streams_beside}
        settings = {"gradients": "on", **settings}
        with moving(streams, model, steps_by, directory, parameters=settings) as moved:
            self.handle = moved.parameters
            step = moved.steps(model, in_units)
            self._watch(steps_by)
            for number in range(steps):
                steps_by.zero_grad()
                for call in range(calls):
                    losses = step(batches_of(number * calls + call))
                    self.losses += [float(loss) for loss in losses]
                self.resident_bytes.append(resident_bytes(model))
                if clip is not None:
                    self.norms.append(
                        float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
                    )
                steps_by.step()
            self.counted = self.handle.statistics if self.handle is not None else {}
            self.states = copy.deepcopy(steps_by.state_dict()["state"])
        self.weights = {k: v.clone() for k, v in model.state_dict().items()}

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Keeps the gradients that each step uses, in the order of the parameters."""
        order = [p for group in optimizer.param_groups for p in group["params"]]
        kind, used = type(optimizer), self.used

        def step(self: torch.optim.Optimizer, closure: Any = None) -> Any:
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        number = next(i for i, one in enumerate(order) if one is param)
                        used.append((number, param.grad.clone()))
            return kind.step.__wrapped__(self, closure)

        hooked = torch.optim.Optimizer.profile_hook_step(step)
        hooked.hooked = True  # type: ignore[attr-defined]  # as torch marks those of its classes
        optimizer.__class__ = type("Watched", (kind,), {"step": hooked})

    def assert_is(self, other: Trained) -> None:
        assert (self.losses, self.norms) == (other.losses, other.norms)
        in_order = [sorted(one.used, key=lambda pair: pair[0]) for one in (self, other)]
        assert [n for n, _ in in_order[0]] == [n for n, _ in in_order[1]]
        # A parameter's gradients of several steps stay in their order.
        for (_, ours), (_, theirs) in zip(*in_order, strict=True):
            assert torch.equal(ours, theirs)
        for name, weight in other.weights.items():
            assert torch.equal(self.weights[name], weight), name
        assert self.states.keys() == other.states.keys()
        for number, state in other.states.items():
            for key, value in state.items():
                assert torch.equal(
                    torch.as_tensor(self.states[number][key]), torch.as_tensor(value)
                )


def resident_bytes(model: torch.nn.Module) -> int:
    """Of the gradients of its layers."""
    params = [p for layer in model.layers for p in layer.parameters()]  # type: ignore[union-attr]
    there = [p.grad for p in params if p.grad is not None and bucket_of(p) is None]
    buckets = {id(bucket): bucket for p in params if (bucket := bucket_of(p)) is not None}
    return sum(g.nbytes for g in there) + sum(p.memory_bytes for p in buckets.values())


@pytest.mark.parametrize(
    ("make", "optimizer", "clip", "settings"),
    [
        (Language, adamw, 0.1, {"mode": "host", "in_units": 3, "units": 2}),
        (Recomputed, fused, 0.1, {"streams_beside": ("states", "activations")}),
        (Recomputed, adamw, None, {"streams_beside": ()}),
        (Language, fused, 0.1, {"calls": 2}),
        *(
            pytest.param(Language, fused, clip, settings, marks=pytest.mark.rare)
            for clip, settings in (
                (None, {}),
                (0.1, {"in_units": 2, "units": 3, "live_units": 3, "io": "buffered"}),
                (0.1, {"streams_beside": (), "mode": "tiered", "host_budget": 1 << 16}),
            )
        ),
    ],
    ids=["host", "recomputed", "states in memory", "two calls of a step", "1", "2", "3"],
)
def test_all_bits_are_the_same(
    make: Callable[[], torch.nn.Module],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    clip: float | None,
    settings: dict[str, Any],
    tmp_path: Path,
) -> None:
    calls = settings.get("calls", 1)
    expected = Trained(None, make, optimizer, clip=clip, in_units=None, calls=calls)
    found = Trained(tmp_path, make, optimizer, clip=clip, **settings)
    found.assert_is(expected)


class Tied(Language):
    """Layers that share a weight; so do the embedding and the output layer."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.layers[5].up.weight = self.layers[4].up.weight


class Partial(Language):
    """Parameters that are frozen, and that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)
        self.layers[2].up.weight.requires_grad_(False)
        self.layers[3].unused = torch.nn.Parameter(torch.ones(HIDDEN, HIDDEN))


@pytest.mark.parametrize("make", [Tied, Partial])
def test_what_has_no_gradient_or_one_of_several_units_is_left_alone(
    make: Callable[[], torch.nn.Module], tmp_path: Path
) -> None:
    expected = Trained(None, make, clip=0.1, in_units=None)
    found = Trained(tmp_path, make, clip=0.1, units=2)
    found.assert_is(expected)


def test_an_optimizer_of_two_groups_updates_all_bits_the_same(tmp_path: Path) -> None:
    """Its buckets go by units, and each has parameters of both groups."""

    def two_groups(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        groups = [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-2)

    expected = Trained(None, optimizer=two_groups, clip=0.1)
    Trained(tmp_path, optimizer=two_groups, clip=0.1).assert_is(expected)


@pytest.mark.parametrize("mode", ["ssd", "host"])
def test_no_more_than_two_units_gradients_are_in_memory(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is made while the one before is written, on however slow a disk; all others are away."""
    write = UnlinkedFile.write

    def slow(*arguments: Any) -> Any:
        time.sleep(0.005)
        return write(*arguments)

    monkeypatch.setattr(UnlinkedFile, "write", slow)
    trained = Trained(tmp_path, clip=0.1, mode=mode)
    each = trained.counted["parameter_bytes"] / LAYERS
    assert each < trained.counted["gradient_peak_bytes"] <= 2.5 * each
    assert max(trained.resident_bytes) <= each  # the first unit's, which is still written
    assert trained.counted["gradient_memory_bytes"] == 0
    assert max(Trained(None, clip=0.1).resident_bytes) > (LAYERS - 1) * each


@pytest.mark.slow
def test_memory_goes_back_to_the_system(tmp_path: Path) -> None:
    """Not only to an allocator, which cannot give it to the next unit."""
    layers = 24
    model = torch.nn.Sequential(*(torch.nn.Linear(1 << 10, 1 << 10) for _ in range(layers)))
    device = open_device(torch.device("cpu"))
    found: list[int] = []
    settings: dict[str, Any] = {"layers": [torch.nn.Linear], "gradients": "on"}
    with offload_parameters(model, tmp_path, **settings) as handle:
        layer_major = LayerMajor(model, layers=[torch.nn.Linear])
        x = torch.randn(4, 4, 1 << 10)
        for _ in range(2):  # in the first one libraries take memory for good
            device.return_freed_memory()
            found.append(device.allocated_bytes())
            layer_major.step(x.unbind(), lambda one: model(one).square().mean())
            found.append(device.allocated_bytes())
            model.zero_grad()
        each = handle.statistics["parameter_bytes"] / layers
        assert found[3] - found[2] < layers / 2 * each


def test_parameters_of_several_units_or_outside_of_layers_are_no_units() -> None:
    model = Tied()
    model.register_parameter("beside", model.layers[1].up.weight)
    layers = {layer: number for number, layer in enumerate(model.layers)}
    found = params_by_unit(model, layers)
    names = {id(param): name for name, param in model.named_parameters()}
    units = {names[id(param)]: unit for unit, params in found.items() for param in params}
    assert units["layers.3.up.weight"] == 3 and units["layers.5.down.bias"] == 5
    assert not {"beside", "layers.1.up.weight", "layers.4.up.weight"} & units.keys()
    assert not {"embedding.weight", "output.weight"} & units.keys()
