# SPDX-License-Identifier: Apache-2.0
"""The door in plain PyTorch, in every situation that a training loop can bring about.

Each test runs the same loop with and without the door and compares every gradient; afterwards
nothing is left on the tier, and another step works.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed._composable import checkpoint as checkpoint_by_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from megatron.offload import ChangedInPlaceError, ConfigurationError, offload_activations
from megatron.offload.integration.torch.buffer_snapshot import BufferSnapshot
from megatron.offload.integration.torch.offload import ActivationOffload
from tests.support.loops import HIDDEN, Net, gradients, net, noise
from tests.support.same_training import digest
from tests.support.waiting import SOON_S

Loop = Callable[[Net], Any]


def compared(loop: Loop, directory: Path, **settings: Any) -> ActivationOffload:
    """Runs a loop without and with the door, then a plain step; the closed handle."""

    def run(folder: Path | None) -> tuple[Any, ActivationOffload]:
        model = net()
        options = {"min_bytes": 1, **settings} if folder is not None else {"mode": "off"}
        with offload_activations(model, folder, **options) as offload:
            torch.manual_seed(1)
            found = loop(model)
            after = gradients(model)
            model.zero_grad()
            gc.collect()
            torch.manual_seed(2)
            model(noise(9)).sum().backward()
            if folder is not None:
                assert offload.engine is not None
                # A write that its use has overtaken may still run when a step ends.
                assert offload.engine.wait_for_writes(SOON_S)
                assert [one.used_bytes for one in offload.engine.tiers.values()] == [0]
                assert offload.statistics["offloaded_storages"] > 10
            return (found, after, gradients(model)), offload

    expected, _ = run(None)
    found, offload = run(directory)
    assert found == expected
    assert any(one is not None for one in expected[1]) or expected[0] is not None
    return offload


# -- Passes ---------------------------------------------------------------------------------------


def accumulates(model: Net) -> None:
    for seed in range(3):
        model(noise(seed)).sum().backward()


def several_forward_passes_and_one_backward(model: Net) -> None:
    sum(model(noise(seed)).square().mean() for seed in range(3)).backward()


def backward_passes_in_another_order(model: Net) -> None:
    losses = [model(noise(seed)).square().mean() for seed in range(4)]
    for loss in (losses[2], losses[0], losses[3], losses[1]):
        loss.backward()


def retains_its_graph(model: Net) -> None:
    loss = model(noise()).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def differentiates_twice(model: Net) -> None:
    x = noise().requires_grad_()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        (gradient,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        gradient.square().sum().backward()


def asks_for_some_gradients(model: Net) -> list[str]:
    found = torch.autograd.grad(model(noise()).square().mean(), list(model.first.parameters()))
    return [digest(one) for one in found]


def evaluates_between_steps(model: Net) -> list[str]:
    model(noise()).sum().backward()
    model.eval()
    with torch.no_grad():
        one = digest(model(noise(1)))
    with torch.inference_mode():
        other = digest(model(noise(1)))
    model.train()
    model(noise(2)).sum().backward()
    return [one, other]


def drops_a_forward_pass(model: Net) -> None:
    model(noise())
    model(noise(1)).sum().backward()


def keeps_its_outputs(model: Net) -> list[str]:
    kept = []
    for seed in range(3):
        out = model(noise(seed))
        loss = out.square().mean()
        loss.backward()
        kept += [out, loss]
    return [digest(one) for one in kept]


def leaves_an_output_unused(model: Net) -> None:
    head = model.first
    with_hidden = model(noise())
    unused = head(with_hidden).exp()
    with_hidden.square().mean().backward()
    del unused


def calls_parts_by_themselves(model: Net) -> None:
    x = model.first(noise())
    for block in model.blocks:
        x = block(x)
    x.sum().backward()


def casts_automatically(model: Net) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(noise()).float().square().mean()
    scaler.scale(loss).backward()


def computes_backward_in_another_thread(model: Net) -> None:
    loss = model(noise()).square().mean()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def freezes_half(model: Net) -> None:
    for p in model.blocks[0].parameters():
        p.requires_grad_(False)
    model(noise()).sum().backward()
    for p in model.blocks[0].parameters():
        p.requires_grad_(True)


def replaces_its_parameters(model: Net) -> None:
    model(noise()).sum().backward()
    model.first.weight = torch.nn.Parameter(model.first.weight.detach() * 2)
    model(noise(1)).sum().backward()


def checkpoints_the_model_and_more(model: Net) -> list[str]:
    """Within the checkpoint something is saved outside of the model too."""
    x = noise().requires_grad_()

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(model(x * 0.5) * x)

    checkpoint(step, x, use_reentrant=False).square().mean().backward()
    assert x.grad is not None
    return [digest(x.grad)]


def checkpoints_its_parts_in_segments(model: Net) -> None:
    parts = [model.first, torch.tanh, *model.blocks, torch.tanh]
    x = noise().requires_grad_()
    checkpoint_sequential(parts, 2, x, use_reentrant=False).square().mean().backward()


def checkpoints_the_model_reentrantly(model: Net) -> None:
    x = noise().requires_grad_()
    checkpoint(model, x, use_reentrant=True).square().mean().backward()


def saves_on_cpu(model: Net) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = model(noise()).square().mean()
    loss.backward()


def changes_what_is_saved(model: Net) -> None:
    def change(block: torch.nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out.exp().mul_(0.5)

    handle = model.blocks[1].register_forward_hook(change)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        model(noise()).square().mean().backward()
    handle.remove()


LOOPS: list[Loop] = [
    accumulates,
    several_forward_passes_and_one_backward,
    backward_passes_in_another_order,
    retains_its_graph,
    differentiates_twice,
    asks_for_some_gradients,
    evaluates_between_steps,
    drops_a_forward_pass,
    keeps_its_outputs,
    leaves_an_output_unused,
    calls_parts_by_themselves,
    casts_automatically,
    computes_backward_in_another_thread,
    freezes_half,
    replaces_its_parameters,
    checkpoints_the_model_and_more,
    checkpoints_its_parts_in_segments,
    checkpoints_the_model_reentrantly,
    saves_on_cpu,
    changes_what_is_saved,
]


@pytest.mark.parametrize("loop", LOOPS, ids=[loop.__name__ for loop in LOOPS])
def test_a_loop_that(loop: Loop, tmp_path: Path) -> None:
    compared(loop, tmp_path)


def test_hooks_of_others_are_left_alone_and_said_once(tmp_path: Path, caplog: Any) -> None:
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    def loop(model: Net) -> int:
        kept.clear()
        for seed in range(2):
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = model(noise(seed)).square().mean()
            loss.backward()
        return len(kept)

    compared(loop, tmp_path)
    (said,) = (one.getMessage() for one in caplog.records if one.levelname == "WARNING")
    assert "Net is called within hooks for saved tensors that are not ours" in said


# -- Inside of the forward pass -------------------------------------------------------------------


def _reentrant(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=True)  # type: ignore[no-any-return]


def _not_reentrant(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]


def _selective(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saves = operation is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)

    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)  # type: ignore


def _on_cpu(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return block(x)  # type: ignore[no-any-return]


@pytest.mark.slow(but="_reentrant")
@pytest.mark.parametrize("way", [_reentrant, _not_reentrant, _selective, _on_cpu])
def test_a_model_that_places_activations_itself(
    way: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    def loop(model: Net) -> None:
        blocks = list(model.blocks)
        original = type(model).forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            x = model.first(x)
            for block in blocks:
                x = way(block, x)
            return x

        model.forward = forward  # type: ignore[method-assign]
        for seed in range(2):
            model(noise(seed)).sum().backward()
        model.forward = original.__get__(model)  # type: ignore[method-assign]

    compared(loop, tmp_path)


def _not_reentrant_with_more(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(block(x * 2))

    return checkpoint(run, x, use_reentrant=False)  # type: ignore[no-any-return]


def _checkpoints_itself(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """By hooks of the layer, which enter the checkpoint when ours have heard of the layer."""
    if not hasattr(block, "checkpoints_itself"):
        block.checkpoints_itself = True  # type: ignore[assignment]
        checkpoint_by_hooks(block)
    return block(x)  # type: ignore[no-any-return]


WAYS = [_reentrant, _not_reentrant, _not_reentrant_with_more, _selective, _checkpoints_itself]


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_checkpoints_a_layer_that_is_to_be_recomputed(
    way: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor], tmp_path: Path, caplog: Any
) -> None:
    def loop(model: Net) -> None:
        def forward(x: torch.Tensor) -> torch.Tensor:
            x = model.first(x)
            x = way(model.blocks[0], x)
            return model.blocks[2](model.blocks[1](x))  # type: ignore[no-any-return]

        model.forward = forward  # type: ignore[method-assign]
        for seed in range(2):
            model(noise(seed)).sum().backward()
        del model.forward

    offload = compared(loop, tmp_path, recompute_layers="0-1")
    said = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    if way is _reentrant:
        assert not said
    else:
        (sentence,) = said
        assert "blocks.0 is to be recomputed, and the model calls it within hooks" in sentence
    # The last step is a plain one, but for the layer that has a checkpoint of its own for good.
    num_again = 1 if way is _checkpoints_itself else 2
    assert offload.statistics["recomputed_layers"] == num_again


def test_a_layer_that_calls_another_one_is_recomputed_as_a_whole(
    tmp_path: Path, caplog: Any
) -> None:
    def loop(model: Net) -> None:
        first, second = model.blocks[0], model.blocks[1]
        original = type(first).forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            return torch.sin(second(original(first, x) * 2))  # type: ignore[arg-type]

        first.forward = forward
        for seed in range(2):
            model(noise(seed)).sum().backward()
        del first.forward

    compared(loop, tmp_path, recompute_layers="0-1")
    assert [one.getMessage() for one in caplog.records if one.levelname == "WARNING"] == []


@torch.jit.script
def scripted(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return torch.sin(torch.tanh(x) * by) * torch.exp(-x * x)


class EndsInScript(torch.nn.Module):
    """What its forward saves last it saves within a function that was scripted."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)
        self.by = torch.nn.Parameter(torch.rand(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = scripted(self.linear(x), self.by)
        return result


def test_parts_of_a_model_may_be_torchscript(tmp_path: Path) -> None:
    def digests(**settings: Any) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        parts = [
            torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Tanh()) for _ in "abcd"
        ]
        parts[1], parts[3] = torch.jit.script(parts[1]), torch.jit.trace(parts[3], noise(0))
        model, found = torch.nn.Sequential(*parts), []
        with offload_activations(model, **settings) as offload:
            for seed in range(4):
                model(noise(seed)).square().sum().backward()
                found.append([digest(one.grad) for one in model.parameters()])
            return found, offload.statistics

    digests(mode="off")  # gradients of the first scripts of a process have other last bits
    expected, _ = digests(mode="off")
    for settings in ({"mode": "keep"}, {"directory": tmp_path}, {"mode": "host", "replay": "off"}):
        found, statistics = digests(min_bytes=1, **settings)
        assert found == expected
        assert settings == {"mode": "keep"} or statistics["offloaded_bytes"]


def test_a_scripted_function_that_torch_cannot_end_half_way_is_refused(tmp_path: Path) -> None:
    """The interpreter replaces the error with which torch ends a recomputation early."""
    model = torch.nn.Sequential(*(EndsInScript() for _ in range(3)))
    for _ in range(3):  # torch runs another graph of the function from its second call on
        model(noise(0)).sum().backward()
    with offload_activations(model, tmp_path, min_bytes=1, recompute_layers="0-1"):
        loss = model(noise(0)).sum()
        with pytest.raises(ConfigurationError, match="what its forward saves last"):
            loss.backward()


def test_an_error_of_a_scripted_function_that_runs_again_is_raised(tmp_path: Path) -> None:
    class Refuses(EndsInScript):
        fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            return scripted(x, self.by[:3] if self.fails else self.by)  # type: ignore[no-any-return]

    model = torch.nn.Sequential(*(Refuses() for _ in range(3)))
    with offload_activations(model, tmp_path, min_bytes=1, recompute_layers="0-1"):
        loss = model(noise(0)).sum()
        Refuses.fails = True
        with pytest.raises(RuntimeError, match=r"TorchScript interpreter(.|\n)*size of tensor"):
            loss.backward()


class Changing(torch.nn.Module):
    """A layer whose result depends on buffers that it changes, in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(HIDDEN, HIDDEN))
        self.norm = torch.nn.BatchNorm1d(16)
        self.inner = torch.nn.Sequential(torch.nn.GELU())
        self.register_buffer("calls", torch.zeros(()))
        self.inner.register_buffer("also", self.calls)
        self.register_buffer("mean", torch.zeros(HIDDEN))
        self.register_buffer("fixed", torch.ones(HIDDEN) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        self.mean = self.mean * 0.9 + x.detach().mean((0, 1))
        x = self.norm(self.linear(x)) * self.mean * float(self.inner.also)  # type: ignore[arg-type]
        return self.inner(x) * self.fixed  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "loop", [accumulates, several_forward_passes_and_one_backward, retains_its_graph]
)
def test_a_recomputed_layer_changes_its_buffers_once(loop: Loop, tmp_path: Path) -> None:
    def changing(model: Net) -> list[str]:
        torch.manual_seed(4)
        blocks, model.blocks = model.blocks, torch.nn.ModuleList(Changing() for _ in range(2))
        with offload_activations(model, **settings) as offload:
            loop(model)
            num_again.append(offload.statistics.get("recomputed_layers", 0))
        found = [digest(one) for one in model.buffers()]
        found += [str(one) for one in gradients(model)]
        model.blocks = blocks
        return found

    num_again: list[int | float] = []
    settings: dict[str, Any] = {"mode": "off"}
    expected = changing(net())
    settings = {"directory": tmp_path, "min_bytes": 1, "recompute_layers": "0-1"}
    assert changing(net()) == expected
    assert num_again[0] == 0 and num_again[1] >= 2


def test_of_buffers_that_stay_as_they_are_no_copies_are_kept() -> None:
    layer = Changing()
    buffers = BufferSnapshot(layer.modules())
    layer(noise())
    buffers.keep_changed()
    fixed, calls = layer.fixed, layer.calls
    with buffers.restored():
        assert layer.fixed is fixed
        assert layer.calls is not calls and float(layer.calls) == 0  # type: ignore[arg-type]
    assert layer.calls is calls and float(layer.calls) == 1  # type: ignore[arg-type]


BUFFERS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(HIDDEN).to_sparse(),
    "sparse rows": lambda: torch.eye(HIDDEN).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "oneDNN": lambda: torch.ones(HIDDEN).to_mkldnn(),
    "without memory": lambda: torch.ones(HIDDEN, device="meta"),
}


@pytest.mark.filterwarnings("ignore")  # some are prototypes, torch says
@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers_may_be_of_any_kind(kind: str) -> None:
    layer = torch.nn.Linear(HIDDEN, HIDDEN)
    layer.register_buffer("odd", BUFFERS[kind]())
    own = layer.odd
    buffers = BufferSnapshot(layer.modules())
    layer(noise())
    buffers.keep_changed()
    with buffers.restored():
        assert type(layer.odd) is type(own) and layer.odd.layout is own.layout
        assert layer.odd is not own, "what cannot be compared is copied"
    assert layer.odd is own


def test_an_activation_that_is_changed_in_place_raises(tmp_path: Path) -> None:
    class Changes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x).exp()
            x.add_(1)
            return x

    with (
        offload_activations(Changes(), tmp_path, min_bytes=1) as offload,
        pytest.raises(ChangedInPlaceError),
    ):
        offload._models[0](noise()).sum().backward()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: {"logits": x},
        lambda x: (x, None, "text"),
        lambda x: SimpleNamespace(logits=x),
        lambda x: [{"a": x}, {"b": (x * 2,)}],
    ],
    ids=["dict", "tuple", "object", "nested"],
)
def test_outputs_of_any_kind_tell_of_backward(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    class Wrapped(Net):
        def forward(self, x: torch.Tensor) -> Any:
            self.out = super().forward(x)
            return wrap(self.out)

    model = Wrapped()
    with offload_activations(model, tmp_path, min_bytes=1) as offload:
        for _ in range(2):
            model(noise())
            model.out.sum().backward()
            assert offload._passes._step is None  # the step has ended with its backward pass
            assert offload.statistics["offloaded_storages"] > 10


# -- Errors ---------------------------------------------------------------------------------------


def failing(model: Net, error: BaseException) -> contextlib.AbstractContextManager[None]:
    @contextlib.contextmanager
    def fails() -> Iterator[None]:
        def hook(*_: Any) -> None:
            raise error

        handle = model.blocks[1].register_forward_pre_hook(hook)
        try:
            with pytest.raises(type(error)):
                yield
        finally:
            handle.remove()
            error.__traceback__ = None  # its frames hold the graph

    return fails()


@pytest.mark.parametrize("error", [ValueError("stop"), KeyboardInterrupt()], ids=repr)
def test_a_forward_pass_that_raises(error: BaseException, tmp_path: Path) -> None:
    def loop(model: Net) -> None:
        with failing(model, error):
            model(noise())
        model(noise(1)).sum().backward()

    compared(loop, tmp_path)


def test_a_backward_pass_that_raises(tmp_path: Path) -> None:
    def loop(model: Net) -> None:
        def stop(_: torch.Tensor) -> None:
            raise ValueError("stop")

        handle = model.blocks[0].norm.weight.register_hook(stop)
        with pytest.raises(ValueError, match="stop"):
            model(noise()).sum().backward()
        handle.remove()
        model.zero_grad()
        model(noise(1)).sum().backward()

    compared(loop, tmp_path)
