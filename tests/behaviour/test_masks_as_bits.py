# SPDX-License-Identifier: Apache-2.0
"""A storage saved as torch.bool moves one bit for each byte, and comes back byte for byte."""

from __future__ import annotations

import contextlib
import errno
import threading
from typing import ClassVar

import pytest
import torch

from megatron.offload import ChangedInPlaceError, OffloadEngine, Scope
from megatron.offload.activations.saved.bits import bits_bytes, pack_bits, unpack_bits
from megatron.offload.activations.saved.record import State
from megatron.offload.tiers.file import UnlinkedFile
from tests.support.models import settle
from tests.support.simulated_device import SimulatedDevice

NUM = 4099  # no multiple of 8
BITS = 513 + 1  # and the byte that says whether bits are all there is


def new_mask(num_values: int = NUM) -> torch.Tensor:
    return torch.rand(num_values, generator=torch.Generator().manual_seed(num_values)) < 0.5


@pytest.mark.parametrize("num_values", [*range(1, 70), 4096, 4097, 4103])
def test_bits_of_any_number_of_values_are_unpacked_as_they_were(num_values):
    mask = new_mask(num_values)
    packed = pack_bits(mask.untyped_storage())
    assert packed.nbytes() == bits_bytes(num_values)
    unpacked = unpack_bits(packed, num_values)
    assert unpacked.tolist() == mask.tolist()


@pytest.mark.parametrize("mode", ["ssd", "host"])
def test_a_mask_moves_as_bits_in_both_directions(make_engine, mode):
    engine = make_engine(mode=mode, io="buffered", host_budget=1 << 20)
    mask = new_mask()
    expected = mask.clone()
    with engine.step():
        packed = engine.hooks.pack(mask)
        settle(engine)
        del mask
        assert torch.equal(engine.hooks.unpack(packed), expected)
    counted = engine.statistics
    assert counted.offloaded_bytes == BITS and counted.bit_packed_bytes == NUM - BITS
    assert counted.written_bytes + counted.host_written_bytes == BITS
    assert counted.read_bytes + counted.host_read_bytes == BITS


def test_what_is_no_mask_moves_as_it_is(engine):
    with engine.step():
        packed = [engine.hooks.pack(torch.ones(NUM, dtype=d)) for d in (torch.uint8, torch.int8)]
        settle(engine)
    assert engine.statistics.written_bytes == 2 * NUM and engine.statistics.bit_packed_bytes == 0
    assert [engine.hooks.unpack(view).sum() for view in packed] == [NUM, NUM]


def test_masks_of_which_bits_are_no_less_move_as_they_are(engine):
    with engine.step():
        packed = [engine.hooks.pack(new_mask(number)) for number in (1, 2, 3)]
        settle(engine)
        assert engine.statistics.offloaded_bytes == 1 + 2 + 2
        for number, view in enumerate(packed, start=1):
            assert torch.equal(engine.hooks.unpack(view), new_mask(number))


def test_the_memory_of_a_mask_and_of_its_bits_is_given_up(engine):
    mask = new_mask()
    weak = mask.untyped_storage()._weak_ref()
    with engine.step():
        packed = engine.hooks.pack(mask)
        del mask
        settle(engine)
        assert torch.UntypedStorage._expired(weak)
        assert packed.saved.bits is None and packed.saved.memory_bytes == NUM
    torch.UntypedStorage._free_weak_ref(weak)


@pytest.mark.parametrize("place", [0, 1234, NUM - 1])
@pytest.mark.parametrize("byte", [2, 255])
def test_other_bytes_than_0_and_1_stay_byte_for_byte(engine, byte, place):
    content = new_mask().view(torch.uint8).clone()
    content[place] = byte
    expected = content.clone()
    with engine.step():
        packed = engine.hooks.pack(content.view(torch.bool))
        del content
        settle(engine)
        assert packed.saved.state is State.IN_MEMORY and packed.saved.block is None
        assert torch.equal(engine.hooks.unpack(packed).view(torch.uint8), expected)
    assert engine.statistics.read_bytes == 0


