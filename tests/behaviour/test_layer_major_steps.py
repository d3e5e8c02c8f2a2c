# SPDX-License-Identifier: Apache-2.0
"""A layer-major step gives what a step that runs one micro-batch after the other does.

The same bits; where gradients are added in another order, sums that differ by no more than that.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from megatron.offload import ConfigurationError, LayerMajor, offload_activations
from tests.support.layer_major import (
    failing_at,
    one_by_one,
    waiting_threads,
)
from tests.support.models import Block, settle
from tests.support.waiting import wait_until_empty

pytestmark = pytest.mark.usefixtures("one_thread_for_each_pass")

HIDDEN, VOCABULARY, MICRO_BATCHES, LAYERS = 32, 64, 5, 6


class Language(torch.nn.Module):
    """An embedding, layers with dropout, and an output layer with a loss."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = torch.nn.ModuleList(Block(HIDDEN) for _ in range(LAYERS))
        self.output = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.dropout(self.embedding(tokens), 0.1, self.training)
        for layer in self.layers:
            x = self.run(layer, x)
        return self.loss(x, tokens)

    def run(self, layer: torch.nn.Module, x: torch.Tensor) -> Any:
        return layer(x)

    def loss(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.output(x).flatten(0, -2)
        return torch.nn.functional.cross_entropy(logits, tokens.flatten()) / MICRO_BATCHES


class Crossed(torch.nn.Module):
    """Attends to what an encoder of a few layers has made, in every later layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.encoder = torch.nn.ModuleList(Block(HIDDEN) for _ in range(3))
        self.decoder = torch.nn.ModuleList(Mixed(HIDDEN) for _ in range(3))
        self.norm = torch.nn.LayerNorm(HIDDEN)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.encoder:
            x = layer(x)
        x, y = self.norm(x), self.embedding(tokens.flip(-1))
        for layer in self.decoder:
            y = layer(y, memory=x)
        return y.square().mean() / MICRO_BATCHES


class Mixed(Block):
    """A block that reads a second tensor."""

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        assert memory is not None
        return super().forward(x + self.up(memory)[..., :HIDDEN].tanh())


class Summed(Language):
    """Adds what every layer has made, behind the layers."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        total = x
        for layer in self.layers:
            x = layer(x)
            total = total + x
        return self.loss(total, tokens)


class Short(Language):
    """Leaves its last layers out."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers[: LAYERS // 2]:
            x = layer(x)
        return self.loss(x, tokens)


class Backwards(Language):
    """Runs its layers in another order than they stand in."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in reversed(self.layers):
            x = layer(x)
        return self.loss(x, tokens)


class Checkpointed(Language):
    """Recomputes its layers."""

    def run(self, layer: torch.nn.Module, x: torch.Tensor) -> Any:
        return checkpoint(layer, x, use_reentrant=False)


def micro_batches(step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randint(VOCABULARY, (2, 16), generator=draw) for _ in range(MICRO_BATCHES)]


class Outcome:
    """Losses, gradients of the last step, weights and the generator's state after training."""

    def __init__(
        self,
        model: torch.nn.Module,
        step: Callable[[list[torch.Tensor]], list[Any]],
        num_steps: int = 3,
    ) -> None:
        torch.manual_seed(7)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.losses: list[float] = []
        for number in range(num_steps):
            optimizer.zero_grad()
            self.losses += [float(loss) for loss in step(micro_batches(number))]
            optimizer.step()
        self.gradients = {name: p.grad for name, p in model.named_parameters()}
        self.weights = dict(model.named_parameters())
        self.random = torch.get_rng_state()

    def assert_is(self, other: Outcome) -> None:
        assert self.losses == other.losses
        assert torch.equal(self.random, other.random)
        for name, gradient in other.gradients.items():
            assert gradient is not None and torch.equal(self.gradients[name], gradient), name
            assert torch.equal(self.weights[name], other.weights[name]), name


def usual(kind: Callable[[], torch.nn.Module], num_steps: int = 3) -> Outcome:
    """Of such a model, in steps that run one micro-batch after the other, by as many threads."""
    return _usual(kind, num_steps, torch.get_num_threads())


@functools.cache
def _usual(kind: Callable[[], torch.nn.Module], num_steps: int, _num_threads: int) -> Outcome:
    model = kind()
    return Outcome(model, functools.partial(one_by_one, model), num_steps)


def unit_by_unit(
    model: torch.nn.Module, units: int | None = 3, **settings: Any
) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    layer_major = LayerMajor(model, units, **settings)
    return lambda batches: layer_major.step(batches, model)


@pytest.mark.parametrize("units", [1, 2, 3, 4, None])
@pytest.mark.parametrize("kind", [Language, Checkpointed])
def test_all_bits_are_the_same(kind: type[torch.nn.Module], units: int | None) -> None:
    model = kind()
    Outcome(model, unit_by_unit(model, units)).assert_is(usual(kind))


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "ssd"},
        {"mode": "host"},
        {"mode": "ssd", "recompute_layers": "2-4", "recompute_input": "ssd"},
    ],
    ids=["ssd", "host", "recomputed"],
)
def test_all_bits_are_the_same_with_offload(settings: dict[str, str], tmp_path: Path) -> None:
    model = Language()
    with offload_activations(model, tmp_path, min_bytes=1, **settings) as offload:
        Outcome(model, unit_by_unit(model, offload=offload)).assert_is(usual(Language))
        assert offload.statistics["offloaded_bytes"] > 0
        assert offload.engine is not None
        settle(offload.engine)
        wait_until_empty(offload.engine.tiers.values())


