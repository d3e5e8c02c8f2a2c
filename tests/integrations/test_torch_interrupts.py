# SPDX-License-Identifier: Apache-2.0
"""Forward passes in plain PyTorch that something else than an Exception ends, or another thread."""

from __future__ import annotations

import contextlib
import gc
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import offload_activations
from megatron.offload.integration.torch.module_hooks import ModuleHooks
from megatron.offload.integration.torch.offload import ActivationOffload
from tests.support.loops import HIDDEN, Net, gradients, net, noise

END_S = 60.0  # of waiting for a thread that has nothing to wait for


@contextlib.contextmanager
def before_the_second_block(model: Net, call: Callable[[], None]) -> Iterator[None]:
    handle = model.blocks[1].register_forward_pre_hook(lambda *_: call())
    try:
        yield
    finally:
        handle.remove()


def interrupt(model: Net) -> None:
    """Calls it, and presses Ctrl-C in the middle."""

    def press() -> None:
        raise KeyboardInterrupt

    with before_the_second_block(model, press):
        try:
            model(noise())
        except KeyboardInterrupt:
            return
    raise AssertionError("it went on")


def compile_again(model: Net) -> None:
    """What `Module.compile` does, with a compiler that changes nothing."""
    model._compiled_call_impl = model._call_impl


