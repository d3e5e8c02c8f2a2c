# SPDX-License-Identifier: Apache-2.0
"""Weights and tensors that several units use: their gradients are autograd's sums, bit for bit."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import ConfigurationError, LayerMajor, offload_activations
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.layer_major.graph_cuts import CutTensor
from tests.support.layer_major import one_by_one
from tests.support.models import Block, settle
from tests.support.waiting import wait_until_empty

pytestmark = pytest.mark.usefixtures("one_thread_for_each_pass")

HIDDEN, WORDS, LAYERS, MICRO_BATCHES, STEPS = 32, 64, 6, 5, 3
Step = Callable[[torch.nn.Module, list[torch.Tensor]], Any]


class Tied(torch.nn.Module):
    """As Gemma: embeddings are scaled, and the output layer has their weight.

    Args:
        shared: numbers of layers whose first weight is one.
    """

    def __init__(self, shared: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(WORDS, HIDDEN)
        self.layers = torch.nn.ModuleList(Block(HIDDEN) for _ in range(LAYERS))
        self.output = torch.nn.Linear(HIDDEN, WORDS, bias=False)
        self.output.weight = self.embedding.weight
        for number in shared:
            self.layers[number].qkv.weight = self.layers[shared[0]].qkv.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * HIDDEN**0.5
        for layer in self.layers:
            x = self.run(layer, x)
        # Used twice in the first unit too, and by a part of the micro-batches in the last one.
        x = x + self.output.weight.mean(0) if int(tokens[0, 0]) % 2 else x
        logits = self.output(x).flatten(0, -2)
        return torch.nn.functional.cross_entropy(logits, tokens.flatten()) / MICRO_BATCHES

    def run(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = layer(x)
        return result


class Twice(Tied):
    """Uses the embedding twice before the layers, and once where they end."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(tokens)
        return loss

    def run(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        if layer is self.layers[0]:
            x = x @ self.embedding.weight.T @ self.embedding.weight / WORDS
        return super().run(layer, x)


class Attending(torch.nn.Module):
    """Each layer of a decoder takes an encoder's output, and uses it twice.

    Args:
        readers: how many of the decoder's layers take it.
        changes: the first of them changes it in place.
    """

    def __init__(self, readers: int = LAYERS, *, changes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.readers, self.changes = readers, changes
        self.embedding = torch.nn.Embedding(WORDS, HIDDEN)
        self.encoder = torch.nn.ModuleList(Block(HIDDEN) for _ in range(3))
        self.decoder = torch.nn.ModuleList(Reading(HIDDEN) for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.encoder:
            x = layer(x)
        x, y = x * 1.0, self.embedding(tokens.flip(-1))
        for number, layer in enumerate(self.decoder):
            read = x if number < self.readers else x.detach()
            y = layer(y, read, self.changes and number == 0)
        return y.square().mean() / MICRO_BATCHES


class Reading(Block):
    def forward(self, x: torch.Tensor, read: Any = None, changes: bool = False) -> torch.Tensor:
        if changes:
            read.mul_(2.0)  # an operation that saves nothing of it
        keys, values = self.up(read)[..., :HIDDEN], self.qkv(read)[..., :HIDDEN]
        return super().forward(x + keys.tanh() * values)


def micro_batches(step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randint(WORDS, (2, 16), generator=draw) for _ in range(MICRO_BATCHES)]


def trained(model: torch.nn.Module, step: Step) -> list[Any]:
    """Losses, the last step's gradients and the weights."""
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[Any] = []
    for number in range(STEPS):
        optimizer.zero_grad()
        losses += step(model, micro_batches(number))
        optimizer.step()
    return [*losses, *(p.grad for p in model.parameters()), *model.parameters()]


def in_units(units: int | None, **settings: Any) -> Step:
    @functools.cache
    def of(model: torch.nn.Module) -> LayerMajor:
        return LayerMajor(model, units, **settings)

    return lambda model, batches: of(model).step(batches, model)


def assert_same_bits(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "tied": Tied,
    "twice": Twice,
    "two layers": lambda: Tied((0, 4)),
    "all layers": lambda: Twice(tuple(range(LAYERS))),
    "encoder": Attending,
}


@functools.cache
def one_by_one_trained(kind: str) -> list[Any]:
    return trained(MODELS[kind](), one_by_one)


@pytest.mark.parametrize("units", [2, 3, None])
@pytest.mark.parametrize("kind", MODELS)
def test_all_bits_are_the_same(kind: str, units: int | None) -> None:
    assert_same_bits(trained(MODELS[kind](), in_units(units)), one_by_one_trained(kind))


def test_a_layer_may_change_what_the_next_one_of_its_unit_takes() -> None:
    """Of three units the second one has the decoder's first three layers."""
    expected = trained(Attending(3, changes=True), one_by_one)
    assert_same_bits(trained(Attending(3, changes=True), in_units(3)), expected)
    with pytest.raises(ConfigurationError, match="has changed in place a tensor that a later unit"):
        trained(Attending(4, changes=True), in_units(3))


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "ssd", "boundary": "ssd"},
        {"mode": "host", "recompute_layers": "all", "recompute_input": "host"},
    ],
    ids=["ssd", "recomputed"],
)
@pytest.mark.parametrize("kind", ["two layers", "all layers", "encoder"])
def test_all_bits_are_the_same_with_offload(
    kind: str, settings: dict[str, str], tmp_path: Path
) -> None:
    model = MODELS[kind]()
    with offload_activations(model, tmp_path, min_bytes=1, **settings) as offload:
        found = trained(model, in_units(3, offload=offload))
        assert_same_bits(found, one_by_one_trained(kind))
        assert offload.engine is not None
        settle(offload.engine)
        wait_until_empty(offload.engine.tiers.values())


