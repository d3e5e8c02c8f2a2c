# SPDX-License-Identifier: Apache-2.0
"""The door in plain PyTorch, in every situation that a training loop can bring about.

Each test runs the same loop with and without the door and compares every gradient; afterwards
nothing is left on the tier, and another step works.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from megatron.offload import ChangedInPlaceError, ConfigurationError, offload_activations
from megatron.offload.integration.torch.offload import ActivationOffload
from tests.support.models import Block
from tests.support.processes import ROOT
from tests.support.same_training import digest

HIDDEN = 32


class Net(torch.nn.Module):
    """Blocks with dropout."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.first = torch.nn.Linear(HIDDEN, HIDDEN)
        self.blocks = torch.nn.ModuleList(Block(HIDDEN) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def noise(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 16, HIDDEN, generator=torch.Generator().manual_seed(seed))


def gradients(*models: torch.nn.Module) -> list[str | None]:
    return [
        None if p.grad is None else digest(p.grad) for model in models for p in model.parameters()
    ]


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
                assert offload.statistics["tier_used_bytes"] == 0
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
]


@pytest.mark.parametrize("loop", LOOPS, ids=[loop.__name__ for loop in LOOPS])
def test_a_loop_that(loop: Loop, tmp_path: Path) -> None:
    compared(loop, tmp_path)


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


# -- Several models, copies, threads --------------------------------------------------------------


@pytest.mark.parametrize("together", [True, False], ids=["one handle", "two handles"])
def test_two_models_that_train_each_other(together: bool, tmp_path: Path) -> None:
    def run(folder: Path | None) -> list[str | None]:
        makes, judges = net(1), net(2)
        with contextlib.ExitStack() as stack:
            handles = []
            if folder is not None:
                groups: list[Any] = [[makes, judges]] if together else [makes, judges]
                handles = [
                    stack.enter_context(offload_activations(group, folder, min_bytes=1))
                    for group in groups
                ]
            torch.manual_seed(3)
            for seed in range(2):
                made = makes(noise(seed))
                loss = judges(made.detach()).mean() - judges(noise(seed + 5)).mean()
                loss.backward()
                judges(made).mean().backward()
            for handle in handles:
                assert handle.statistics["offloaded_storages"] > 10
            return gradients(makes, judges)

    assert run(tmp_path) == run(None)


def test_another_thread_is_left_alone(tmp_path: Path) -> None:
    model, other = net(), net(1)
    found: list[Any] = []

    def beside() -> None:
        other(noise()).sum().backward()
        found.append(gradients(other))

    def start(*_: Any) -> None:
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()

    model.blocks[1].register_forward_pre_hook(start)
    model.eval(), other.eval()
    with offload_activations([model, other], tmp_path, min_bytes=1):
        model(noise()).sum().backward()
    expected = net(1).eval()
    expected(noise()).sum().backward()
    assert found == [gradients(expected)]


def test_transforms_of_torch_func_are_left_alone(tmp_path: Path) -> None:
    model = net().eval()
    parameters = dict(model.named_parameters())

    def loss(values: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, values, (x,)).square().mean()

    def run() -> list[str]:
        one = torch.func.grad(loss)(parameters, noise())
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, noise()[:, None])
        return [digest(value) for found in (one, each) for value in found.values()]

    expected = run()
    with offload_activations(model, tmp_path, min_bytes=1) as offload:
        assert run() == expected
        model(noise()).sum().backward()
        assert offload.statistics["offloaded_storages"] > 10


def test_a_copy_and_a_pickle_have_no_hooks(tmp_path: Path) -> None:
    model = net()
    with offload_activations(model, tmp_path, min_bytes=1) as offload:
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        for other in (copy.deepcopy(model), loaded):
            other(noise()).sum().backward()
        assert offload.engine is None  # nobody has called the model


