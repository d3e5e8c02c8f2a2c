# SPDX-License-Identifier: Apache-2.0
"""How a drive gets at the bytes of a storage: edges, staging buffers, and who waits for whom.

The drive is played by the tests: they copy bodies out and in. The device's work lags behind.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron.offload.config import MIB
from megatron.offload.storage.access import InPlace, Staged, View
from megatron.offload.storage.arena import HostArena
from megatron.offload.storage.direct import Alignment, Cut, aligned_storage
from tests.simulated_device import POISON, PoisoningArena, SimulatedDevice

PAGE = 4096


class GatedDevice(SimulatedDevice):
    """Its copies wait at a gate; it knows which threads set its marks."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.marked_by: list[threading.Thread] = []

    def mark(self) -> Any:
        self.marked_by.append(threading.current_thread())
        return super().mark()

    def _take_a_while(self) -> None:
        assert self.gate.wait(timeout=10)


def storage_of(num_bytes: int, device: SimulatedDevice | None = None) -> torch.UntypedStorage:
    storage = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).untyped_storage()
    if device is not None:
        device.queued(storage)
    return storage


def bytes_of(storage: torch.UntypedStorage) -> bytes:
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


def body_of(view: View) -> bytes:
    return bytes(view.memory(0, view.cut.body_bytes))


def is_aligned(view: View, alignment: Alignment) -> bool:
    """Whether a drive can work on the body where it is."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(view.memory(0, 1)))
    return address % alignment.memory == 0 or not view.cut.body_bytes


def in_thread(call: Any) -> threading.Thread:
    """As an I/O thread would call it."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


# -- In place -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [1, 511, 512, 5000, 3 * PAGE + 7])
@pytest.mark.parametrize("alignment", [Alignment(512, 512), Alignment(PAGE, PAGE)], ids=str)
def test_edges_and_body_come_back_each_in_its_place(num_bytes: int, alignment: Alignment) -> None:
    access, source = InPlace(alignment), storage_of(num_bytes)
    view = access.for_writing(source)
    view.before_write()
    body = body_of(view)
    assert is_aligned(view, alignment)
    new_storage = access._new_storage

    def new_and_full_of_others(cut: Cut) -> torch.UntypedStorage:
        storage = new_storage(cut)
        ctypes.memset(storage.data_ptr(), POISON, storage.nbytes())
        return storage

    access._new_storage = new_and_full_of_others  # type: ignore[method-assign]
    target, view = access.for_reading(view.cut, num_parts=2)
    assert is_aligned(view, alignment)
    half = len(body) // 2
    view.memory(0, half)[:] = body[:half]
    view.memory(half, len(body) - half)[:] = body[half:]
    for _ in range(2):
        view.after_read()
    assert bytes_of(target) == bytes_of(source)


@pytest.mark.parametrize("head_bytes", [0, 1, 63])
def test_memory_to_read_into_is_aligned_whatever_the_head(head_bytes: int) -> None:
    alignment = Alignment(512, 512)
    access = InPlace(alignment)
    for _ in range(3):
        cut = Cut(head_bytes + PAGE, bytes(head_bytes), PAGE, b"")
        target, view = access.for_reading(cut, num_parts=1)
        assert is_aligned(view, alignment) and target.nbytes() == cut.num_bytes


@pytest.mark.parametrize("direction", ["write", "read"])
def test_a_view_keeps_the_memory_alive(direction: str) -> None:
    access, source = InPlace(Alignment(512, 512)), storage_of(5000)
    view = access.for_writing(source)
    if direction == "read":
        source, view = access.for_reading(view.cut, num_parts=1)
    weak = source._weak_ref()
    del source
    assert not torch.UntypedStorage._expired(weak)
    del view
    assert torch.UntypedStorage._expired(weak)
    torch.UntypedStorage._free_weak_ref(weak)


def test_the_memory_of_an_aligned_storage_lives_as_long_as_it() -> None:
    target = aligned_storage(64 * PAGE, 100, Alignment(512, 512))
    ctypes.memset(target.data_ptr(), 3, target.nbytes())
    others = [torch.full((64 * PAGE + size,), 4, dtype=torch.uint8) for size in (0, 512) * 8]
    assert set(bytes_of(target)) == {3} and others


def test_a_storage_that_was_freed_before_its_write_is_refused() -> None:
    source = storage_of(5000)
    view = InPlace(Alignment(512, 512)).for_writing(source)
    source.resize_(0)
    with pytest.raises(RuntimeError, match="resized"):
        view.before_write()


# -- Staged -------------------------------------------------------------------------------------


