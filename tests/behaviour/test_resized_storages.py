# SPDX-License-Identifier: Apache-2.0
"""Storages that somebody frees under everybody's hands and fills again: recomputation does that."""

from __future__ import annotations

import threading

import pytest
import torch

from megatron.offload.activations.saved.record import State
from tests.support.models import settle, ssd


def test_freed_before_its_write_began_it_is_not_written(make_engine, write_gate):
    engine = make_engine(io="buffered", threads=1)
    with engine.step():
        first = engine.hooks.pack(torch.zeros(1024))
        write_gate.wait_for_arrival()
        tensor = torch.zeros(1 << 20)  # large: its memory is unmapped when it is freed
        packed = engine.hooks.pack(tensor)
        engine.dispatcher.drain()  # its write is queued
        tensor.untyped_storage().resize_(0)
        write_gate.open.set()
        settle(engine)
        assert not ssd(engine).degraded, "that is no fault of the drive"
        tensor.untyped_storage().resize_(4 << 20)
        tensor.detach().data.fill_(7.0)
        assert torch.equal(engine.hooks.unpack(packed), torch.full((1 << 20,), 7.0))
        assert torch.equal(engine.hooks.unpack(first), torch.zeros(1024))


@pytest.mark.parametrize("mode", ["ssd", "host", "tiered"])
def test_freed_before_its_write_was_queued_it_is_not_written(make_engine, caplog, mode):
    engine = make_engine(mode=mode, host_budget=64 << 20)
    hold = threading.Event()
    engine.dispatcher.submit(lambda: hold.wait(10))
    with engine.step():
        tensor = torch.zeros(1 << 20)
        packed = engine.hooks.pack(tensor)
        tensor.untyped_storage().resize_(0)
        hold.set()
        settle(engine)
        assert packed.saved.state is State.IN_MEMORY and not caplog.records
        tensor.untyped_storage().resize_(4 << 20)
        tensor.detach().data.fill_(7.0)
        assert torch.equal(engine.hooks.unpack(packed), torch.full((1 << 20,), 7.0))
    assert engine.statistics.written_bytes == engine.statistics.host_written_bytes == 0


def test_freed_after_it_was_written_it_is_read(engine):
    tensor = torch.full((1024,), 3.0)
    with engine.step():
        packed = engine.hooks.pack(tensor)
        settle(engine)
        tensor.untyped_storage().resize_(0)
        assert torch.equal(engine.hooks.unpack(packed), torch.full((1024,), 3.0))
    assert engine.statistics.read_bytes == 4096


@pytest.mark.parametrize("is_filled_at_once", [True, False])
def test_freed_while_it_is_written_it_is_as_it_was_filled_again(
    make_engine, write_gate, is_filled_at_once
):
    engine = make_engine(io="buffered", threads=1)

    def fill_again():
        others.extend(torch.full((1 << 20,), 9.0) for _ in range(8))  # takes the old memory
        tensor.untyped_storage().resize_(4 << 20)
        tensor.detach().data.fill_(7.0)

    with engine.step():
        others: list[torch.Tensor] = []
        tensor = torch.full((1 << 20,), 7.0)
        packed = engine.hooks.pack(tensor)
        write_gate.wait_for_arrival()
        tensor.untyped_storage().resize_(0)
        if is_filled_at_once:
            fill_again()
        write_gate.open.set()
        settle(engine)
        if not is_filled_at_once:
            fill_again()
        assert torch.equal(engine.hooks.unpack(packed), torch.full((1 << 20,), 7.0))
        assert not ssd(engine).degraded, "that is no fault of the drive"


def test_freed_while_it_is_written_and_filled_again_elsewhere(make_engine, write_gate):
    engine = make_engine(io="buffered", threads=1)
    num_bytes = 64 << 20  # more than the allocator keeps for reuse: what is freed is unmapped
    with engine.step():
        tensor = torch.full((num_bytes // 4,), 7.0)
        packed = engine.hooks.pack(tensor)
        write_gate.wait_for_arrival()
        before = tensor.data_ptr()
        tensor.untyped_storage().resize_(0)
        in_its_place = torch.empty(num_bytes // 4)
        tensor.untyped_storage().resize_(num_bytes)
        tensor.detach().data.fill_(7.0)
        assert tensor.data_ptr() != before
        del in_its_place  # now nothing is where the write reads from
        write_gate.open.set()
        settle(engine)
        assert torch.equal(engine.hooks.unpack(packed), tensor)
        assert not ssd(engine).degraded, "that is no fault of the drive"