def test_views_of_other_types_see_the_same_bytes(engine):
    mask = new_mask(4096)
    views = [mask, mask.view(torch.uint8), mask.view(torch.int64)[7:300], mask.view(64, 64).t()]
    expected = [view.clone() for view in views]
    with engine.step():
        packed = [engine.hooks.pack(view) for view in views]
        settle(engine)
        del mask, views
        restored = [engine.hooks.unpack(view) for view in packed]
        for tensor, wanted in zip(restored, expected, strict=True):
            assert torch.equal(tensor, wanted) and tensor.dtype == wanted.dtype
        assert len({tensor.untyped_storage().data_ptr() for tensor in restored}) == 1
    assert engine.statistics.offloaded_bytes == engine.statistics.read_bytes == bits_bytes(4096)


def test_a_small_part_of_a_mask_moves_as_its_own_bits(engine):
    mask = new_mask(10000)
    expected = mask[1001:1100].clone()
    with engine.step():
        packed = engine.hooks.pack(mask[1001:1100])
        del mask
        settle(engine)
        assert torch.equal(engine.hooks.unpack(packed), expected)
    before = 1001 % 256  # parts are copied from a multiple of these on
    assert engine.statistics.written_bytes == bits_bytes(before + 99)


@pytest.mark.parametrize("is_queued", [True, False])
def test_a_mask_needed_before_it_was_written_is_the_one_that_was_saved(
    engine, write_gate, is_queued
):
    mask = new_mask()
    with engine.step():
        packed = engine.hooks.pack(mask)
        if not is_queued:
            write_gate.wait_for_arrival()
        restored = engine.hooks.unpack(packed)
        assert restored.data_ptr() == mask.data_ptr()
        assert packed.saved.bits is None
        write_gate.open.set()
    assert torch.equal(restored, new_mask()) and engine.statistics.read_bytes == 0


def test_a_mask_that_somebody_kept_needs_no_read(engine):
    mask = new_mask()
    with engine.step():
        packed = engine.hooks.pack(mask)
        settle(engine)
        assert engine.hooks.unpack(packed).data_ptr() == mask.data_ptr()
    assert engine.statistics.read_bytes == 0


