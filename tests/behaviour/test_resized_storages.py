# SPDX-License-Identifier: Apache-2.0
"""Storages that somebody frees under everybody's hands and fills again: recomputation does that."""

from __future__ import annotations

import torch

from tests.models import settle, ssd


def test_freed_before_its_write_began_it_is_not_written(make_engine, write_gate):
    engine = make_engine(io="buffered", threads=1)
    with engine.step():
        first = engine._hooks.pack(torch.zeros(1024))
        write_gate.wait_for_arrival()
        tensor = torch.zeros(1 << 20)  # large: its memory is unmapped when it is freed
        packed = engine._hooks.pack(tensor)
        tensor.untyped_storage().resize_(0)
        write_gate.open.set()
        settle(engine)
        assert not ssd(engine).degraded, "that is no fault of the drive"
        tensor.untyped_storage().resize_(4 << 20)
        tensor.detach().data.fill_(7.0)
        assert torch.equal(engine._hooks.unpack(packed), torch.full((1 << 20,), 7.0))
        assert torch.equal(engine._hooks.unpack(first), torch.zeros(1024))


def test_freed_after_it_was_written_it_is_read(engine):
    tensor = torch.full((1024,), 3.0)
    with engine.step():
        packed = engine._hooks.pack(tensor)
        settle(engine)
        tensor.untyped_storage().resize_(0)
        assert torch.equal(engine._hooks.unpack(packed), torch.full((1024,), 3.0))
    assert engine.statistics.read_bytes == 4096
