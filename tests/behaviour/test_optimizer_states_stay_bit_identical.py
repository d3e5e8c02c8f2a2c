# SPDX-License-Identifier: Apache-2.0
"""Weights, states and checkpoints are the same, bit for bit, wherever an optimizer's states are."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import ConfigurationError, offload_optimizer

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda params: torch.optim.AdamW(params),
    "adamw-fused": lambda params: torch.optim.AdamW(params, fused=True),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "adam-amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True),
    "adam-groups": lambda params: torch.optim.Adam(
        [{"params": params[:5], "lr": 1e-2}, {"params": params[5:], "weight_decay": 0.1}]
    ),
    "sgd-without-states": lambda params: torch.optim.SGD(params, lr=0.1),
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params),
    "adafactor": lambda params: torch.optim.Adafactor(params),
}


def small_model() -> torch.nn.Sequential:
    torch.manual_seed(1)
    linear = [torch.nn.Linear(48, 48) for _ in range(6)]
    return torch.nn.Sequential(*linear, torch.nn.LayerNorm(48)).requires_grad_()


class Trained:
    """A small model after some steps, and what was seen on the way."""

    def __init__(self, make: Make, **offload: Any) -> None:
        self.model = small_model()
        self.optimizer = make(list(self.model.parameters()))
        self.handle = None
        if offload:
            settings = {"bucket_bytes": 30000, "window_bytes": 80000, **offload}
            self.handle = offload_optimizer(self.optimizer, **settings)
        self.losses: list[float] = []
        self._generator = torch.Generator().manual_seed(3)

    def train(self, num_steps: int, after: Callable[[int], None] = lambda step: None) -> Trained:
        for step in range(num_steps):
            inputs = torch.randn(8, 48, generator=self._generator)
            loss = self.model(inputs).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
            after(step)
        return self

    @property
    def result(self) -> tuple[Any, ...]:
        weights = [param.detach().clone() for param in self.model.parameters()]
        return self.losses, weights, copy.deepcopy(self.optimizer.state_dict())


def same(a: Any, b: Any) -> bool:
    """Whether nested values are equal, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.fixture(params=["ssd", "host", "tiered"])
