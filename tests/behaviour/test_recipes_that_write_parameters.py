# SPDX-License-Identifier: Apache-2.0
"""Recipes that read and write parameters between steps, with parameters on a tier: the same bits.

As scripts have them; no recipe knows of a handle.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import (
    LayerMajor,
    offload_activations,
    offload_optimizer,
    offload_parameters,
)
from megatron.offload.errors import ConfigurationError, OffloadError
from megatron.offload.integration.open_parameters import unit_backward
from megatron.offload.integration.torch.parameter_offload import ParameterOffload
from megatron.offload.moving.storage import Where
from tests.behaviour.test_parameters_that_others_write import LAYERS, SMALL, Net, batch
from tests.support.beneath import beneath
from tests.support.copies import COPIES
from tests.support.training import moving

STEPS = 3
Seen = list[Any]


def evaluate(model: Net, seen: Seen) -> None:
    with torch.no_grad():
        seen.append(float(model(batch(9))))


class Recipe:
    """A training step, and what a script does around it; recipes override some of it."""

    def __init__(self, model: Net, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.seen: Seen = []

    def loss(self, step: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch(step))
        return loss

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        loss = self.loss(step)
        self.seen.append(float(loss))
        loss.backward()
        self.update(step)

    def update(self, step: int) -> None:
        self.optimizer.step()


class Clamped(Recipe):
    """As a Wasserstein critic."""

    def update(self, step: int) -> None:
        super().update(step)
        for param in self.model.parameters():
            param.data.clamp_(-0.1, 0.1)


class Gates(Recipe):
    """Keeps the parameters of one element within bounds, and nothing else."""

    def update(self, step: int) -> None:
        super().update(step)
        with torch.no_grad():
            for layer in self.model.layers:
                layer.gate.clamp_(0.0, 0.5)


class SharpnessAware(Recipe):
    """SAM: climbs, computes once more, and goes back."""

    def update(self, step: int) -> None:
        own = [param for param in self.model.parameters() if param.grad is not None]
        norm = torch.stack([param.grad.norm() for param in own]).norm()
        before = {}
        with torch.no_grad():
            for param in own:
                before[param] = param.data.clone()
                param.add_(param.grad * (0.05 / norm))
        self.optimizer.zero_grad()
        self.loss(step).backward()
        for param in own:
            param.data = before[param]
        super().update(step)


class Shadow(Recipe):
    """The moving average that most scripts have: swapped in for an evaluation, by `data`."""

    names: Callable[[str], bool] = staticmethod(lambda name: True)

    def __init__(self, model: Net, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self.shadow = {n: p.data.clone() for n, p in model.named_parameters() if self.names(n)}

    def update(self, step: int) -> None:
        super().update(step)
        own = {n: p for n, p in self.model.named_parameters() if self.names(n)}
        for name, param in own.items():
            self.shadow[name] = (1.0 - 0.5) * param.data + 0.5 * self.shadow[name]
        backup = {}
        for name, param in own.items():
            backup[name] = param.data  # and no copy of it
            param.data = self.shadow[name]
        evaluate(self.model, self.seen)
        for name, param in own.items():
            param.data = backup[name]
        evaluate(self.model, self.seen)


class ShadowOfSome(Shadow):
    """Of every second layer, and of biases."""

    names = staticmethod(lambda name: "bias" in name or ".3." in name or ".5." in name)


class ShadowBeforeTheStep(Shadow):
    """Evaluates where a graph waits for its backward pass."""

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        loss = self.loss(step)
        backup = {name: param.data for name, param in self.model.named_parameters()}
        for name, param in self.model.named_parameters():
            param.data = self.shadow[name]
        evaluate(self.model, self.seen)
        for name, param in self.model.named_parameters():
            param.data = backup[name]
        loss.backward()
        Recipe.update(self, step)


class Averaged(Recipe):
    """torch's own average of the weights."""

    def __init__(self, model: Net, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        self.average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=decay)

    def update(self, step: int) -> None:
        super().update(step)
        self.average.update_parameters(self.model)
        evaluate(self.average.module, self.seen)
        if step == STEPS - 1:
            for own, other in zip(
                self.model.parameters(), self.average.module.parameters(), strict=True
            ):
                own.data.copy_(other.data)
            evaluate(self.model, self.seen)