@pytest.mark.slow
def test_all_bits_of_a_larger_step_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 layers in 8 units, 8 micro-batches."""
    for name, number in {"LAYERS": 16, "MICRO_BATCHES": 8}.items():
        monkeypatch.setattr(sys.modules[__name__], name, number)
    model = Language()
    expected = _usual.__wrapped__(Language, 3, torch.get_num_threads())
    with offload_activations(model, tmp_path, min_bytes=1) as offload:
        Outcome(model, unit_by_unit(model, 8, offload=offload)).assert_is(expected)


def test_a_step_between_layer_major_ones_is_as_ever(tmp_path: Path) -> None:
    model = Language()
    with offload_activations(model, tmp_path, min_bytes=1) as offload:
        in_units, in_turn = (
            unit_by_unit(model, offload=offload),
            functools.partial(one_by_one, model),
        )
        steps = iter([in_units, in_turn, in_units, in_turn])
        found = Outcome(model, lambda batches: next(steps)(batches), num_steps=4)
        found.assert_is(usual(Language, 4))


def test_a_unit_runs_all_micro_batches_before_the_next() -> None:
    model = Language()
    ran: list[tuple[str, int]] = []
    for index, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda *_, i=index: ran.append(("forward", i)))
        layer.register_full_backward_pre_hook(lambda *_, i=index: ran.append(("backward", i)))
    step = unit_by_unit(model, 3)
    step(micro_batches(0))  # counts random numbers, one micro-batch after the other
    ran.clear()
    step(micro_batches(1))
    both = [("forward", 4), ("forward", 5), ("backward", 5), ("backward", 4)]
    assert ran == [
        *[("forward", 0), ("forward", 1)] * MICRO_BATCHES,
        *[("forward", 2), ("forward", 3)] * MICRO_BATCHES,
        *both * MICRO_BATCHES,
        *[("backward", 3), ("backward", 2)] * MICRO_BATCHES,
        *[("backward", 1), ("backward", 0)] * MICRO_BATCHES,
    ]


def sum_of_magnitudes(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Of each weight's gradients of the micro-batches of step 1, in fp64."""
    totals = {
        name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()
    }
    for batch in micro_batches(1):
        model.zero_grad()
        model(batch).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            totals[name] += p.grad.double().abs()
    return totals


@pytest.mark.parametrize(
    ("kind", "settings", "differing"),
    [
        (lambda: Language(tied=True), {}, set()),
        (Language, {"alternates": True}, None),
        (Crossed, {}, set()),
    ],
    ids=["tied", "alternating", "encoder"],
)
def test_sums_in_another_order_differ_by_no_more_than_that(
    kind: Callable[[], torch.nn.Module], settings: dict[str, bool], differing: set[str] | None
) -> None:
    """Without dropout: the sums of the magnitudes are to be those of the same gradients."""
    model = kind().eval()
    limits = sum_of_magnitudes(copy.deepcopy(model))
    one_by_one(expected := copy.deepcopy(model), micro_batches(1))
    step = unit_by_unit(model, **settings)
    step(micro_batches(0))
    model.zero_grad()
    step(micro_batches(1))
    eps, differs = torch.finfo(torch.float32).eps, set()
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        error = (p.grad.double() - q.grad.double()).abs()
        # Inside of a micro-batch a gradient may have come together in another order as well.
        assert (error <= 4 * MICRO_BATCHES * eps * limits[name] + 1e-9).all(), name
        if not torch.equal(p.grad, q.grad):
            differs.add(name)
    assert differs if differing is None else differs <= differing


def test_evaluation_between_steps_is_left_alone() -> None:
    model = Language()
    step = unit_by_unit(model)
    step(micro_batches(0))
    model.eval()
    with torch.no_grad():
        before = model(micro_batches(1)[0])
    assert torch.equal(model(micro_batches(1)[0]), before)


