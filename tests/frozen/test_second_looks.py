# SPDX-License-Identifier: Apache-2.0
"""`cache_frozen` relies on what it found at the last look: what has changed since is seen."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import OffloadError, cache_frozen
from tests.support.full_disk import one_warning_about

ROWS = 6


class Layer(torch.nn.Module):
    """Scales hidden states by an argument that all layers get."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: torch.Tensor, scale: torch.Tensor, more: Any = ()) -> torch.Tensor:
        return self.inner(x * scale) + self.shift + sum(more)


class Model(torch.nn.Module):
    """Four frozen layers and a trained one; `change` runs before the last frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([Layer() for _ in range(4)]).requires_grad_(False)
        self.head = torch.nn.Linear(4, 2)
        self.gives_lists = False

    def forward(
        self, x: torch.Tensor, change: Callable[..., torch.Tensor | None] | None = None
    ) -> torch.Tensor:
        scale, more = torch.ones(ROWS, 4), [1.0]
        given = more if self.gives_lists else (1.0,)
        for number, layer in enumerate(self.layers):
            changed = change(x, scale, more) if change is not None and number == 3 else None
            x = layer(x if changed is None else changed, scale, more=given)
        return self.head(x)


def _shifts_a_buffer(model: Model) -> None:
    model.layers[2].shift = torch.ones(4)


def _replaces_a_module(model: Model) -> None:
    model.layers[1].inner[1] = torch.nn.Tanh()


def _changes_a_class(model: Model) -> None:
    model.layers[1].inner[1].__class__ = torch.nn.Tanh


def _replaces_a_weight(model: Model) -> None:
    old = model.layers[3].inner[0].weight
    model.layers[3].inner[0].weight = torch.nn.Parameter(2 * old, requires_grad=False)


def _changes_a_number(model: Model) -> None:
    model.layers[0].inner[0].in_features = 5  # which decides nothing, but might


@pytest.mark.parametrize(
    "change",
    [
        _shifts_a_buffer,
        _replaces_a_module,
        _changes_a_class,
        _replaces_a_weight,
        _changes_a_number,
    ],
)
def test_a_model_that_changes_after_two_passes_is_a_miss(
    change: Callable[[Model], None], tmp_path: Path
) -> None:
    model, x, hits = Model(), torch.randn(ROWS, 4), []
    with cache_frozen(model, tmp_path) as features:
        for number in range(5):
            if number == 3:
                change(model)
            assert torch.equal(model(x), copy.deepcopy(model)(x))
            features.store.wait_for_writes()
            hits.append(features.statistics["hit_rows"])
    # A module that was not there at first may have another forward: nothing of it is stored.
    later = 2 if change is _replaces_a_module else 3
    assert hits == [0, ROWS, 2 * ROWS, 2 * ROWS, later * ROWS]


def _scales_in_place(x: torch.Tensor, scale: torch.Tensor, more: list[float]) -> None:
    scale.mul_(2)


def _adds_to_a_list(x: torch.Tensor, scale: torch.Tensor, more: list[float]) -> None:
    more.append(3.0)


def _changes_hidden_states(x: torch.Tensor, scale: torch.Tensor, more: list[float]) -> None:
    x.add_(1)


def _passes_others_on(x: torch.Tensor, scale: torch.Tensor, more: list[float]) -> torch.Tensor:
    return x.detach() * 1.5


@pytest.mark.parametrize(
    "change", [_scales_in_place, _adds_to_a_list, _changes_hidden_states, _passes_others_on]
)
@pytest.mark.parametrize("comes_first", [True, False])
def test_an_argument_that_changes_between_layers_counts(
    change: Callable[..., Any], comes_first: bool, tmp_path: Path
) -> None:
    """Of a pass that is computed, and of one that was skipped so far."""
    tried_out = torch.randn(ROWS, 4)
    model, x = Model(), torch.randn(ROWS, 4)
    model.gives_lists = change is _adds_to_a_list
    ways = [change, None] if comes_first else [None, change]
    with torch.no_grad():
        expected = [copy.deepcopy(model)(x.clone(), way) for way in ways]
        assert not torch.equal(*expected)
        with cache_frozen(model, tmp_path) as features:
            model(tried_out)
            features.store.wait_for_writes()
            for _ in range(2):
                for way, wanted in zip(ways, expected, strict=True):
                    # What skipped layers were to compute cannot be computed any more.
                    is_lost = way is _scales_in_place and not comes_first
                    with pytest.raises(OffloadError) if is_lost else contextlib.nullcontext():
                        assert torch.equal(model(x.clone(), way), wanted)
                    features.store.wait_for_writes()


def test_arguments_that_change_in_place_are_not_tried_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are not there any more to compute with: what would come out tells nothing of rows."""
    model, x = Model(), torch.randn(ROWS, 4)
    with cache_frozen(model, tmp_path) as features:
        model(x, _scales_in_place)
        assert features.store.num_stored == 0
        one_warning_about("its arguments change in place while it computes", caplog)
        for _ in range(2):
            assert torch.equal(model(x), copy.deepcopy(model)(x))
            features.store.wait_for_writes()
        assert features.statistics["hit_rows"] == ROWS


def test_a_layer_that_draws_numbers_in_a_later_pass_is_not_stored(tmp_path: Path) -> None:
    draws = False

    class Sometimes(Layer):
        def forward(self, x: torch.Tensor, scale: torch.Tensor, more: Any = ()) -> torch.Tensor:
            noise = torch.rand(4) if draws else torch.zeros(4)
            return super().forward(x, scale, more) + noise

    model = Model()
    model.layers[2] = Sometimes().requires_grad_(False)
    with cache_frozen(model, tmp_path) as features:
        for number, draws in enumerate([False, False, True, False, False]):
            x = torch.full((ROWS, 4), float(number))
            stored = features.store.num_stored
            torch.manual_seed(number)
            result = model(x)
            torch.manual_seed(number)
            assert torch.equal(result, copy.deepcopy(model)(x))
            features.store.wait_for_writes()
            assert (features.store.num_stored > stored) == (not draws)
