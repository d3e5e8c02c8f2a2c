# SPDX-License-Identifier: Apache-2.0
"""The attention and the MLP of a layer get placements of their own, where a policy wants that."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron.offload import OffloadConfig, OffloadEngine, Placement, Scope
from megatron.offload.activations.transfer.writer import Outgoing
from megatron.offload.integration.megatron import layer_hooks as layer_module
from megatron.offload.integration.megatron.layer_hooks import LayerHooks, _PiecewiseCapture
from megatron.offload.integration.megatron.layer_split import LayerDivision

HIDDEN = 32


class Layer(torch.nn.Module):
    """Named as Megatron's is, where it matters; `attention` and `mlp` tell what each part saves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.input_layernorm = torch.nn.LayerNorm(HIDDEN)
        self.attention = torch.nn.Linear(HIDDEN, HIDDEN)
        self.pre_mlp_layernorm: torch.nn.Module | None = torch.nn.LayerNorm(HIDDEN)
        self.mlp = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        x = x + self.attention(self.input_layernorm(x)).sigmoid()
        norm = self.pre_mlp_layernorm
        return x + self.mlp(norm(x) if norm is not None else x).tanh(), None


class Divider:
    """Wants parts; sends those that it is told to host memory, and notes what it was asked."""

    divides_layers = True

    def __init__(self, moving: set[str]) -> None:
        self.moving = moving
        self.asked: dict[str, int] = {}

    def replays(self, scope: Scope) -> bool:
        return False

    def encodes(self, scope: Scope) -> bool:
        return False

    def place_layer(self, scope: Scope) -> Placement:
        return Placement.KEEP

    def place(self, scope: Scope, num_bytes: int) -> Placement:
        self.asked[scope.part] = self.asked.get(scope.part, 0) + 1
        return Placement.HOST if scope.part in self.moving else Placement.KEEP


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> Iterator[Layer]:
    layer = Layer()
    monkeypatch.setattr(layer_module, "layer_names", lambda _: {layer: "decoder.1"})
    yield layer


def run(
    layer: Layer, policy: Divider | None, granularity: str = "part", replay: str = "on"
) -> tuple[list[torch.Tensor], int]:
    """One step. Gradients, and how many storages moved."""
    config = OffloadConfig(
        mode="host", min_bytes=1, host_budget=1 << 24, granularity=granularity, replay=replay
    )
    engine = OffloadEngine(config, policy=policy)
    engine.exclude(layer.parameters())
    calls = LayerHooks(engine, [layer])
    x = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(2), requires_grad=True)
    layer.zero_grad()
    with engine.step():
        with engine.forward(Scope()) as save_order:
            output, _ = calls.layer(Layer.forward, layer, (x.flip(0),), {})  # not computed again
        with engine.backward(save_order):
            output.sum().backward()
    moved = engine.statistics.offloaded_storages
    calls.close()
    engine.close()
    assert not (layer.pre_mlp_layernorm or layer)._forward_pre_hooks
    return [p.grad.clone() for p in (x, *layer.parameters()) if p.grad is not None], moved


def test_each_storage_belongs_to_one_group(block: Layer) -> None:
    whole, num_all = run(block, None, replay="off")
    moved = {}
    for moving in ({"attention"}, {"mlp"}, {"attention", "mlp"}):
        gradients, moved[tuple(sorted(moving))] = run(block, Divider(moving))
        assert all(map(torch.equal, gradients, whole))
    assert moved["attention",] > 0 and moved["mlp",] > 0
    assert moved["attention",] + moved["mlp",] == moved["attention", "mlp"] == num_all


class Replaying(Divider):
    """It computes again as well."""

    def replays(self, scope: Scope) -> bool:
        return True


def test_what_one_part_saved_the_other_computes_of(block: Layer) -> None:
    """The middle of the layer is the sum of its input and of what attention made."""
    whole, moved = run(block, None)
    gradients, moved_in_parts = run(block, Replaying({"attention", "mlp"}))
    assert all(map(torch.equal, gradients, whole)) and moved_in_parts == moved > 0


def test_attention_comes_first_and_what_both_parts_use_is_the_mlps(block: Layer) -> None:
    policy = Divider(set())
    run(block, policy)
    assert list(policy.asked) == ["attention", "mlp"]
    # Norm: input, mean, deviation; linear: input; sigmoid or tanh: its result. The middle of the
    # layer is the input of the second norm.
    assert policy.asked == {"attention": 5, "mlp": 5}


