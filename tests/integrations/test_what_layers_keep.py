# SPDX-License-Identifier: Apache-2.0
"""Layers that keep something from call to call, of many kinds, when they run again: same bits."""

from __future__ import annotations

import array
import collections
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from megatron.offload import offload_activations
from tests.support.same_training import digest


class Refusing(dict[str, float]):
    """A dict that takes single values alone, as model outputs of transformers do."""

    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError("one by one")


@dataclasses.dataclass(slots=True)
class Slotted:
    """An object without a dict."""

    count: float = 0.0
    later: float = dataclasses.field(init=False)


class Both(Slotted):
    """An object with slots of its base, and with a dict."""


class Named(list[float]):
    """A list with an attribute."""

    count = 0.0


class Recent:
    """The last few calls, in a deque."""

    def __init__(self) -> None:
        self.calls: collections.deque[float] = collections.deque(maxlen=2)


def _in_a_deque(kept: Any, x: torch.Tensor) -> float:
    kept.append(len(kept) + 1.0)
    return sum(kept)


def _tensors_in_a_deque(kept: Any, x: torch.Tensor) -> Any:
    result = sum(one.mean() for one in kept)
    kept.append(x.detach().clone())
    return result


def _in_an_object(kept: Any, x: torch.Tensor) -> float:
    return _in_a_deque(kept.calls, x)


def _in_an_array(kept: Any, x: torch.Tensor) -> float:
    kept[0] += 1
    return float(kept[0])


def _in_a_dict(kept: Any, x: torch.Tensor) -> float:
    kept["count"] = kept.get("count", 0.0) + 1
    return float(kept["count"])


def _in_slots(kept: Any, x: torch.Tensor) -> float:
    kept.count += 1
    kept.later = getattr(kept, "later", 0.0) + 2
    return float(kept.count + kept.later)


def _in_both(kept: Any, x: torch.Tensor) -> float:
    kept.more = getattr(kept, "more", 0.0) + 3
    return _in_slots(kept, x) + float(kept.more)


def _beside_a_list(kept: Any, x: torch.Tensor) -> float:
    kept.count += 1
    return float(kept.count)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any, torch.Tensor], Any]]] = {
    "deque": (lambda: collections.deque(maxlen=3), _in_a_deque),
    "deque of tensors": (lambda: collections.deque(maxlen=3), _tensors_in_a_deque),
    "deque of an object": (Recent, _in_an_object),
    "numpy": (lambda: numpy.zeros(1), _in_an_array),
    "array": (lambda: array.array("d", [0.0]), _in_an_array),
    "bytearray": (lambda: bytearray(1), _in_an_array),
    "dict": (Refusing, _in_a_dict),
    "slots": (Slotted, _in_slots),
    "slots and a dict": (Both, _in_both),
    "attribute of a list": (Named, _beside_a_list),
}


class Keeping(torch.nn.Module):
    """Computes with what earlier calls have left."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        make, self.use = KINDS[kind]
        self.kept = make()
        self.project = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, given: Any = None) -> torch.Tensor:
        kept = self.kept if given is None else given
        return x + torch.tanh(self.project(x) * (1 + 0.1 * self.use(kept, x)))


class Handing(torch.nn.Module):
    """Hands something new from layer to layer in each pass, if it is to."""

    def __init__(self, kind: str, *, hands_on: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Keeping(kind) for _ in range(3))
        self.make: Callable[[], Any] = KINDS[kind][0] if hands_on else lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.make()
        for layer in self.layers:
            x = layer(x, given)
        return x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hands_on", [False, True], ids=["attribute", "argument"])
def test_a_layer_that_runs_again_finds_what_it_keeps_as_it_was(
    hands_on: bool, kind: str, tmp_path: Path
) -> None:
    def trained(**settings: Any) -> tuple[list[float], list[str]]:
        torch.manual_seed(1)
        layers = Handing(kind, hands_on=hands_on)
        losses = []
        with offload_activations(layers, tmp_path, layers=["Keeping"], **settings):
            for _ in range(4):
                loss = layers(torch.randn(4, 8)).square().mean()
                loss.backward()
                losses.append(loss.item())
        return losses, [digest(one.grad) for one in layers.parameters() if one.grad is not None]

    assert trained(recompute_layers="all") == trained(mode="off")
