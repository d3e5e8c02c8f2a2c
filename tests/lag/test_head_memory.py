# SPDX-License-Identifier: Apache-2.0
"""Working memory of the loss, in a profile of steps in which all that layers save leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.offload import OffloadConfig, OffloadEngine, Scope
from megatron.offload.planner.online.step_meter import StepMeter
from megatron.offload.planner.profile.pipeline_schedule import PipelinePosition
from megatron.offload.planner.profile.stage_profile import StageProfile
from tests.support.accelerators import Lag
from tests.support.lag.module import LagModule

MIB = 1 << 20
NUM_LAYERS = 4
LAYER_BYTES = 4 * MIB
SAVED_BYTES = 2 * MIB  # by the loss, for its backward
POSITION = PipelinePosition(1, 0, 1, 0)


class Saves(torch.autograd.Function):
    """Saves so many bytes, and takes some more while it runs, forward and backward.

    Before that `begins` is called.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        saved_bytes: int,
        forward_bytes: int,
        backward_bytes: int,
        begins: Callable[[], object] = lambda: None,
    ) -> torch.Tensor:
        begins()
        ctx.save_for_backward(torch.ones(saved_bytes, dtype=torch.uint8, device="lag"))
        ctx.backward_bytes = backward_bytes
        torch.empty(forward_bytes, dtype=torch.uint8, device="lag")
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (saved,) = ctx.saved_tensors
        assert int(saved[-1]) == 1
        torch.empty(ctx.backward_bytes, dtype=torch.uint8, device="lag")
        return grads[0], None, None, None, None


def run_step(meter: StepMeter, engine: OffloadEngine, forward_bytes: int, more_bytes: int) -> None:
    profiler = meter.profiler
    with meter.step(detailed=True), engine.step():
        with profiler.forward(0, 0), engine.forward(Scope()) as order, engine.saved_tensors_hooks():
            x = torch.ones(8, device="lag", requires_grad=True) * 1
            for number in range(NUM_LAYERS):
                scope = Scope(layer=f"decoder.{number + 1}")
                profiler.begin_layer(scope, [x], recomputes=False)
                with engine.within(scope):
                    x = Saves.apply(x, LAYER_BYTES, 8, 8)  # type: ignore[no-untyped-call]
                profiler.end_layer([x])
            # What layers have saved leaves while the loss runs.
            begins = engine.wait_for_writes
            y = Saves.apply(x, SAVED_BYTES, forward_bytes, more_bytes, begins)  # type: ignore[no-untyped-call]
            loss = y.sum()
        with profiler.backward(0, 0), engine.backward(order):
            loss.backward()


def profile_of(
    accelerator: Lag, lag: LagModule, forward_bytes: int, backward_bytes: int
) -> StageProfile:
    lag.set_bandwidth(64 * MIB, 64 * MIB)
    device = accelerator.open()
    config = OffloadConfig(mode="host", min_bytes=4096, host_budget=64 * MIB)
    engine = OffloadEngine(config, device)
    meter = StepMeter(config, engine, device)
    try:
        for _ in range(2):
            run_step(meter, engine, forward_bytes, backward_bytes)
        return meter.profile(POSITION, recomputes=True, previous=None)
    finally:
        engine.close()


@pytest.mark.parametrize(("forward_mib", "backward_mib"), [(16, 1), (1, 16)])
def test_a_profile_has_the_working_memory_of_the_loss(
    forward_mib: int, backward_mib: int, accelerator: Lag, lag: LagModule
) -> None:
    profile = profile_of(accelerator, lag, forward_mib * MIB, backward_mib * MIB)
    assert abs(profile.head_bytes - 16 * MIB) <= 16 * MIB * 0.02


def test_a_loss_without_any_has_none(accelerator: Lag, lag: LagModule) -> None:
    assert profile_of(accelerator, lag, 8, 8).head_bytes < MIB // 16
