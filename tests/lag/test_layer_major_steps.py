# SPDX-License-Identifier: Apache-2.0
"""Layer-major steps keep their bits on streams that lag, with activations on their way.

Forward passes run in threads of their own: on the caller's stream and device, also where these are
none that a new thread stands on.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import LayerMajor, offload_activations
from megatron.offload.activations.capture.tensor_swapper import SwappedTensor, TensorSwapper
from megatron.offload.device.platform import register_platform
from megatron.offload.sizes import MIB
from megatron.offload.tiers import ssd as ssd_tier
from megatron.offload.tiers.staging import StagingPool
from tests.support.lag.module import LagModule
from tests.support.lag.platform import LagPlatform
from tests.support.layer_major import one_by_one
from tests.support.training import Stack

DEVICE = "lag:1"  # new threads stand on another one
HIDDEN, LAYERS, MICRO_BATCHES, STEPS = 32, 4, 3, 3
MODES: dict[str, dict[str, Any]] = {
    "ssd": {"mode": "ssd", "pinned_bytes": 0, "write_bytes_per_s": 20e6},
    "host": {"mode": "host", "host_budget": 64 * MIB},
}
DELAYS = ((60, 300), (600, 10), (300, 300))  # of a kernel and of a copy at most, in microseconds
LATE_S = 0.02


def stack() -> Stack:
    return Stack(HIDDEN, LAYERS, MICRO_BATCHES).to(DEVICE)


@pytest.fixture
def accelerator(lag: LagModule, monkeypatch: pytest.MonkeyPatch) -> Iterator[LagModule]:
    register_platform("lag", LagPlatform(lag))
    small = functools.partial(StagingPool, piece_bytes=4 << 10)
    monkeypatch.setattr(ssd_tier, "StagingPool", small)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lag
    torch.set_num_threads(before)


def micro_batches(step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(2, 16, HIDDEN, generator=draw).to(DEVICE) for _ in range(MICRO_BATCHES)]


def results(lag: LagModule, model: torch.nn.Module, losses: list[torch.Tensor]) -> Any:
    """In host memory, when all streams are done."""
    gradients = [p.grad for p in model.parameters()]
    found = [one.cpu() for one in [*losses, *gradients] if one is not None]
    lag.synchronize(DEVICE)
    model.zero_grad()
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.rare)])
def test_all_bits_are_the_same(
    accelerator: LagModule, mode: str, seed: int, tmp_path: Path
) -> None:
    lag, model = accelerator, stack()
    side = lag.Stream(DEVICE)
    inputs = [micro_batches(number) for number in range(STEPS)]
    with lag.device(DEVICE), lag.stream(side):
        lag.synchronize(DEVICE)
        torch.manual_seed(7)
        expected = [results(lag, model, one_by_one(model, one)) for one in inputs]
        state = torch.get_rng_state()
        torch.manual_seed(7)
        with offload_activations(model, tmp_path, min_bytes=1, **MODES[mode]) as offload:
            layer_major, waits = LayerMajor(model, 2, offload=offload), False

            def wait(*_: object) -> None:
                assert not waits or (offload.engine and offload.engine.wait_for_writes(30))

            hook = model.layers[-1].register_forward_pre_hook(wait)
            for number, (batches, theirs) in enumerate(zip(inputs, expected, strict=True)):
                lag.set_delays(*DELAYS[number], seed=seed)
                lag.late(side, LATE_S)
                waits = number == 1  # else what is written late is forwarded, all of it perhaps
                mine = results(lag, model, layer_major.step(batches, model))
                assert len(mine) == len(theirs)
                for place, (one, other) in enumerate(zip(mine, theirs, strict=True)):
                    assert torch.equal(one, other), (number, place)
                assert offload.statistics["offloaded_bytes"] > 0
                back = "read_bytes" if mode == "ssd" else "host_read_bytes"
                assert offload.statistics[back] > 0 or not waits
            layer_major.close()
            hook.remove()
        assert torch.equal(torch.get_rng_state(), state)
        lag.reset()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.rare) for n in (2, 3, 4))])
def test_what_waits_between_units_comes_back_before_it_is_used(
    accelerator: LagModule,
    mode: str,
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Read back while streams lag; the memory that it leaves is used again meanwhile."""
    monkeypatch.setattr(sys.modules[__name__], "MICRO_BATCHES", 5)
    lag, model = accelerator, stack()
    side, inputs = lag.Stream(DEVICE), [micro_batches(number) for number in range(STEPS)]
    filled: list[bool] = []  # whether each hidden state had left
    taken: list[bool] = []  # and each gradient
    fill, take = TensorSwapper.fill, TensorSwapper.take

    def noted_take(aside: TensorSwapper, waiting: Any) -> Any:
        taken.append(waiting.saved.block is not None)
        return take(aside, waiting)

    def noted_fill(aside: TensorSwapper, emptied: SwappedTensor) -> Any:
        filled.append(emptied.memory is None)
        return fill(aside, emptied)

    monkeypatch.setattr(TensorSwapper, "fill", noted_fill)
    monkeypatch.setattr(TensorSwapper, "take", noted_take)
    with lag.device(DEVICE), lag.stream(side):
        lag.synchronize(DEVICE)
        torch.manual_seed(7)
        expected = [results(lag, model, one_by_one(model, one)) for one in inputs]
        torch.manual_seed(7)
        with offload_activations(
            model, tmp_path, min_bytes=1, boundary=mode, **MODES[mode]
        ) as offload:
            layer_major = LayerMajor(model, None, offload=offload)

            def wait(*_: object) -> None:
                assert not waits or (offload.engine and offload.engine.wait_for_writes(30))

            for layer in model.layers:
                layer.register_forward_hook(wait)
            for number, (batches, theirs) in enumerate(zip(inputs, expected, strict=True)):
                lag.set_delays(*DELAYS[number], seed=seed)
                lag.late(side, LATE_S)
                waits = number == 1  # else what is written late is still there, all of it perhaps
                mine = results(lag, model, layer_major.step(batches, model))
                for place, (one, other) in enumerate(zip(mine, theirs, strict=True)):
                    assert torch.equal(one, other), (number, place)
            layer_major.close()
        lag.reset()
    assert any(filled) and any(taken), "none had left"


