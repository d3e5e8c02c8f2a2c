# SPDX-License-Identifier: Apache-2.0
"""Optimizers that keep something beside their parameters' states: the same bits, or a sentence."""

from __future__ import annotations

import copy
import gc
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from megatron.offload import ConfigurationError, offload_optimizer
from megatron.offload.errors import OffloadError

_NUM_LAYERS = 4


class Plain(torch.optim.Optimizer):
    """Gradient descent, whose subclasses keep something beside it."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, {"lr": 0.1, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, group)

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.add_(param.grad, alpha=-group["lr"])


class CountsInItsState(Plain):
    """Has a state that is no parameter's."""

    def step(self, closure: Any = None) -> None:
        self.state["k"] = self.state.get("k", 0) + 1
        super().step()


class CountsItself(Plain):
    """Counts its steps in an attribute."""

    count: Any = 0

    def step(self, closure: Any = None) -> None:
        self.count = self.count + 1
        super().step()


class CountsItselfFromTheBeginning(CountsItself):
    """Has had the attribute since it was made."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count = 0


class CountsInATensor(Plain):
    """Counts its steps in a tensor that it has."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count = torch.zeros(())

    def step(self, closure: Any = None) -> None:
        self.count += 1
        super().step()


class MovesItsTensor(CountsInATensor):
    """Has its tensor elsewhere from its first step on."""

    def step(self, closure: Any = None) -> None:
        self.count = self.count.to("meta")
        Plain.step(self)


class CountsInATensorOfItsGroup(Plain):
    """Counts its steps in a tensor of each group, in place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group["count"] = torch.zeros(())

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
        super().step()


class SumsInItsGroup(Plain):
    """Keeps the norm of a group's gradients, of those that it sees."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            norms = [param.grad.norm() for param in group["params"] if param.grad is not None]
            group["norm"] = float(sum(norms))
        super().step()


class CountsInGroups(Plain):
    """Counts its steps in its groups, and updates by the count."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, count=0)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
        super().step()

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.add_(param.grad, alpha=-group["lr"] / group["count"])


class HandsOn(Plain):
    """Has the last two gradients of a parameter, and hands a tensor from one key to another."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        for key in ("last", "before") if not state else ():
            state[key] = torch.zeros_like(param)
        param.sub_(param.grad + 0.5 * state["last"] + 0.25 * state["before"], alpha=group["lr"])
        state["before"], state["last"] = state["last"], param.grad.clone()


class Swaps(Plain):
    """Has two states that take turns."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        for key in ("one", "other") if not state else ():
            state[key] = torch.zeros_like(param)
        state["one"], state["other"] = state["other"], state["one"]
        param.sub_(state["one"].add_(param.grad), alpha=group["lr"])


class HasMainWeights(Plain):
    """Has each parameter once more, under a name that others use for the parameter itself."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["param"] = param.detach().double()
        param.copy_(state["param"].sub_(param.grad, alpha=group["lr"]))


