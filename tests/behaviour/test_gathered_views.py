# SPDX-License-Identifier: Apache-2.0
"""Invariant 2 for a view of a small part of a storage: its span alone moves, and is itself."""

from __future__ import annotations

import pytest
import torch

from megatron.offload import Scope
from tests.models import settle


def test_two_small_parts_of_one_storage_come_back_each_with_its_own_bytes(engine):
    base = torch.arange(4096.0)
    parts = [
        base[100:200],
        base.view(64, 64)[5:7, 1::3],
        base[3000:3100].view(torch.int16)[1:77],
        base[100:200].view(10, 10).t(),
    ]
    expected = [part.clone() for part in parts]
    strides = [part.stride() for part in parts]
    with engine.step():
        packed = [engine._hooks.pack(part) for part in parts]
        settle(engine)
        del base, parts
        assert engine.statistics.offloaded_storages == 3, "two of them are the same bytes"
        assert engine.statistics.offloaded_bytes == 400 + 4 * 125 + 2 * 76
        for view, wanted, stride in zip(packed, expected, strides, strict=True):
            restored = engine._hooks.unpack(view)
            assert torch.equal(restored, wanted) and restored.dtype == wanted.dtype
            assert restored.stride() == stride


def test_a_part_of_a_freed_storage_and_of_a_new_one_in_its_place_are_two(engine):
    with engine.step():
        packed = []
        for value in range(50):
            packed.append(engine._hooks.pack(torch.full((4096,), float(value))[8:108]))
            settle(engine)
        for value, view in enumerate(packed):
            assert torch.equal(engine._hooks.unpack(view), torch.full((100,), float(value)))


@pytest.mark.parametrize("is_small", [True, False])
def test_a_part_changed_between_two_saves_is_saved_twice(engine, is_small):
    base = torch.zeros(4096)
    part = base[8:108] if is_small else base
    with engine.step():
        before = engine._hooks.pack(part)
        settle(engine)
        part.add_(1)
        after = engine._hooks.pack(part)
        settle(engine)
        assert engine.statistics.offloaded_storages == 2
        assert torch.equal(engine._hooks.unpack(after), torch.ones_like(part))
        del before


def test_a_gathered_part_does_not_keep_its_storage_alive(engine):
    base = torch.zeros(4096)
    weak = base.untyped_storage()._weak_ref()
    with engine.step():
        packed = engine._hooks.pack(base[8:108])
        del base
        assert torch.UntypedStorage._expired(weak)
        assert torch.equal(engine._hooks.unpack(packed), torch.zeros(100))
    torch.UntypedStorage._free_weak_ref(weak)


def test_a_part_that_a_layer_saved_moves_alone(engine):
    x = torch.randn(4096, requires_grad=True)
    with engine.step(), engine.forward(Scope()) as tape:
        part = x.neg()[8:108].sin()  # saves a part
        engine.capture(Scope(), [part], [x])
        settle(engine)
        assert engine.statistics.offloaded_bytes == 400
        total = part.sum()
        del part
        with engine.backward(tape):
            total.backward()
    assert torch.equal(x.grad[8:108], -x.detach()[8:108].neg().cos())


def test_parts_that_cover_a_storage_move_as_one(engine):
    x = torch.randn(4096, requires_grad=True)
    with engine.step(), engine.forward(Scope()) as tape:
        middle = x.neg()
        parts = [part.sin() for part in middle.chunk(4)]  # each saves its part
        engine.capture(Scope(), parts, [x])
        settle(engine)
        assert engine.statistics.offloaded_storages == 1
        assert engine.statistics.offloaded_bytes == 4 * 4096
        total = sum(part.sum() for part in parts)
        del middle, parts
        with engine.backward(tape):
            total.backward()
    assert torch.equal(x.grad, -x.detach().neg().cos())
