# SPDX-License-Identifier: Apache-2.0
"""Gradients of an accelerator's layers that wait on tiers, while its streams are late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import LayerMajor, offload_parameters
from megatron.offload.errors import OffloadError
from megatron.offload.parameters import gradients as gradients_file
from tests.lag.test_parameters_on_an_accelerator import (
    DELAYS,
    DEVICE,
    LAYERS,
    MODES,
    assert_equal,
    micro_batches,
    stack,
)
from tests.support.lag.module import LagModule
from tests.support.training import moving

pytestmark = pytest.mark.usefixtures("accelerator")


@pytest.fixture(autouse=True)
def weights_leave_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients_file, "ALONE_BYTES", 1 << 12)


def train(
    lag: LagModule, directory: Path | None, *, calls: int = 1, **settings: Any
) -> list[torch.Tensor]:
    """Losses, norms, states and weights, in host memory."""
    model, found = stack().to(DEVICE), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(7)
    streams = () if directory is None else ("parameters", "states")
    settings = {"gradients": "on", **settings}
    with moving(streams, model, optimizer, directory, parameters=settings) as moved:
        step = moved.steps(model, LAYERS)
        for number in range(2):
            lag.set_delays(*DELAYS[number], seed=number)
            for call in range(calls):
                found += step(micro_batches(number * calls + call))
            found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True))
            optimizer.step()
            optimizer.zero_grad()
        if moved.parameters is not None:
            counted = moved.parameters.statistics
            assert counted["gradient_peak_bytes"] <= 2.5 * counted["parameter_bytes"] / LAYERS
        state = optimizer.state_dict()["state"]
        found += [one.cpu() for n in sorted(state) for one in state[n].values()]
        found += [one.cpu().clone() for one in model.state_dict().values()]
    lag.reset()
    return [one.cpu() for one in found]


@pytest.mark.slow(but="host")
@pytest.mark.parametrize(
    ("mode", "calls"), [("ssd", 2), ("host", 1)], ids=["ssd, two calls of a step", "host"]
)
def test_all_bits_are_the_same(lag: LagModule, mode: str, calls: int, tmp_path: Path) -> None:
    expected = train(lag, None, calls=calls)
    assert_equal(train(lag, tmp_path, calls=calls, **MODES[mode]), expected)


class Wide:
    """Layers of which each has `layer_bytes` of weights, and the steps that train them."""

    def __init__(self, directory: Path) -> None:
        layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(8)]
        self.model = torch.nn.Sequential(*layers).to(DEVICE)
        self.handle = offload_parameters(
            self.model, directory, layers=[torch.nn.Linear], gradients="on"
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.layer_major = LayerMajor(self.model, layers=[torch.nn.Linear])
        self.layer_bytes = 512 * 512 * 4

    def passes(self) -> None:
        x = torch.ones(4, 512).to(DEVICE)
        self.layer_major.step([x, x], lambda one: self.model(one).square().mean())

    def settle(self) -> None:
        window = self.handle.window
        assert window is not None and window.gradients is not None
        for unit in window.units:
            unit.wait_for_write()
        for bucket in list(window.gradients._buckets):
            bucket.wait_for_write()


def test_device_memory_holds_no_more_than_what_is_made_and_written(
    lag: LagModule, tmp_path: Path
) -> None:
    """Also while the host could run far ahead of kernels that take long."""
    wide = Wide(tmp_path)
    wide.passes()
    wide.optimizer.zero_grad()
    wide.settle()
    lag.synchronize(DEVICE)
    lag.reset_peak_memory_stats(DEVICE)
    before = lag.memory_stats(DEVICE)["active_bytes.all.current"]
    lag.set_delays(3000, 100, seed=1)
    wide.passes()
    # What is reserved says less: pieces that earlier tests have cut the allocator's segments into.
    peak = lag.memory_stats(DEVICE)["active_bytes.all.peak"]
    # Parameters as without: two that live, two that the allocator has not taken back yet. Of
    # gradients one that is made, one that is added to it, one that is written and its successor.
    assert peak - before <= 6 * wide.layer_bytes
    lag.reset()
    wide.settle()
    assert all(p.grad is not None for p in wide.model.parameters())
    wide.handle.close(restore=False)


def test_the_other_kernel_for_norms_is_an_error(lag: LagModule, tmp_path: Path) -> None:
    wide = Wide(tmp_path)
    wide.passes()
    with pytest.raises(OffloadError, match=r"\(on an accelerator with foreach=True\)"):
        torch.nn.utils.clip_grad_norm_(wide.model.parameters(), 0.1)
    torch.nn.utils.clip_grad_norm_(wide.model.parameters(), 0.1, foreach=True)
    wide.optimizer.step()
    wide.handle.close(restore=False)
