# SPDX-License-Identifier: Apache-2.0
"""GPUDirect's events are set by the thread that computes, once the memory they guard is taken."""

from __future__ import annotations

import threading
from typing import Any

import torch

from megatron.offload.tiers.gds import _FromDevice
from tests.support.simulated_device import Event, SimulatedDevice


class Device(SimulatedDevice):
    """It knows which events were set, by whom, and which were waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.awaited: list[Event] = []
        self.marked_by: list[threading.Thread] = []

    def record_event(self) -> Any:
        self.marked_by.append(threading.current_thread())
        self.events.append(super().record_event())
        return self.events[-1]

    def wait_for_event(self, event: Any) -> None:
        self.awaited.append(event)


def test_a_view_keeps_its_memory() -> None:
    access, storage = _FromDevice(Device()), torch.UntypedStorage(64)
    weak = storage._weak_ref()
    view = access.for_writing(storage)
    del storage
    assert not torch.UntypedStorage._expired(weak)
    del view
    assert torch.UntypedStorage._expired(weak)
    torch.UntypedStorage._free_weak_ref(weak)


def test_the_mark_of_a_read_is_set_after_its_memory_is_taken() -> None:
    device = Device()
    access = _FromDevice(device)
    target, view = access.for_reading(access.for_writing(torch.UntypedStorage(64)).cut)
    assert device.events[1].time >= device._written_at[target._cdata].time
    thread = threading.Thread(target=lambda: next(view.pieces_to_fill(0, 64)))
    thread.start()
    thread.join(timeout=10)
    assert device.awaited == [device.events[1]]
    assert device.marked_by == [threading.current_thread()] * 2


def test_a_write_waits_for_its_mark_before_the_drive_gets_the_memory() -> None:
    device = Device()
    storage = torch.UntypedStorage(64)
    view = _FromDevice(device).for_writing(storage)
    assert device.awaited == []
    (memory,) = view.pieces_to_write(16, 32)
    assert device.awaited == device.events
    assert (memory.address, len(memory)) == (storage.data_ptr() + 16, 32)
