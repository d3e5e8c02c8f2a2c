# SPDX-License-Identifier: Apache-2.0
"""Autocast's casts of weights never move: they are made again, with the bits that they had."""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import (
    ChangedInPlaceError,
    LayerMajor,
    offload_activations,
    offload_parameters,
)
from megatron.offload.activations.capture.hooks import Move, SavedTensorHooks
from megatron.offload.activations.saved.view import SavedView
from megatron.offload.activations.saved.weight_casts import WeightCast, WeightCasts
from megatron.offload.activations.transfer.write_batch import WriteBatch
from megatron.offload.integration.torch.offload import ActivationOffload
from megatron.offload.sizes import MIB
from tests.support.layer_major import one_by_one
from tests.support.loops import gradients
from tests.support.models import Block

BF16 = torch.bfloat16
HIDDEN, LAYERS = 32, 3


class Net(torch.nn.Module):
    """Linear layers, a convolution, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(HIDDEN, HIDDEN)
        self.layers = torch.nn.ModuleList(Block(HIDDEN) for _ in range(LAYERS))
        self.mix = torch.nn.Conv1d(8, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.mix(self.first(x)).float().square().mean()


def noise(seed: int) -> torch.Tensor:
    return torch.randn(4, 8, HIDDEN, generator=torch.Generator().manual_seed(seed))


def autocast() -> contextlib.AbstractContextManager[None]:
    return torch.autocast("cpu", BF16)


@contextlib.contextmanager
def moved() -> Iterator[list[torch.Tensor]]:
    """Copies of all tensors whose bytes went to a tier."""
    found: list[torch.Tensor] = []
    take = SavedTensorHooks.take

    def noted(self: Any, tensor: torch.Tensor, move: Move, batch: WriteBatch) -> SavedView:
        if move[3] is not None:
            found.append(tensor.detach().clone())
        return take(self, tensor, move, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedTensorHooks, "take", noted)
        yield found


def casts_in(tensors: list[torch.Tensor], model: torch.nn.Module) -> int:
    """How many of these are a weight in another type, or a view of one."""
    casts = [p.detach().to(BF16) for p in model.parameters() if p.dim() > 1]
    casts += [one.t() for one in casts if one.dim() == 2]
    same = [one for one in tensors if any(torch.equal(one, cast) for cast in casts)]
    return sum(one.dtype is BF16 for one in same)


# -- What moves -----------------------------------------------------------------------------------


def test_a_llama_moves_its_activations_and_no_weight() -> None:
    transformers = pytest.importorskip("transformers")

    def run(dtype: torch.dtype, *, casts: bool, replay: str) -> tuple[Any, Any, list[torch.Tensor]]:
        torch.manual_seed(3)
        config = transformers.LlamaConfig(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        model = transformers.LlamaForCausalLM(config).to(dtype).train()
        ids = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
        with (
            offload_activations(
                model, mode="host", host_budget=64 * MIB, min_bytes=1024, replay=replay
            ) as handle,
            moved() as found,
        ):
            with torch.autocast("cpu", BF16, enabled=casts):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            return model, handle.statistics, found

    for replay in ("on", "off"):
        model, statistics, found = run(torch.float32, casts=True, replay=replay)
        linear = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
        assert casts_in(found, model) == 0
        assert statistics["recast_bytes"] == sum(2 * one.numel() for one in linear)

    # What the model in bf16 moves without replay, some of it in fp32, and more that autocast saves
    # of tokens.
    _, _, found_in_bf16 = run(BF16, casts=False, replay="off")
    kinds, kinds_in_bf16 = (
        collections.Counter((tuple(one.shape), one.dtype) for one in tensors)
        for tensors in (found, found_in_bf16)
    )
    more, less = kinds - kinds_in_bf16, kinds_in_bf16 - kinds
    assert all({24, 2 * 24} & {*shape} for shape, _ in more), more
    assert all(more[shape, torch.float32] >= number for (shape, _), number in less.items()), less


def test_the_memory_of_a_cast_is_free_after_the_forward_pass(tmp_path: Path) -> None:
    model = Net()
    casts: list[weakref.ref[torch.Tensor]] = []
    find = WeightCasts.find

    def noted(self: WeightCasts, tensor: torch.Tensor, *others: Any) -> WeightCast | None:
        found = find(self, tensor, *others)
        if found is not None:
            casts.append(weakref.ref(tensor.untyped_storage()))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightCasts, "find", noted)
        with offload_activations(model, tmp_path, min_bytes=1) as handle:
            with autocast():
                loss = model(noise(0))
            assert len(casts) == len(matrices(model))
            assert all(one() is None for one in casts)
            loss.backward()
            # `first` is used twice, and its first input wants no gradient: saved once.
            expected = sum(2 * one.numel() for one in matrices(model))
            assert handle.statistics["recast_bytes"] == expected
            assert "of weights' casts are made again" in handle.summary()


# -- The same bits --------------------------------------------------------------------------------

Loop = Callable[[Net], Any]


def compared(loop: Loop, directory: Path, **settings: Any) -> dict[str, int | float]:
    """Runs a loop with and without offload, whose gradients and results must have the same bits."""

    def run(folder: Path | None) -> tuple[Any, Any, ActivationOffload]:
        model = Net()
        options = {"min_bytes": 1, **settings} if folder is not None else {"mode": "off"}
        with offload_activations(model, folder, **options) as handle:
            result = loop(model)
            return result, gradients(model), handle

    expected, of_weights, _ = run(None)
    result, same_weights, handle = run(directory)
    assert result == expected and same_weights == of_weights
    return handle.statistics


def trains(model: Net) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        for seed in range(2):
            with autocast():
                loss = model(noise(2 * step + seed))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def one_context_around_all_steps(model: Net) -> list[float]:
    """Autocast's cache then has casts of weights that have changed since."""
    with autocast():
        return trains_within(model)


