# SPDX-License-Identifier: Apache-2.0
"""GPUDirect's marks: set by the thread that computes, after the memory that they guard is taken."""

from __future__ import annotations

import threading
from typing import Any

import torch

from megatron.offload.storage.gds import _FromDevice
from tests.simulated_device import SimulatedDevice


class Mark:
    """Notes that somebody waits for it."""

    def __init__(self, time: int) -> None:
        self.time = time
        self.num_waits = 0

    def synchronize(self) -> None:
        self.num_waits += 1


class Device(SimulatedDevice):
    """Its marks know when they were set."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[Mark] = []
        self.marked_by: list[threading.Thread] = []

    def mark(self) -> Any:
        self.marked_by.append(threading.current_thread())
        self.marks.append(Mark(super().mark().time))
        return self.marks[-1]


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
    target, view = access.for_reading(access.for_writing(torch.UntypedStorage(64)).cut, num_parts=1)
    assert device.marks[1].time >= device._written_at[target._cdata].time
    thread = threading.Thread(target=view.memory, args=(0, 64))
    thread.start()
    thread.join(timeout=10)
    assert device.marks[1].num_waits == 1
    assert device.marked_by == [threading.current_thread()] * 2