class Around(torch.optim.Optimizer):
    """Runs another optimizer's step, and has its groups."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.base = inner

    def step(self, closure: Any = None) -> None:
        self.base.step()


def linear_layers() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(_NUM_LAYERS)])


def gradients_of(layers: torch.nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for param in layers.parameters():
        param.grad = torch.rand(param.shape, generator=generator)


def offloaded(optimizer: torch.optim.Optimizer, directory: Path | None = None) -> Any:
    return offload_optimizer(optimizer, directory, bucket_bytes=1, window_bytes=0)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (CountsInItsState, "keeps 'k' in its state"),
        (CountsItself, "changes what it has as 'count'"),
        (CountsItselfFromTheBeginning, "changes what it has as 'count'"),
        (CountsInATensor, "changes what it has as 'count'"),
        (MovesItsTensor, "changes what it has as 'count'"),
        (CountsInATensorOfItsGroup, "changes what it has as 'count of group 0'"),
        (SumsInItsGroup, "computes 'norm' of a group from several parameters"),
    ],
)
def test_what_a_step_keeps_elsewhere_ends_the_training(
    kind: Callable[[Any], torch.optim.Optimizer], what: str
) -> None:
    layers = linear_layers()
    optimizer = kind(layers.parameters())
    gradients_of(layers, 0)
    with offloaded(optimizer), pytest.raises(OffloadError, match=what):
        optimizer.step()


def test_an_optimizer_that_has_a_state_of_no_parameter_is_refused() -> None:
    layers = linear_layers()
    optimizer = CountsInItsState(layers.parameters())
    gradients_of(layers, 0)
    optimizer.step()
    with pytest.raises(ConfigurationError, match="keeps 'k' in its state"):
        offloaded(optimizer)
    assert "step" not in vars(optimizer)


def test_a_state_of_no_parameter_that_is_loaded_ends_the_training() -> None:
    layers = linear_layers()
    optimizer = Plain(layers.parameters())
    gradients_of(layers, 0)
    before = [param.detach().clone() for param in layers.parameters()]
    with offloaded(optimizer):
        optimizer.state["k"] = 3
        with pytest.raises(ConfigurationError, match="keeps 'k' in its state"):
            optimizer.step()
    assert all(map(torch.equal, before, layers.parameters()))


@pytest.mark.parametrize("is_in_a_list", [False, True])
def test_an_optimizer_around_another_one_is_refused(is_in_a_list: bool) -> None:
    inner = torch.optim.SGD(linear_layers().parameters(), lr=0.1)
    optimizer = Around(inner)
    if is_in_a_list:
        optimizer.base = [inner]
    with pytest.raises(ConfigurationError, match=r"\(base, SGD\).*offload the states of SGD"):
        offloaded(optimizer)
    assert "step" not in vars(optimizer)


class Scales(Plain):
    """Takes a factor with each step."""

    def step(self, closure: Any = None, *, scale: float = 1.0) -> None:
        for group in self.param_groups:
            group["lr"] = 0.1 * scale
        super().step(closure)


def test_an_optimizer_without_parameters_is_refused() -> None:
    """A trainer may have one in the place of none."""
    optimizer = Plain([torch.zeros(1)])
    optimizer.param_groups.clear()
    with pytest.raises(ConfigurationError, match="this Plain has no parameters"):
        offload_optimizer(optimizer)


def test_a_step_that_is_called_with_more_than_a_closure_is_refused() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = Scales(model.parameters())
    with offload_optimizer(optimizer):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        before = model.weight.detach().clone()
        with pytest.raises(ConfigurationError, match=r"step\(\) was called with scale, and"):
            optimizer.step(scale=0.5)
        assert torch.equal(model.weight, before)
    optimizer.step(scale=0.5)
    assert not torch.equal(model.weight, before)


def test_the_optimizer_inside_of_another_one_can_be_offloaded() -> None:
    models = []
    for is_offloaded in (True, False):
        layers = linear_layers()
        optimizer = Around(torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9))
        if is_offloaded:
            offloaded(optimizer.base)
        for number in range(3):
            gradients_of(layers, number)
            optimizer.step()
        models.append(layers)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.parametrize("name", ["Prodigy", "DAdaptAdam", "FusedLAMB"])
def test_what_sums_over_all_parameters_is_refused(name: str) -> None:
    optimizer = type(name, (Plain,), {})(linear_layers().parameters())
    with pytest.raises(ConfigurationError, match=f"{name} .* sums over all parameters"):
        offloaded(optimizer)


def two_groups(layers: torch.nn.Sequential) -> list[dict[str, Any]]:
    half = _NUM_LAYERS // 2
    return [{"params": [*part.parameters()]} for part in (layers[:half], layers[half:])]


def test_a_group_without_gradients_counts_its_steps() -> None:
    found = []
    for is_offloaded in (True, False):
        layers = linear_layers()
        optimizer = CountsInGroups(two_groups(layers))
        if is_offloaded:
            offloaded(optimizer)
        for number in range(5):
            gradients_of(layers, number)
            if number in (1, 2):
                layers[: _NUM_LAYERS // 2].zero_grad()
            if number == 3:
                layers.zero_grad()
            optimizer.step()
        found.append((layers, [group["count"] for group in optimizer.param_groups]))
    (ours, counts), (expected, expected_counts) = found
    assert counts == expected_counts == [5, 5]
    assert all(map(torch.equal, ours.parameters(), expected.parameters()))


def test_what_a_step_that_failed_wrote_into_groups_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = linear_layers()
    optimizer = Plain(two_groups(layers))
    gradients_of(layers, 0)

    def fail(self: Plain, param: torch.Tensor, group: dict[str, Any]) -> None:
        if param is layers[2].weight:
            raise KeyboardInterrupt

    with offloaded(optimizer):
        optimizer.step()
        saved = optimizer.state_dict()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Plain, "update", fail)
            optimizer.step()
        optimizer.load_state_dict(saved)
        for group in optimizer.param_groups:
            group["lr"] = 0.001
        optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.001, 0.001]


@pytest.mark.parametrize("kind", [HandsOn, Swaps, HasMainWeights])
@pytest.mark.parametrize("is_on_ssd", [False, True])
def test_states_of_any_name_that_change_their_names_have_the_same_bits(
    kind: Callable[[Any], torch.optim.Optimizer], is_on_ssd: bool, tmp_path: Path
) -> None:
    found = []
    for is_offloaded in (True, False):
        layers = linear_layers()
        optimizer = kind(layers.parameters())
        if is_offloaded:
            offloaded(optimizer, tmp_path if is_on_ssd else None)
        for number in range(5):
            gradients_of(layers, number)
            optimizer.step()
        states = [
            value for state in optimizer.state_dict()["state"].values() for value in state.values()
        ]
        found.append([*layers.parameters(), *states])
    assert len(found[0]) == len(found[1]) and all(map(torch.equal, *found))


class KeepsPairs(Plain):
    """Has a state made of two tensors, as 8-bit ones of torchao are, beside a plain one."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["pair"] = TwoTensor(torch.zeros_like(param), torch.ones_like(param))
            state["mean"] = torch.zeros_like(param)
        state["pair"].add_(param.grad)
        state["mean"].lerp_(param.grad, 0.5)
        param.add_(state["pair"].a * state["pair"].b + state["mean"], alpha=-group["lr"])


