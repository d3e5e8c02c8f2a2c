# SPDX-License-Identifier: Apache-2.0
"""How a drive gets at the bytes of a storage: edges, staging in pieces, and who waits for whom.

The drive is played by the tests: they copy bodies out and in. The device's work lags behind.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.offload.tiers import access as access_module
from megatron.offload.tiers import mapped
from megatron.offload.tiers.access import InPlace, Staged, View
from megatron.offload.tiers.direct_io import Alignment, Cut, aligned_storage
from tests.support.simulated_device import (
    POISON,
    Event,
    GatedDevice,
    PoisoningPool,
    SimulatedDevice,
)
from tests.support.waiting import SOON_S

PAGE = 4096


def fill_with_anything(storage: torch.UntypedStorage) -> None:
    torch.tensor([], dtype=torch.uint8).set_(storage).random_(0, 256)


def storage_of(num_bytes: int, device: SimulatedDevice | None = None) -> torch.UntypedStorage:
    storage = torch.UntypedStorage(num_bytes)
    fill_with_anything(storage)
    if device is not None:
        device.queued(storage)
    return storage


def bytes_of(storage: torch.UntypedStorage) -> bytes:
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


def written(view: View, start: int = 0, num_bytes: int | None = None) -> bytes:
    """What a drive would write of a part of the body."""
    length = view.cut.body_bytes - start if num_bytes is None else num_bytes
    return b"".join(bytes(piece) for piece in view.pieces_to_write(start, length))


def fill(view: View, body: bytes, start: int = 0) -> None:
    """Reads a part of the body as a drive would."""
    for piece in view.pieces_to_fill(start, len(body)):
        piece[:], body = body[: len(piece)], body[len(piece) :]
    assert not body


def arrive(view: View, device: SimulatedDevice) -> None:
    """The device has done what a view that was filled has queued."""
    for event in view.events or ():
        device.wait_for_event(event)


def is_aligned(view: View, alignment: Alignment) -> bool:
    """Whether a drive can work on the body where it is."""
    memory = next(view.pieces_to_fill(0, 1))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
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
    for in_pages in (False, True):
        _edges_and_body_come_back(InPlace(alignment, in_pages=in_pages), num_bytes, alignment)


def _edges_and_body_come_back(access: InPlace, num_bytes: int, alignment: Alignment) -> None:
    source = aligned_storage(num_bytes, 192, alignment)  # has a head
    fill_with_anything(source)
    view = access.for_writing(source, None)
    body = written(view)
    assert is_aligned(view, alignment)
    new_storage = access._new_storage

    def new_and_full_of_others(cut: Cut) -> torch.UntypedStorage:
        storage = new_storage(cut)
        ctypes.memset(storage.data_ptr(), POISON, storage.nbytes())
        return storage

    access._new_storage = new_and_full_of_others  # type: ignore[method-assign]
    target, view = access.for_reading(view.cut)
    assert is_aligned(view, alignment)
    half = len(body) // 2
    fill(view, body[half:], half)
    fill(view, body[:half])
    assert bytes_of(target) == bytes_of(source)


@pytest.mark.parametrize("head_bytes", [0, 1, 63])
def test_memory_to_read_into_is_aligned_whatever_the_head(head_bytes: int) -> None:
    alignment = Alignment(512, 512)
    access = InPlace(alignment)
    for _ in range(3):
        cut = Cut(head_bytes + PAGE, bytes(head_bytes), PAGE, b"")
        target, view = access.for_reading(cut)
        assert is_aligned(view, alignment) and target.nbytes() == cut.num_bytes


@pytest.mark.parametrize("head_bytes", [0, 192])
def test_pages_of_a_large_storage_go_back_wherever_its_source_began(head_bytes: int) -> None:
    """An allocator would keep what gradients, which begin within a page, have come back into."""
    made = []

    def own_pages(*args: int) -> torch.UntypedStorage:
        made.append(mapped.own_pages(*args))
        return made[-1]

    access = InPlace(Alignment(512, 512), in_pages=True)
    cut = Cut(head_bytes + 8 * PAGE, bytes(head_bytes), 8 * PAGE, b"")
    with mock.patch.object(access_module, "own_pages", own_pages):
        target, view = access.for_reading(cut)
    assert [one.data_ptr() for one in made] == [target.data_ptr()]
    assert target.nbytes() == cut.num_bytes and is_aligned(view, Alignment(512, 512))
    first_page = target.data_ptr() // PAGE * PAGE
    assert _is_mapped(first_page)
    made.clear()
    del target, view
    assert not _is_mapped(first_page)


def _is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(word, 16) for word in line.split()[0].split("-"))
        if begin <= address < end:
            return True
    return False


@pytest.mark.parametrize("direction", ["write", "read"])
def test_a_view_keeps_the_memory_alive(direction: str) -> None:
    access, source = InPlace(Alignment(512, 512)), storage_of(5000)
    view = access.for_writing(source, None)
    if direction == "read":
        source, view = access.for_reading(view.cut)
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
    view = InPlace(Alignment(512, 512)).for_writing(source, None)
    source.resize_(0)
    with pytest.raises(RuntimeError, match="resized"):
        written(view)


# -- Staged -------------------------------------------------------------------------------------


@pytest.fixture
def device() -> Iterator[GatedDevice]:
    device = GatedDevice()
    yield device
    device.gate.set()


@pytest.fixture
def pool(device: GatedDevice) -> Iterator[PoisoningPool]:
    pool = PoisoningPool(2, device)
    yield pool
    pool.close()


@pytest.fixture
def staged(device: GatedDevice, pool: PoisoningPool) -> Staged:
    return Staged(Alignment(512, 512), device, pool)


def num_free(pool: PoisoningPool) -> int:
    return pool._free.qsize()


def test_a_storage_that_was_freed_before_it_was_staged_is_refused(
    staged: Staged, device: GatedDevice, pool: PoisoningPool
) -> None:
    source = storage_of(3 * pool.piece_bytes, device)
    view = staged.for_writing(source, device.record_event())
    pieces = view.pieces_to_write(0, view.cut.body_bytes)
    next(pieces)
    source.resize_(0)
    with pytest.raises(RuntimeError, match="resized"):
        next(pieces)
    assert device.num_copies == 1 and num_free(pool) == 2


@pytest.mark.parametrize("num_bytes", [1, 512, 5000, 8192, 8193, 50_000])
def test_bytes_come_back_through_staging_buffers(
    staged: Staged, device: GatedDevice, pool: PoisoningPool, num_bytes: int
) -> None:
    source = storage_of(num_bytes, device)
    view = staged.for_writing(source, device.record_event())
    body = written(view)
    assert len(body) % 512 == 0 and body[:num_bytes] == bytes_of(source)
    target, view = staged.for_reading(view.cut)
    fill(view, body)
    arrive(view, device)
    assert bytes_of(target) == bytes_of(source)
    assert device.num_copies == 2 * -(-num_bytes // pool.piece_bytes)


def test_each_part_moves_its_own_bytes_in_any_order(
    staged: Staged, device: GatedDevice, pool: PoisoningPool
) -> None:
    source = storage_of(3 * pool.piece_bytes + 5, device)
    half = pool.piece_bytes + 512
    view = staged.for_writing(source, device.record_event())
    last, first = written(view, half), written(view, 0, half)
    assert (first + last)[: source.nbytes()] == bytes_of(source)
    target, view = staged.for_reading(view.cut)
    fill(view, last, half)
    fill(view, first)
    assert len(view.events or ()) == 2
    arrive(view, device)
    assert bytes_of(target) == bytes_of(source)


def test_what_was_not_read_well_does_not_reach_the_device(
    staged: Staged, device: GatedDevice, pool: PoisoningPool
) -> None:
    cut = staged.for_writing(storage_of(2 * PAGE, device), None).cut
    target, view = staged.for_reading(cut)
    pieces = view.pieces_to_fill(0, 2 * PAGE)
    next(pieces)
    pieces.close()  # as a drive does that has found an error
    assert device.num_copies == 0 and set(bytes_of(target)) == {POISON}
    assert num_free(pool) == 2


def test_a_write_waits_for_its_event_and_for_nothing_that_was_queued_later(
    staged: Staged, device: GatedDevice
) -> None:
    source = storage_of(PAGE, device)
    too_early, after = Event({}), device.record_event()
    for event, is_right in ((too_early, False), (after, True)):
        body: list[bytes] = []
        view = staged.for_writing(source, event)
        in_thread(lambda view=view, body=body: body.append(written(view))).join(timeout=SOON_S)
        assert (body[0] == bytes_of(source)) is is_right
        assert is_right or set(body[0]) == {POISON}


def test_a_read_does_not_wait_for_its_copies(
    staged: Staged, device: GatedDevice, pool: PoisoningPool
) -> None:
    cut = staged.for_writing(storage_of(2 * pool.piece_bytes, device), None).cut
    target, view = staged.for_reading(cut)
    device.gate.clear()
    fill(view, bytes([1]) * pool.piece_bytes + bytes([2]) * pool.piece_bytes)
    assert set(bytes_of(target)) == {POISON} and num_free(pool) == 2
    device.gate.set()
    arrive(view, device)
    assert bytes_of(target)[:: pool.piece_bytes - 1] == b"\1\1\2"


def test_a_buffer_is_not_filled_before_the_copy_from_it_has_ended(
    staged: Staged, device: GatedDevice, pool: PoisoningPool
) -> None:
    cut = staged.for_writing(storage_of(3 * pool.piece_bytes, device), None).cut
    target, view = staged.for_reading(cut)
    device.gate.clear()
    body = b"".join(bytes([value]) * pool.piece_bytes for value in (1, 2, 3))
    reading = in_thread(lambda: fill(view, body))
    reading.join(timeout=0.1)
    assert reading.is_alive(), "a third piece, and two buffers that are being copied from"
    device.gate.set()
    reading.join(timeout=SOON_S)
    arrive(view, device)
    assert bytes_of(target) == body


@pytest.mark.parametrize("direction", ["write", "read"])
def test_a_buffer_is_taken_by_a_thread_that_works_and_by_nobody_who_waits(
    staged: Staged, device: GatedDevice, pool: PoisoningPool, direction: str
) -> None:
    views = [
        staged.for_writing(storage_of(3 * PAGE, device), device.record_event()) for _ in range(5)
    ]
    if direction == "read":
        views = [staged.for_reading(view.cut)[1] for view in views]
    assert num_free(pool) == 2, "what is in flight takes none"
    pieces = getattr(views[0], "pieces_to_write" if direction == "write" else "pieces_to_fill")
    for piece in pieces(0, 3 * PAGE):
        assert num_free(pool) == 1, "the drive has still to use it"
        piece[:] = bytes(len(piece))
    assert num_free(pool) == 2


def test_buffers_do_not_overlap(device: GatedDevice) -> None:
    pool = PoisoningPool(3, device)
    with pool.buffer() as first, pool.buffer() as second, pool.buffer() as third:
        addresses = sorted(buffer.address for buffer in (first, second, third))
        assert all(address % PAGE == 0 for address in addresses)
        assert addresses[1] - addresses[0] >= pool.piece_bytes <= addresses[2] - addresses[1]
    pool.close()
