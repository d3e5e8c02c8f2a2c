# SPDX-License-Identifier: Apache-2.0
"""GPUDirect waits for events: for a source's producer, and for those who had a target's memory."""

from __future__ import annotations

import threading
from typing import Any

import torch

from megatron.offload.tiers.gds import _FromDevice
from tests.support.simulated_device import Event, SimulatedDevice
from tests.support.waiting import SOON_S


class Device(SimulatedDevice):
    """It knows which events were waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited: list[Event] = []

    def wait_for_event(self, event: Any) -> None:
        self.awaited.append(event)


def test_a_view_keeps_its_memory() -> None:
    access, storage = _FromDevice(Device()), torch.UntypedStorage(64)
    weak = storage._weak_ref()
    view = access.for_writing(storage, None)
    del storage
    assert not torch.UntypedStorage._expired(weak)
    del view
    assert torch.UntypedStorage._expired(weak)
    torch.UntypedStorage._free_weak_ref(weak)


def test_a_read_waits_for_those_who_had_its_memory() -> None:
    device = Device()
    access = _FromDevice(device)
    target, view = access.for_reading(access.for_writing(torch.UntypedStorage(64), None).cut)
    taken = device._written[target._cdata]
    thread = threading.Thread(target=lambda: next(view.pieces_to_fill(0, 64)))
    thread.start()
    thread.join(timeout=SOON_S)
    (event,) = device.awaited
    assert event.seen[taken.stream] >= taken.time and view.events == []


def test_a_write_waits_for_its_producer_before_the_drive_gets_the_memory() -> None:
    device = Device()
    storage = torch.UntypedStorage(64)
    after = device.record_event()
    view = _FromDevice(device).for_writing(storage, after)
    assert device.awaited == []
    (memory,) = view.pieces_to_write(16, 32)
    assert device.awaited == [after]
    assert (memory.address, len(memory)) == (storage.data_ptr() + 16, 32)
