# SPDX-License-Identifier: Apache-2.0
"""GPUDirect's marks: set by the thread that computes, after the memory that they guard is taken."""

from __future__ import annotations

import threading
from typing import Any

import torch

from megatron.offload.tiers.gds import _FromDevice
from tests.simulated_device import Mark, SimulatedDevice


class Device(SimulatedDevice):
    """It knows which marks were set, by whom, and which were waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[Mark] = []
        self.awaited: list[Mark] = []
        self.marked_by: list[threading.Thread] = []

    def mark(self) -> Any:
        self.marked_by.append(threading.current_thread())
        self.marks.append(super().mark())
        return self.marks[-1]

    def wait_for(self, mark: Any) -> None:
        self.awaited.append(mark)


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
    assert device.marks[1].time >= device._written_at[target._cdata].time
    thread = threading.Thread(target=lambda: next(view.pieces_to_fill(0, 64)))
    thread.start()
    thread.join(timeout=10)
    assert device.awaited == [device.marks[1]]
    assert device.marked_by == [threading.current_thread()] * 2


def test_a_write_waits_for_its_mark_before_the_drive_gets_the_memory() -> None:
    device = Device()
    storage = torch.UntypedStorage(64)
    view = _FromDevice(device).for_writing(storage)
    assert device.awaited == []
    (memory,) = view.pieces_to_write(16, 32)
    assert device.awaited == device.marks
    assert (memory.address, len(memory)) == (storage.data_ptr() + 16, 32)
