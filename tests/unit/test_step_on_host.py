# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps on the host: main weights that live there, memory of the twins.

On a device whose memory is host memory and whose copies are done at once; that they are waited for
is shown on the test accelerator.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron.offload.device.cpu import CpuDevice
from megatron.offload.errors import ConfigurationError
from megatron.offload.integration.torch import optimizer as front_door
from megatron.offload.integration.torch.optimizer import OptimizerOffload
from megatron.offload.states.config import StatesConfig
from megatron.offload.states.step_on_host import StepOnHost


class NoHostDevice(CpuDevice):
    """Says that its memory is its own."""

    is_host = False

    def __init__(self) -> None:
        super().__init__()
        self.copied_bytes = 0

    def copy_to_host(
        self, source: torch.UntypedStorage, address: int, after: None, part: slice = slice(None)
    ) -> None:
        """Counts."""
        start, stop, _ = part.indices(source.nbytes())
        self.copied_bytes += stop - start
        super().copy_to_host(source, address, after, part)


def test_main_weights_live_on_the_host_and_only_gradients_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = NoHostDevice()
    monkeypatch.setattr(front_door, "open_device", lambda *_: device)

    def run(config: StatesConfig) -> list[torch.Tensor]:
        torch.manual_seed(3)
        weights = [torch.randn(40, 30, dtype=torch.bfloat16) for _ in range(5)]
        mains = [torch.nn.Parameter(weight.float()) for weight in weights]
        filled: list[torch.Tensor] = []

        def fill(params: Sequence[torch.Tensor]) -> None:
            for weight, main in zip(weights, mains, strict=True):
                if any(one is main for one in params):
                    weight.copy_(main.data)
                    filled.append(weight)

        optimizer = torch.optim.AdamW(mains, lr=1e-2, fused=True)
        with OptimizerOffload(
            optimizer, config, moves_param=lambda param: True, updated=fill
        ) as offload:
            for _ in range(3):
                for main in mains:
                    main.grad = torch.rand_like(main)
                optimizer.step()
                if offload.states is None:
                    fill(mains)
                else:
                    assert all(main.isnan().all() for main in mains)
            assert len(filled) == 3 * len(weights)
        states = [value for main in mains for value in optimizer.state[main].values()]
        return [*weights, *(main.detach() for main in mains), *states]

    expected = run(StatesConfig())
    config = StatesConfig(
        mode="ssd", directories=(tmp_path,), step_on="cpu", bucket_bytes=1, window_bytes=0
    )
    ours = run(config)
    for mine, other in zip(ours, expected, strict=True):
        assert torch.equal(mine, other)
    assert device.copied_bytes == 3 * 5 * 40 * 30 * 4


def test_memory_of_the_twins_grows_with_the_slices_and_is_given_back() -> None:
    params = [torch.nn.Parameter(torch.ones(size)) for size in (100, 1000, 50_000)]
    for param in params:
        param.grad = torch.ones_like(param)
    step = StepOnHost(torch.optim.SGD(params, lr=0.5), NoHostDevice(), lambda param: False)
    with torch.no_grad():
        for slices in ([params[:1], params[1:2]], [params[2:], params[:2]]):
            step.begin_step(slices)
            for one in slices:
                step.step(one, {})
            step.end_step()
    assert [float(param.detach().max()) for param in params] == [0.0, 0.0, 0.5]
    assert step.memory_bytes >= 2 * 2 * params[2].nbytes
    step.close()
    assert step.memory_bytes == 0


def test_twins_are_in_pageable_memory_where_none_can_be_page_locked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Unwilling(NoHostDevice):
        pins_host_memory = True

        def pin(self, address: int, num_bytes: int) -> None:
            """Refuses."""
            raise RuntimeError("refused")

    param = torch.nn.Parameter(torch.ones(10))
    param.grad = torch.ones(10)
    step = StepOnHost(torch.optim.SGD([param], lr=0.5), Unwilling(), lambda param: False)
    slices = [[param]]
    with torch.no_grad():
        step.begin_step(slices)
        step.step(slices[0], {})
    assert float(param.detach()[0]) == 0.5
    assert "could not be pinned (refused)" in caplog.text
    step.close()


def test_a_step_begins_as_one_where_the_parameters_are() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([param], lr=0.1)
    slices = StepOnHost(optimizer, NoHostDevice(), lambda _: True)
    optimizer.state["k"] = 3  # type: ignore[index]
    with pytest.raises(ConfigurationError, match="keeps 'k' in its state"):
        slices.begin_step([[param]])