def test_a_mask_that_could_not_be_written_stays(engine, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(UnlinkedFile, "write", fail)
    with engine.step():
        packed = engine.hooks.pack(new_mask())
        settle(engine)
        assert packed.saved.state is State.IN_MEMORY and packed.saved.bits is None
        assert torch.equal(engine.hooks.unpack(packed), new_mask())


def test_a_mask_that_no_tier_takes_stays(make_engine):
    engine = make_engine(mode="host", host_budget=BITS // 2)
    with engine.step():
        packed = engine.hooks.pack(new_mask())
        settle(engine)
        assert packed.saved.state is State.IN_MEMORY and packed.saved.bits is None
        assert torch.equal(engine.hooks.unpack(packed), new_mask())
    assert engine.statistics.rejected_bytes == BITS and engine.statistics.offloaded_bytes == 0


def test_a_changed_mask_raises(engine):
    mask = new_mask()
    with engine.step():
        packed = engine.hooks.pack(mask)
        settle(engine)
        mask.logical_not_()
        with pytest.raises(ChangedInPlaceError):
            engine.hooks.unpack(packed)


@pytest.mark.parametrize("captured", [True, False])
def test_masks_of_operations_serve_every_pass_through_their_graph(engine, captured):
    def gradients(*, offloads: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        x = torch.randn(1000, requires_grad=True)
        hooks = not captured and offloads
        with engine.step(), engine.forward(Scope()) as save_order:
            with engine.saved_tensors_hooks() if hooks else contextlib.nullcontext():
                y = torch.native_dropout(x * 1, 0.3, True)[0].masked_fill(x > 0.5, 2.0)
            if captured and offloads:
                engine.capture(Scope(), [y], [x])
            settle(engine)
            found = []
            with engine.backward(save_order):
                for keeps in (True, True, False):
                    found += torch.autograd.grad(y.sum(), x, retain_graph=keeps)
        return found

    ours = gradients(offloads=True)
    assert engine.statistics.bit_packed_bytes == 2 * (1000 - bits_bytes(1000))
    assert engine.statistics.read_bytes >= 3 * 2 * bits_bytes(1000)
    for one, other in zip(ours, gradients(offloads=False), strict=True):
        assert torch.equal(one, other)


def test_a_plan_hears_what_a_mask_takes_in_memory_and_the_read_ahead_what_moves(engine):
    class Listens:
        heard: ClassVar[list[int]] = []

        def moves(self, scope: Scope, num_bytes: int) -> None:
            self.heard.append(num_bytes)

        def stayed(self, scope: Scope, storage: torch.UntypedStorage) -> None: ...

    engine.observe(Listens())
    with engine.step(), engine.forward(Scope()) as save_order:
        packed = engine.hooks.pack(new_mask())
        assert Listens.heard == [NUM] and save_order.largest_bytes == BITS
        assert torch.equal(engine.hooks.unpack(packed), new_mask())


def test_what_a_node_changes_in_a_restored_mask_others_see(engine):
    mask = new_mask()
    with engine.step():
        packed = [engine.hooks.pack(mask), engine.hooks.pack(mask[:])]
        settle(engine)
        del mask
        one, other = [engine.hooks.unpack(view) for view in packed]
        one.data.fill_(True)
        assert other.all()


def test_read_ahead_a_mask_waits_as_bits(engine, caplog):
    with engine.step(), engine.forward(Scope()) as save_order:
        packed = engine.hooks.pack(new_mask())
        settle(engine)
        with engine.backward(save_order):
            packed.saved.wait_for_read()
            engine.dispatcher.drain()
            packed.saved.wait_for_read()
            engine.dispatcher.drain()
            assert packed.saved.state is State.RESTORED and packed.saved.memory_bytes == BITS
            assert torch.equal(engine.hooks.unpack(packed), new_mask())
    assert not caplog.records, "nobody has taken the bits for the mask"


class WaitingDevice(SimulatedDevice):
    """Counts waits for events in the thread that computes."""

    num_waits = 0

    def wait_for_event(self, event: object) -> None:
        self.num_waits += threading.current_thread() is threading.main_thread()
        super().wait_for_event(event)


@pytest.mark.parametrize("mode", ["ssd", "host"])
def test_on_a_device_that_lags_behind_masks_come_back_and_nothing_waits(offload_config, mode):
    device = WaitingDevice()
    engine = OffloadEngine(offload_config(mode=mode, io="buffered", host_budget=1 << 20), device)
    bad = torch.full((NUM,), 3, dtype=torch.uint8)
    try:
        with device.computing(), engine.step():
            packed = engine.hooks.pack(new_mask())
            stays = engine.hooks.pack((bad * 1).view(torch.bool))
            settle(engine)
            assert torch.equal(engine.hooks.unpack(packed), new_mask())
            assert torch.equal(engine.hooks.unpack(stays).view(torch.uint8), bad)
        assert engine.statistics.read_bytes + engine.statistics.host_read_bytes == BITS
        assert device.num_waits == 0
    finally:
        engine.close()


def test_an_expanded_tensor_moves_as_what_its_storage_holds(engine):
    row = torch.arange(1000.0)
    with engine.step():
        packed = engine.hooks.pack(row.expand(300, 1000))
        flags = engine.hooks.pack(new_mask(100).view(100, 1).expand(100, 500))
        settle(engine)
        assert engine.statistics.offloaded_bytes == 4000 + bits_bytes(100)
        restored = engine.hooks.unpack(packed)
        assert torch.equal(restored, row.expand(300, 1000)) and restored.stride() == (0, 1)
        restored = engine.hooks.unpack(flags)
        assert torch.equal(restored[:, 499], new_mask(100)) and restored.stride() == (1, 0)
        assert restored.untyped_storage().nbytes() == 100
