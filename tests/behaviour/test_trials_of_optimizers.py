# SPDX-License-Identifier: Apache-2.0
"""Optimizers that look at other parameters or draw numbers are noticed before they update."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.offload import ConfigurationError, offload_optimizer
from tests.behaviour.test_what_optimizers_keep import Plain, gradients_of, linear_layers


class ClipsByTheNormOfAll(Plain):
    """Divides gradients by the norm of all of them, which it keeps in a variable."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        norms = [param.grad.norm() for param in params if param.grad is not None]
        self._divide_by(max(float(torch.stack(norms).norm()), 1.0) if norms else 1.0)

    def _divide_by(self, norm: float) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad / norm, alpha=group["lr"])


class ClipsMomenta(ClipsByTheNormOfAll):
    """The same of momenta, which are there before the first step."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, **defaults)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["momentum"] = torch.zeros_like(param)

    def _divide_by(self, norm: float) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    momentum = self.state[param]["momentum"].add_(param.grad / norm)
                    param.sub_(momentum, alpha=group["lr"])


class Draws(Plain):
    """Adds a random number to each gradient."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.sub_(param.grad + self.draw(), alpha=group["lr"])

    def draw(self) -> float:
        return float(torch.rand(()))


class DrawsOfPython(Draws):
    def draw(self) -> float:
        return random.random()


class DrawsOfNumpy(Draws):
    def draw(self) -> float:
        return float(np.random.random())


class DrawsOfItsOwn(Draws):
    """Has a generator of its own."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, **defaults)
        self.numbers = torch.Generator().manual_seed(1)

    def draw(self) -> float:
        return float(torch.rand((), generator=self.numbers))


class RoundsByDice(Plain):
    """Rounds to bfloat16 up or down."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        exact = param.float() - group["lr"] * param.grad.float()
        dice = torch.randint_like(exact, 1 << 16, dtype=torch.int32)
        bits = exact.view(torch.int32) + dice
        param.copy_((bits & -(1 << 16)).view(torch.float32))


class CountsInAList(Plain):
    """Has a list of its steps, and smaller ones the longer it is."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, **defaults)
        self.steps: list[int] = []

    def step(self, closure: Any = None) -> None:
        self.steps.append(1)
        super().step()

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.sub_(param.grad, alpha=group["lr"] / len(self.steps))


class HeavyBall(Plain):
    """Momentum, of which it asks where a parameter is."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for number, param in enumerate(group["params"]):
                self.update_numbered(param, group, number)

    @torch.no_grad()
    def update_numbered(self, param: torch.Tensor, group: dict[str, Any], number: int) -> None:
        if param.grad is not None:
            state = self.state[param]
            momentum = state["momentum"] = state.get("momentum", 0.0) + param.grad
            param.sub_(momentum, alpha=group["lr"] / (1 + number))


class NeedsGradients(HeavyBall):
    """The same for each place, and an error where a gradient is missing."""

    def update_numbered(self, param: torch.Tensor, group: dict[str, Any], number: int) -> None:
        assert param.grad is not None
        super().update_numbered(param, group, 0)


class HasStatesOfAll(HeavyBall):
    """The same for each place, and states before it looks at gradients."""

    def update_numbered(self, param: torch.Tensor, group: dict[str, Any], number: int) -> None:
        self.state[param].setdefault("momentum", torch.zeros_like(param))
        super().update_numbered(param, group, 0)


