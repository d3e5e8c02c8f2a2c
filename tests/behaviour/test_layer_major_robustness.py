# SPDX-License-Identifier: Apache-2.0
"""Layer-major steps of models that do unusual things, and steps that do not come to their end."""

from __future__ import annotations

import _thread
import gc
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.offload import ConfigurationError, LayerMajor, offload_activations
from megatron.offload.layer_major import random_numbers
from tests.support.layer_major import failing_at, one_by_one, waiting_threads
from tests.support.models import Block
from tests.support.training import Stack
from tests.support.waiting import SOON_S

pytestmark = pytest.mark.usefixtures("one_thread_for_each_pass")

HIDDEN, LAYERS, MICRO_BATCHES = 16, 4, 4


class Plain(Stack):
    """Blocks with dropout."""

    kind: type[Block] = Block

    def __init__(self) -> None:
        super().__init__(HIDDEN, LAYERS, MICRO_BATCHES, self.kind)


class Product(Block):
    """Takes two tensors."""

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        assert other is not None
        up = self.up(other)[..., :HIDDEN]
        return x + self.qkv(x)[..., :HIDDEN] * up.tanh() + other.sigmoid()


class Twice(Plain):
    """Gives each layer the same tensor twice."""

    kind = Product

    def run(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x, other=x)  # type: ignore[no-any-return]


class InPlace(Block):
    """Changes its input in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 0.5
        x.view(-1).mul_(1.5)
        return super().forward(x)


class ChangesInputs(Plain):
    kind = InPlace


class Pair(Block):
    """Returns a tuple with a list, of which the model uses both parts."""

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y, [y.tanh(), None]


class Tuples(Plain):
    kind = Pair

    def run(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        y, (other, _) = layer(x)
        return y * other  # type: ignore[no-any-return]


class Checkpointed(Plain):
    """Recomputes its layers; pauses within checkpoints."""

    def run(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False)  # type: ignore[no-any-return]


class Reentrant(Plain):
    def run(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=True)  # type: ignore[no-any-return]


def micro_batches(step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(2, 8, HIDDEN, generator=draw) for _ in range(MICRO_BATCHES)]


def gradients(model: torch.nn.Module) -> list[torch.Tensor | None]:
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return found


def assert_same_bits(
    model: torch.nn.Module, bare: torch.nn.Module, step: LayerMajor, numbers: Sequence[int] = (0, 1)
) -> None:
    """Of steps, the first of which may count random numbers."""
    for number in numbers:
        torch.manual_seed(number)
        theirs = one_by_one(bare, micro_batches(number)), gradients(bare), torch.get_rng_state()
        torch.manual_seed(number)
        losses = step.step(micro_batches(number), model)
        mine = losses, gradients(model), torch.get_rng_state()
        assert mine[0] == theirs[0] and torch.equal(mine[2], theirs[2])
        assert any(one is not None for one in mine[1])
        for one, other in zip(mine[1], theirs[1], strict=True):
            assert one is other is None or torch.equal(one, other)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Twice, ChangesInputs, Tuples, Checkpointed])
@pytest.mark.parametrize("mode", ["off", "ssd"])
def test_all_bits_are_the_same(kind: Callable[[], Stack], mode: str, tmp_path: Path) -> None:
    model = kind()
    with offload_activations(model, tmp_path, mode=mode, min_bytes=1) as offload:
        assert_same_bits(model, kind(), LayerMajor(model, offload=offload))


def test_a_pass_that_pauses_within_a_checkpoint_recomputes_that_layer_too(tmp_path: Path) -> None:
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    model = Checkpointed()
    for layer in model.layers:
        layer.qkv.register_forward_hook(count)
    with offload_activations(model, tmp_path, min_bytes=1) as offload:
        LayerMajor(model, None, offload=offload).step(micro_batches(0), model)
    assert calls == 2 * LAYERS * MICRO_BATCHES


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"units": "auto"}, "units='auto' is no number of units"),
        ({"units": True}, "units=True is no number of units"),
        ({"alternates": "ascending"}, "alternates='ascending' is neither True nor False"),
    ],
)
def test_a_flags_value_is_not_taken_for_an_argument(wrong: dict[str, Any], sentence: str) -> None:
    """Of which the last would be true, and change the order of sums."""
    with pytest.raises(ConfigurationError, match=sentence):
        LayerMajor(torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(4)]), **wrong)


def test_checkpoints_that_hide_the_layers_are_refused() -> None:
    model = Reentrant()
    with pytest.raises(ConfigurationError, match="checkpoints with use_reentrant=False"):
        LayerMajor(model, 2).step(micro_batches(0), model)


def test_a_model_that_evaluates_within_steps() -> None:
    """Nothing is drawn, and nothing is to be said of it."""
    model, copied = Plain().eval(), Plain().eval()
    step = LayerMajor(model, 2)
    assert_same_bits(model, copied, step)


@pytest.fixture
def _hears_ctrl_c() -> Iterator[None]:
    """A process in the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_hears_ctrl_c")