def test_a_layer_without_a_middle_is_not_divided(block: Layer) -> None:
    block.pre_mlp_layernorm = None
    policy = Divider({""})
    _, moved = run(block, policy)
    assert list(policy.asked) == [""] and moved == run(block, None, replay="off")[1]


def test_a_middle_that_autograd_does_not_know_divides_nothing(block: Layer) -> None:
    policy = Divider({""})
    forward = Layer.forward

    def detached(layer: Layer, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert layer.pre_mlp_layernorm is not None
        layer.pre_mlp_layernorm(x.detach())
        norm, layer.pre_mlp_layernorm = layer.pre_mlp_layernorm, None
        try:
            return forward(layer, x)
        finally:
            layer.pre_mlp_layernorm = norm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layer, "forward", detached)
        run(block, policy)
    assert list(policy.asked) == [""]


def test_a_policy_that_wants_no_groups_hooks_nothing(block: Layer, tmp_path: Path) -> None:
    config = OffloadConfig(mode="host", min_bytes=1, host_budget=1 << 24, granularity="layer")
    engine = OffloadEngine(config)
    calls = LayerHooks(engine, [block])
    assert block.pre_mlp_layernorm is not None and not block.pre_mlp_layernorm._forward_pre_hooks
    calls.close()
    engine.close()


@pytest.mark.parametrize("granularity", ["layer", "part", "operation"])
def test_results_and_what_moves_do_not_depend_on_the_granularity(
    block: Layer, granularity: str
) -> None:
    gradients, moved = run(block, None, "layer")
    same, same_moved = run(block, None, granularity)
    assert all(map(torch.equal, gradients, same)) and same_moved == moved > 0


def test_what_an_operation_saved_leaves_when_the_next_one_begins(block: Layer) -> None:
    config = OffloadConfig(mode="host", min_bytes=1, host_budget=1 << 24)
    engine = OffloadEngine(config)
    engine.exclude(block.parameters())
    calls = LayerHooks(engine, [block])
    seen: dict[str, list[int]] = {"input_layernorm": [], "attention": [], "mlp": []}
    for name, counts in seen.items():
        module = getattr(block, name)
        module.register_forward_pre_hook(
            lambda *_, counts=counts: counts.append(engine.statistics.offloaded_storages)
        )
    x = torch.randn(8, HIDDEN, requires_grad=True)
    with engine.step(), engine.forward(Scope()):
        calls.layer(Layer.forward, block, (x * 1,), {})
    # The norm's input and statistics; then the linear's input, the sigmoid's result, and the second
    # norm's statistics, whose input is computed again.
    assert seen == {"input_layernorm": [0], "attention": [3], "mlp": [7]}
    assert engine.statistics.offloaded_storages == 9
    calls.close()
    engine.close()


