# SPDX-License-Identifier: Apache-2.0
"""Whole engines whose streams are late: every wait that is missing gives other bits.

On a GPU where there is one, else on the test accelerator, which can hold its streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import OffloadConfig, OffloadEngine, Scope
from megatron.offload.device.accelerator import AcceleratorDevice
from megatron.offload.sizes import MIB
from megatron.offload.tiers import ssd as ssd_module
from megatron.offload.tiers.staging import StagingPool
from tests.support.accelerators import Accelerator, Cuda, Lag
from tests.support.lag.module import LagModule
from tests.support.models import Model, assert_same, run_step, settle
from tests.support.waiting import wait_until

_LATE_S = 0.15
_ROWS, _WIDTH = 64, 32

if torch.cuda.is_available():  # torch has one accelerator in a process

    @pytest.fixture
    def accelerator() -> Accelerator:
        return Cuda()

else:

    @pytest.fixture
    def accelerator(lag: LagModule) -> Accelerator:
        return Lag(lag)


@pytest.fixture
def device(accelerator: Accelerator) -> Iterator[AcceleratorDevice]:
    accelerator.prepare()
    yield accelerator.open()
    accelerator.module.synchronize()


@pytest.fixture
def make_engine(
    device: AcceleratorDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., OffloadEngine]]:
    """Small staging buffers, so that storages have several pieces."""
    engines: list[OffloadEngine] = []

    def build(**settings: Any) -> OffloadEngine:
        settings = {"directories": (tmp_path,), "min_bytes": 1, "host_budget": 64 * MIB, **settings}
        engines.append(OffloadEngine(OffloadConfig(**settings), device))
        return engines[-1]

    class SmallPool(StagingPool):
        def __init__(self, num_buffers: int, device: AcceleratorDevice, **told: Any) -> None:
            super().__init__(num_buffers, device, piece_bytes=4096, **told)

    monkeypatch.setattr(ssd_module, "StagingPool", SmallPool)
    yield build
    for engine in engines:
        engine.close()


class WithAPartAside(torch.nn.Module):
    """A layer of which one part is on a side stream, as experts that all tokens share may be."""

    def __init__(self, device: AcceleratorDevice, side: Any) -> None:
        super().__init__()
        self.device, self.stream = device, side
        self.main, self.side = torch.nn.Linear(_WIDTH, 64), torch.nn.Linear(_WIDTH, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        main = self.device.current_stream()
        self.stream.wait_stream(main)
        with self.device.use_stream(self.stream):
            aside = torch.nn.functional.dropout(self.side(x).sigmoid(), 0.3)
            part = aside.view(-1)[: _WIDTH * len(x)].square()  # a copy of it moves
            aside = part.view(len(x), _WIDTH).sigmoid()
            x.record_stream(self.stream)
        main.wait_stream(self.stream)
        aside.record_stream(main)
        return self.main(x)[:, :_WIDTH].sigmoid() * aside + x


@pytest.fixture
def side(accelerator: Accelerator, device: AcceleratorDevice) -> Any:
    return accelerator.module.Stream(device.device)


@pytest.fixture
def model(device: AcceleratorDevice, side: Any) -> Model:
    torch.manual_seed(3)
    model = Model(num_layers=0)
    model.blocks.extend(WithAPartAside(device, side) for _ in range(3))
    return model.to(device.device)


SETTINGS = [
    {"mode": "ssd", "pinned_bytes": 0},
    {"mode": "ssd", "pinned_bytes": 0, "threads": 1, "inflight_bytes": 40_000},
    {"mode": "ssd", "pinned_bytes": 32 * 1024},
    {"mode": "ssd"},
    {"mode": "host"},
    {"mode": "tiered", "host_budget": 100_000},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("late", ["compute", "side", "copies to the host", "copies from it"])
def test_results_are_equal_whichever_stream_is_late(
    accelerator: Accelerator,
    device: AcceleratorDevice,
    make_engine: Callable[..., OffloadEngine],
    model: Model,
    side: Any,
    settings: dict[str, Any],
    late: str,
) -> None:
    streams = {
        "compute": [device.current_stream()],
        "side": [side],
        "copies to the host": [device._store, device._pieces],
        "copies from it": [device._load],
    }

    def be_late() -> None:
        for stream in streams[late]:
            if isinstance(accelerator, Lag):
                accelerator.module.late(stream, _LATE_S)
            else:
                with device.use_stream(stream):
                    accelerator.keep_busy()

    x = torch.randn(_ROWS, _WIDTH).to(device.device)
    plain = run_step(model, x)
    engine = make_engine(**settings)
    for _ in range(2):
        be_late()
        assert_same(run_step(model, x, engine, between=be_late), plain)
    counted = engine.statistics
    assert counted.offloaded_bytes > 0 and counted.bit_packed_bytes > 0
    assert counted.read_bytes + counted.host_read_bytes > 0.9 * counted.offloaded_bytes
    accelerator.module.synchronize()
    wait_until(
        lambda: not any(tier.used_bytes for tier in engine.tiers.values()), "a tier is not empty"
    )


@pytest.mark.parametrize("settings", SETTINGS[2:5], ids=str)
def test_results_are_equal_when_backward_comes_before_the_writes_have_ended(
    accelerator: Accelerator,
    device: AcceleratorDevice,
    make_engine: Callable[..., OffloadEngine],
    model: Model,
    settings: dict[str, Any],
) -> None:
    x = torch.randn(_ROWS, _WIDTH).to(device.device)
    plain = run_step(model, x)
    engine = make_engine(**settings)
    engine.exclude(model.parameters())
    for _ in range(3):
        torch.manual_seed(5)
        model.zero_grad()
        with engine.step():
            with engine.forward(Scope()) as save_order:
                accelerator.nap()
                loss = model(x, engine).square().mean()
            with engine.backward(save_order):
                loss.backward()
        assert_same((loss.detach(), [p.grad.clone() for p in model.parameters()]), plain)
        del loss
    settle(engine)


@pytest.mark.parametrize("mode", ["ssd", "host"])
def test_device_memory_is_free_before_the_drive_has_the_bytes_and_compute_does_not_wait(
    accelerator: Accelerator,
    device: AcceleratorDevice,
    make_engine: Callable[..., OffloadEngine],
    mode: str,
) -> None:
    """A read is queued, and the thread that computes goes on, while its copy is held."""
    if not isinstance(accelerator, Lag):
        pytest.skip("a GPU's streams cannot be held")
    engine = make_engine(mode=mode)
    with engine.step():
        tensor = torch.randn(5_000).to(device.device)  # fewer pieces than buffers
        expected = tensor.cpu()
        before = device.allocated_bytes()
        packed = engine.hooks.pack(tensor)
        del tensor
        settle(engine)
        assert device.allocated_bytes() == before - 20_480  # in units of 512 bytes
        with accelerator.module.held(device._load):
            restored = engine.hooks.unpack(packed)
            doubled = restored * 2
            used = device.record_event()
            assert not used.query()
        assert torch.equal(doubled.cpu(), expected * 2)
