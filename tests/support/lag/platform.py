# SPDX-License-Identifier: Apache-2.0
"""How the package pins host memory for the test accelerator, and so on: `LagPlatform`."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from megatron.offload.device.platform import PeakReader
from megatron.offload.machine.shared_peak import shared_counters
from tests.support.lag.module import LagModule


class LagPlatform:
    """See `Platform` for the calls."""

    def __init__(self, lag: LagModule) -> None:
        self._lag = lag

    def pin(self, address: int, num_bytes: int) -> None:
        self._lag.host_register(address, num_bytes)

    def unpin(self, address: int) -> None:
        with contextlib.suppress(RuntimeError):
            self._lag.host_unregister(address)

    def new_event(self) -> torch.Event:
        return torch.Event("lag")

    def annotate(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def peak_reader(self, device: torch.device) -> PeakReader:
        return shared_counters(self._lag).reader(device.index)