@pytest.mark.parametrize("mode", ["off", "ssd"])
@pytest.mark.parametrize("layer", [0, 2, 3])
def test_a_step_after_one_that_was_interrupted(mode: str, layer: int, tmp_path: Path) -> None:
    model = Plain()
    runs = 0

    def interrupt(*_: Any) -> None:
        nonlocal runs
        runs += 1
        if runs == 3:
            _thread.interrupt_main()
            time.sleep(0.05)  # the pass is still under way when the step ends

    with offload_activations(model, tmp_path, mode=mode, min_bytes=1) as one:
        step = LayerMajor(model, 2, offload=one)
        step.step(micro_batches(0), model)
        hook = model.layers[layer].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            step.step(micro_batches(1), model)
        assert not waiting_threads()
        hook.remove()
        model.zero_grad()
        assert_same_bits(model, Plain(), step, (2, 3))
        if mode == "ssd":
            assert one.engine is not None and one.engine.wait_for_writes(SOON_S)
            gc.collect()
            assert all(not tier.used_bytes for tier in one.engine.tiers.values())


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("mode", ["off", "ssd"])
def test_a_step_after_an_error_in_backward(mode: str, layer: int, tmp_path: Path) -> None:
    model = Plain()
    fail = failing_at(2, ZeroDivisionError("in backward"))
    with offload_activations(model, tmp_path, mode=mode, min_bytes=1) as one:
        step = LayerMajor(model, 2, offload=one)
        step.step(micro_batches(0), model)
        hook = model.layers[layer].register_full_backward_hook(fail)
        with pytest.raises(ZeroDivisionError, match="in backward"):
            step.step(micro_batches(1), model)
        hook.remove()
        model.zero_grad()
        assert_same_bits(model, Plain(), step, (2, 3))


def test_an_error_keeps_nothing_of_its_step() -> None:
    """Who catches it and goes on with less has the memory back, without a garbage collection."""
    model = Plain()
    step = LayerMajor(model, 2)
    kept: list[weakref.ref[torch.Tensor]] = []

    def fail(*call: Any) -> None:
        kept.append(weakref.ref(call[-1]))
        if len(kept) == 3:
            raise MemoryError

    model.layers[0].register_forward_hook(fail)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(MemoryError):
            step.step(micro_batches(0), model)
        assert len(kept) == 3
        assert not [one for one in kept if one() is not None]
    finally:
        gc.enable()


@pytest.mark.slow
def test_what_is_compiled_within_layers_is_no_obstacle() -> None:
    model = Plain()
    model.layers[1].qkv.compile()  # never called here
    assert LayerMajor(model, 2).units
    model.layers[1].compile()
    with pytest.raises(ConfigurationError, match="compiled module"):
        LayerMajor(model, 2)


def test_random_numbers_that_nobody_can_count_are_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_numbers, "num_drawn", lambda begin, end: None)
    model, copied = Plain(), Plain()
    step = LayerMajor(model, 2)
    assert_same_bits(model, copied, step)
    assert caplog.text.count("cannot be counted") == 1
