# SPDX-License-Identifier: Apache-2.0
"""All that offloads in a process shares an accelerator's streams, and so the memory they free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import offload_activations, offload_optimizer, offload_parameters
from megatron.offload.device import open as open_module
from megatron.offload.device.accelerator import AcceleratorDevice
from megatron.offload.device.open import open_device
from megatron.offload.sizes import MIB
from tests.lag.test_parameters_on_an_accelerator import DEVICE, micro_batches, stack
from tests.support.lag.module import LagModule

pytestmark = pytest.mark.usefixtures("accelerator")


def test_memory_that_one_user_has_freed_serves_the_next(lag: LagModule) -> None:
    """torch's allocator gives memory that it holds for one stream to no other stream."""
    lag.synchronize(DEVICE)
    lag.empty_cache()
    before_bytes = lag.memory_reserved(DEVICE)
    for _ in ("activations", "optimizer states", "parameters"):
        memory = open_device(DEVICE).new_restored(64 * MIB)
        del memory
        lag.synchronize(DEVICE)
    assert lag.memory_reserved(DEVICE) - before_bytes <= 1.1 * 64 * MIB


def test_every_door_gets_the_same_device(
    lag: LagModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[AcceleratorDevice] = []

    def make(*args: Any) -> AcceleratorDevice:
        made.append(AcceleratorDevice(*args))
        return made[-1]

    monkeypatch.setattr(open_module, "_opened", {})
    monkeypatch.setattr(open_module, "AcceleratorDevice", make)
    model = stack().to(DEVICE)
    metrics = tmp_path / "metrics.jsonl"  # with peaks of steps
    with (
        offload_activations(model, tmp_path, min_bytes=1, metrics_file=metrics) as activations,
        offload_parameters(model, tmp_path) as parameters,
    ):
        optimizer = torch.optim.AdamW(model.parameters())
        sizes = {"bucket_bytes": 1 << 16, "window_bytes": 1 << 17}
        with offload_optimizer(optimizer, tmp_path, **sizes) as states:
            for step in range(2):
                for batch in micro_batches(step):
                    model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert activations.statistics["offloaded_bytes"] > 0
            assert parameters.statistics["read_bytes"] > 0
            assert states.states is not None and states.states.num_bytes > 0
    assert [one.device for one in made] == [torch.device(DEVICE)]
