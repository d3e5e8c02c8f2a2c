# SPDX-License-Identifier: Apache-2.0
"""Results of graphs that `torch.compile(mode="reduce-overhead")` captures stay where they are.

torch's own bookkeeping of such graphs is played here: it needs a GPU, where
`tests/integrations/test_cuda_graphs.py` runs it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import offload_activations
from megatron.offload.device.graph_memory import GraphMemory

DEVICE = "lag"
HIDDEN, TOKENS = 64, 32
RESULT_BYTES = TOKENS * HIDDEN * 4
pytestmark = pytest.mark.usefixtures("accelerator")


class Result:
    """As torch refers to a graph's result."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._address = tensor.untyped_storage().data_ptr()

    def data_ptr(self) -> int:
        return self._address


class Graph:
    """A graph that has run."""

    def __init__(self, *results: torch.Tensor) -> None:
        self._results = [Result(one) for one in results]

    def path_live_weakrefs(self) -> Iterator[Result]:
        return iter(self._results)


class Trees(types.ModuleType):
    """In the place of `torch._inductor.cudagraph_trees`."""

    def __init__(self) -> None:
        super().__init__("torch._inductor.cudagraph_trees")
        self.current_node: Graph | None = None
        self.asked: set[int] = set()
        self.pool: list[torch.Tensor] = []  # holds all results, as a pool of a graph does

    def get_manager(self, index: int, create_if_none_exists: bool = True) -> Any:
        assert not create_if_none_exists
        self.asked.add(index)
        return self


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch) -> Trees:
    trees = Trees()
    monkeypatch.setitem(sys.modules, trees.__name__, trees)
    return trees


class Played(torch.autograd.Function):
    """A compiled function: what it saves is its graph's result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, trees: Trees) -> torch.Tensor:
        result = x.exp()
        trees.pool.append(result)
        trees.current_node = Graph(result)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (result,) = ctx.saved_tensors
        return gradients[0] * result, None


class Graphed(torch.nn.Module):
    """A layer that replays a graph."""

    def __init__(self, trees: Trees) -> None:
        super().__init__()
        self._trees = trees

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Played.apply(x, self._trees)
        return result


class Model(torch.nn.Module):
    """The layers around it save its result, and each its own."""

    def __init__(self, trees: Trees) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = torch.nn.ModuleList(
            [
                torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Tanh()),
                Graphed(trees),
                torch.nn.Sequential(torch.nn.GELU(), torch.nn.Linear(HIDDEN, HIDDEN)),
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def trained(trees: Trees, **settings: Any) -> tuple[list[torch.Tensor], dict[str, int | float]]:
    """Gradients, and what moved in the last step."""
    model = Model(trees).to(DEVICE)
    x = torch.linspace(-1, 1, TOKENS * HIDDEN).reshape(TOKENS, HIDDEN).to(DEVICE)
    with offload_activations(model, min_bytes=1, **settings) as handle:
        for _ in range(3):
            model(x).square().mean().backward()
        moved = dict(handle.statistics) if handle.engine is not None else {}
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None], moved


@pytest.mark.parametrize("mode", ["host", "ssd", "keep"])
def test_a_graphs_results_stay_and_no_stream_is_recorded_for_them(
    trees: Trees, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[bool] = []  # whether it was for a graph's result
    record_stream = torch.Tensor.record_stream

    def spy(tensor: torch.Tensor, stream: torch.Stream) -> None:
        results = {one.untyped_storage().data_ptr() for one in trees.pool}
        recorded.append(tensor.untyped_storage().data_ptr() in results)
        record_stream(tensor, stream)

    monkeypatch.setattr(torch.Tensor, "record_stream", spy)
    # With `keep` the next layer's activation function is computed again, of the graph's result.
    where: dict[str, Any] = {"ssd": {"directory": tmp_path}, "keep": {"replay": "on"}}.get(mode, {})
    found, moved = trained(trees, mode=mode, **where)
    assert recorded and not any(recorded)
    # The result of the graph is saved by its own last operation and by the next layer's first.
    assert moved["foreign_bytes"] == 2 * RESULT_BYTES
    # What the other layers save still moves.
    assert moved["replayed_bytes" if mode == "keep" else "offloaded_bytes"] > 0
    assert trees.asked == {0}
    expected, _ = trained(trees, mode="off")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_results_are_those_of_the_graph_that_ran_last(trees: Trees) -> None:
    memory = GraphMemory(0)
    one, other = torch.ones(4), torch.ones(4)
    assert not memory.has(one.untyped_storage())  # nothing has run
    trees.current_node = Graph(one)
    assert memory.has(one.untyped_storage()) and not memory.has(other.untyped_storage())
    trees.current_node = Graph(one, other)
    assert memory.has(one.untyped_storage()) and memory.has(other.untyped_storage())
    trees.current_node = None
    assert not memory.has(other.untyped_storage())


def test_where_nothing_is_captured_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    assert not GraphMemory(0).has(torch.ones(4).untyped_storage())
    assert "torch._inductor.cudagraph_trees" not in sys.modules