class NeedsItsSize(Plain):
    """Works with matrices and vectors of one size only."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        if param.shape[-1] != 96:
            raise ValueError("only the size it was made for")
        param.sub_(param.grad, alpha=group["lr"])


_OTHERS, _RANDOM = r"where there are others", r"draws random numbers"


def trained(
    kind: Callable[..., torch.optim.Optimizer],
    *,
    dtype: torch.dtype = torch.float32,
    bucket_bytes: int | None = None,
    size: int | None = None,
    directory: Path | None = None,
    **defaults: Any,
) -> list[torch.Tensor]:
    """Weights after three steps, offloaded with buckets of this size or not at all."""
    layers: torch.nn.Module = linear_layers()
    if size is not None:
        torch.manual_seed(1)
        layers = torch.nn.Sequential(*[torch.nn.Linear(size, size) for _ in range(3)])
    layers.to(dtype)
    optimizer = kind(layers.parameters(), **defaults)
    if bucket_bytes is not None:
        offload_optimizer(optimizer, directory, bucket_bytes=bucket_bytes, window_bytes=0)
    torch.manual_seed(2)
    for number in range(3):
        gradients_of(layers, number)
        optimizer.step()
    return [param.detach() for param in layers.parameters()]


@pytest.mark.parametrize(
    ("kind", "settings", "what"),
    [
        (ClipsByTheNormOfAll, {}, _OTHERS),
        (ClipsByTheNormOfAll, {"lr": 0.0}, _OTHERS),  # a warm-up begins so
        (ClipsMomenta, {}, _OTHERS),
        (Draws, {}, _RANDOM),
        (DrawsOfPython, {}, _RANDOM),
        (DrawsOfNumpy, {}, _RANDOM),
        (DrawsOfItsOwn, {}, _OTHERS),
        (RoundsByDice, {"dtype": torch.bfloat16}, _RANDOM),
        (CountsInAList, {}, _OTHERS),
    ],
)
def test_what_would_have_other_weights_is_refused_before_anything_is_updated(
    kind: Callable[..., torch.optim.Optimizer], settings: dict[str, Any], what: str
) -> None:
    dtype = settings.pop("dtype", torch.float32)
    layers = linear_layers().to(dtype)
    optimizer = kind(layers.parameters(), **settings)
    before = [param.detach().clone() for param in layers.parameters()]
    with offload_optimizer(optimizer, bucket_bytes=1, window_bytes=0):
        for _ in range(2):  # whoever tries again is told again
            for param in layers.parameters():
                param.grad = torch.ones_like(param)
            with pytest.raises(ConfigurationError, match=f"{kind.__name__} .*{what}"):
                optimizer.step()
    assert all(map(torch.equal, before, layers.parameters()))


@pytest.mark.parametrize("kind", [ClipsByTheNormOfAll, Draws, CountsInAList])
def test_where_all_parameters_are_in_one_bucket_nothing_is_in_slices(
    kind: Callable[..., torch.optim.Optimizer],
) -> None:
    found, expected = trained(kind, bucket_bytes=1 << 30), trained(kind)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("kind", "has_frozen"),
    [(HeavyBall, False), (HeavyBall, True), (NeedsGradients, False), (HasStatesOfAll, False)],
)
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 30])
def test_parameters_keep_their_places_in_groups_where_an_optimizer_counts_them(
    kind: Callable[..., torch.optim.Optimizer], has_frozen: bool, bucket_bytes: int
) -> None:
    def trained(**settings: Any) -> list[torch.Tensor]:
        layers = torch.nn.Sequential(*[torch.nn.Linear(40, 40) for _ in range(12)])
        torch.manual_seed(1)
        for param in layers.parameters():
            torch.nn.init.normal_(param)
        optimizer = kind(layers.parameters())
        with offload_optimizer(optimizer, window_bytes=0, **settings) as handle:
            for number in range(3):
                gradients_of(layers, number)
                if has_frozen:
                    layers[0].weight.grad = layers[0].bias.grad = None
                optimizer.step()
            assert settings == {"mode": "off"} or handle.statistics["state_bytes"] > 0
        return [param.detach() for param in layers.parameters()]

    found, expected = trained(bucket_bytes=bucket_bytes), trained(mode="off")
    assert all(map(torch.equal, found, expected))


def test_an_optimizer_that_steps_alone_has_no_trace_of_its_trial(tmp_path: Path) -> None:
    """Neither generators nor what it has in lists, groups and states."""

    class Notes(Plain):
        """Notes the largest parameter that it has seen, in a list, and counts in its groups."""

        def __init__(self, params: Any) -> None:
            super().__init__(params, notes=[], count=0)
            self.notes: list[int] = []

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["count"] += 1
                for notes in (self.notes, group["notes"]):
                    notes += [p.numel() for p in group["params"] if p.grad is not None]
            super().step()

    layers = torch.nn.Sequential(*[torch.nn.Linear(100, 100, bias=False) for _ in range(3)])
    optimizer = Notes(layers.parameters())
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with offload_optimizer(optimizer, tmp_path, bucket_bytes=1, window_bytes=0):
        gradients_of(layers, 0)
        optimizer.step()
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert np.random.get_state()[1].tolist() == generators[2]
    (group,) = optimizer.param_groups
    assert optimizer.notes == group["notes"] == [100 * 100] * 3 and group["count"] == 1
    assert not optimizer.state


def test_a_trial_that_fails_is_said_and_the_training_goes_on(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    expected = trained(NeedsItsSize, size=96)
    found = trained(NeedsItsSize, size=96, bucket_bytes=1, directory=tmp_path)
    assert all(map(torch.equal, found, expected))
    (line,) = [one.getMessage() for one in caplog.records if "trial" in one.getMessage()]
    assert (
        "NeedsItsSize on small tensors failed (ValueError: only the size it was made for)" in line
    )


class LooksAtCurvature(Plain):
    """Divides gradients by products with the Hessian of all parameters, as Adahessian does."""

    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        gradients = [param.grad for param in params]
        curved = torch.autograd.grad(gradients, params, gradients)
        with torch.no_grad():
            for param, gradient, one in zip(params, gradients, curved, strict=True):
                param.sub_(gradient / (1 + one.abs()), alpha=0.1)


def test_an_optimizer_that_needs_the_graph_of_gradients_is_refused(tmp_path: Path) -> None:
    """Of some parameters the products are others, and a trial on tensors without graphs fails."""
    layers = linear_layers()
    optimizer = LooksAtCurvature(layers.parameters())
    before = [param.detach().clone() for param in layers.parameters()]
    with offload_optimizer(optimizer, tmp_path, bucket_bytes=1, window_bytes=0):
        gradients = torch.autograd.grad(
            sum(param.pow(3).sum() for param in layers.parameters()) ** 2,
            list(layers.parameters()),
            create_graph=True,
        )
        for param, gradient in zip(layers.parameters(), gradients, strict=True):
            param.grad = gradient
        with pytest.raises(ConfigurationError, match="create_graph=True"):
            optimizer.step()
    assert all(map(torch.equal, before, layers.parameters()))


def test_parameters_that_come_later_are_tried_too() -> None:
    class OfItsSecondGroup(ClipsByTheNormOfAll):
        """Looks at others in its second group alone."""

        def step(self, closure: Any = None) -> None:
            groups = self.param_groups
            self.param_groups = groups[1:]
            super().step()
            self.param_groups = groups[:1]
            Plain.step(self)
            self.param_groups = groups

    first, second = linear_layers(), linear_layers()
    optimizer = OfItsSecondGroup(first.parameters())
    with offload_optimizer(optimizer, bucket_bytes=1, window_bytes=0):
        gradients_of(first, 0)
        optimizer.step()
        optimizer.add_param_group({"params": list(second.parameters())})
        gradients_of(second, 0)
        with pytest.raises(ConfigurationError, match=_OTHERS):
            optimizer.step()


def test_a_trial_copies_no_trainer_whose_methods_are_hooks() -> None:
    class Trainer:
        num_copies = 0

        def __init__(self) -> None:
            self.layers = linear_layers()
            self.optimizer = torch.optim.Adam(self.layers.parameters())
            self.optimizer.register_step_post_hook(self.after_step)

        def after_step(self, *_: Any) -> None:
            pass

        def __deepcopy__(self, memo: Any) -> Any:
            Trainer.num_copies += 1
            return self

    trainer = Trainer()
    with offload_optimizer(trainer.optimizer, bucket_bytes=1, window_bytes=0):
        gradients_of(trainer.layers, 0)
        trainer.optimizer.step()
    assert Trainer.num_copies == 0