def test_a_state_of_several_tensors_stays_and_it_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(is_offloaded: bool) -> list[torch.Tensor]:
        torch.manual_seed(2)
        layers = linear_layers()
        optimizer = KeepsPairs(layers.parameters())
        handle = offloaded(optimizer, tmp_path) if is_offloaded else None
        for step in range(4):
            gradients_of(layers, step)
            optimizer.step()
        if handle is not None:
            assert handle.statistics["read_bytes"] > 0
            for state in optimizer.state.values():
                assert state["mean"].is_meta and type(state["pair"]) is TwoTensor
        return [param.detach().clone() for param in layers.parameters()]

    assert all(map(torch.equal, run(is_offloaded=True), run(is_offloaded=False)))
    said = [one.getMessage() for one in caplog.records if "TwoTensor" in one.getMessage()]
    assert len(said) == 1 and "stay in memory" in said[0]


def test_a_sparse_state_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SGD's momentum of an embedding with sparse gradients is sparse as well."""

    def run(is_offloaded: bool) -> list[torch.Tensor]:
        torch.manual_seed(2)
        model = torch.nn.Sequential(torch.nn.Embedding(8, 8, sparse=True), linear_layers())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        handle = None
        for step in range(4):
            if is_offloaded and step % 2 == 0:  # without states, and with some
                if handle is not None:
                    handle.close()
                handle = offloaded(optimizer, tmp_path)
            model(torch.tensor([1, 2, 3 + step])).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if handle is not None:
            assert handle.statistics["read_bytes"] > 0
            handle.close()
        momenta = [state["momentum_buffer"].to_dense() for state in optimizer.state.values()]
        return [*momenta, *(param.detach().clone() for param in model.parameters())]

    assert all(map(torch.equal, run(is_offloaded=True), run(is_offloaded=False)))
    said = [one.getMessage() for one in caplog.records if "sparse_coo" in one.getMessage()]
    assert len(said) == 2 and "stay in memory" in said[0]  # once a handle


class DecaysAll(Plain):
    """Decays parameters before it looks whether they have a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(0.9)
        super().step()


class TakesZeros(Plain):
    """Takes a gradient of zeros where there is none, and has a momentum, as Muon does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                self.update(param, group)

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
        param.sub_(momentum.mul_(0.9).add_(param.grad), alpha=group["lr"])


