# SPDX-License-Identifier: Apache-2.0
"""Optimizer states on tiers, of parameters on an accelerator whose streams are late."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import ConfigurationError
from megatron.offload.integration.torch.optimizer import OptimizerOffload, offload_optimizer
from megatron.offload.moving.storage import Where
from megatron.offload.sizes import MIB
from megatron.offload.tiers.host import HostTier
from tests.support.accelerators import assert_equal
from tests.support.lag.module import LagModule
from tests.support.waiting import wait_until

_WIDTH, _NUM_LAYERS, _NUM_STEPS = 64, 6, 5
_BUCKET = 2 * 4 * _WIDTH * (_WIDTH + 1)  # bytes of Adam's states of a layer

Make = Callable[[Any], torch.optim.Optimizer]

pytestmark = pytest.mark.usefixtures("accelerator", "lag")


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


@pytest.fixture
def offload(tmp_path: Path) -> Iterator[Callable[..., OptimizerOffload]]:
    handles: list[OptimizerOffload] = []

    def build(optimizer: torch.optim.Optimizer, mode: str, **settings: Any) -> OptimizerOffload:
        if mode != "ssd":
            settings = {"host_budget": MIB, **settings}
        directory = None if mode == "host" else tmp_path
        settings = {"bucket_bytes": _BUCKET, "window_bytes": 2 * _BUCKET, **settings}
        handles.append(offload_optimizer(optimizer, directory, mode=mode, **settings))
        return handles[-1]

    yield build
    for handle in handles:
        handle.close()


def model_on(device: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_NUM_LAYERS)]
    return torch.nn.Sequential(*layers).to(device, dtype)


def backward(model: torch.nn.Module) -> None:
    model(torch.ones(1, _WIDTH).to("lag")).sum().backward()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Losses, gradient norms, weights and states, in host memory."""
    first = next(model.parameters())
    torch.manual_seed(4)
    inputs = torch.randn(_NUM_STEPS, 8, _WIDTH).to(first.device, first.dtype)
    results = []
    for x in inputs:
        loss = model(x).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        results += [loss.detach(), norm]
    results += [parameter.detach() for parameter in model.parameters()]
    for state in optimizer.state_dict()["state"].values():
        results += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [one.cpu().clone() for one in results]


SETTINGS = [
    ("ssd", {}),
    ("ssd", {"window_bytes": 0}),
    ("host", {}),
    ("tiered", {"host_budget": 2 * _BUCKET}),
]


@pytest.mark.parametrize(("mode", "settings"), SETTINGS)
def test_results_are_equal(
    lag: LagModule, offload: Any, mode: str, settings: dict[str, Any]
) -> None:
    model = model_on("lag")
    expected = train(model, adamw(model.parameters()))
    model = model_on("lag")
    optimizer = adamw(model.parameters())
    offload(optimizer, mode, **settings)
    lag.set_delays(200, 500)
    assert_equal(train(model, optimizer), expected)


@pytest.mark.parametrize("mode", ["ssd", "host"])
def test_a_step_on_the_host_has_the_bits_of_a_training_on_the_cpu(
    lag: LagModule, offload: Any, mode: str
) -> None:
    model = model_on("cpu")
    expected = train(model, fused(model.parameters()))
    model = model_on("lag")
    optimizer = adamw(model.parameters())  # which leaves the kernel open
    offload(optimizer, mode, step_on="cpu")
    lag.set_delays(200, 500)
    assert_equal(train(model, optimizer), expected)
    assert optimizer.param_groups[0]["fused"] is None


KINDS: list[Make] = [
    lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False, amsgrad=True),
    lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-2), fused=True, maximize=True),
    lambda params: torch.optim.Adam(params, lr=1e-2, fused=True, weight_decay=0.1),
    lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, foreach=False),
    lambda params: torch.optim.NAdam(params, lr=1e-2, foreach=False),
]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_step_on_the_host_is_the_optimizers_own(
    offload: Any, make: Make, dtype: torch.dtype
) -> None:
    model = model_on("lag", dtype)
    expected = train(model, make(model.parameters()))
    model = model_on("lag", dtype)
    optimizer = make(model.parameters())
    offload(optimizer, "ssd", step_on="cpu")
    assert_equal(train(model, optimizer), expected)


def test_a_scaler_skips_steps_on_the_host(offload: Any) -> None:
    def run(step_on: str | None) -> list[torch.Tensor]:
        model = model_on("lag")
        optimizer = fused(model.parameters())
        if step_on is not None:
            offload(optimizer, "ssd", step_on=step_on)
        found = torch.zeros((), device="lag")
        optimizer.grad_scale = torch.full((), 4.0, device="lag")
        optimizer.found_inf = found  # as `GradScaler.step` leaves it to a fused optimizer
        results = []
        for number in range(4):
            found.fill_(float(number == 2))
            results += train(model, optimizer)
        return results

    expected = run(None)
    assert_equal(run("cpu"), expected)
    assert_equal(run("device"), expected)


