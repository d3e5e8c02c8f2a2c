# SPDX-License-Identifier: Apache-2.0
"""Compiled models whose activations move inside of their graphs.

With the backend `aot_eager`, whose graphs are divided as inductor's are, and with inductor.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.offload import ConfigurationError, offload_activations
from megatron.offload.integration.torch import compiled_graphs
from tests.support.compiled import (
    HIDDEN,
    Short,
    Stack,
    assert_same,
    batch,
    trained,
    without_offload,
)

BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


pytestmark = pytest.mark.usefixtures("compiled_anew")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["ssd", "host"])
def test_a_graph_has_the_same_bits(backend: str, mode: str, tmp_path: Path) -> None:
    alone = trained(None, backend)
    found = trained(tmp_path, backend, mode=mode)
    assert_same(found, alone)
    for step in found[1]:
        assert step["offloaded_bytes"] > 0
    assert not compiled_graphs._saved, "all of it has come back"


def test_layers_are_placed_within_a_graph(tmp_path: Path) -> None:
    everything = trained(tmp_path)[1][-1]["offloaded_bytes"]
    first = trained(tmp_path, offload_layers="0")
    assert_same(first, trained(None))
    assert 0.2 < first[1][-1]["offloaded_bytes"] / everything < 0.45


@pytest.mark.slow
def test_two_lengths_in_turn(tmp_path: Path) -> None:
    run = functools.partial(trained, kind=Short, lengths=(32, 48, 32, 40, 48))
    assert_same(run(tmp_path), run(None))


def test_a_graph_that_is_dropped_gives_its_bytes_back(tmp_path: Path) -> None:
    model = Stack().eval()
    compiled: Any = torch.compile(model, backend="aot_eager")
    with offload_activations(model, tmp_path, min_bytes=1024, inside_graphs=True) as offload:
        compiled(batch(0)).backward()
        loss = compiled(batch(1))
        assert compiled_graphs._saved
        del loss
        gc.collect()
        assert not compiled_graphs._saved
        assert offload.engine is not None
        assert offload.engine.wait_for_writes(30)


def test_a_graph_outlives_its_handle(tmp_path: Path) -> None:
    model = Stack().eval()
    compiled: Any = torch.compile(model, backend="aot_eager")
    with offload_activations(model, tmp_path, min_bytes=1024, inside_graphs=True):
        compiled(batch(0)).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    compiled(batch(0)).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)


def test_a_graph_that_is_retained_may_be_asked_twice(tmp_path: Path) -> None:
    model = Stack().eval()
    compiled: Any = torch.compile(model, backend="aot_eager")
    with offload_activations(model, tmp_path, min_bytes=1024, inside_graphs=True):
        loss = compiled(batch(0))
        loss.backward(retain_graph=True)
        once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        loss.backward()
        twice = [p.grad for p in model.parameters() if p.grad is not None]
        for one, other in zip(once, twice, strict=True):
            torch.testing.assert_close(2 * one, other)


@pytest.mark.slow
def test_graphs_in_inductors_caches_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    alone = trained(None, "inductor", kind=Short)
    for directory, min_bytes in (
        (tmp_path, 1024),
        (None, 0),
        (tmp_path, 1024),
        (tmp_path, 1 << 14),
        (None, 0),
    ):
        torch.compiler.reset()
        found = trained(directory, "inductor", kind=Short, min_bytes=min_bytes)
        assert_same(found, alone)
        assert all(step["offloaded_bytes"] > 0 for step in found[1])


def test_dropout_autocast_and_accumulated_gradients(tmp_path: Path) -> None:
    def run(directory: Path | None) -> list[torch.Tensor]:
        torch.compiler.reset()
        model = Stack()
        compiled: Any = torch.compile(model, backend="aot_eager")
        torch.manual_seed(5)
        with contextlib.ExitStack() as stack:
            if directory is not None:
                stack.enter_context(
                    offload_activations(model, directory, min_bytes=1024, inside_graphs=True)
                )
            for step in range(4):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = compiled(batch(step))
                loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    alone, found = run(None), run(tmp_path)
    assert len(alone) == len(found) and all(map(torch.equal, alone, found))


def test_a_pass_that_raises_leaves_nothing(tmp_path: Path) -> None:
    model = Stack().eval()
    compiled: Any = torch.compile(model, backend="aot_eager")
    expected = without_offload(1)[0]

    def fails(_: torch.Tensor) -> None:
        raise ArithmeticError

    with offload_activations(model, tmp_path, min_bytes=1024, inside_graphs=True):
        handle = model.first.weight.register_hook(fails)
        with pytest.raises(ArithmeticError):
            compiled(batch(1)).backward()
        handle.remove()
        model.zero_grad()
        gc.collect()
        assert not compiled_graphs._saved
        loss = compiled(batch(0))
        loss.backward()
        found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def test_a_checkpoint_around_a_graph_writes_nothing_in_vain(tmp_path: Path) -> None:
    model = Stack().eval()
    for block in model.blocks:
        block.compile(backend="aot_eager")

    def run(x: torch.Tensor) -> torch.Tensor:
        x = model.first(x)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()

    model.forward = run  # type: ignore[method-assign]
    with offload_activations(model, tmp_path, min_bytes=1024, inside_graphs=True) as offload:
        loss = model(batch(0))
        loss.backward()
        assert offload.statistics["offloaded_bytes"] <= 5 * batch(0).nbytes
    gradient = model.first.weight.grad
    model.zero_grad()
    model(batch(0)).backward()
    assert gradient is not None and torch.equal(gradient, model.first.weight.grad)
    assert not compiled_graphs._saved


class InPlace(torch.nn.Module):
    """Inductor may have `index_put` write into what it gets, once nothing else uses that."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).exp()
        place = torch.zeros(1, dtype=torch.long)
        z = torch.index_put(y, (place,), torch.ones(1, *y.shape[1:]), accumulate=True)
        return z.square().mean()


