# SPDX-License-Identifier: Apache-2.0
"""Steps of optimizers that have all parameters in memory: with closures, errors, steps in steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import LayerMajor, offload_optimizer, offload_parameters
from megatron.offload.integration.torch.parameter_offload import ParameterOffload
from megatron.offload.parameters.offloaded_parameter import OffloadedParameter
from tests.behaviour.test_gradient_offload import weights_leave_alone
from tests.behaviour.test_layer_major_steps import LAYERS, Language, micro_batches
from tests.behaviour.test_parameters_that_others_write import Net, batch
from tests.support.layer_major import one_by_one

__all__ = ["weights_leave_alone"]  # a fixture for all tests


def same_weights(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(one, its) for one, its in pairs)


class Looking(torch.optim.SGD):
    """Takes a step of its own, by what parameters are, before it calls its closure."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.sign() * 1e-3)
        return super().step(closure)


class Replacing(torch.optim.SGD):
    """Puts new tensors in the places of parameters: before it calls its closure, and behind it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"]]
        for param in params:
            param.data = param - param.sign() * 1e-3
        with torch.enable_grad():
            loss = closure()
        for param in params:
            param.data = param - 0.1 * param.grad
        return loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "lbfgs": lambda params: torch.optim.LBFGS(
        params, max_iter=3, history_size=2, line_search_fn="strong_wolfe"
    ),
    "looking": lambda params: Looking(params, lr=0.1),
    "replacing": lambda params: Replacing(params),
}


def trained_by_closures(
    kind: str,
    directory: Path | None,
    *,
    gradients: str = "off",
    states: bool = False,
    by_name: bool = False,
) -> tuple[Language, list[float]]:
    """A model after two steps, and the losses."""
    model = Language().eval()
    optimizer = OPTIMIZERS[kind](model.parameters())
    layer_major = LayerMajor(model) if gradients == "on" else None
    losses: list[float] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        if layer_major is None:
            own = one_by_one(model, batches)
        else:
            own = layer_major.step(batches, model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        losses.extend(float(loss) for loss in own)
        return torch.stack([loss.detach() for loss in own]).sum()

    with contextlib.ExitStack() as handles:
        if directory is not None:
            handles.enter_context(offload_parameters(model, directory, gradients=gradients))
        if states:
            handles.enter_context(offload_optimizer(optimizer, directory))
        for number in range(2):
            batches = micro_batches(number)[:2]
            loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
            losses.append(float(loss))
    return model, losses


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("sgd", {}),
        ("adamw", {"by_name": True}),
        ("adamw", {"gradients": "on"}),
        ("adamw", {"states": True}),
        ("lbfgs", {}),
        ("lbfgs", {"gradients": "on"}),
        ("looking", {}),
        ("replacing", {}),
    ],
)
def test_a_step_with_a_closure_has_the_same_bits(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    expected, expected_losses = trained_by_closures(kind, None)
    found, losses = trained_by_closures(kind, tmp_path, **settings)
    assert losses == expected_losses
    assert same_weights(found, expected)


class Noting(torch.optim.SGD):
    """Notes, whenever it updates parameters, which of them are what they are without offload."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.noted: list[set[type]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self._update()
        if closure is not None:
            with torch.enable_grad():
                closure()
            self._update()

    def _update(self) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        self.noted.append({type(param) for param in params})
        for param in params:
            param.sub_(param.grad, alpha=0.1)


@pytest.mark.parametrize("closure", ["none", "by place", "by name"])
def test_an_optimizer_updates_memory_and_no_mapped_file(closure: str, tmp_path: Path) -> None:
    """A write to a mapped file cannot fail: the system ends the process where the disk is full."""
    model = Language().eval()
    optimizer = Noting(model.parameters())

    def passes() -> None:
        model(micro_batches(0)[0]).backward()

    with offload_parameters(model, tmp_path) as handle:
        assert handle.window is not None
        passes()
        if closure == "by name":
            optimizer.step(closure=passes)
        else:
            optimizer.step(*[passes] * (closure == "by place"))
        assert optimizer.noted == [{torch.nn.Parameter}] * (1 if closure == "none" else 2)
        with torch.no_grad():
            model(micro_batches(0)[0])  # so that the first units are away
        assert {type(param) for param in model.layers[0].parameters()} == {OffloadedParameter}


def test_a_unit_that_leaves_while_it_is_updated_keeps_its_update(tmp_path: Path) -> None:
    """As where a step runs layers. A change through `data` leaves no trace by itself."""
    model, expected = Language().eval(), Language().eval()
    with offload_parameters(model, tmp_path) as handle:
        assert handle.window is not None
        with handle.window.changing(list(model.layers[0].parameters())):
            for param in model.layers[0].parameters():
                param.data.mul_(0.5)
            with torch.no_grad():
                model(micro_batches(0)[0])
        for param in expected.layers[0].parameters():
            param.data.mul_(0.5)
        assert same_weights(model, expected)