def test_gradients_in_any_order_of_dimensions_come_to_the_host(offload: Any) -> None:
    def run(step_on: str | None) -> list[torch.Tensor]:
        torch.manual_seed(3)
        kernels = torch.randn(8, 4, 3, 3).to("lag").to(memory_format=torch.channels_last)
        param, other = torch.nn.Parameter(kernels), torch.nn.Parameter(torch.ones(4, 6).to("lag"))
        unused = torch.nn.Parameter(torch.ones(5).to("lag"))
        optimizer = torch.optim.AdamW([param, other, unused], lr=1e-2, foreach=False)
        if step_on is not None:
            offload(optimizer, "ssd", step_on=step_on)
        for _ in range(3):
            param.grad = torch.rand(8, 3, 3, 4).to("lag").permute(0, 3, 1, 2)
            other.grad = torch.rand(4, 1).to("lag").expand(4, 6)
            optimizer.step()
        assert unused not in optimizer.state
        return [param.detach().cpu(), other.detach().cpu(), unused.detach().cpu()]

    assert_equal(run("cpu"), run(None))


def test_states_that_were_made_on_the_device_move_to_the_host(offload: Any) -> None:
    model = model_on("lag")
    optimizer = fused(model.parameters())
    train(model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(model, optimizer)
    for how in ("ours from the beginning", "loaded later"):
        model = model_on("lag")
        optimizer = fused(model.parameters())
        if how == "loaded later":
            offload(optimizer, "ssd", step_on="cpu")
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        if how != "loaded later":
            offload(optimizer, "ssd", step_on="cpu")
        assert_equal(train(model, optimizer), expected)


def bytes_of_a_step(lag: LagModule, optimizer: torch.optim.Optimizer, states: Any) -> int:
    """The most that the optimizer's step takes on the device, above what was there before."""
    states.wait_for_writes()
    lag.synchronize()
    before = lag.memory_allocated()
    lag.reset_peak_memory_stats()
    optimizer.step()
    states.wait_for_writes()
    lag.synchronize()
    return lag.max_memory_allocated() - before


def test_a_device_holds_three_buckets_in_a_step_and_none_between(
    lag: LagModule, offload: Any
) -> None:
    model = model_on("lag")
    optimizer = fused(model.parameters())
    states = offload(optimizer, "ssd").states
    train(model, optimizer)
    states.wait_for_writes()
    lag.synchronize()
    between = lag.memory_allocated()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    most = 3 * max(bucket.num_bytes for bucket in states.buckets)
    assert bytes_of_a_step(lag, optimizer, states) <= most
    assert states.memory_bytes == 0
    optimizer.zero_grad()
    assert lag.memory_allocated() <= between


def test_a_device_holds_a_large_bucket_and_two_small_ones(lag: LagModule, offload: Any) -> None:
    """As of an output layer, which is a bucket by itself, behind layers."""
    small = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_NUM_LAYERS)]
    model = torch.nn.Sequential(*small, torch.nn.Linear(_WIDTH, 8 * _WIDTH)).to("lag")
    optimizer = fused(model.parameters())
    states = offload(optimizer, "ssd").states
    train(model, optimizer)
    sizes = sorted(bucket.num_bytes for bucket in states.buckets)
    assert sizes[-1] >= 6 * sizes[-2]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(2):  # from its end on, and back
        assert bytes_of_a_step(lag, optimizer, states) <= sum(sizes[-3:])


def test_what_the_window_asks_for_is_in_host_memory(offload: Any) -> None:
    model = model_on("lag")
    optimizer = fused(model.parameters())
    states = offload(optimizer, "ssd", window_bytes=MIB).states
    train(model, optimizer)
    host, ssd = states.tiers
    assert isinstance(host, HostTier)
    wait_until(lambda: host.used_bytes == states.num_bytes, "not all of it is there")
    assert ssd.used_bytes == 0
    model = model_on("lag")
    optimizer = fused(model.parameters())
    assert len(offload(optimizer, "ssd", step_on="cpu").states.tiers) == 1


def test_reads_begin_in_backward(lag: LagModule, offload: Any) -> None:
    model = model_on("lag")
    optimizer = fused(model.parameters())
    states = offload(optimizer, "ssd").states
    backward(model)
    optimizer.step()
    states.wait_for_writes()
    assert all(bucket.where is Where.ON_TIER for bucket in states.buckets)
    backward(model)
    began = [bucket for bucket in states.buckets if bucket.where is Where.READING]
    assert len(began) == 3
    optimizer.step()
    states.wait_for_writes()
    assert all(bucket.where is Where.ON_TIER for bucket in states.buckets)


def test_writes_run_into_the_next_forward(lag: LagModule, offload: Any) -> None:
    model = model_on("lag")
    optimizer = fused(model.parameters())
    states = offload(optimizer, "host").states
    backward(model)
    lag.set_bandwidth(to_host=4e5)  # a bucket takes a twelfth of a second
    optimizer.step()
    assert any(bucket.where is Where.WRITING for bucket in states.buckets)
    away = lambda: all(bucket.where is Where.ON_TIER for bucket in states.buckets)  # noqa: E731
    wait_until(away, "the states to leave")


def test_what_has_no_step_on_the_host_is_refused(tmp_path: Path) -> None:
    class FusedAdam(torch.optim.Adam):
        pass

    for optimizer, why in (
        (FusedAdam(model_on("lag").parameters()), "FusedAdam has no CPU kernel"),
        (torch.optim.Adam(model_on("lag").parameters(), capturable=True), "CUDA graphs"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            offload_optimizer(optimizer, tmp_path, step_on="cpu")
        with offload_optimizer(optimizer, tmp_path):
            pass
