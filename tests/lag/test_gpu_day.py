# SPDX-License-Identifier: Apache-2.0
"""tools/gpu_day.py on the test accelerator: a step lasts as long as the device takes for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from check.gpu_day.settings import Settings
from check.gpu_day.training import Trainee, measure, train

from tests.support.accelerators import Lag
from tests.support.lag.module import LagModule

_KERNEL_US = 500.0
_NUM_STEPS = 2


@pytest.fixture
def settings(accelerator: Lag, tmp_path: Path) -> Settings:
    return Settings(torch.device("lag", 0), tmp_path, True, 1 << 28, 1 << 28)


def test_a_step_lasts_as_long_as_its_kernels(settings: Settings, lag: LagModule) -> None:
    trainee = Trainee("none", settings.shape("stack"), settings, "device", None)
    trainee.settle()
    lag.set_delays(kernel_us=_KERNEL_US, copy_us=0, jitter=False)
    before = lag.counters()["kernels"]
    found = measure(trainee, settings, _NUM_STEPS)
    num_kernels = lag.counters()["kernels"] - before
    trainee.close()
    assert len(found["steps_s"]) == _NUM_STEPS and num_kernels > 100 * _NUM_STEPS
    assert sum(found["steps_s"]) >= num_kernels * _KERNEL_US / 1e6
    assert sum(found["steps_s"]) <= found["wall_s"] * _NUM_STEPS


def test_memory_and_losses_are_those_of_the_device(settings: Settings) -> None:
    shape = settings.shape("stack")
    found = {
        way: train(
            settings, lambda _: None, way=way, shape=shape, num_steps=_NUM_STEPS, seconds=100.0
        )
        for way in ("none", "host", "recompute_host")
    }
    none, host = found["none"], found["host"]
    shared = min(len(one["losses"]) for one in found.values())  # a slow machine runs fewer
    reference = none["losses"][:shared]
    assert len(reference) >= 2
    assert all(one["losses"][:shared] == reference for one in found.values())
    assert host["statistics"]["offloaded_bytes"] > 0
    for one in found.values():
        assert one["base_bytes"] < one["peak_bytes"] <= one["reserved_bytes"]
        assert one["alloc_retries"] == 0
