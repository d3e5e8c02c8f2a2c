# SPDX-License-Identifier: Apache-2.0
"""The CPU runtime goes on once, changes nothing where CUDA is, and leaves everything as it was."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import random as core_random
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.offload.integration.megatron import cpu_runtime
from tests.support.vector_calls import ONE_VALUE, VectorCalls

_ABSENT = object()


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    """Each test begins and ends with the runtime off."""
    cpu_runtime.deactivate()
    yield
    cpu_runtime.deactivate()


def symbols() -> dict[str, Any]:
    """What stands at every place that the runtime redirects."""
    found = {}
    for redirection in cpu_runtime._table():
        owner = redirection.resolve_owner()
        key = f"{redirection.owner}.{redirection.name}"
        found[key] = inspect.getattr_static(owner, redirection.name, _ABSENT)
    return found


def test_deactivate_restores_every_symbol() -> None:
    before = symbols()
    assert cpu_runtime.activate()
    during = symbols()
    assert all(during[key] is not before[key] for key in before)
    cpu_runtime.deactivate()
    after = symbols()
    assert all(after[key] is before[key] for key in before)
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_there_is_no_cuda_for_those_who_ask_by_counting_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A build for CUDA without a device, after accelerate has set this for its processes."""
    assert cpu_runtime.activate()
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    assert torch.cuda.device_count() == 1  # for launchers
    assert not torch.cuda.is_available()


def test_every_redirection_says_why() -> None:
    assert all(redirection.reason for redirection in cpu_runtime._table())


def test_activate_twice_is_activate_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert cpu_runtime.activate()
        assert cpu_runtime.activate()
    assert [record.message.split(":")[0] for record in caplog.records] == ["CPU runtime on"]
    cpu_runtime.deactivate()
    assert not cpu_runtime.is_active()


def test_vector_functions_are_first_called_by_one_thread() -> None:
    with VectorCalls() as calls:
        cpu_runtime.activate()
    assert calls.found == [ONE_VALUE]


def test_nothing_is_touched_where_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = symbols()
    assert not cpu_runtime.activate()
    assert not cpu_runtime.is_active()
    assert all(value is before[key] for key, value in symbols().items())


def test_failure_in_the_middle_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    before = symbols()
    whole = list(cpu_runtime._table())
    broken = cpu_runtime.Redirection("no.such.module", "x", None, "a test")
    monkeypatch.setattr(cpu_runtime, "_table", lambda: [*whole, broken])
    with pytest.raises(ModuleNotFoundError):
        cpu_runtime.activate()
    monkeypatch.undo()
    assert not cpu_runtime.is_active()
    assert all(value is before[key] for key, value in symbols().items())


def test_cuda_is_still_not_available() -> None:
    assert cpu_runtime.activate()
    assert not torch.cuda.is_available()


def test_cuda_devices_mean_the_cpu() -> None:
    cpu_runtime.activate()
    tensor = torch.zeros(2, device="cuda")
    assert tensor.device.type == "cpu"
    assert torch.ones(2, device=torch.cuda.current_device()).device.type == "cpu"
    assert torch.empty(2, device=torch.device("cuda", 0)).device.type == "cpu"
    assert tensor.cuda() is tensor
    assert tensor.to("cuda:0").device.type == "cpu"
    assert tensor.to(torch.float64).dtype == torch.float64
    assert tensor.to(tensor.double()).dtype == torch.float64
    assert tensor.type() == "torch.cuda.FloatTensor"
    assert torch.zeros(2, device="meta").device.type == "meta"


class _MakesATensorInBackward(torch.autograd.Function):
    """As what is recomputed does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * torch.full((2,), 3.0, device="cuda")


def test_cuda_devices_mean_the_cpu_in_backward() -> None:
    cpu_runtime.activate()
    x = torch.zeros(2, requires_grad=True)

    def output() -> torch.Tensor:
        result: torch.Tensor = _MakesATensorInBackward.apply(x)
        return result.sum()

    output().backward()
    torch.autograd.backward(output())
    assert x.grad is not None and x.grad.tolist() == [6, 6]
    assert torch.autograd.grad(output(), x)[0].tolist() == [3, 3]
    cpu_runtime.deactivate()
    with pytest.raises((AssertionError, RuntimeError)):
        output().backward()


def test_random_tracker_forks_the_cpu_generator() -> None:
    cpu_runtime.activate()
    tracker = core_random.CudaRNGStatesTracker()
    torch.manual_seed(5)
    tracker.add("test", 7)
    outside = torch.rand(3)
    with tracker.fork("test"):
        first = torch.rand(3)
    with tracker.fork("test"):
        second = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(outside, torch.rand(3))
    assert not torch.equal(first, second)
    assert torch.equal(first, torch.rand(3, generator=torch.Generator().manual_seed(7)))


def test_norms_are_marked_for_sequence_parallelism() -> None:
    cpu_runtime.activate()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
    )
    norm = WrappedTorchNorm(config, 8)
    assert isinstance(norm, torch.nn.LayerNorm)
    assert all(parameter.sequence_parallel for parameter in norm.parameters())
    assert config.sequence_parallel
