# SPDX-License-Identifier: Apache-2.0
"""Compiled graphs and the engine behind them: the order of reads, the window, faults, breaks.

What a graph's bits are: test_compiled_graphs.py.
"""

from __future__ import annotations

import errno
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import default_partition
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from megatron.offload import StorageError, offload_activations
from megatron.offload.activations.capture.hooks import SavedTensorHooks
from megatron.offload.activations.saved.view import SavedView
from megatron.offload.activations.transfer.prefetcher import Prefetcher
from megatron.offload.integration.torch import compiled_graphs
from tests.support.compiled import (
    HIDDEN,
    STEPS,
    Stack,
    added_gradients,
    assert_same,
    batch,
    trained,
    without_offload,
)
from tests.support.nth_fault import ALLOCATION, READ, WRITE, NthFault
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("compiled_anew")


VIEWS = [
    getattr(torch.ops.aten, name).default
    for name in ("view", "t", "detach", "permute", "_unsafe_view", "expand")
] + [torch.ops.aten.transpose.int]


class LateViews(torch.nn.Module):
    """A partitioner makes the views that it saves at the end of forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            flat = torch.addmm(layer.bias, x.view(-1, HIDDEN), layer.weight)  # as GPT-2's
            heads = flat.view(*x.shape[:-1], 4, -1).transpose(1, 2)
            mixed = (heads @ heads.transpose(-1, -2)).softmax(-1) @ heads
            x = x + torch.nn.functional.gelu(mixed.transpose(1, 2).reshape(x.shape))
        return x.square().mean()


class Broken(Stack):
    """The graph ends between two blocks, and another one goes on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x.square().mean()


