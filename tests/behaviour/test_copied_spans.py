# SPDX-License-Identifier: Apache-2.0
"""Invariant 2 for a view of a small part of a storage: its span alone moves, and is itself."""

from __future__ import annotations

import contextlib

import pytest
import torch

from megatron.offload import Scope
from tests.support.models import settle

ALIGNED = 256  # bytes; a part is copied from a multiple of these on


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
        packed = [engine.hooks.pack(part) for part in parts]
        settle(engine)
        del base, parts
        assert engine.statistics.offloaded_storages == 3, "two of them are the same bytes"
        before_bytes = [400 % ALIGNED, 1284 % ALIGNED, 12002 % ALIGNED]
        assert engine.statistics.offloaded_bytes == 400 + 4 * 125 + 2 * 76 + sum(before_bytes)
        for view, wanted, stride in zip(packed, expected, strides, strict=True):
            restored = engine.hooks.unpack(view)
            assert torch.equal(restored, wanted) and restored.dtype == wanted.dtype
            assert restored.stride() == stride


def test_a_part_of_a_freed_storage_and_of_a_new_one_in_its_place_are_two(engine):
    with engine.step():
        packed = []
        for value in range(50):
            packed.append(engine.hooks.pack(torch.full((4096,), float(value))[8:108]))
            settle(engine)
        for value, view in enumerate(packed):
            assert torch.equal(engine.hooks.unpack(view), torch.full((100,), float(value)))


@pytest.mark.parametrize("is_small", [True, False])
def test_a_part_changed_between_two_saves_is_saved_twice(engine, is_small):
    base = torch.zeros(4096)
    part = base[8:108] if is_small else base
    with engine.step():
        before = engine.hooks.pack(part)
        settle(engine)
        part.add_(1)
        after = engine.hooks.pack(part)
        settle(engine)
        assert engine.statistics.offloaded_storages == 2
        assert torch.equal(engine.hooks.unpack(after), torch.ones_like(part))
        del before


def test_a_copied_span_does_not_keep_its_storage_alive(engine):
    base = torch.zeros(4096)
    weak = base.untyped_storage()._weak_ref()
    with engine.step():
        packed = engine.hooks.pack(base[8:108])
        del base
        assert torch.UntypedStorage._expired(weak)
        assert torch.equal(engine.hooks.unpack(packed), torch.zeros(100))
    torch.UntypedStorage._free_weak_ref(weak)


def test_a_part_that_a_layer_saved_moves_alone(engine):
    x = torch.randn(4096, requires_grad=True)
    with engine.step(), engine.forward(Scope()) as save_order:
        part = x.neg()[8:108].sin()  # saves a part
        engine.capture(Scope(), [part], [x])
        settle(engine)
        assert engine.statistics.offloaded_bytes == 400 + 32 % ALIGNED
        total = part.sum()
        del part
        with engine.backward(save_order):
            total.backward()
    assert torch.equal(x.grad[8:108], -x.detach()[8:108].neg().cos())


def test_parts_that_cover_a_storage_move_as_one(engine):
    x = torch.randn(4096, requires_grad=True)
    with engine.step(), engine.forward(Scope()) as save_order:
        middle = x.neg()
        parts = [part.sin() for part in middle.chunk(4)]  # each saves its part
        engine.capture(Scope(), parts, [x])
        settle(engine)
        assert engine.statistics.offloaded_storages == 1
        assert engine.statistics.offloaded_bytes == 4 * 4096
        total = sum(part.sum() for part in parts)
        del middle, parts
        with engine.backward(save_order):
            total.backward()
    assert torch.equal(x.grad, -x.detach().neg().cos())


def test_what_an_operation_fills_after_it_saved_it_is_copied_then(engine):
    def gradient(*, offloads: bool) -> torch.Tensor:
        torch.manual_seed(1)
        x, noise = torch.randn(1000, requires_grad=True), torch.zeros(10000)[:1000]
        hooks = engine.saved_tensors_hooks() if offloads else contextlib.nullcontext()
        with engine.step(), hooks:
            y = torch._C._nn.rrelu_with_noise(x * 1, noise, 0.1, 0.3, True)
        settle(engine)
        y.sum().backward()
        return x.grad

    assert torch.equal(gradient(offloads=True), gradient(offloads=False))


class Accumulate(torch.autograd.Function):
    """Its backward adds to a buffer that it saved."""

    @staticmethod
    def forward(ctx, x, buffer):
        ctx.save_for_backward(buffer)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        ctx.saved_tensors[0].add_(gradient)
        return gradient, None


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("on_tier", [True, False])
def test_what_backward_writes_into_a_part_is_seen_by_all_of_the_storage(
    engine, write_gate, captured, on_tier
):
    buffer, x = torch.zeros(10000), torch.ones(1000, requires_grad=True)
    with engine.step():
        with contextlib.nullcontext() if captured else engine.saved_tensors_hooks():
            y = Accumulate.apply(x, buffer[2000:3000])
        if captured:
            engine.capture(Scope(), [y], [x])
        if on_tier:
            write_gate.open.set()
            settle(engine)
        y.sum().backward()
        write_gate.open.set()
    assert engine.statistics.offloaded_storages == 1
    assert buffer.sum() == 1000 and buffer[2000] == 1


def test_no_more_than_the_part_is_written(engine):
    with engine.step():
        packed = engine.hooks.pack(torch.arange(4096.0)[100:200])
        settle(engine)
    assert engine.statistics.written_bytes == 400 + 400 % ALIGNED
    assert torch.equal(engine.hooks.unpack(packed), torch.arange(100.0, 200.0))


@pytest.mark.parametrize("first", [1, 501, 513])
def test_a_part_is_as_aligned_as_it_was(engine, first):
    """Matrix products of other kernels have other last bits."""
    torch.manual_seed(1)
    base, row = torch.randn(3000, 65, dtype=torch.float64), torch.randn(65, dtype=torch.float64)
    part = base[first:][:999]
    address, expected = part.data_ptr(), part @ row
    with engine.step():
        packed = engine.hooks.pack(part)
        del base, part
        settle(engine)
        restored = engine.hooks.unpack(packed)
    assert (restored.data_ptr() - address) % 64 == 0, "torch aligns memory so"
    assert torch.equal(restored @ row, expected)


@pytest.mark.parametrize("mode", ["ssd", "host", "tiered"])
def test_a_part_without_elements_stays_whatever_may_move(make_engine, mode):
    engine = make_engine(mode=mode, min_bytes=0)
    with engine.step():
        packed = engine.hooks.pack(torch.zeros(64, 64)[:, :0])
        settle(engine)
        assert engine.hooks.unpack(packed).shape == (64, 0)
        assert engine.statistics.offloaded_storages == 0
