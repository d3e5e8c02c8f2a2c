# SPDX-License-Identifier: Apache-2.0
"""What is found out before an accelerator's first step, and how an interrupted copy ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import OffloadConfig, offload_optimizer
from megatron.offload.activations.open import check_tiers, open_tiers
from megatron.offload.device.accelerator import AcceleratorDevice
from megatron.offload.errors import ConfigurationError
from megatron.offload.sizes import MIB
from megatron.offload.tiers.bounce import BouncingTier
from megatron.offload.tiers.file import UnlinkedFile
from megatron.offload.tiers.host import HostTier
from megatron.offload.tiers.probe import has_fallocate
from megatron.offload.tiers.transfer import Transfer
from tests.support.accelerators import Lag
from tests.support.lag.module import LagModule


@pytest.fixture
def device(lag: LagModule) -> Iterator[AcceleratorDevice]:
    yield Lag(lag).open(1)
    lag.synchronize(1)


def test_drives_are_measured_before_states_of_some_size_go_there(
    device: AcceleratorDevice, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(2100, 2100, bias=False).to(device.device)
    optimizer = torch.optim.AdamW(model.parameters())
    with caplog.at_level(logging.INFO), offload_optimizer(optimizer, tmp_path, window_bytes=0):
        assert "GB/s just measured" in caplog.text
    file = UnlinkedFile(tmp_path, "auto")
    assert has_fallocate(file)
    file.close()


@pytest.mark.parametrize("mode", ["ssd", "tiered"])
def test_gpudirect_storage_needs_cuda(mode: str, device: AcceleratorDevice, tmp_path: Path) -> None:
    config = OffloadConfig(mode=mode, io="gds", host_budget=MIB, directories=(tmp_path,))
    sentence = "GPUDirect Storage needs a CUDA device, and there is none"
    with pytest.raises(ConfigurationError, match=sentence):
        open_tiers(config, device, reserve_bytes=0, num_local_ranks=1)
    with pytest.raises(ConfigurationError, match=sentence):
        check_tiers(config, reserve_bytes=0, num_local_ranks=1)


def test_a_pool_that_no_address_space_holds_is_refused(
    device: AcceleratorDevice, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match="no address space for"):
        BouncingTier([tmp_path], device=device, pool_bytes=1 << 60)


def test_a_watcher_of_copies_that_is_interrupted_says_so_and_goes_on(
    device: AcceleratorDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = HostTier(MIB, device=device)
    right, calls = Transfer.run, []

    def interrupted(self: Transfer, *args: Any) -> bool:
        calls.append(self)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return right(self, *args)

    monkeypatch.setattr(Transfer, "run", interrupted)
    for number in range(2):
        made = torch.full((4096,), number, dtype=torch.uint8, device=device.device)
        started = tier.begin_write(made.untyped_storage(), device.record_event())
        assert started is not None
        block, transfer = started
        if number == 0:
            with pytest.raises(OSError, match="was interrupted"):
                transfer.wait()
        else:
            transfer.wait()
            storage, read = tier.begin_read(block)
            read.wait()
            device.use_after(storage, read.events or ())
            back = torch.empty(0, dtype=torch.uint8, device=device.device).set_(storage)
            assert set(back.cpu().tolist()) == {1}
    assert caplog.text.count("a copy's end was not noticed") == 1
    tier.close()
