# SPDX-License-Identifier: Apache-2.0
"""Gradients in buckets that are reduced on a stream of their own, and leave, with late streams.

What Megatron does there with NCCL is played; its optimizer is torch's.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.offload import LayerMajor, offload_optimizer
from megatron.offload.integration.megatron.bucket_gradients import BucketGradients
from megatron.offload.integration.torch.parameter_offload import ParameterOffload
from megatron.offload.layer_major.units import units_of
from megatron.offload.parameters.config import ParametersConfig
from megatron.offload.parameters.parameter_places import Part
from megatron.offload.parameters.window import ParameterWindow
from tests.lag.test_parameters_on_an_accelerator import (
    DELAYS,
    DEVICE,
    LAYERS,
    assert_equal,
    micro_batches,
    stack,
)
from tests.support.lag.module import LagModule

STEPS = len(DELAYS)


pytestmark = pytest.mark.usefixtures("accelerator")


class Group:
    """A bucket of gradients that are reduced together: here divided by two, late."""

    def __init__(self, params: list[torch.nn.Parameter], lag: LagModule, stream: Any) -> None:
        self._lag, self._stream = lag, stream
        self.params = set(params)
        whole = torch.zeros(sum(param.numel() for param in params), device=DEVICE)
        start = 0
        for param in params:
            param.main_grad = whole[start : start + param.numel()].view(param.shape)  # type: ignore
            start += param.numel()
        bucket = SimpleNamespace(params_list=params, grad_data=whole, offset=0)
        self.buckets = [bucket]
        self.cached_grad_buffer_shard_list: list[Any] = [None]
        self.grad_reduce_handle: Any = None

    def start_grad_sync(self) -> None:
        (bucket,) = self.buckets
        self._stream.wait_stream(self._lag.current_stream(DEVICE))
        with self._lag.stream(self._stream):
            bucket.grad_data.mul_(0.5)
            bucket.grad_data.record_stream(self._stream)
        self.grad_reduce_handle = self._stream.record_event()

    def finish_grad_sync(self) -> None:
        if self.grad_reduce_handle is None:
            self.start_grad_sync()
        self._lag.current_stream(DEVICE).wait_event(self.grad_reduce_handle)
        self.grad_reduce_handle = None


class FP32Optimizer:
    """As Megatron's of this name, as far as it is asked."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        self.optimizer = torch.optim.AdamW(params, lr=1e-2)
        self.config = SimpleNamespace()


class Chunk:
    """A model whose gradients are added up in buckets of a layer, and one for the rest."""

    def __init__(self, lag: LagModule) -> None:
        self.model = stack().to(DEVICE)
        stream = torch.Stream(DEVICE)
        parts = [*self.model.layers, self.model.first]
        self.bucket_groups = [Group(list(part.parameters()), lag, stream) for part in parts]
        self.buffers = [
            SimpleNamespace(
                numel=group.buckets[0].grad_data.numel(),
                grad_data=group.buckets[0].grad_data,
                buckets=group.buckets,
            )
            for group in self.bucket_groups
        ]
        self.expert_parallel_buffers: list[Any] = []
        self.expert_parallel_bucket_groups: list[Any] = []
        self.optimizer = FP32Optimizer(list(self.model.parameters()))
        for param in self.model.parameters():
            param.register_post_accumulate_grad_hook(add_to_bucket)

    def zero(self) -> None:
        for buffer in self.buffers:
            buffer.grad_data.zero_()

    def step(self) -> list[torch.Tensor]:
        """What is left of a step when backward is over; the norm of each gradient."""
        for group in self.bucket_groups:
            group.finish_grad_sync()
        params = list(self.model.parameters())
        for param in params:
            param.grad = param.main_grad  # type: ignore[attr-defined]
        norms = [torch.linalg.vector_norm(param.grad) for param in params]  # type: ignore
        for param in params:
            param.grad.mul_(0.7)  # type: ignore[union-attr]
        self.optimizer.optimizer.step()
        self.optimizer.optimizer.zero_grad()
        return norms


def add_to_bucket(param: torch.Tensor) -> None:
    param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
    param.grad = None


def train(lag: LagModule, directory: Path | None, **settings: Any) -> list[torch.Tensor]:
    """Losses, norms and weights, in host memory."""
    chunk, found = Chunk(lag), []
    torch.manual_seed(7)
    with contextlib.ExitStack() as handles:
        if directory is not None:
            config = ParametersConfig(
                mode="ssd", directories=(directory,), gradients="on", **settings
            )
            no_parts: dict[torch.Tensor, Part] = {}

            def gradients(window: ParameterWindow) -> BucketGradients:
                return BucketGradients([chunk], [chunk.optimizer], no_parts, window)

            offload = handles.enter_context(
                ParameterOffload(
                    units_of(list(chunk.model.layers), None), config, gradients=gradients
                )
            )
            sizes = {"bucket_bytes": 1 << 15, "window_bytes": 1 << 17}
            handles.enter_context(offload_optimizer(chunk.optimizer.optimizer, directory, **sizes))
        layer_major = LayerMajor(chunk.model, LAYERS)
        for number in range(STEPS):
            lag.set_delays(*DELAYS[number], seed=number)
            chunk.zero()
            found += layer_major.step(micro_batches(number), chunk.model)
            found += chunk.step()
        if directory is not None:
            assert offload.window is not None
            each = offload.statistics["parameter_bytes"] / LAYERS
            assert offload.statistics["gradient_peak_bytes"] <= 4 * each
            freed = [group.buckets[0].grad_data for group in chunk.bucket_groups[:-1]]
            assert {one.untyped_storage().nbytes() for one in freed} == {0}
        found += [one.cpu().clone() for one in chunk.model.state_dict().values()]
    # Once more in one buffer, which is no unit's.
    lag.set_delays(*DELAYS[0], seed=9)
    chunk.zero()
    found += LayerMajor(chunk.model, LAYERS).step(micro_batches(STEPS), chunk.model)
    found += chunk.step()
    lag.reset()
    return [one.detach().cpu() for one in found]


@pytest.mark.slow
def test_all_bits_are_the_same(lag: LagModule, tmp_path: Path) -> None:
    assert_equal(train(lag, tmp_path), train(lag, None))