def trains_within(model: Net) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(3):
        loss = model(noise(step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


def backward_twice(model: Net) -> float:
    with autocast():
        loss = model(noise(0))
    loss.backward(retain_graph=True)
    loss.backward()
    return loss.item()


def gradients_of_gradients(model: Net) -> float:
    x = noise(0).requires_grad_()
    # The other kernel has no second derivative, and since PyTorch 2.14 no way round that.
    with autocast(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = model(x)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    gradient.square().sum().backward()
    return loss.item()


def matrices(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Weights that autocast casts; of norms autograd saves the weight itself."""
    return [one for one in model.parameters() if one.dim() > 1]


def set_to_zero(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for one in matrices(model):
            one.zero_()


def steps_before_backward(model: Net) -> list[float]:
    """The graph goes on with the casts of before, without a word from autograd."""
    optimizer = torch.optim.SGD(matrices(model), lr=0.5)
    with autocast():
        first = model(noise(0))
        second = model(noise(1))
    first.backward()
    optimizer.step()
    second.backward()
    return [first.item(), second.item()]


def copies_step_before_backward(model: Net) -> float:
    """An optimizer of copies changes weights where no version counter sees it."""
    copies = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.5)
    with autocast():
        loss = model(noise(0))
    for one in copies:
        one.grad = torch.ones_like(one)
    optimizer.step()
    for one, copy in zip(model.parameters(), copies, strict=True):
        one.data.copy_(copy)
    loss.backward()
    return loss.item()


def weights_are_swapped_before_backward(model: Net) -> float:
    with autocast():
        loss = model(noise(0))
    for one in model.parameters():
        one.data = torch.zeros_like(one)
    loss.backward()
    return loss.item()


@pytest.mark.parametrize(
    "loop",
    [
        trains,
        one_context_around_all_steps,
        backward_twice,
        gradients_of_gradients,
        steps_before_backward,
        copies_step_before_backward,
        weights_are_swapped_before_backward,
    ],
)
def test_gradients_have_the_same_bits(loop: Loop, tmp_path: Path) -> None:
    statistics = compared(loop, tmp_path)
    assert statistics["offloaded_bytes"] > 0
    # Casts of an earlier step are taken for what they are: other bytes than their weight's.
    assert bool(statistics["recast_bytes"]) is (loop is not one_context_around_all_steps)


def test_a_cast_that_was_changed_before_it_was_saved_moves(tmp_path: Path) -> None:
    class Changed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                weight = layer.weight.to(BF16)
                with torch.no_grad():
                    weight.mul_(2)
                x = torch.nn.functional.linear(x.to(BF16), weight)
            return x.float().square().sum()

    def run(mode: str) -> Any:
        model = Changed()
        with offload_activations(model, mode=mode, min_bytes=1) as handle:
            with autocast():
                loss = model(noise(0)[..., :16].requires_grad_())
            loss.backward()
            return gradients(model), handle.statistics.get("recast_bytes", 0)

    assert run("host") == run("off")


def test_a_weight_that_is_changed_in_place_before_backward_is_told(tmp_path: Path) -> None:
    model = Net()
    with offload_activations(model, tmp_path, min_bytes=1):
        with autocast():
            loss = model(noise(0))
        with torch.no_grad():
            model.layers[1].up.weight.mul_(2)
        with pytest.raises(
            ChangedInPlaceError, match=r"layers\.1 needs.*modified by an inplace operation.*after"
        ):
            loss.backward()


def test_other_weights_may_change_before_backward(tmp_path: Path) -> None:
    model = Net()
    with offload_activations(model, tmp_path, min_bytes=1) as handle:
        optimizer = torch.optim.SGD(model.first.parameters(), lr=0.5)
        with autocast():
            loss = model(noise(0))
        optimizer.step()
        held = list(handle.engine._casts._held)  # type: ignore[union-attr]
        assert [one._kept is not None for one in held].count(True) == 1
        loss.backward()


def test_graphs_that_outlive_the_handle_keep_their_casts() -> None:
    def run(mode: str) -> Any:
        torch.manual_seed(1)
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
        with offload_activations(model, mode=mode, min_bytes=4096) as handle, autocast():
            loss = model(torch.ones(2, 64)).float().square().sum()
            assert mode == "off" or handle.engine.statistics.recast_bytes  # type: ignore[union-attr]
        set_to_zero(model)
        loss.backward()
        return gradients(model)

    assert run("host") == run("off")


@pytest.mark.usefixtures("one_thread_for_each_pass")
def test_layer_major_steps_make_them_again_too(tmp_path: Path) -> None:
    batches = [noise(seed) for seed in range(3)]

    def run(mode: str) -> tuple[Any, dict[str, int | float]]:
        model = Net().eval()
        with offload_activations(model, tmp_path, mode=mode, min_bytes=1) as handle:
            with moved() as found, autocast():
                if mode == "off":
                    one_by_one(model, batches)
                else:
                    LayerMajor(model, units=3, offload=handle).step(batches, model)
            assert casts_in(found, model) == 0
            return gradients(model), handle.statistics

    _, statistics = run("ssd")
    assert statistics["recast_bytes"] > 0


def test_parameters_that_wait_on_a_tier_are_cast_again_when_their_layer_has_them(
    tmp_path: Path,
) -> None:
    def run(mode: str) -> tuple[Any, Any, dict[str, int | float]]:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            offload_parameters(model, tmp_path, mode=mode) as parameters,
            offload_activations(model, tmp_path, mode=mode, min_bytes=1) as handle,
            moved() as found,
        ):
            for seed in range(3):
                optimizer.zero_grad()
                with autocast():
                    loss = model(noise(seed))
                loss.backward()
                assert mode == "off" or parameters.statistics["memory_bytes"] < layer_bytes
                optimizer.step()
            parameters.expose()
            assert casts_in(found, model) == 0
            return gradients(model), [one.clone() for one in model.parameters()], handle.statistics

    layer_bytes = sum(one.nbytes for one in Net().layers.parameters())
    *expected, _ = run("off")
    *found, statistics = run("ssd")
    assert all(map(torch.equal, found[1], expected[1]))
    assert found[0] == expected[0]
    assert statistics["recast_bytes"] == 2 * sum(
        one.numel() for one in Net().parameters() if one.dim() > 1
    )
