# SPDX-License-Identifier: Apache-2.0
"""Invariant 2: one storage moves once; each view comes back as it was."""

from __future__ import annotations

import torch

from megatron.offload import OffloadEngine, Placement, Scope
from tests.support.models import settle


def pack_all(engine, tensors):
    return [engine.hooks.pack(tensor) for tensor in tensors]


def test_views_of_one_storage_are_written_once_and_come_back_in_shape(engine):
    base = torch.arange(4096.0)
    views = [
        base,
        base[100:200],
        base.view(64, 64).t(),
        base.view(64, 64)[::2, 1::3],
        base[7].expand(5, 5),
        base.as_strided((10, 20), (3, 1), 5),  # rows overlap
        base.view(torch.int32),
    ]
    expected = [view.clone() for view in views]
    with engine.step():
        packed = pack_all(engine, views)
        settle(engine)
        strides = [view.stride() for view in views]
        offsets = [view.storage_offset() for view in views]
        del base, views
        assert engine.statistics.offloaded_storages == 1
        restored = [engine.hooks.unpack(view) for view in packed]
        assert len({tensor.untyped_storage()._cdata for tensor in restored}) == 1
    for tensor, wanted, stride, offset in zip(restored, expected, strides, offsets, strict=True):
        assert torch.equal(tensor, wanted) and tensor.dtype == wanted.dtype
        assert tensor.stride() == stride and tensor.storage_offset() == offset
    assert engine.statistics.read_bytes == 4096 * 4


def test_a_freed_storage_and_a_new_one_at_its_address_are_two(engine):
    seen = set()
    with engine.step():
        packed = []
        for value in range(50):
            tensor = torch.full((1000,), float(value))
            seen.add(tensor.data_ptr())
            packed += pack_all(engine, [tensor])
            del tensor
            settle(engine)
        assert len(seen) < 50, "the allocator never reused an address: the test shows nothing"
        for value, view in enumerate(packed):
            assert torch.equal(engine.hooks.unpack(view), torch.full((1000,), float(value)))


def test_a_storage_changed_between_two_saves_is_saved_twice(engine):
    tensor = torch.zeros(1000)
    with engine.step():
        (before,) = pack_all(engine, [tensor])
        settle(engine)
        tensor.add_(1)
        (after,) = pack_all(engine, [tensor])
        settle(engine)
        assert engine.statistics.offloaded_storages == 2
        assert torch.equal(engine.hooks.unpack(after), torch.ones(1000))
        del before


def test_the_memory_is_really_given_up(engine):
    tensor = torch.randn(1000, requires_grad=True)
    with engine.step(), engine.forward(Scope()) as save_order:
        middle = tensor * 2
        result = middle.exp()  # saves its result
        engine.capture(Scope(), [result], [tensor])
        weak = result.untyped_storage()._weak_ref()
        total = result.sum()
        del result, middle
        settle(engine)
        assert torch.UntypedStorage._expired(weak)
        with engine.backward(save_order):
            total.backward()
    torch.UntypedStorage._free_weak_ref(weak)
    assert torch.equal(tensor.grad, 2 * (tensor.detach() * 2).exp())


def pack_whole(engine, tensor):
    """As the end of a layer does where several parts of a storage are needed together."""
    move = engine.hooks.find_move(tensor, tensor.untyped_storage(), whole=True)
    batch = engine.new_batch()
    view = engine.hooks.take(tensor, move, batch)
    batch.submit()
    return view


def test_parts_that_count_their_changes_apart_move_each(engine):
    """`unsafe_chunk` makes parts of one storage with a version counter each, all at 0."""
    whole = torch.zeros(2000)
    left, right = whole.unsafe_chunk(2)
    with engine.step():
        left.add_(1)
        before = pack_whole(engine, left)
        settle(engine)
        right.add_(1)
        after = pack_whole(engine, right)  # both have been changed once
        settle(engine)
        del whole, left, right  # or their memory would do
        assert torch.equal(engine.hooks.unpack(after), torch.ones(1000))
        assert torch.equal(engine.hooks.unpack(before), torch.ones(1000))


class ByLayer:
    """Sends what one layer saves to the SSD and keeps what others save; notes what it was asked."""

    def __init__(self):
        self.asked = []

    def replays(self, scope):
        return False

    def encodes(self, scope):
        return False

    def place_layer(self, scope):
        return Placement.SSD if scope.layer == "first" else Placement.KEEP

    def place(self, scope, num_bytes):
        self.asked.append((scope.layer, num_bytes))
        return self.place_layer(scope)


def test_a_storage_has_one_placement_whoever_saves_it_again(offload_config):
    policy = ByLayer()
    engine = OffloadEngine(offload_config(io="buffered"), policy=policy)
    try:
        x = torch.randn(1000, requires_grad=True)
        with engine.step():
            shared = x.exp()  # saves its result
            engine.capture(Scope(layer="first"), [shared], [x])
            y = shared.sin()  # saves it again, and keeps what it saves
            engine.capture(Scope(layer="second"), [y], [shared])
            settle(engine)
            y.sum().backward()
        assert policy.asked == [("first", 4000)]
        assert engine.statistics.deduplicated_bytes == engine.statistics.offloaded_bytes == 4000
    finally:
        engine.close()
    assert torch.equal(x.grad, x.detach().exp().cos() * x.detach().exp())