def test_tied_and_meta_and_moved_weights(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = net()
    offload = offload_activations(model, tmp_path, min_bytes=1)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    model.to(torch.bfloat16).eval()
    model(noise().bfloat16()).sum().backward()
    assert offload.statistics["offloaded_storages"] > 10
    offload.close()
    expected = copy.deepcopy(model)
    expected.zero_grad()
    expected(noise().bfloat16()).sum().backward()
    assert gradients(model) == gradients(expected)


# -- The handle -----------------------------------------------------------------------------------


def test_parameters_buffers_and_inputs_never_move(tmp_path: Path) -> None:
    class Saves(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(64, 64))
            self.register_buffer("scale", torch.randn(64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight.t() * self.scale).sum()  # saves all three, and one product

    model = Saves()
    with offload_activations(model, tmp_path, min_bytes=1) as offload:
        for _ in range(2):
            model(torch.randn(64, 64)).backward()
            assert offload.statistics["offloaded_storages"] <= 1


def test_one_handle_a_model(tmp_path: Path) -> None:
    model = net()
    with offload_activations(model, tmp_path):
        for again in (model, torch.nn.Sequential(model), model.blocks):
            with pytest.raises(ConfigurationError, match="offloaded already"):
                offload_activations(again, tmp_path)
    offload_activations(model, tmp_path).close()


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (torch.nn.DataParallel(torch.nn.Linear(2, 2)), "use DistributedDataParallel"),
        (torch.jit.script(torch.nn.Linear(2, 2)), "TorchScript"),
        ([], "there is no model"),
        ("model", "is no torch.nn.Module"),
    ],
    ids=["DataParallel", "TorchScript", "none", "text"],
)
def test_what_cannot_be_served_is_refused(model: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        offload_activations(model, tmp_path)


def test_settings_have_the_names_of_the_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="did you mean min_bytes"):
        offload_activations(net(), tmp_path, min_byte=1)
    with pytest.raises(ConfigurationError, match="memory_budget_bytes is for mode auto"):
        offload_activations(net(), tmp_path, memory_budget_bytes="1GiB")
    with pytest.raises(ConfigurationError, match=r"layers='Blok' names no module"):
        offload_activations(net(), tmp_path, layers=["Blok"])


def test_off_touches_nothing(tmp_path: Path) -> None:
    model = net()
    offload = offload_activations(model, mode="off")
    assert not model._forward_pre_hooks and not model._forward_hooks
    model(noise()).sum().backward()
    assert offload.statistics == {} and offload.summary() == ""
    offload.close()


def test_the_report_says_what_was_found_and_the_summary_what_moved(tmp_path: Path) -> None:
    model = net()
    with offload_activations(model, tmp_path, min_bytes=1) as offload:
        for seed in range(3):
            model(noise(seed)).sum().backward()
        report = offload.report()
    assert "3: blocks.0 to blocks.2" in report and str(tmp_path) in report
    assert offload.summary() in report and "offloaded" in offload.summary()
    assert offload.statistics["offloaded_storages"] > 10  # also afterwards
    offload.close()


def test_a_user_is_told_when_nothing_moves(tmp_path: Path, caplog: Any) -> None:
    with offload_activations(net(), tmp_path) as offload:
        offload._models[0](noise()).sum().backward()
    with offload_activations(net(), tmp_path):
        pass
    said = [record.getMessage() for record in caplog.records]
    assert any("no saved storage has 1 MiB or more; lower min_bytes" in one for one in said)
    assert any("no forward pass with gradients was seen of Net" in one for one in said)


def test_graphs_that_are_alive_at_the_end_still_have_their_bytes(tmp_path: Path) -> None:
    model, expected = net().eval(), net().eval()
    offload = offload_activations(model, mode="host", min_bytes=1)
    loss = model(noise()).sum()
    loss.backward()
    offload.close()
    expected(noise()).sum().backward()
    assert gradients(model) == gradients(expected)
    model.zero_grad()
    model(noise()).sum().backward()
    assert gradients(model) == gradients(expected)


def test_a_program_may_end_without_closing(tmp_path: Path) -> None:
    script = """
        import sys, torch
        from megatron.offload import offload_activations
        linear = torch.nn.Linear(64, 64)
        model = torch.nn.Sequential(linear, torch.nn.GELU(), torch.nn.Linear(64, 64))
        offload_activations(model, sys.argv[1], min_bytes=1, metrics_file=sys.argv[1] + "/m.jsonl")
        for _ in range(2):
            model(torch.randn(64, 64)).sum().backward()
        loss = model(torch.randn(64, 64)).sum()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 3


def test_nothing_grows_with_the_number_of_steps(tmp_path: Path) -> None:
    model = net().eval()
    with offload_activations(model, tmp_path, min_bytes=1) as offload:

        def objects_after(num_steps: int) -> int:
            for seed in range(num_steps):
                model(noise(seed)).sum().backward()
            gc.collect()
            return len(gc.get_objects())

        before = objects_after(10)
        assert objects_after(60) - before < 60
        assert offload.engine is not None and offload.engine.cache.num_records < 5


def test_a_layer_may_be_the_outermost_call(tmp_path: Path) -> None:
    model = net().eval()
    expected = copy.deepcopy(model)
    with offload_activations(model, tmp_path, min_bytes=1, layers=["Block"]):
        model.blocks[0](noise()).sum().backward()
    expected.blocks[0](noise()).sum().backward()
    assert gradients(model) == gradients(expected)