class Joined(torch.nn.Module):
    """Inductor may lay both exponentials into one buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(HIDDEN, HIDDEN)
        self.second = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.first(x).exp()
        other = self.second(one).exp()
        both = torch.cat([one, other], 1)
        return both.square().mean() + torch.matmul(both, self.first.weight).square().mean()


class Divided(torch.nn.Module):
    """Parts of one storage are saved, in its strides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(HIDDEN, 3 * HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two, three = self.first(x).chunk(3, -1)
        return (one @ two.transpose(-1, -2) @ three).square().mean()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [InPlace, Joined, Divided])
def test_what_inductor_would_write_over_is_right(
    kind: type[torch.nn.Module], backend: str, tmp_path: Path
) -> None:
    results = []
    for directory in (None, tmp_path):
        torch.compiler.reset()
        model = kind()
        compiled: Any = torch.compile(model, backend=backend)
        with contextlib.ExitStack() as stack:
            offload = None
            if directory is not None:
                settings: dict[str, Any] = {"min_bytes": 1024, "inside_graphs": True}
                offload = stack.enter_context(offload_activations(model, directory, **settings))
            for step in range(3):
                loss = compiled(batch(step))
                if offload is not None:  # so that it comes from the tier
                    assert offload.engine is not None and offload.engine.wait_for_writes(30)
                loss.backward()
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    one, other = results
    assert len(one) == len(other) and all(map(torch.equal, one, other))