def test_a_closure_that_fails_leaves_all_as_it_was(tmp_path: Path) -> None:
    model, expected = Language().eval(), Language().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        model(micro_batches(0)[0])
        raise KeyboardInterrupt

    with offload_parameters(model, tmp_path):
        with pytest.raises(KeyboardInterrupt):
            optimizer.step(closure)
        assert same_weights(model, expected)


class Interrupted(torch.optim.SGD):
    """Its first step ends before it has done anything."""

    is_first = True

    def step(self, closure: Any = None) -> Any:
        if self.is_first:
            self.is_first = False
            raise KeyboardInterrupt
        return super().step(closure)


class Two:
    """A model with an optimizer of its layers, whose first step fails, and one of all else."""

    def __init__(self, directory: Path | None, **settings: Any) -> None:
        self.model = Language().eval()
        self.of_layers = Interrupted(self.model.layers.parameters(), lr=0.1)
        others = [*self.model.embedding.parameters(), *self.model.output.parameters()]
        self.of_others = torch.optim.SGD(others, lr=0.1)
        self.handle: ParameterOffload | None = None
        if directory is not None:
            self.handle = offload_parameters(self.model, directory, **settings)
        self.layer_major = LayerMajor(self.model)

    def passes(self, number: int) -> None:
        self.model.zero_grad()
        self.layer_major.step(micro_batches(number), self.model)

    def fail(self) -> None:
        with pytest.raises(KeyboardInterrupt):
            self.of_layers.step()


@pytest.fixture(params=["off", "on"], ids=["gradients stay", "gradients leave"])
def two(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Two, Two]]:
    """One that is offloaded, and one that is not."""
    found = Two(tmp_path, gradients=request.param)
    yield found, Two(None)
    assert found.handle is not None
    found.handle.close(restore=False)


def test_steps_go_on_after_one_that_failed(two: tuple[Two, Two]) -> None:
    for one in two:
        one.passes(0)
        one.fail()
        one.passes(1)
        one.of_others.step()  # does not end the step that failed
        one.of_layers.step()
    assert same_weights(two[0].model, two[1].model)


def test_a_step_that_failed_can_be_repeated(two: tuple[Two, Two]) -> None:
    """Though another optimizer has stepped meanwhile: its gradients are still there."""
    for one in two:
        one.passes(0)
        one.fail()
        one.of_others.step()
        one.of_layers.step()
    assert same_weights(two[0].model, two[1].model)


def test_after_a_step_that_failed_units_leave(tmp_path: Path) -> None:
    """Nobody has them in memory for the sake of an optimizer that does not step any more."""
    one = Two(tmp_path)
    one.passes(0)
    one.fail()
    one.passes(1)
    assert one.handle is not None and one.handle.window is not None
    one.of_others.step()
    for unit in one.handle.window.units:
        unit.wait_for_write()
    statistics = one.handle.statistics
    assert statistics["memory_bytes"] <= statistics["parameter_bytes"] / LAYERS * 2
    one.handle.close()


class Outer(torch.optim.SGD):
    """Has another optimizer step before it updates its own parameters."""

    inner: torch.optim.Optimizer

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.inner.step()
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad, alpha=0.1)


def test_a_step_that_runs_another_optimizers_keeps_its_parameters(tmp_path: Path) -> None:
    """Those of the other one are few enough to live beside what is read ahead, and push out all."""
    models = []
    for directory in (tmp_path, None):
        model = Language().eval()
        outer = Outer(model.layers[1:].parameters())
        outer.inner = torch.optim.SGD(model.layers[0].parameters(), lr=0.1)
        with offload_parameters(model, directory, mode="ssd" if directory else "off"):
            for number in range(2):
                model.zero_grad()
                model(micro_batches(number)[0]).backward()
                outer.step()
        models.append(model)
    assert same_weights(*models)


@pytest.mark.parametrize("kind", ["raises", "replaces"])
def test_weights_may_be_used_between_a_step_that_a_hook_changes_and_the_next_pass(
    kind: str, tmp_path: Path
) -> None:
    """A hook raises, or gives the step new arguments; then there is a penalty on weights."""

    def change(_: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if kind == "raises":
            raise ArithmeticError
        return args, dict(kwargs)

    def gradients(directory: Path | None) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.register_step_pre_hook(change)
        handle = None if directory is None else offload_parameters(model, directory, live_units=2)
        found = []
        for number in range(3):
            penalty = sum(one.square().sum() for one in model.parameters())
            (model(batch(number)) + penalty).backward()
            with contextlib.suppress(ArithmeticError):
                optimizer.step()
            found += [one.grad.clone() for one in model.parameters()]
            found += [one.detach().clone() for one in model.parameters()]
            optimizer.zero_grad()
        if handle is not None:
            handle.close()
        return found

    assert all(map(torch.equal, gradients(tmp_path), gradients(None)))