def in_thread(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def end_of(thread: threading.Thread) -> None:
    thread.join(END_S)
    assert not thread.is_alive()


def assert_offloads(model: Net, offload: ActivationOffload) -> None:
    """A step moves what it saves, and its gradients are right."""
    expected = net().eval()
    expected(noise(1)).sum().backward()
    model.zero_grad()
    model(noise(1)).sum().backward()
    assert gradients(model) == gradients(expected)
    assert offload.statistics["offloaded_storages"] > 10


class Counts(torch.autograd.graph.saved_tensors_hooks):
    """Somebody else's hooks."""

    def __init__(self) -> None:
        self.count = 0
        super().__init__(self._seen, lambda kept: kept)

    def _seen(self, tensor: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return tensor.detach()


def saves_one() -> None:
    torch.ones(HIDDEN, HIDDEN, requires_grad=True).exp()


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled since"])
def test_after_an_interrupt_everything_else_in_the_thread_works_at_once(
    compiled: bool, tmp_path: Path
) -> None:
    model = net().eval()
    with offload_activations(model, tmp_path, min_bytes=1) as offload:
        if compiled:
            compile_again(model)
            model(noise())
        interrupt(model)
        assert torch.func.grad(lambda x: x.exp().sum())(noise()) is not None  # takes no hooks
        gc.collect()
        assert offload.engine is not None and offload.engine.wait_for_writes(10)
        assert [one.used_bytes for one in offload.engine.tiers.values()] == [0]
        other = net().eval()
        with offload_activations(other, tmp_path, min_bytes=1) as offload_of_other:
            assert_offloads(other, offload_of_other)
        assert_offloads(model, offload)


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled since"])
def test_hooks_of_others_around_the_pass_after_an_interrupt_stay(
    compiled: bool, tmp_path: Path
) -> None:
    model = net().eval()
    with offload_activations(model, tmp_path, min_bytes=1) as offload:
        if compiled:
            compile_again(model)
        interrupt(model)
        with (hooks := Counts()):
            model(noise())
            before = hooks.count
            saves_one()
            assert hooks.count == before + 1
        torch.func.grad(lambda x: x.exp().sum())(noise())
        assert_offloads(model, offload)


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled since"])
def test_a_thread_that_ends_in_its_forward_pass_leaves_the_model_to_others(
    compiled: bool, tmp_path: Path
) -> None:
    model = net().eval()

    def run() -> None:
        def leave() -> None:
            raise SystemExit

        with before_the_second_block(model, leave), contextlib.suppress(SystemExit):
            model(noise())

    with offload_activations(model, tmp_path, min_bytes=1) as offload:
        if compiled:
            compile_again(model)
        end_of(in_thread(run))
        assert_offloads(model, offload)


def test_a_handle_may_be_closed_while_another_thread_is_in_a_forward_pass(tmp_path: Path) -> None:
    model = net().eval()
    reached, go_on = threading.Event(), threading.Event()
    found: list[Any] = []

    def wait() -> None:
        reached.set()
        assert go_on.wait(END_S)

    def run() -> None:
        model(noise())
        saves_one()
        found.append(torch.func.grad(lambda x: x.exp().sum())(noise()))  # takes no hooks

    offload = offload_activations(model, tmp_path, min_bytes=1)
    with before_the_second_block(model, wait), (hooks := Counts()):
        thread = in_thread(run)
        assert reached.wait(END_S)
        offload.close()
        go_on.set()
        end_of(thread)
        saves_one()
        assert hooks.count == 1  # those of this thread are where they were
    assert found
    with offload_activations(model, tmp_path, min_bytes=1) as offload:
        assert_offloads(model, offload)


def test_a_handle_whose_last_step_does_not_end_gives_everything_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net().eval()
    offload = offload_activations(model, tmp_path, min_bytes=1)
    model(noise()).sum().backward()

    def fail(**_: Any) -> None:
        raise OSError("the last step")

    monkeypatch.setattr(offload._passes, "close", fail)
    with pytest.raises(OSError, match="the last step"):
        offload.close()
    assert offload.engine is None and not list(tmp_path.iterdir())


def test_a_log_of_steps_goes_on_after_an_interrupt(tmp_path: Path) -> None:
    model, file = net().eval(), tmp_path / "steps.jsonl"
    with offload_activations(model, mode="off", metrics_file=file):
        interrupt(model)
        for seed in range(2):
            model(noise(seed)).sum().backward()
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 3]


def test_an_exception_is_told_of_once() -> None:
    told: list[Any] = []

    class Fails(torch.nn.Module):
        def forward(self) -> None:
            raise ValueError("stop")

    hooks = ModuleHooks()
    model = Fails()
    hooks.add(model, lambda *_: None, lambda *got: told.append(got), outside_of_graphs=True)
    with pytest.raises(ValueError, match="stop"):
        model()
    assert told == [(model, None)]


def test_a_model_with_a_handle_does_not_pass_for_compiled(tmp_path: Path, caplog: Any) -> None:
    model = net()
    with offload_activations(model, tmp_path, min_bytes=1):
        model(noise()).sum().backward()
    assert "is compiled as a whole" not in caplog.text


@pytest.mark.parametrize(
    ("compiled", "is_whole"),
    [("blocks", False), ("the model", True), ("a wrapper's model", True)],
)
def test_a_model_that_is_compiled_as_a_whole_is_told_of(
    compiled: str, is_whole: bool, tmp_path: Path, caplog: Any
) -> None:
    """Not so where its layers are, also where they are its children, as those of a Sequential."""
    model = torch.nn.Sequential(*net().blocks)
    if compiled == "a wrapper's model":
        model = torch.nn.Sequential(model)
    for one in {"blocks": [*model], "the model": [model]}.get(compiled, [model[0]]):
        one.compile(backend="eager")
    with offload_activations(model, tmp_path, min_bytes=1):
        model(noise()).sum().backward()
    assert ("is compiled as a whole" in caplog.text) == is_whole


def test_a_model_gets_its_call_back(tmp_path: Path) -> None:
    model = net()
    with offload_activations(model, tmp_path, metrics_file=tmp_path / "steps.jsonl"):
        assert model._compiled_call_impl is not None
        compile_again(model)
        model(noise())
    assert model._compiled_call_impl == model._call_impl
    model = net()
    with offload_activations(model, tmp_path, metrics_file=tmp_path / "steps.jsonl"):
        pass
    assert model._compiled_call_impl is None