@pytest.fixture
def device() -> Iterator[GatedDevice]:
    device = GatedDevice()
    yield device
    device.gate.set()


@pytest.fixture
def arena() -> Iterator[HostArena]:
    arena = PoisoningArena(MIB)
    yield arena
    arena.close()


@pytest.fixture
def staged(device: GatedDevice, arena: HostArena) -> Staged:
    return Staged(Alignment(512, 512), device, arena)


def test_a_storage_that_was_freed_before_it_was_staged_is_refused(
    staged: Staged, device: GatedDevice
) -> None:
    source = storage_of(5000, device)
    view = staged.for_writing(source)
    source.resize_(0)
    with pytest.raises(RuntimeError, match="resized"):
        view.before_write()


@pytest.mark.parametrize("num_bytes", [1, 512, 5000])
def test_bytes_come_back_through_a_staging_buffer(
    staged: Staged, device: GatedDevice, num_bytes: int
) -> None:
    source = storage_of(num_bytes, device)
    view = staged.for_writing(source)
    view.before_write()
    body = body_of(view)
    assert len(body) % 512 == 0 and body[:num_bytes] == bytes_of(source)
    target, view = staged.for_reading(view.cut, num_parts=1)
    view.memory(0, len(body))[:] = body
    view.after_read()
    assert bytes_of(target) == bytes_of(source)


def test_every_part_of_a_write_waits_for_the_one_copy_to_the_host(
    staged: Staged, device: GatedDevice
) -> None:
    source = storage_of(PAGE, device)
    view = staged.for_writing(source)
    device.gate.clear()
    parts = [in_thread(view.before_write) for _ in range(3)]
    parts[0].join(timeout=0.1)
    are_waiting = [part.is_alive() for part in parts]
    device.gate.set()
    for part in parts:
        part.join(timeout=10)
    assert all(are_waiting)
    assert device.num_copies == 1 and body_of(view) == bytes_of(source)


def test_the_copy_to_the_device_waits_for_all_parts_of_a_read(
    staged: Staged, device: GatedDevice
) -> None:
    cut = staged.for_writing(storage_of(2 * PAGE, device)).cut
    target, view = staged.for_reading(cut, num_parts=2)
    view.memory(0, PAGE)[:] = bytes([1]) * PAGE
    view.after_read()
    assert device.num_copies == 0
    view.memory(PAGE, PAGE)[:] = bytes([2]) * PAGE
    view.after_read()
    assert device.num_copies == 1
    assert bytes_of(target) == bytes([1]) * PAGE + bytes([2]) * PAGE


def test_marks_are_set_at_once_by_the_thread_that_computes_and_after_memory_is_taken(
    staged: Staged, device: GatedDevice
) -> None:
    source = storage_of(PAGE, device)
    written = staged.for_writing(source)
    target, read = staged.for_reading(written.cut, num_parts=1)
    device.queued(source)  # what is queued later, copies do not wait for: it is none of theirs
    device.queued(target)
    for call in (written.before_write, read.after_read):
        in_thread(call).join(timeout=10)
    assert device.marked_by == [threading.current_thread()] * 2
    assert set(body_of(written)) == set(bytes_of(target)) == {POISON}
    target, read = staged.for_reading(written.cut, num_parts=1)
    read.memory(0, PAGE)[:] = bytes([1]) * PAGE
    read.after_read()
    assert set(bytes_of(target)) == {1}


def test_a_buffer_goes_back_with_its_view_and_no_sooner(
    staged: Staged, device: GatedDevice, arena: HostArena
) -> None:
    view: View | None = staged.for_writing(storage_of(PAGE, device))
    assert view is not None
    view.before_write()
    assert arena.used_bytes == PAGE, "the drive has still to write it"
    cut, view = view.cut, None
    assert arena.used_bytes == 0
    target, view = staged.for_reading(cut, num_parts=1)
    view.memory(0, PAGE)[:] = bytes([1]) * PAGE
    assert arena.used_bytes == PAGE
    view.after_read()
    assert set(bytes_of(target)) == {1}
    view = None
    assert arena.used_bytes == 0


def test_a_buffer_from_outside_the_arena_is_memory_of_its_own(device: GatedDevice) -> None:
    empty = HostArena(0)
    staged = Staged(Alignment(512, 512), device, empty)
    source = storage_of(64 * PAGE, device)
    view = staged.for_writing(source)
    view.before_write()
    others = [torch.full((64 * PAGE + size,), 4, dtype=torch.uint8) for size in (0, PAGE) * 8]
    assert body_of(view) == bytes_of(source) and others
    empty.close()