def test_what_operations_of_a_layer_saved_is_handed_over_at_its_end(
    block: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = OffloadConfig(mode="host", min_bytes=1, host_budget=1 << 24)
    engine = OffloadEngine(config)
    engine.exclude(block.parameters())
    submit, submitted = engine.writer.submit, []

    def noted(outgoing: list[Outgoing]) -> None:
        submitted.append(len(outgoing))
        submit(outgoing)

    monkeypatch.setattr(engine.writer, "submit", noted)
    calls = LayerHooks(engine, [block])
    x = torch.randn(8, HIDDEN, requires_grad=True)
    with engine.step(), engine.forward(Scope()):
        result = calls.layer(Layer.forward, block, (x * 1,), {})
        assert submitted == [engine.statistics.offloaded_storages] == [9]
        del result
    calls.close()
    engine.close()


class Discarding(Layer):
    """Frees its norm's result before its end, as Megatron's selective recomputation does."""

    def __init__(self, granularity: str, modules: list[str]) -> None:
        super().__init__()
        self.config = SimpleNamespace(recompute_granularity=granularity, recompute_modules=modules)


@pytest.mark.parametrize(
    ("granularity", "modules", "num_places"),
    [("selective", ["core_attn"], 4), ("selective", ["layernorm"], 1), ("full", ["layernorm"], 4)],
)
def test_a_layer_that_discards_results_is_divided_in_the_middle_alone(
    granularity: str, modules: list[str], num_places: int
) -> None:
    division = LayerDivision([Discarding(granularity, modules)], operations=True)
    assert len(division._handles) == num_places
    division.close()


def test_a_layer_is_divided_where_its_operations_begin() -> None:
    linear = functools.partial(torch.nn.Linear, HIDDEN, HIDDEN)
    layer = torch.nn.ModuleDict(
        {
            "self_attention": torch.nn.ModuleDict(
                {"qkv": linear(), "core_attention": torch.nn.ModuleDict({"scores": linear()})}
            ),
            "pre_mlp_layernorm": torch.nn.LayerNorm(HIDDEN),
            "dropout": torch.nn.Dropout(),
            "mlp": torch.nn.ModuleDict({"router": linear(), "experts": linear(), "down": linear()}),
        }
    )
    layer.pre_mlp_layernorm = layer["pre_mlp_layernorm"]
    division = LayerDivision([layer], operations=True)
    hooked = {path: len(one._forward_pre_hooks) for path, one in layer.named_modules()}
    assert {path: number for path, number in hooked.items() if number} == {
        "self_attention.qkv": 1,
        "self_attention.core_attention": 1,  # not what it is made of
        "pre_mlp_layernorm": 1,
        "mlp.down": 1,  # experts may run on another stream
    }
    division.close()


def test_what_runs_without_gradients_begins_no_operation() -> None:
    layer, reached = Layer(), []
    division = LayerDivision([layer], operations=True)
    x, middle = torch.randn(8, HIDDEN, requires_grad=True) * 1, layer.pre_mlp_layernorm
    assert middle is not None
    with division.watching(lambda tensors, is_middle: reached.append(is_middle)):
        layer.attention(x)
        with torch.no_grad():  # a part that runs again in backward begins with the middle
            layer.attention(x)
            middle(x)
    assert reached == [False, True]
    layer(x)
    assert reached == [False, True]
    division.close()


@dataclasses.dataclass
class Captures:
    """In place of an engine: notes what is captured, part by part."""

    parts: list[str] = dataclasses.field(default_factory=list)
    recomputed: dict[str, list[torch.Tensor]] = dataclasses.field(default_factory=dict)

    hooks = SimpleNamespace(end_layer=lambda: None)

    def new_batch(self) -> Any:
        return SimpleNamespace(submit=lambda: None)

    def capture(
        self, scope: Scope, outputs: Any, inputs: Any, captured: Any, recomputes: bool, batch: Any
    ) -> None:
        self.parts.append(scope.part)
        if recomputes:
            self.recomputed[scope.part] = inputs


def pieces_of(again: list[str], selective: list[str]) -> tuple[Captures, list[torch.Tensor]]:
    """What is captured of a layer with an operation in each part, and its input and middle."""
    found, tensors = Captures(), [torch.randn(2) for _ in range(5)]
    pieces = _PiecewiseCapture(
        cast(OffloadEngine, found), None, Scope(), tensors[:1], again, selective
    )
    for tensor, is_middle in zip(tensors[1:4], (False, True, False), strict=True):
        pieces.reach([tensor], is_middle)
    pieces.end(tensors[4:])
    return found, [tensors[0], tensors[2]]


def test_parts_with_selective_operations_are_captured_at_their_end() -> None:
    for selective, parts in (
        ([], ["attention", "attention", "mlp", "mlp"]),
        (["attention"], ["attention", "mlp", "mlp"]),
        (["mlp"], ["attention", "attention", "mlp"]),
    ):
        assert pieces_of([], selective)[0].parts == parts


def test_of_a_recomputed_part_what_it_starts_from_may_move() -> None:
    found, (start, middle) = pieces_of(["mlp"], [])
    assert list(found.recomputed) == ["mlp"]
    assert found.recomputed["mlp"][0] is start and found.recomputed["mlp"][1] is middle
    found, (start, _) = pieces_of(["attention"], [])
    assert list(found.recomputed) == ["attention"]
    assert len(found.recomputed["attention"]) == 1 and found.recomputed["attention"][0] is start


def test_the_last_layer_of_each_chunk_ends_the_layers(
    monkeypatch: pytest.MonkeyPatch, offload_config: Callable[..., OffloadConfig]
) -> None:
    chunks = [torch.nn.ModuleList(Layer() for _ in range(2)) for _ in range(2)]
    layers = [layer for chunk in chunks for layer in chunk]
    monkeypatch.setattr(
        layer_module, "layer_names", lambda some: {one: str(layers.index(one)) for one in some[0]}
    )
    engine = OffloadEngine(offload_config())
    ended: list[int] = []
    run: list[torch.nn.Module] = []
    monkeypatch.setattr(engine, "end_layers", lambda: ended.append(len(run)))
    hooks = LayerHooks(engine, chunks)
    with engine.step(), engine.forward(Scope()):
        for layer in layers:
            run.append(layer)
            hooks.layer(Layer.forward, layer, (torch.randn(8, HIDDEN, requires_grad=True),), {})
    assert ended == [2, 4]
    hooks.close()
    engine.close()