@pytest.mark.parametrize("kind", [Stack, LateViews, Broken])
def test_reads_are_in_the_order_of_use_and_keep_to_the_window(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    used: list[int] = []
    too_much: list[tuple[float, float]] = []
    begin, unpack = Prefetcher._begin, SavedTensorHooks.unpack

    def begins(prefetcher: Prefetcher, record: Any) -> None:
        others = sum(prefetcher._ahead.values())
        begin(prefetcher, record)
        begun.append(id(record))
        if others and others + record.num_bytes > prefetcher.window_bytes:
            too_much.append((others + record.num_bytes, prefetcher.window_bytes))

    def uses(hooks: SavedTensorHooks, packed: Any) -> torch.Tensor:
        if isinstance(packed, SavedView):
            used.append(id(packed.saved))
        return unpack(hooks, packed)

    monkeypatch.setattr(Prefetcher, "_begin", begins)
    monkeypatch.setattr(SavedTensorHooks, "unpack", uses)
    found = trained(tmp_path, kind=kind, settled=True, lengths=(32,))
    assert found[1][-1]["read_bytes"] > 0
    first_uses = list(dict.fromkeys(used))  # several views of one storage are one read
    assert len(begun) > 8
    assert begun == [one for one in first_uses if one in set(begun)]
    assert not too_much


def test_what_is_saved_leaves_as_soon_as_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not where a partitioner makes the view that it saves."""
    graphs: list[torch.fx.Graph] = []
    rewrite = compiled_graphs.rewrite

    def noted(forward: torch.fx.GraphModule, *others: Any) -> None:
        rewrite(forward, *others)
        graphs.append(forward.graph)

    monkeypatch.setattr(compiled_graphs, "rewrite", noted)
    trained(tmp_path, kind=LateViews, lengths=(32,))
    (graph,) = graphs
    nodes = list(graph.nodes)
    writes = [one for one in nodes if "begin_write" in str(one.target)]
    assert len(writes) > 12
    for write in writes:
        complete = write.all_input_nodes[0]
        while complete.target in VIEWS:
            complete = complete.all_input_nodes[0]
        meanwhile = nodes[nodes.index(complete) + 1 : nodes.index(write)]
        assert not [one for one in meanwhile if "mm" in str(one.target)], write


@pytest.mark.parametrize("kind", [LateViews, Broken])
@pytest.mark.parametrize("mode", ["ssd", "host"])
def test_the_bits_are_the_same(kind: Any, mode: str, tmp_path: Path) -> None:
    found = trained(tmp_path, kind=kind, mode=mode, settled=True)
    assert_same(found, without_offload(kind=kind))
    assert all(step["offloaded_storages"] > 8 for step in found[1])


@pytest.mark.parametrize(("kind", "number"), [(WRITE, 3), (WRITE, 1), (ALLOCATION, 5)])
def test_a_drive_that_fails_or_is_full_loses_nothing(
    kind: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = without_offload()
    fault = NthFault(monkeypatch)
    error = errno.ENOSPC if kind == ALLOCATION else errno.EIO
    fault.begin(kind, number, error, for_ever=True)
    found = trained(tmp_path, settled=True)
    assert_same(found, expected)
    assert fault.num_failed > 0 and any(step["rejected_bytes"] > 0 for step in found[1])


def test_a_read_that_fails_is_an_error_and_the_next_step_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = without_offload(1)[0]
    model = Stack().eval()
    compiled: Any = torch.compile(model, backend="aot_eager")
    fault = NthFault(monkeypatch)
    with offload_activations(model, tmp_path, min_bytes=1024, inside_graphs=True) as offload:
        loss = compiled(batch(1))
        assert offload.engine is not None and offload.engine.wait_for_writes(30)
        fault.begin(READ, 4, errno.EIO, for_ever=True)
        with pytest.raises(StorageError, match="Errno 5"):
            loss.backward()
        fault.end()
        del loss
        gc.collect()
        model.zero_grad()
        loss = compiled(batch(0))
        loss.backward()
        found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


class Attention(torch.nn.Module):
    """Inductor would lay results of its backward pass over what that has read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(HIDDEN, 3 * HIDDEN)
        self.last = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.first(x).chunk(3, -1)
        mixed = (q.tanh() @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.last(mixed).square().mean()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_closed", [False, True])
def test_a_second_backward_pass_has_the_bits_of_the_first(
    is_closed: bool, backend: str, tmp_path: Path
) -> None:
    """Whether bytes come from the tier, or are in memory all the time."""
    model = Attention()
    compiled: Any = torch.compile(model, backend=backend)
    with offload_activations(model, tmp_path, min_bytes=256, inside_graphs=True) as offload:
        compiled(batch(0)).backward()
        assert offload.statistics["offloaded_storages"] > 3
        model.zero_grad()
        if is_closed:
            offload.close()
        loss = compiled(batch(0))
        found = []
        for retain_graph in (True, True, False):
            loss.backward(retain_graph=retain_graph)
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            model.zero_grad()
    first, *others = found
    assert len(first) == 4
    for other in others:
        assert all(map(torch.equal, first, other))


class SavesAll(CustomPartitionerFn):
    """What forward makes is saved, views of it beside it; inductor's own saves one of them."""

    def __call__(self, gm: Any, joint_inputs: Any, **settings: Any) -> Any:
        settings.pop("compiler", None)
        return default_partition(gm, joint_inputs, **settings)

    def uuid(self) -> Any:
        return "saves all"


class TwoViews(torch.nn.Module):
    """Backward computes a gradient of one view, and reads the other one afterwards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(HIDDEN, HIDDEN)
        self.scale = torch.nn.Parameter(torch.randn(HIDDEN * HIDDEN))
        self.last = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.first(x).tanh()
        scaled = (wide.view(-1) * self.scale).view(HIDDEN, HIDDEN)
        return self.last(scaled).square().sum()


@pytest.mark.slow
def test_backward_overwrites_nothing_that_several_views_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views of one storage that is in memory still, because others have it too."""
    held: list[torch.UntypedStorage] = []
    pack = SavedTensorHooks.pack

    def noted(self: SavedTensorHooks, tensor: torch.Tensor, *args: Any, **settings: Any) -> Any:
        held.append(tensor.untyped_storage())
        return pack(self, tensor, *args, **settings)

    monkeypatch.setattr(SavedTensorHooks, "pack", noted)
    x = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(4))
    found = []
    # Inductor lays results over what it is given, and does not look for other views of that.
    own = functorch_config.patch(donated_buffer=False)
    with own, inductor_config.patch(custom_partitioner_fn=SavesAll()):
        for moves in (False, True):
            torch._dynamo.reset()
            model = TwoViews()
            compiled: Any = torch.compile(model)
            settings: dict[str, Any] = {"inside_graphs": True} if moves else {"mode": "off"}
            with offload_activations(
                model, tmp_path, min_bytes=256, layers=["first"], **settings
            ) as offload:
                compiled(x).backward()
                assert (offload.statistics.get("forwarded_bytes", 0) > 0) is moves
            found.append([p.grad for p in model.parameters()])
    expected, ours = found
    assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize("is_closed", [False, True])
def test_hooks_of_others_get_tensors_that_they_can_copy(is_closed: bool, tmp_path: Path) -> None:
    model = Stack().eval()
    compiled: Any = torch.compile(model, backend="aot_eager")
    with offload_activations(model, tmp_path, min_bytes=1024, inside_graphs=True) as offload:
        compiled(batch(0)).backward()
        if is_closed:
            offload.close()
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda one: one):
            loss = compiled(batch(1))
        loss.backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    expected = added_gradients(2)  # copies are of the same numbers
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))