class Penalty(Recipe):
    """A term of all weights in the loss, and the distance from where they began."""

    def __init__(self, model: Net, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self.start = [param.detach().clone() for param in model.parameters()]

    def loss(self, step: int) -> torch.Tensor:
        pairs = zip(self.model.parameters(), self.start, strict=True)
        distance = sum((param - start).pow(2).sum() for param, start in pairs)
        squares = sum(param.pow(2).sum() for param in self.model.parameters())
        return super().loss(step) + 1e-2 * squares + 1e-2 * distance


class Clipped(Recipe):
    """Adaptive gradient clipping: by the norms of weights."""

    def update(self, step: int) -> None:
        for param in self.model.parameters():
            ratio = param.detach().norm() / param.grad.norm().clamp(min=1e-6)
            param.grad.mul_((0.1 * ratio).clamp(max=1.0))
        super().update(step)


class Vector(Recipe):
    """All parameters as one vector, and back."""

    def update(self, step: int) -> None:
        super().update(step)
        vector = torch.nn.utils.parameters_to_vector(self.model.parameters())
        torch.nn.utils.vector_to_parameters(vector * 0.9, self.model.parameters())


class Loaded(Recipe):
    """Goes back to a checkpoint of the parameters alone."""

    def update(self, step: int) -> None:
        file = io.BytesIO()
        torch.save(list(self.model.parameters()), file)
        super().update(step)
        evaluate(self.model, self.seen)
        if step == 1:
            file.seek(0)
            kept = torch.load(file, weights_only=False)
            for param, value in zip(self.model.parameters(), kept, strict=True):
                param.data.copy_(value)


class Merged(Recipe):
    """Adds something small to weights for an evaluation, and takes it out, as adapters do."""

    def update(self, step: int) -> None:
        super().update(step)
        evaluate(self.model, self.seen)
        for sign in (1, -1):
            for layer in self.model.layers:
                layer.up.weight.data += sign * 0.125
            evaluate(self.model, self.seen)


RECIPES = (
    *(Clamped, Gates, SharpnessAware, Shadow, ShadowOfSome, ShadowBeforeTheStep, Averaged),
    *(Penalty, Clipped, Vector, Loaded, Merged),
)
DOORS = ("parameters", "parameters states", "parameters states activations", "host parameters")


@functools.cache
def seen_without() -> Seen:
    """What a script without any recipe has seen."""
    return train(Recipe, "", None)[0]


def train(
    make: type[Recipe], door: str, directory: Path | None
) -> tuple[Seen, dict[str, torch.Tensor]]:
    """What a recipe has seen, and the weights at its end."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    at = None if "host" in door else directory
    with moving(door, model, optimizer, at, states=SMALL):
        recipe = make(model, optimizer)
        for step in range(STEPS):
            recipe.step(step)
    return recipe.seen, {k: v.clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_has_the_same_bits(recipe: type[Recipe], tmp_path: Path) -> None:
    seen, weights = train(recipe, "", tmp_path)
    for door in DOORS:
        found, own = train(recipe, door, tmp_path)
        assert found == seen, door
        for name, weight in weights.items():
            assert torch.equal(own[name], weight), (door, name)
    assert seen != seen_without()


@pytest.fixture
def offloaded(tmp_path: Path) -> tuple[Net, ParameterOffload]:
    model = Net()
    handle = offload_parameters(model, tmp_path)
    with torch.no_grad():
        model(batch(0))
    assert handle.window is not None
    for unit in handle.window.units:
        unit.wait_for_write()
    return model, handle


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("of_layer", [False, True], ids=["model", "layer"])
def test_a_copy_is_whole_and_another_model(
    copied: Callable[[Any], Any], of_layer: bool, offloaded: tuple[Net, ParameterOffload]
) -> None:
    model, handle = offloaded
    one, other = (model.layers[2], Net().layers[2]) if of_layer else (model, Net())
    twin = copied(one)
    for param, wanted in zip(twin.parameters(), other.parameters(), strict=True):
        assert type(param) is torch.nn.Parameter and param.requires_grad
        assert torch.equal(param, wanted)
    assert not any(vars(param) for param in twin.parameters())
    x = batch(1)
    assert torch.equal(twin(x), other(x))
    before = handle.statistics
    twin.double()(x.double())
    assert handle.statistics == before
    handle.close()


@pytest.mark.parametrize("copied", COPIES)
def test_a_model_with_all_doors_is_copied(copied: Callable[[Any], Any], tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with contextlib.ExitStack() as handles:
        activations = handles.enter_context(offload_activations(model, tmp_path, min_bytes=1))
        handles.enter_context(offload_parameters(model, tmp_path, gradients="on"))
        handles.enter_context(offload_optimizer(optimizer, tmp_path))
        layer_major = LayerMajor(model, offload=activations)
        for step in range(2):
            optimizer.zero_grad()
            layer_major.step([batch(step), batch(7)], model)
            optimizer.step()
        twin = copied(model)
        wanted = {name: value.clone() for name, value in model.state_dict().items()}
        for name, value in twin.state_dict().items():
            assert torch.equal(value, wanted[name])
        written = activations.statistics
        twin(batch(3)).backward()
        assert activations.statistics == written
        assert all(param.grad is not None for param in twin.parameters())


def test_a_file_of_one_layer_has_the_bytes_of_one_layer(
    offloaded: tuple[Net, ParameterOffload],
) -> None:
    model, handle = offloaded
    plain = len(pickle.dumps(Net().layers[1]))
    assert len(pickle.dumps(model.layers[1])) < 1.2 * plain
    assert len(pickle.dumps(model.layers[LAYERS - 1])) < 1.2 * plain  # it was in memory
    handle.close()


def test_what_asks_for_no_bytes_reads_none(offloaded: tuple[Net, ParameterOffload]) -> None:
    """Trainers ask every parameter many things, and move the model to where it is."""
    model, handle = offloaded
    assert handle.window is not None
    before = handle.statistics
    model.to("cpu")
    model.float()
    model.requires_grad_(True)
    model.zero_grad()
    torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        assert param.shape.numel() == param.numel() and param.device.type == "cpu"
        assert param.dtype == torch.float32 and param.is_leaf and param.grad is None
        assert isinstance(param, torch.nn.Parameter) and {param: 1}[param] == 1
    assert handle.statistics == before
    assert sum(beneath(unit.params[0]).isnan().all() for unit in handle.window.units) == LAYERS
    handle.close()


def test_touching_a_parameter_shows_its_unit_and_no_other(
    offloaded: tuple[Net, ParameterOffload],
) -> None:
    model, handle = offloaded
    assert handle.window is not None
    assert not model.layers[1].up.bias.isnan().any()
    units = handle.window.units
    assert not beneath(model.layers[1].gate).isnan().any() and units[1].where is Where.ON_TIER
    assert beneath(model.layers[2].gate).isnan().all()
    with torch.no_grad():
        model(batch(0))
    assert beneath(model.layers[1].gate).isnan().all()
    assert handle.statistics["written_bytes"] == handle.statistics["parameter_bytes"]
    handle.close()


def test_what_was_written_past_python_is_an_error(
    offloaded: tuple[Net, ParameterOffload],
) -> None:
    model, handle = offloaded
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        model.layers[2].gate.fill_(3.0)
    with pytest.raises(OffloadError, match=r"^parameters: a parameter of unit 3 of 6 was written"):
        model(batch(0))
    handle.close()  # nothing else is lost
    for one, other in zip(model.parameters(), Net().parameters(), strict=True):
        assert torch.equal(one, other)


def test_what_was_swapped_out_of_a_model_has_no_bytes(
    offloaded: tuple[Net, ParameterOffload],
) -> None:
    model, handle = offloaded
    other = torch.nn.Parameter(torch.ones(1))
    torch.utils.swap_tensors(model.layers[2].gate, other)
    with pytest.raises(OffloadError, match="swapped with another tensor"):
        other.sum()
    assert model.layers[2].gate.item() == 1.0
    assert torch.equal(model.layers[2].up.weight, Net().layers[2].up.weight)  # shows the unit
    assert model.layers[2].gate.item() == 1.0
    handle.close()
    assert model.layers[2].gate.item() == 1.0


def test_memory_of_before_stays_with_who_has_it(offloaded: tuple[Net, ParameterOffload]) -> None:
    model, handle = offloaded
    kept = [layer.up.weight.data for layer in model.layers]
    for layer in model.layers:
        layer.up.weight.data = torch.zeros(layer.up.weight.shape)
    with torch.no_grad():
        for _ in range(2):
            model(batch(0))
    for one, layer in zip(kept, Net().layers, strict=True):
        assert torch.equal(one, layer.up.weight)
    handle.close()
    assert not any(layer.up.weight.any() for layer in model.layers)


def test_a_model_is_offloaded_once(offloaded: tuple[Net, ParameterOffload]) -> None:
    model, handle = offloaded
    with pytest.raises(ConfigurationError, match="is offloaded already; close"):
        offload_parameters(model, mode="host")
    handle.close()


def test_a_backward_pass_is_of_its_own_model_alone(tmp_path: Path) -> None:
    """Another model of the process trains in another thread, perhaps."""
    models = Net(), Net()
    handles = [offload_parameters(model, tmp_path, gradients="on") for model in models]
    told = []
    with unit_backward(list(models[0].layers[0].parameters()), is_last=False):
        for handle in handles:
            assert handle.window is not None and handle.window.gradients is not None
            with contextlib.suppress(OffloadError):
                handle.window.gradients.check_is_told()
                told.append(handle)
    assert told == handles[:1]
    for handle in handles:
        handle.close()