def test_hooks_of_a_weight_get_a_micro_batch_s_whole_gradient_once() -> None:
    """Such as those that clip it, or step an optimizer."""

    def hooked(step: Step) -> tuple[list[Any], list[torch.Tensor]]:
        model = Tied()
        seen: list[torch.Tensor] = []
        weight = model.output.weight
        weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        return trained(model, step), seen

    (found, mine), (expected, theirs) = hooked(in_units(3)), hooked(one_by_one)
    assert_same_bits(found, expected)
    assert len(theirs) == STEPS * MICRO_BATCHES
    assert_same_bits(mine, theirs)


def test_a_step_that_fails_leaves_gradient_and_hooks_of_a_weight() -> None:
    model = Tied()
    weight = model.output.weight
    step, before = LayerMajor(model, 3), torch.ones_like(weight)
    step.step(micro_batches(0), model)
    seen: list[int] = []
    weight.register_hook(lambda _: seen.append(1))
    weight.grad = before

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    hook = model.layers[-1].register_full_backward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        step.step(micro_batches(1), model)
    hook.remove()
    assert weight.grad is before and torch.equal(before, torch.ones_like(before)) and not seen
    step.step(micro_batches(1), model)
    assert len(seen) == MICRO_BATCHES


class Adding(torch.nn.Module):
    """Saves nothing of what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        return x * 0.5 + read * 0.25 + self.bias


class Reads(torch.nn.Module):
    """Hands a second tensor to each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.start = torch.nn.Parameter(torch.ones(HIDDEN))
        self.layers = torch.nn.ModuleList(Adding() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read, x = x * self.start, x + self.start
        for layer in self.layers:
            x = layer(x, read)
        return x.sum()


def test_what_a_layer_took_lives_no_longer_than_the_model_or_the_unit_needs_it() -> None:
    """Hidden states until the layer has run, what all layers take until the unit has."""
    model = Reads()
    taken: dict[int, list[weakref.ref[torch.Tensor]]] = {n: [] for n in range(LAYERS)}
    alive: list[tuple[int, list[bool]]] = []

    def note(number: int, args: tuple[torch.Tensor, ...]) -> None:
        if number and taken[number - 1]:  # of the layer before, of this micro-batch
            before = taken[number - 1].pop(0), taken[number - 1].pop(0)
            alive.append((number, [one() is not None for one in before]))
        taken[number] += map(weakref.ref, args)

    for number, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda _, args, n=number: note(n, args))
    step = LayerMajor(model, 3, layers=[Adding])
    for _ in range(2):
        alive.clear()
        step.step([torch.ones(2, HIDDEN) for _ in range(3)], model)
    # Units begin with the layers 0, 2 and 4. The first one takes the model's own tensors.
    expected = {1: [False, True], 2: [False, True], 3: [False, True], 4: [False, False]}
    assert [one for one in alive if one[0] < 5] == [
        *[(1, expected[1])] * 3,
        *[(2, expected[2]), (3, expected[3])] * 3,
        *[(4, expected[4])] * 3,
    ]


def test_a_tensor_that_comes_back_in_parts_gets_their_sum() -> None:
    cut = CutTensor(None, Scope(0, 0))  # type: ignore[arg-type]
    for number in (1.0, 2.0):
        cut.add(torch.full((2,), number))
    assert torch.equal(cut.take(), torch.full((2,), 3.0))  # type: ignore[arg-type]