class Shared(torch.nn.Module):
    """Has weights that two products use: an embedding tied to the output, a layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = torch.nn.Embedding(512, 2 * HIDDEN)
        self.norm = torch.nn.LayerNorm(2 * HIDDEN)
        self.up = torch.nn.Linear(2 * HIDDEN, 2 * HIDDEN)
        self.bias = torch.nn.Parameter(torch.zeros(512))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words(tokens))
        x = self.norm(self.up(self.up(x).tanh() + x).tanh())
        logits = torch.nn.functional.linear(x, self.words.weight, self.bias)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def test_inductor_knows_before_its_first_graph_what_wants_a_buffer() -> None:
    """Else the first one in a process is another than later ones, and bf16 is rounded elsewhere."""
    from torch._inductor import lowering

    operators = {
        torch.ops.megatron_offload.begin_write.default,
        torch.ops.megatron_offload.wait_for_read.default,
    }
    compiled_graphs._want_buffers.cache_clear()
    lowering.needs_realized_inputs.difference_update(operators)
    with compiled_graphs._rewriting((), 0):
        assert operators <= lowering.needs_realized_inputs


@pytest.mark.slow
def test_products_that_inductor_adds_to_others_have_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It adds up the two gradients of a weight within a product, if nothing else takes it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))

    def gradients(directory: Path | None) -> list[torch.Tensor]:
        torch.compiler.reset()
        model = Shared()
        compiled: Any = torch.compile(model, backend="inductor")
        tokens = torch.randint(0, 512, (4, HIDDEN), generator=torch.Generator().manual_seed(1))
        with contextlib.ExitStack() as stack:
            if directory is not None:
                stack.enter_context(
                    offload_activations(model, directory, min_bytes=1024, inside_graphs=True)
                )
            compiled(tokens).backward()
        return [one.grad for one in model.parameters() if one.grad is not None]

    torch.use_deterministic_algorithms(True)
    try:
        found, expected = gradients(tmp_path), gradients(None)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(found) == 6
    assert all(map(torch.equal, found, expected))


@torch.library.custom_op(
    "megatron_offload_tests::scaled", mutates_args=(), tags=(torch.Tag.needs_exact_strides,)
)
def scaled(x: torch.Tensor, factor: float, shift: float) -> torch.Tensor:
    """An operator of a library, as transformers has for products of experts."""
    return x * factor + shift


@scaled.register_fake
def _(x: torch.Tensor, factor: float, shift: float) -> torch.Tensor:
    return torch.empty_like(x)


def _note_factor(ctx: Any, inputs: tuple[torch.Tensor, float, float], output: torch.Tensor) -> None:
    ctx.factor = inputs[1]


scaled.register_autograd(
    lambda ctx, grad: (grad * ctx.factor, None, None), setup_context=_note_factor
)


class OfLibrary(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (scaled(self.first(x), 2.0, 1.0).sin() ** 2).mean()


@pytest.mark.slow
def test_what_operators_of_libraries_make_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    found = trained(tmp_path, "inductor", kind=OfLibrary)
    assert_same(found, trained(None, "inductor", kind=OfLibrary))
    assert all(step["offloaded_bytes"] > 0 for step in found[1])


# -- Models of transformers -----------------------------------------------------------------------


def train_llama(
    backend: str, directory: Path | None, is_given_compiled: bool = False
) -> tuple[list[torch.Tensor], list[dict[str, float]]]:
    """Two layers, compiled as a whole with their loss: losses and gradients, and what moved."""
    from tests.support.text_models import llama, text_batches

    torch.compiler.reset()
    torch.manual_seed(1)
    model = llama(num_hidden_layers=2)
    compiled: Any = torch.compile(model, backend=backend)
    results, statistics = [], []
    with contextlib.ExitStack() as stack:
        offload = None
        if directory is not None:
            given = compiled if is_given_compiled else model
            settings: dict[str, Any] = {"min_bytes": 1024, "inside_graphs": True}
            offload = stack.enter_context(offload_activations(given, directory, **settings))
        for inputs in text_batches()[:3]:
            loss = compiled(**inputs).loss
            loss.backward()
            results += [loss.detach(), *(p.grad for p in model.parameters())]
            model.zero_grad()
            if offload is not None:
                statistics.append(dict(offload.statistics))
    return results, statistics


@functools.cache
def llama_alone(backend: str) -> list[torch.Tensor]:
    return train_llama(backend, None)[0]


@pytest.mark.slow
@pytest.mark.usefixtures("one_compute_thread")
@pytest.mark.parametrize("compiled_first", [True, False])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_llama_has_the_same_bits(backend: str, compiled_first: bool, tmp_path: Path) -> None:
    """Compiled as a whole, its loss too: no hook of ours divides the graph."""
    alone = llama_alone(backend)
    found, statistics = train_llama(backend, tmp_path, compiled_first)
    assert len(found) == len(alone) and all(map(torch.equal, found, alone))
    assert all(one["offloaded_storages"] > 5 for one in statistics)


@pytest.mark.slow
@pytest.mark.usefixtures("one_compute_thread")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gpt2", torch.float32),
        ("bert", torch.bfloat16),
        ("mixtral", torch.float32),
    ],
)
def test_families_train_the_same_with_the_defaults_of_their_classes(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Their dropout, caches and padded texts; four steps of an optimizer."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from check.family.catalogue import families
    from check.family.sample import find_sample, loss_of
    from check.family.training import seed_everything

    sample = find_sample(families()[name], "sdpa")

    def run(directory: Path | None) -> list[torch.Tensor]:
        torch.compiler.reset()
        model = sample.model().to(dtype)
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        seed_everything()
        found = []
        with contextlib.ExitStack() as stack:
            offload = None
            if directory is not None:
                settings: dict[str, Any] = {"min_bytes": 256, "inside_graphs": True}
                offload = stack.enter_context(offload_activations(model, directory, **settings))
            for batch in sample.batches(4):
                loss = loss_of(compiled, batch)
                loss.backward()
                found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
                if offload is not None:
                    assert offload.statistics["offloaded_storages"] > 30
        return found

    alone, found = run(None), run(tmp_path)
    assert len(found) == len(alone) and all(map(torch.equal, found, alone))


@pytest.mark.slow
def test_the_trainer_compiles_and_trains_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from megatron.offload import OffloadCallback
    from tests.support.text_models import llama

    rows = torch.randint(0, 97, (8, 40), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": one, "labels": one} for one in rows]

    def run(*callbacks: Any) -> tuple[torch.Tensor, list[dict[str, Any]]]:
        torch.compiler.reset()
        torch.manual_seed(1)
        model = llama(num_hidden_layers=2)
        arguments = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=2, report_to=[], save_strategy="no",
            use_cpu=True, disable_tqdm=True, max_steps=4, logging_steps=1, torch_compile=True,
            torch_compile_backend="aot_eager",
        )  # fmt: skip
        trainer = transformers.Trainer(
            model, arguments, train_dataset=data, callbacks=list(callbacks)
        )
        trainer.train()
        weights = torch.cat([one.detach().flatten() for one in model.parameters()])
        return weights, trainer.state.log_history

    alone, _ = run()
    found, history = run(OffloadCallback(tmp_path, min_bytes=1024, inside_graphs=True))
    assert torch.equal(found, alone)
    moved = [line["offload/offloaded_gib"] for line in history if "loss" in line]
    assert len(moved) == 4 and all(moved)
    assert not compiled_graphs._saved


def test_compiled_autograd_is_refused(tmp_path: Path) -> None:
    model = Stack().eval()
    compiled: Any = torch.compile(model, backend="aot_eager")
    backward = torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager"))
    with offload_activations(model, tmp_path, min_bytes=1024, inside_graphs=True):
        with backward, pytest.raises(ConfigurationError, match="compiled autograd cannot trace"):
            compiled(batch(0))
        compiled(batch(0)).backward()
    assert all(one.grad is not None for one in model.parameters())


@pytest.mark.parametrize("lacks_parts", [False, True])
def test_another_pytorch_is_refused(
    lacks_parts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks_parts:
        monkeypatch.setitem(sys.modules, compiled_graphs.__name__, None)
    else:
        monkeypatch.setattr(compiled_graphs, "_COMPILE", "gone")
    with pytest.raises(ConfigurationError, match=r"is for PyTorch 2\.11 and newer"):
        offload_activations(Stack(), tmp_path, inside_graphs=True)
