# SPDX-License-Identifier: Apache-2.0
"""Ways in which scripts compile and train a model, whose activations move inside of its graphs.

Losses, gradients and weights are those of the same script without offload, bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.offload import offload_activations, offload_parameters
from tests.support.compiled import HIDDEN, Short, Stack, batch

SETTINGS: dict[str, Any] = {"min_bytes": 1024, "inside_graphs": True}
Call = Callable[[torch.Tensor], torch.Tensor]


pytestmark = pytest.mark.usefixtures("compiled_anew")


class Pair(Stack):
    """Two blocks: each more is compiled as the second is."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks[2:]


class Checkpointed(Stack):
    """Its blocks are recomputed, within the graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


class Convolution(torch.nn.Module):
    """With a norm of the batch, whose buffers a graph changes."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1)
        self.norm = torch.nn.BatchNorm1d(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu_(self.norm(self.convolution(x))) + x


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = torch.nn.ModuleList(Convolution() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def whole(model: torch.nn.Module, **how: Any) -> Call:
    return torch.compile(model, **how)


def in_place(model: torch.nn.Module, **how: Any) -> Call:
    model.compile(**how)
    return model


def by_layers(model: torch.nn.Module, **how: Any) -> Call:
    for block in model.blocks:
        block.compile(**how)
    return model


def trained(
    directory: Path | None,
    compiled: Callable[..., Call],
    *,
    kind: Callable[[], torch.nn.Module] = Pair,
    lengths: tuple[int, ...] = (32, 32, 32),
    num_micro_batches: int = 1,
    evaluates: bool = False,
    **how: Any,
) -> list[torch.Tensor]:
    """Losses and gradients of each step, and at the end weights and buffers."""
    torch.compiler.reset()
    model = kind().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    results = []
    with contextlib.ExitStack() as stack:
        offload = None
        if directory is not None:
            offload = stack.enter_context(offload_activations(model, directory, **SETTINGS))
        call = compiled(model, **how)
        for step, length in enumerate(lengths):
            for micro_batch in range(num_micro_batches):
                torch.manual_seed(10 * step + micro_batch)
                loss = call(batch(10 * step + micro_batch, length))
                if evaluates:
                    with torch.no_grad():  # while it is in the mode of training, and in its own
                        results.append(call(batch(100 + step, length)))
                        model.eval()
                        results.append(call(batch(100 + step, length)))
                        model.train()
                loss.backward()
                results.append(loss.detach())
                if offload is not None:
                    assert offload.statistics["offloaded_storages"] > 3
            results += [one.grad.clone() for one in model.parameters() if one.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
            if evaluates:
                model.eval()
                results.append(call(batch(200 + step, length)).detach())  # that wants gradients
                model.train()
    return [*results, *(one.detach() for one in model.state_dict().values())]


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other) > 10
    assert all(map(torch.equal, one, other))


# A dozen graphs, with and without: minutes of compilation.
MANY_GRAPHS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.rare)]


SLOW, RARE = pytest.mark.slow, pytest.mark.rare
FULL, DYNAMIC = {"fullgraph": True}, {"dynamic": True}


@pytest.mark.parametrize(
    ("compiled", "kind", "backend", "how"),
    [
        (whole, Pair, "aot_eager", FULL),
        pytest.param(whole, Pair, "inductor", FULL, marks=SLOW),
        pytest.param(in_place, Short, "aot_eager", DYNAMIC, marks=SLOW),
        pytest.param(in_place, Short, "inductor", DYNAMIC, marks=RARE),
        pytest.param(by_layers, Pair, "aot_eager", FULL | DYNAMIC, marks=SLOW),
        pytest.param(by_layers, Pair, "inductor", FULL | DYNAMIC, marks=SLOW),
        (whole, Checkpointed, "aot_eager", {}),
        pytest.param(whole, Checkpointed, "inductor", {}, marks=SLOW),
        (whole, Normed, "aot_eager", FULL),
        pytest.param(whole, Normed, "inductor", FULL, marks=SLOW),
        (by_layers, Normed, "aot_eager", {}),
        pytest.param(by_layers, Normed, "inductor", {}, marks=RARE),
    ],
)
def test_whole_in_place_and_by_layers(
    compiled: Callable[..., Call], kind: Any, backend: str, how: dict[str, Any], tmp_path: Path
) -> None:
    run = functools.partial(trained, compiled=compiled, kind=kind, backend=backend, **how)
    assert_same(run(tmp_path), run(None))


@pytest.mark.slow
@pytest.mark.parametrize("backend", MANY_GRAPHS)
@pytest.mark.parametrize(("compiled", "dynamic"), [(whole, True), (by_layers, None), (whole, None)])
def test_lengths_accumulation_and_evaluation_in_between(
    compiled: Callable[..., Call], dynamic: bool | None, backend: str, tmp_path: Path
) -> None:
    run = functools.partial(
        trained,
        compiled=compiled,
        kind=Short if compiled is whole else Pair,
        backend=backend,
        dynamic=dynamic,
        lengths=(32, 48, 32),
        num_micro_batches=2,
        evaluates=True,
    )
    assert_same(run(tmp_path), run(None))


@pytest.mark.rare
def test_a_mode_that_tunes_kernels(tmp_path: Path) -> None:
    run = functools.partial(trained, compiled=whole, mode="max-autotune-no-cudagraphs")
    assert_same(run(tmp_path), run(None))