def offload(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    if request.param == "host":
        return {"mode": "host"}
    return {"mode": request.param, "directory": tmp_path}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_has_the_same_bits(name: str, offload: dict[str, Any]) -> None:
    expected = Trained(OPTIMIZERS[name]).train(6)
    trained = Trained(OPTIMIZERS[name], **offload).train(6)
    assert same(trained.result, expected.result)
    trained.handle.close()
    assert same(trained.result, expected.result)
    assert same(trained.train(2).result, expected.train(2).result)


def test_states_come_back_from_a_checkpoint(offload: dict[str, Any], tmp_path: Path) -> None:
    make = OPTIMIZERS["adamw"]
    files = {}

    def resumed(name: str, **offload: Any) -> Any:
        one = Trained(make, **offload)
        files[name] = tmp_path / f"{name}.pt"

        def save(step: int) -> None:
            if step == 2:
                torch.save(one.optimizer.state_dict(), files[name])
            if step == 4:
                one.optimizer.load_state_dict(torch.load(files[name]))

        return one.train(7, save).result

    expected, found = resumed("in-memory"), resumed("offloaded", **offload)
    assert same(found, expected)
    assert same(torch.load(files["offloaded"]), torch.load(files["in-memory"]))


def test_states_that_exist_already_move(offload: dict[str, Any]) -> None:
    expected = Trained(OPTIMIZERS["adamw"]).train(3)
    begun = Trained(OPTIMIZERS["adamw"]).train(3)
    settings = {"bucket_bytes": 30000, "window_bytes": 80000, **offload}
    with offload_optimizer(begun.optimizer, **settings) as handle:
        assert handle.states is not None and handle.states.memory_bytes <= 80000
        begun.train(3)
        assert same(begun.result, expected.train(3).result)


def test_states_that_are_changed_in_place_between_steps_stay_changed(
    offload: dict[str, Any],
) -> None:
    def halve(trained: Trained) -> Callable[[int], None]:
        def change(step: int) -> None:
            if step != 2:
                return
            if trained.handle is not None:
                trained.handle.states.expose()
            for state in trained.optimizer.state.values():
                state["exp_avg"].mul_(0.5)

        return change

    results = []
    for settings in ({}, offload):
        one = Trained(OPTIMIZERS["adamw"], **settings)
        results.append(one.train(5, halve(one)).result)
    assert same(*results)


def test_parameters_without_a_gradient_keep_their_states(offload: dict[str, Any]) -> None:
    def freeze(trained: Trained) -> Callable[[int], None]:
        def change(step: int) -> None:
            trained.model[step % 6].requires_grad_(step % 2 == 0)

        return change

    results = []
    for settings in ({}, offload):
        one = Trained(OPTIMIZERS["adamw"], **settings)
        results.append(one.train(8, freeze(one)).result)
    assert same(*results)


def test_parameters_that_are_added_later_move_too(offload: dict[str, Any]) -> None:
    def add(trained: Trained) -> Callable[[int], None]:
        def change(step: int) -> None:
            if step == 1:
                trained.model.append(torch.nn.Linear(48, 48))
                trained.optimizer.add_param_group({"params": trained.model[-1].parameters()})

        return change

    results = []
    for settings in ({}, offload):
        one = Trained(OPTIMIZERS["adamw"], **settings)
        results.append(one.train(5, add(one)).result)
    assert same(*results)


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_scheduler_works_whether_it_comes_first_or_last(
    offload: dict[str, Any], comes_first: bool
) -> None:
    def with_schedule(settings: dict[str, Any]) -> Any:
        schedulers: list[Any] = []

        def make(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
            optimizer = torch.optim.AdamW(params)
            if comes_first:
                schedulers.append(torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1, 4))
            return optimizer

        one = Trained(make, **settings)
        if not comes_first:
            schedulers.append(torch.optim.lr_scheduler.LinearLR(one.optimizer, 0.1, 1, 4))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # that a scheduler went before the optimizer
            return one.train(6, lambda step: schedulers[0].step()).result

    assert same(with_schedule(offload), with_schedule({}))


def test_hooks_of_steps_run_once_a_step(offload: dict[str, Any]) -> None:
    one = Trained(OPTIMIZERS["adamw"], **offload)
    calls: list[str] = []
    one.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    one.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    one.train(2)
    assert calls == ["before", "after"] * 2


class NeedsAClosure(torch.optim.AdamW):
    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        super().step()
        return loss


@pytest.mark.parametrize("make", [OPTIMIZERS["adamw"], NeedsAClosure])
def test_a_closure_is_called_once_a_step(make: Make, offload: dict[str, Any]) -> None:
    def with_closure(settings: dict[str, Any]) -> Any:
        one = Trained(make, **settings)
        losses = []
        for _ in range(3):

            def closure() -> torch.Tensor:
                one.optimizer.zero_grad()
                loss = one.model(torch.ones(2, 48)).square().mean()
                loss.backward()
                return loss

            losses.append(one.optimizer.step(closure).item())
        return losses, one.result

    assert same(with_closure(offload), with_closure({}))


def test_what_looks_at_all_parameters_at_once_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="LBFGS"):
        offload_optimizer(torch.optim.LBFGS([torch.nn.Parameter(torch.ones(2))]), tmp_path)


def test_states_are_offloaded_once(tmp_path: Path) -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    handle = offload_optimizer(optimizer, tmp_path)
    with pytest.raises(ConfigurationError, match="already"):
        offload_optimizer(optimizer, tmp_path)
    handle.close()
    offload_optimizer(optimizer, tmp_path).close()


def test_settings_are_named_as_they_were_given(tmp_path: Path) -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ConfigurationError, match=r"give directory=\.\.\.$"):
        offload_optimizer(optimizer, mode="ssd")
    with pytest.raises(ConfigurationError, match="did you mean window_bytes"):
        offload_optimizer(optimizer, tmp_path, window_byte=1)


def test_off_touches_nothing() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    with offload_optimizer(optimizer, mode="off") as handle:
        assert handle.states is None and "step" not in optimizer.__dict__


def test_states_are_listed_in_the_order_in_which_they_were_made(tmp_path: Path) -> None:
    """Also where some parameters have no gradient in the first step."""
    found = []
    for is_offloaded in (True, False):
        params = list(small_model().parameters())
        optimizer = torch.optim.AdamW(params)
        if is_offloaded:
            offload_optimizer(optimizer, tmp_path, bucket_bytes=1, window_bytes=0)
        for missing in ({1, 4, 9}, {4}, set()):
            for index, param in enumerate(params):
                param.grad = None if index in missing else torch.ones_like(param)
            optimizer.step()
        found.append(list(optimizer.state_dict()["state"]))
    assert found[0] == found[1] != sorted(found[1])