@pytest.mark.slow
def test_auto_plans_units_within_a_budget_and_no_bit_changes(
    accelerator: LagModule, tmp_path: Path
) -> None:
    """A budget that plans have to meet: a device's bytes are counted, a CPU's are what malloc has.

    That steps keep to what is predicted is in test_auto.py.
    """
    lag, steps = accelerator, 6

    def trained(**settings: Any) -> tuple[list[Any], list[dict[str, float]]]:
        model, found = stack(), []
        torch.manual_seed(7)
        with offload_activations(
            model, tmp_path, mode="auto", min_bytes=1, replay="off", **settings
        ) as offload:
            layer_major, statistics = LayerMajor(model, 2, offload=offload), []
            for number in range(steps):
                losses = layer_major.step(micro_batches(number), model)
                found.append(results(lag, model, losses))
                statistics.append(dict(offload.statistics))
            layer_major.close()
        return found, statistics

    model, expected = stack(), []
    torch.manual_seed(7)
    for number in range(steps):
        expected.append(results(lag, model, one_by_one(model, micro_batches(number))))
    everything, statistics = trained(memory_budget_bytes="1GiB")
    budget = int(0.8 * statistics[-1]["predicted_peak_bytes"])
    assert statistics[-1]["plans"] and not statistics[-1]["offloaded_bytes"], "all of it stays"
    within, statistics = trained(memory_budget_bytes=budget)
    assert 0 < statistics[-1]["predicted_peak_bytes"] <= budget
    assert statistics[-1]["offloaded_bytes"] + statistics[-1]["recomputed_layers"] > 0
    for found in (everything, within):
        for step, theirs in zip(found, expected, strict=True):
            assert len(step) == len(theirs) and all(map(torch.equal, step, theirs))


def test_forward_passes_run_on_the_caller_s_stream_and_device(accelerator: LagModule) -> None:
    lag, model, seen = accelerator, stack(), []
    for layer in model.layers:
        layer.register_forward_hook(
            lambda *_: seen.append((lag.current_stream(DEVICE), lag.current_device()))
        )
    side = lag.Stream(DEVICE)
    layer_major = LayerMajor(model, 2)
    for current in (0, 1):
        with lag.stream(side), lag.device(current):
            lag.synchronize(DEVICE)
            layer_major.step(micro_batches(0), model)
            lag.synchronize(DEVICE)
        assert seen == [(side, current)] * LAYERS * MICRO_BATCHES
        seen.clear()


def test_the_generator_of_the_model_s_device_counts(
    accelerator: LagModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another device is the current one."""
    asked: list[Any] = []
    own = LagModule.get_rng_state
    monkeypatch.setattr(
        LagModule,
        "get_rng_state",
        lambda self, device=None: (asked.append(device), own(self, device))[1],
    )
    model = stack()
    with accelerator.device(0):
        LayerMajor(model, 2).step(micro_batches(0), model)
        accelerator.synchronize(DEVICE)
    assert set(asked) == {torch.device(DEVICE)}