class Inside(torch.nn.Module):
    """Has the same code as its part, under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)


@pytest.mark.parametrize("which", ["first", "second", "both"])
def test_two_models_of_one_code(which: str, tmp_path: Path) -> None:
    """One graph may serve both; what moves is what was asked for, and no bit differs."""

    def run(directory: Path | None) -> list[torch.Tensor]:
        torch.compiler.reset()
        models = [Stack().eval(), Inside().eval()]
        with torch.no_grad():
            models[1].part.first.weight.mul_(1.5)
        for block in [*models[0].blocks, *models[1].part.blocks]:
            block.compile(backend="aot_eager")
        handles = [
            offload_activations(model, directory, **SETTINGS)
            for model, name in zip(models, ("first", "second"), strict=True)
            if directory is not None and which in (name, "both")
        ]
        results = []
        for step in range(3):
            found = [model(batch(step)) for model in models]
            for loss in found if step % 2 else found[::-1]:
                loss.backward()
            results += [one.detach() for one in found]
        for handle in handles:
            assert handle.statistics["offloaded_storages"] > 8
            handle.close()
        gradients = [one.grad for model in models for one in model.parameters()]
        return results + [one for one in gradients if one is not None]

    assert_same(run(tmp_path), run(None))


def test_what_a_script_changes_behind_a_graph_is_an_error_or_seen(tmp_path: Path) -> None:
    """The output of a compiled layer, changed in place: autograd's own error, and no wrong bits."""

    def run(directory: Path | None) -> str:
        torch.compiler.reset()
        model = Stack().eval()
        for block in model.blocks:
            block.compile(backend="aot_eager")
        first = model.blocks[0]
        first.register_forward_hook(lambda _, __, out: out.mul_(2))
        with contextlib.ExitStack() as stack:
            if directory is not None:
                stack.enter_context(offload_activations(model, directory, **SETTINGS))
            try:
                model(batch(0)).backward()
            except RuntimeError as error:
                return type(error).__name__
        return str(model.first.weight.grad)

    assert run(tmp_path) == run(None)


class Model(torch.nn.Module):
    """A body and a head, which a training loop may call by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack()
        self.head = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.head(x).tanh())


@pytest.mark.parametrize("is_offloaded_first", [False, True])
@pytest.mark.parametrize("mode", ["keep", "host"])
def test_parts_of_a_model_do_not_end_its_graph(mode: Any, is_offloaded_first: bool) -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = Model()
    how: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True}
    call = None if is_offloaded_first else torch.compile(model, **how)
    with offload_activations(model, mode=mode, min_bytes=1) as offload:
        call = torch.compile(model, **how) if call is None else call
        with torch.no_grad():
            call(batch(0, 32))
        call(batch(1, 32)).backward()
        assert offload.statistics["kept_bytes" if mode == "keep" else "offloaded_bytes"] > 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_part_that_is_compiled_and_called_by_itself_is_seen() -> None:
    torch.compiler.reset()
    model = Model()
    with offload_activations(model, mode="host", min_bytes=1) as offload:
        call: Any = torch.compile(model.body, backend="aot_eager")
        call(batch(0, 32)).backward()
        assert offload.statistics["offloaded_storages"] > 3


def row() -> torch.nn.Sequential:
    """Of a class of torch's own, whose hooks torch takes into the graph."""
    torch.manual_seed(4)
    layers = (torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.GELU())
    return torch.nn.Sequential(*(copy.deepcopy(one) for _ in range(3) for one in layers))


@pytest.mark.parametrize("inside_graphs", [False, True])
@pytest.mark.parametrize("way", ["what torch.compile returns", "compile before", "compile after"])
def test_a_sequential_may_be_one_graph(way: str, inside_graphs: bool) -> None:
    torch.compiler.reset()
    how: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True}
    model, expected = row(), row()
    call: Any = torch.compile(model, **how) if way.startswith("what") else model
    if way == "compile before":
        model.compile(**how)
    with offload_activations(
        call, mode="host", min_bytes=1, inside_graphs=inside_graphs
    ) as offload:
        if way == "compile after":
            model.compile(**how)
        for seed in range(2):
            call(batch(seed, 32)).sum().backward()
            expected(batch(seed, 32)).sum().backward()
        assert offload.statistics["offloaded_storages"] > 3
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("is_offloaded_first", [False, True])
def test_hooks_that_cannot_be_in_one_graph_say_what_to_do(is_offloaded_first: bool) -> None:
    torch.compiler.reset()
    model = row()
    how: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True}
    call = None if is_offloaded_first else torch.compile(model, **how)
    with offload_activations(model, mode="host", min_bytes=1):
        call = torch.compile(model, **how) if call is None else call
        with pytest.raises(RuntimeError, match=r"give offload_activations what torch\.compile"):
            call(batch(1, 32))


def test_parameters_that_move_say_that_they_end_graphs() -> None:
    torch.compiler.reset()
    model = Stack()
    with offload_parameters(model, mode="host"):
        call = torch.compile(model, backend="aot_eager", fullgraph=True)
        with pytest.raises(RuntimeError, match=r"between the layers.*layer\.compile"):
            call(batch(1, 32))
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        model(batch(1, 32)).backward()
    expected = Stack()
    expected(batch(1, 32)).backward()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
