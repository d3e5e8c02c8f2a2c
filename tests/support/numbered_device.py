# SPDX-License-Identifier: Apache-2.0
"""A device whose events are numbers: `NumberedDevice`."""

from __future__ import annotations

from typing import Any

from megatron.offload.device.cpu import CpuDevice


class NumberedDevice(CpuDevice):
    """Its events are numbers; it knows which were waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.num_events = 0
        self.awaited: list[int] = []

    def record_event(self, stream: None = None) -> Any:
        self.num_events += 1
        return self.num_events

    def wait_for_event(self, event: Any) -> None:
        self.awaited.append(event)