def test_autocast_around_a_step_holds_in_its_threads() -> None:
    model = Language()

    def within(step: Callable[[list[torch.Tensor]], list[Any]]) -> Any:
        def run(batches: list[torch.Tensor]) -> list[Any]:
            with torch.autocast("cpu", torch.bfloat16):
                return step(batches)

        return run

    expected = Outcome(other := copy.deepcopy(model), within(functools.partial(one_by_one, other)))
    Outcome(model, within(unit_by_unit(model))).assert_is(expected)


def test_what_is_entered_around_a_step_meets_all_of_it() -> None:
    """Hooks of saved tensors, and modes of dispatch: here one that counts operations."""
    model = Language().eval()

    def counted(step: Callable[[list[torch.Tensor]], Any]) -> tuple[int, int]:
        packed = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal packed
            packed += 1
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooks, FlopCounterMode(display=False) as flops:
            step(micro_batches(0))
        return packed, flops.get_total_flops()

    expected = counted(functools.partial(one_by_one, model))
    step = unit_by_unit(model)
    assert [counted(step), counted(step)] == [expected, expected] and all(expected)


def test_offload_s_hooks_rule_over_those_around_a_step(tmp_path: Path) -> None:
    """As in a step that runs one micro-batch after the other."""
    model = Language()
    unpacked: list[torch.Tensor] = []
    with (
        offload_activations(model, tmp_path, min_bytes=1) as offload,
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpacked.append),
    ):
        Outcome(model, unit_by_unit(model, offload=offload)).assert_is(usual(Language))
        assert offload.statistics["offloaded_bytes"] > 0
    assert not unpacked


def test_a_model_that_leaves_its_last_layers_out_has_the_same_bits() -> None:
    model = Short()
    batches = micro_batches(0)
    torch.manual_seed(7)
    losses = unit_by_unit(copied := copy.deepcopy(model))(batches)
    torch.manual_seed(7)
    assert one_by_one(model, batches) == losses
    for mine, theirs in zip(copied.parameters(), model.parameters(), strict=True):
        assert mine.grad is theirs.grad is None or torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]


def test_other_random_numbers_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """More dropout than in the step before: the next micro-batch began too early."""
    model = Language()
    step = unit_by_unit(model)
    step(micro_batches(0))
    model.layers[1].register_forward_hook(lambda *_: (torch.rand(3), None)[1])
    with caplog.at_level(logging.WARNING):
        step(micro_batches(1))
    assert "more or fewer random numbers" in caplog.text
    caplog.clear()
    state = torch.get_rng_state()
    losses = step(micro_batches(2))  # counts again, and is right
    assert not caplog.text
    torch.set_rng_state(state)
    assert one_by_one(model, micro_batches(2)) == losses


def test_alternating_units_draw_the_same_random_numbers() -> None:
    model = Language()
    for batches in (micro_batches(0), micro_batches(1)):
        torch.manual_seed(7)
        expected = one_by_one(model, batches), torch.get_rng_state()
        torch.manual_seed(7)
        step = unit_by_unit(model, 2, alternates=True)
        step(batches)  # counts
        torch.manual_seed(7)
        losses = step(batches)
        assert losses == expected[0] and torch.equal(torch.get_rng_state(), expected[1])


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Summed, "is used in it beside its layers' inputs"),
        (Backwards, "models that run their layers in one order"),
    ],
)
def test_models_that_do_not_fit_are_refused(kind: Callable[[], Any], sentence: str) -> None:
    model = kind()
    with pytest.raises(ConfigurationError, match=f"layer-major steps: .*{sentence}"):
        unit_by_unit(model)(micro_batches(0))


@pytest.mark.parametrize("where", [0, 3, 5])
@pytest.mark.parametrize("step_number", [0, 1])
def test_an_error_in_a_layer_ends_the_step(where: int, step_number: int) -> None:
    model = Language()
    step = unit_by_unit(model)
    for number in range(step_number):
        step(micro_batches(number))
    hook = model.layers[where].register_forward_hook(failing_at(3, ZeroDivisionError("in a layer")))
    with pytest.raises(ZeroDivisionError, match="in a layer"):
        step(micro_batches(1))
    assert not waiting_threads()
    hook.remove()
    step(micro_batches(2))  # and the next one runs


def test_wrappers_that_count_passes_are_refused() -> None:
    class DistributedDataParallel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Language()

    with pytest.raises(ConfigurationError, match="use FSDP2"):
        LayerMajor(DistributedDataParallel())
    with pytest.raises(ConfigurationError, match="compiled module"):
        LayerMajor(torch.nn.Sequential(torch.compile(Language())))
    with pytest.raises(ConfigurationError, match="6 layers"):
        LayerMajor(Language(), 7)
    with pytest.raises(ConfigurationError, match="layers that repeat"):
        LayerMajor(torch.nn.Linear(3, 3))
