# SPDX-License-Identifier: Apache-2.0
"""What happens within and around a backward pass of layers whose parameters are on a tier."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.offload import offload_activations, offload_optimizer, offload_parameters
from megatron.offload.errors import OffloadError
from tests.behaviour.test_parameters_that_others_write import Net, batch

STEPS = 3


def steps_in_backward(directory: Path | None, doors: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Each parameter is updated as soon as its gradient is there, by an optimizer of its own."""
    model = Net()
    optimizers = {one: torch.optim.AdamW([one], lr=1e-2) for one in model.parameters()}

    def update(param: torch.Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in optimizers:
        param.register_post_accumulate_grad_hook(update)
    handles = []
    if directory is not None:
        handles = [offload_parameters(model, directory)]
        if "recompute" in doors:
            handles += [offload_activations(model, directory, recompute_layers="1-2", min_bytes=1)]
        if "states" in doors:
            handles += [offload_optimizer(one, directory) for one in optimizers.values()]
    losses = []
    for step in range(STEPS):
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            loss = model(batch(step))
        loss.backward()
        losses.append(loss.detach())
    for handle in handles:
        handle.close()
    return [*losses, *(one.detach() for one in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("doors", ["parameters", "recompute", "states"])
def test_an_optimizer_may_step_within_the_backward_pass(
    doors: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    expected = steps_in_backward(None, doors, dtype)
    found = steps_in_backward(tmp_path, doors, dtype)
    assert all(map(torch.equal, found, expected))


def assert_gradients_of(model: Net, number: int) -> None:
    """The model has the gradients of this batch, as they are without offload."""
    found = [one.grad for one in model.parameters()]
    model.zero_grad()
    model(batch(number)).backward()
    for one, param in zip(found, model.parameters(), strict=True):
        assert one is not None and param.grad is not None and torch.equal(one, param.grad)


class Keeping(torch.nn.Module):
    """A layer with a loss of its own, as routers of experts have."""

    own_loss: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        self.outer = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.inner(x)
        self.own_loss = inner.square().sum()
        return x + self.outer(inner)


def with_own_losses(
    directory: Path | None, *, alone: bool, recompute: bool = False, live_units: int = 2
) -> list[torch.Tensor | None]:
    torch.manual_seed(3)
    layers = torch.nn.Sequential(*(Keeping() for _ in range(4)))
    with contextlib.ExitStack() as stack:
        if directory is not None:
            stack.enter_context(offload_parameters(layers, directory, live_units=live_units))
        if directory is not None and recompute:
            stack.enter_context(offload_activations(layers, directory, recompute_layers="all"))
        loss = layers(torch.randn(4, 8)).square().sum()
        own = [one.own_loss for one in layers]
        (own[1] if alone else loss + sum(own)).backward()
    return [one.grad for one in layers.parameters()]


def test_layers_may_have_losses_of_their_own(tmp_path: Path) -> None:
    expected = with_own_losses(None, alone=False)
    assert all(map(torch.equal, with_own_losses(tmp_path, alone=False), expected))


@pytest.mark.parametrize("live_units", [2, 4])
def test_a_backward_pass_of_no_result_of_a_layer_is_an_error(
    live_units: int, tmp_path: Path
) -> None:
    """Also if the bytes are in memory, since parameters show them only where they are told.

    On an accelerator torch itself refuses a view of memory that is gone.
    """
    kind: type[Exception] = OffloadError
    said = "did not come from a result of their layer"
    if torch.get_default_device().type != "cpu":
        kind, said = RuntimeError, f"{said}|out of bounds for storage of size 0"
    with pytest.raises(kind, match=said):
        with_own_losses(tmp_path, alone=True, live_units=live_units)


@pytest.mark.parametrize("live_units", [2, 4])
def test_a_layer_that_runs_again_brings_its_weights_wherever_backward_enters_it(
    live_units: int, tmp_path: Path
) -> None:
    expected = with_own_losses(None, alone=True)
    found = with_own_losses(tmp_path, alone=True, recompute=True, live_units=live_units)
    for one, other in zip(found, expected, strict=True):
        assert one is other is None or torch.equal(one, other)


class Filling(torch.nn.Module):
    """A layer that puts its results into what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())

    def forward(self, values: dict[str, list[torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
        x = values["all"][0]
        values["all"][0] = x + self.inner(x)
        return values


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("live_units", [2, 4])
def test_layers_may_put_their_results_into_their_arguments(
    live_units: int, recompute: bool, tmp_path: Path
) -> None:
    """As layers do that hand on one dict of tensors, of force fields for example."""

    def gradients(directory: Path | None) -> list[torch.Tensor | None]:
        torch.manual_seed(3)
        model = torch.nn.ModuleDict()
        model["first"] = torch.nn.Linear(8, 8)
        model["layers"] = torch.nn.Sequential(*(Filling() for _ in range(4)))
        layers = model["layers"]
        with contextlib.ExitStack() as stack:
            if directory is not None:
                stack.enter_context(offload_parameters(layers, directory, live_units=live_units))
            if directory is not None and recompute:
                stack.enter_context(offload_activations(layers, directory, recompute_layers="all"))
            values = layers({"all": [model["first"](torch.randn(4, 8))]})
            values["all"][0].square().sum().backward()
        return [one.grad for one in model.parameters()]

    assert all(map(torch.equal, gradients(tmp_path), gradients(None)))


def test_a_penalty_on_weights_may_have_a_backward_pass_of_its_own(tmp_path: Path) -> None:
    model = Net()
    with offload_parameters(model, tmp_path):
        for number in range(2):
            model.zero_grad()
            loss = model(batch(number))
            sum(one.square().sum() for one in model.parameters()).backward()
            loss.backward()
    found = [one.grad for one in model.parameters()]
    model.zero_grad()
    loss = model(batch(1))
    sum(one.square().sum() for one in model.parameters()).backward()
    loss.backward()
    assert all(map(torch.equal, found, (one.grad for one in model.parameters())))


@pytest.mark.parametrize("is_changed", [False, True])
@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_a_script_goes_on_from_an_error_in_backward(
    error: type[BaseException], is_changed: bool, tmp_path: Path
) -> None:
    """It uses weights before its next forward pass: the layer of the error computes no more."""

    def fail(_: torch.Tensor) -> None:
        raise error

    def gradients(directory: Path | None) -> list[torch.Tensor | None]:
        torch.manual_seed(3)
        model = Net()
        handles = [offload_parameters(model, directory)] if directory is not None else []
        model.layers[-1].register_forward_hook(
            lambda _, __, result: result.register_hook(fail) and None, always_call=False
        )
        with pytest.raises(error):
            model(batch(0)).backward()
        model.layers[-1]._forward_hooks.popitem()
        model.zero_grad()
        if is_changed:
            model.layers[-1].up.weight.data.mul_(0.5)
            model(batch(1)).backward()
        else:
            penalty = sum(one.square().sum() for one in model.parameters())
            (model(batch(1)) + penalty).backward()
        for handle in handles:
            handle.close()
        return [one.grad for one in model.parameters()]

    assert all(map(torch.equal, gradients(tmp_path), gradients(None)))


def test_gradients_that_are_nan_by_themselves_are_no_error(tmp_path: Path) -> None:
    model = Net()
    with offload_parameters(model, tmp_path):
        (model(batch(0)) * float("nan")).backward()
        model.zero_grad()
        model(batch(1)).backward()
    assert_gradients_of(model, 1)


def test_gradients_of_gradients_are_refused(tmp_path: Path) -> None:
    model = Net()
    with offload_parameters(model, tmp_path):
        loss = model(batch(0))
        with pytest.raises(OffloadError, match="keep parameters in memory: close"):
            torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        model(batch(1)).backward()  # what comes after it has the right gradients
    assert_gradients_of(model, 1)


def test_a_graph_outlives_the_handle(tmp_path: Path) -> None:
    model = Net()
    handle = offload_parameters(model, tmp_path)
    loss = model(batch(0))
    handle.close()
    loss.backward()
    assert_gradients_of(model, 0)


def test_a_graph_of_before_raises(tmp_path: Path) -> None:
    model = Net()
    loss = model(batch(0))
    with offload_parameters(model, tmp_path):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        model.zero_grad()
        between = model(batch(1))
        between.backward()
        model.zero_grad()
        between = model(batch(1))
    with offload_parameters(model, tmp_path):  # the other handle's hooks bring nothing
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            between.backward()
        model.zero_grad()
        model(batch(2)).backward()
        assert_gradients_of(model, 2)


def test_a_graph_does_not_outlive_parameters_that_were_not_brought_back(tmp_path: Path) -> None:
    model = Net()
    handle = offload_parameters(model, tmp_path)
    loss = model(batch(0))
    handle.close(restore=False)
    with pytest.raises(OffloadError, match="closed without bringing them back"):
        loss.backward()


def by_layers(model: Net) -> None:
    for layer in model.layers:
        layer.compile(backend="aot_eager")


def as_a_whole(model: Net) -> None:
    """A graph ends at each layer: one that ran on would find parameters away, or old."""
    model.compile(backend="aot_eager")


def train_compiled(compile_it: Callable[[Net], None], directory: Path | None) -> list[torch.Tensor]:
    torch.compiler.reset()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    handle = None if directory is None else offload_parameters(model, directory)
    compile_it(model)
    found = []
    for step in range(STEPS):
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    if handle is not None:
        handle.close()
    return [*found, *(one.detach() for one in model.parameters())]


@pytest.mark.parametrize("compile_it", [by_layers, as_a_whole])
def test_what_is_compiled_trains_the_same(
    compile_it: Callable[[Net], None], tmp_path: Path
) -> None:
    expected = train_compiled(compile_it, None)
    found = train_compiled(compile_it, tmp_path)
    assert all(map(torch.equal, found, expected))