def test_copies_have_the_strides_of_what_they_are_of() -> None:
    matrix = torch.randn(4, 6)
    for like in (matrix, matrix.t(), matrix[:, :1].expand(4, 6), matrix[:1].expand(4, 6).t()):
        for tensor in (like, like.contiguous()):
            copied = compiled_graphs._copied(tensor, like)
            assert torch.equal(copied, like) and copied.stride() == like.stride()
            assert copied.data_ptr() != like.data_ptr()


def test_a_handle_that_is_closed_between_forward_and_backward_is_an_error(tmp_path: Path) -> None:
    model = Stack().eval()
    compiled: Any = torch.compile(model, backend="aot_eager")
    with offload_activations(model, tmp_path, min_bytes=1024, inside_graphs=True) as offload:
        loss = compiled(batch(0))
        assert offload.engine is not None and offload.engine.wait_for_writes(30)
    with pytest.raises(StorageError, match="the tier is closed"):
        loss.backward()
    del loss
    gc.collect()


@pytest.mark.parametrize("inside_graphs", [True, False])
def test_our_hooks_are_not_compiled_where_a_graph_breaks(
    inside_graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: list[str] = []
    compile_frame = torch._dynamo.convert_frame._compile

    def noted(code: Any, *args: Any, **kwargs: Any) -> Any:
        files.append(code.co_filename)
        return compile_frame(code, *args, **kwargs)

    monkeypatch.setattr(torch._dynamo.convert_frame, "_compile", noted)
    trained(tmp_path, kind=Broken, inside_graphs=inside_graphs)
    assert any(one == __file__ for one in files)
    assert not [one for one in files if "/activations/" in one]


def test_two_models_in_turn_and_one_compiled_in_place(tmp_path: Path) -> None:
    models: list[torch.nn.Module] = [Stack().eval(), LateViews()]
    for model in models:
        model.compile(backend="aot_eager")
    handles = [
        offload_activations(model, tmp_path, min_bytes=1024, inside_graphs=True) for model in models
    ]
    for step in range(STEPS):
        losses = [model(batch(step)) for model in models]
        for loss in losses if step % 2 else losses[::-1]:
            loss.backward()
    for handle in handles:
        assert handle.statistics["offloaded_storages"] > 8
        handle.close()
    found = [p.grad for model in models for p in model.parameters() if p.grad is not None]
    expected = added_gradients() + added_gradients(kind=LateViews)
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))


@pytest.mark.slow
def test_ranks_that_share_a_compiled_model_train_the_same(tmp_path: Path) -> None:
    """DDP, which divides the graph, and FSDP2."""
    script = Path(__file__).parent / "compiled_ranks.py"
    for results in run_ranks(script, tmp_path, str(tmp_path)):
        assert set(results) == {"replicated", "sharded"}
        for found in results.values():
            assert found["identical"] and found["moved"] > 20