@pytest.mark.parametrize("kind", [DecaysAll, TakesZeros])
@pytest.mark.parametrize("has_groups", [False, True])
@pytest.mark.parametrize("without", [(), (0, 1), (2, 3)])
def test_parameters_without_a_gradient_are_updated_by_what_updates_all(
    kind: Callable[[Any], torch.optim.Optimizer], has_groups: bool, without: tuple[int, ...]
) -> None:
    found = []
    for is_offloaded in (True, False):
        layers = linear_layers()
        params = two_groups(layers) if has_groups else layers.parameters()
        optimizer = kind(params)
        if is_offloaded:
            offloaded(optimizer)
        for number in range(5):
            gradients_of(layers, number)
            if number in without:
                layers[: _NUM_LAYERS // 2].zero_grad()
            optimizer.step()
        states = copy.deepcopy(optimizer.state_dict()["state"])
        found.append(([*layers.parameters()], [one for s in states.values() for one in s.values()]))
    for ours, expected in zip(*found, strict=True):
        assert len(ours) == len(expected) and all(map(torch.equal, ours, expected))


def test_a_step_that_other_code_has_put_on_an_optimizer_is_refused() -> None:
    """It would be left out, with whatever it does to gradients."""
    layers = linear_layers()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    own_step = optimizer.step
    calls = []

    def step(closure: Any = None) -> Any:
        calls.append(closure)
        return own_step(closure)

    for put_on in (step, types.MethodType(lambda _, closure=None: step(closure), optimizer)):
        optimizer.step = put_on  # type: ignore[method-assign]
        with pytest.raises(ConfigurationError, match="a step of its own in the place of"):
            offloaded(optimizer)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # around it
    with pytest.raises(ConfigurationError, match="call offload_optimizer before that code"):
        offloaded(optimizer)
    gradients_of(layers, 0)
    optimizer.step()
    assert len(calls) == 1


def test_a_step_that_was_put_back_is_the_optimizers_own() -> None:
    """Accelerate puts another one there for a while, and then what it found."""
    optimizer = torch.optim.SGD(linear_layers().parameters(), lr=0.1)
    optimizer.step = optimizer.step  # type: ignore[method-assign]
    offloaded(optimizer).close()
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    offloaded(optimizer).close()


def test_parameters_that_left_the_optimizer_are_let_go() -> None:
    """Some replace them every hundred steps by others, more or fewer: Gaussian splatting does."""
    optimizer = torch.optim.Adam(two_groups(linear_layers()))
    first = optimizer.param_groups[0]["params"]
    with offloaded(optimizer) as handle:
        assert handle.states is not None
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        optimizer.step()
        num_bytes, gone = handle.states.num_bytes, weakref.ref(first[0])
        del param
        for _ in range(3):
            handle.states.expose()
            for group in optimizer.param_groups:
                for number, old in enumerate(group["params"]):
                    group["params"][number] = new = torch.nn.Parameter(old.detach() * 2)
                    optimizer.state[new] = optimizer.state.pop(old)
                    new.grad = torch.ones_like(new)
            del old, new
            optimizer.step()
        gc.collect()
        assert gone() is None
        assert handle.states.num_bytes == num_bytes


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Plain])
def test_a_step_that_other_code_keeps_is_the_optimizers_own_after_close(
    kind: Callable[[Any], torch.optim.Optimizer],
) -> None:
    found = []
    for is_offloaded in (True, False):
        layers = linear_layers()
        optimizer = kind(layers.parameters())
        calls: list[str] = []
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
        handle = offloaded(optimizer) if is_offloaded else None
        step = optimizer.step
        for number in range(4):
            gradients_of(layers, number)
            if number == 2 and handle is not None:
                handle.close()
            step()
        found.append([*layers.parameters()])
        assert len(calls) == 4
        copy.deepcopy(optimizer.state_dict())
    assert all(map(torch.equal, *found))


def test_an_optimizer_that_is_dropped_leaves_no_hook_on_parameters() -> None:
    """A script may make a new one in each phase of a training."""
    layers = linear_layers()
    for _ in range(3):
        optimizer = torch.optim.Adam(layers.parameters())
        offloaded(optimizer)
        del optimizer
        gc.collect()
    hooks = [getattr(one, "_post_accumulate_grad_hooks", None) for one in layers.parameters()]
    assert not any(hooks)
