# SPDX-License-Identifier: Apache-2.0
"""Layers that are recomputed find what they were called with, and what else they change, as it was.
What the caller sees is what one run of the layer has left.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megatron.offload import ChangedInPlaceError, offload_activations
from tests.support.same_training import Training, train

WIDTH, LAYERS, STEPS = 32, 4, 3


class Layer(torch.nn.Module):
    """Adds to its input what linear layers make of it, times a factor that `scale` gives."""

    def __init__(self, scale: Callable[..., Any]) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.scale = scale
        self.calls, self.seen, self.state = 0, [0.5], torch.zeros(1)
        self.numpy = np.random.default_rng(5)
        self.generators = {"torch": torch.Generator().manual_seed(5)}

    def forward(self, x: torch.Tensor, box: Any = None) -> torch.Tensor:
        scale = self.scale(self, box, x)
        result: torch.Tensor = x + self.down(torch.relu(self.up(x))) * scale
        return result


class Model(torch.nn.Module):
    def __init__(self, scale: Callable[..., Any], box: Callable[[], Any]) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.layers = torch.nn.ModuleList(Layer(scale) for _ in range(LAYERS))
        self.make_box = box
        self.boxes: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        box = self.make_box()
        self.boxes.append(box)
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            x = layer(x, box) if number % 2 else layer(x, box=box)
        return x.square().mean()


class Slots:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


@dataclasses.dataclass
class Holder:
    inner: Slots = dataclasses.field(default_factory=Slots)
    entries: collections.OrderedDict[int, float] = dataclasses.field(
        default_factory=collections.OrderedDict
    )


class Pair(NamedTuple):
    values: list[float]
    same: list[float]


def pair() -> Pair:
    values = [0.5]
    return Pair(values, values)


def by_list(_: Any, box: list[float], __: Any) -> float:
    box.append(0.5)
    return sum(box)


def by_dict(_: Any, box: dict[str, float], __: Any) -> float:
    box["sum"] = box.get("sum", 0.0) + 0.5
    return box["sum"]


def by_deque(_: Any, box: collections.deque[float], __: Any) -> float:
    box.append(len(box))
    return sum(box)


def by_object(_: Any, box: Holder, __: Any) -> float:
    box.inner.calls += 1
    box.entries[box.inner.calls] = 0.25
    box.entries.move_to_end(1)
    return box.inner.calls + next(reversed(box.entries)) + sum(box.entries.values())


def by_pair(_: Any, box: Pair, __: Any) -> float:
    box.values.append(len(box.same))
    return sum(box.same)


def by_tensor(_: Any, box: torch.Tensor, __: Any) -> torch.Tensor:
    box += 0.5
    return box.clone()


def by_tensor_in_a_list(_: Any, box: list[torch.Tensor], __: Any) -> torch.Tensor:
    box[0].mul_(1.5)
    return box[0].clone()


def by_reading(layer: Layer, box: dict[str, float], x: torch.Tensor) -> float:
    """Layers read what others write, as some share keys and values."""
    if layer.calls == 0:
        layer.calls = 1 + len(box)
        box[str(len(box))] = 0.5
    else:
        box.pop("0", None)
    return sum(box.values()) + 0.1


def by_hidden_states(_: Any, box: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """As models that mix in what all earlier layers have made."""
    box.append(x)
    return torch.stack(box).mean()


def by_attributes(layer: Layer, _: Any, __: Any) -> float:
    layer.calls += 1
    layer.seen.append(layer.calls)
    layer.state += 0.5
    return layer.calls + sum(layer.seen) + float(layer.state)


def by_random(*_: Any) -> float:
    return random.random()


def by_numpy(*_: Any) -> float:
    return float(np.random.rand())


def by_own_numpy(layer: Layer, *_: Any) -> float:
    return float(layer.numpy.random())


def by_own_generator(layer: Layer, *_: Any) -> float:
    return float(torch.rand((), generator=layer.generators["torch"]))


def by_given_generator(_: Any, box: torch.Generator, __: Any) -> float:
    return float(torch.rand((), generator=box))


WAYS: list[tuple[Callable[..., Any], Callable[[], Any]]] = [
    (by_list, list),
    (by_dict, dict),
    (by_dict, collections.UserDict),
    (by_dict, lambda: collections.defaultdict(float)),
    (by_deque, lambda: collections.deque([1], maxlen=3)),
    (by_object, Holder),
    (by_pair, pair),
    (by_tensor, lambda: torch.zeros(1)),
    (by_tensor_in_a_list, lambda: [torch.ones(1)]),
    (by_tensor_in_a_list, lambda: [torch.ones(WIDTH * 1024)[:1]]),
    (by_reading, dict),
    (by_hidden_states, list),
    (by_attributes, lambda: None),
    (by_random, lambda: None),
    (by_numpy, lambda: None),
    (by_own_numpy, lambda: None),
    (by_own_generator, lambda: None),
    (by_given_generator, lambda: torch.Generator().manual_seed(5)),
]


def trained(
    scale: Callable[..., Any],
    box: Callable[[], Any],
    directory: Path | None = None,
    models: list[Model] | None = None,
    num_steps: int = STEPS,
    **settings: Any,
) -> Training:
    random.seed(5)
    np.random.seed(5)

    def model() -> Model:
        made = Model(scale, box)
        if models is not None:
            models.append(made)
        return made

    draws = [torch.Generator().manual_seed(step) for step in range(num_steps)]
    batches = [{"x": torch.randn(2, 16, WIDTH, generator=draw)} for draw in draws]
    return train(model, batches, directory, call=lambda m, b: m(**b), **settings)


@pytest.mark.parametrize(("scale", "box"), WAYS, ids=[one.__name__ for one, _ in WAYS])
def test_what_layers_change_is_as_it_was_when_they_run_again(
    scale: Callable[..., Any], box: Callable[[], Any], tmp_path: Path
) -> None:
    models: list[Model] = []
    found = trained(scale, box, tmp_path, models, recompute_layers="all")
    assert found == trained(scale, box, None, models)
    assert [one["recomputed_layers"] for one in found.statistics] == [LAYERS] * STEPS
    mine, theirs = models
    assert [_content(one) for one in mine.boxes] == [_content(one) for one in theirs.boxes]
    for one, other in zip(mine.layers, theirs.layers, strict=True):
        assert (one.calls, one.seen, one.state) == (other.calls, other.seen, other.state)


def _content(box: Any) -> Any:
    if isinstance(box, torch.Tensor):
        return box.tolist()
    if isinstance(box, torch.Generator):
        return box.get_state().tolist()
    if isinstance(box, Holder):
        return box.inner.calls, list(box.entries.items())
    if isinstance(box, list):
        return [_content(one) for one in box]
    return box


def test_a_graph_that_is_retained_finds_them_as_they_were_each_time(tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = Model(by_object, Holder)
    x = torch.randn(2, 16, WIDTH)
    results = []
    for settings in ({}, {"recompute_layers": "all"}):
        with offload_activations(model, tmp_path, min_bytes=1, **settings):
            loss = model(x)
            loss.backward(retain_graph=True)
            loss.backward()
        results.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*results, strict=True))


def test_a_large_tensor_in_a_container_is_copied_once_it_is_known_to_change(tmp_path: Path) -> None:
    """The first call of a layer shows it: it is not recomputed."""

    def box() -> list[torch.Tensor]:
        return [torch.ones(1 << 16)]

    def scale(_: Any, box: list[torch.Tensor], __: Any) -> torch.Tensor:
        return box[0].mul_(1.5)[0].clone()

    found = trained(scale, box, tmp_path, recompute_layers="all")
    assert found == trained(scale, box)
    assert [one["recomputed_layers"] for one in found.statistics] == [0, LAYERS, LAYERS]


def in_place(_: Any, box: Any, x: torch.Tensor) -> float:
    x.add_(1.0)
    return 0.5


def test_a_layer_that_changes_its_input_in_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ChangedInPlaceError, match=r"changed its argument x in place.*change a copy"
    ):
        trained(in_place, lambda: None, tmp_path, recompute_layers="all")


@pytest.mark.slow
def test_auto_does_not_plan_what_would_be_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"mode": "auto", "max_slowdown": "9", "write_bytes_per_s": "1MB/s"}
    settings |= {"inflight_bytes": "64KiB", "min_bytes": "1KiB"}
    with caplog.at_level(logging.WARNING):
        found = trained(in_place, lambda: None, tmp_path, num_steps=7, **settings)
    assert found == trained(in_place, lambda: None, num_steps=7)
    assert [one["recomputed_layers"] for one in found.statistics] == [0] * 7
    assert found.statistics[-1]["plans"] > 0
    assert caplog.text.count("layers.1 changes its argument x in place") == 1
    again = trained(by_list, list, tmp_path, num_steps=7, **settings)
    assert again == trained(by_list, list, num_steps=7)
    assert again.statistics[-1]["recomputed_layers"] > 0


def test_what_others_change_in_place_before_a_layer_runs_again_is_refused(tmp_path: Path) -> None:
    class Shared(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.ones(WIDTH)
            x = self.first(x)
            for layer in self.layers:
                x = layer(x, box=mask)
            mask.zero_()
            return x.square().mean()

    model = Shared(lambda _, box, __: box, lambda: None)
    with offload_activations(model, tmp_path, recompute_layers="all"):
        loss = model(torch.randn(2, WIDTH))
        with pytest.raises(ChangedInPlaceError, match="box, with which a recomputed layer"):
            loss.backward()


class Named(torch.nn.Linear):
    """Its forward takes keywords of any name, and computes with their number."""

    def forward(self, x: torch.Tensor, **keywords: Any) -> torch.Tensor:
        return torch.relu(super().forward(x)) * (1 + len(keywords))


@pytest.mark.parametrize(
    "name",
    [
        *("debug", "early_stop", "determinism_check", "preserve_rng_state"),
        *("use_reentrant", "context_fn", "function", "forward"),
    ],
)
def test_keywords_may_have_the_names_that_a_checkpoint_has(name: str, tmp_path: Path) -> None:
    class Stack(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Named(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, **{name: True})
            return x

    def results(*, recomputes: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model, handle = Stack(), None
        with contextlib.ExitStack() as stack:
            if recomputes:
                settings: dict[str, Any] = {"layers": ["Named"], "recompute_layers": "all"}
                handle = offload_activations(model, tmp_path, min_bytes=1, **settings)
                stack.enter_context(handle)
            loss = model(torch.randn(4, WIDTH).requires_grad_()).sum()
            loss.backward()
        assert handle is None or handle.statistics["recomputed_layers"] == 2
        return [loss.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]

    assert all(map(torch.equal, results(recomputes=True), results(recomputes=False)))
