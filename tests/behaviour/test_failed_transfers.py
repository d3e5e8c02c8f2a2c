# SPDX-License-Identifier: Apache-2.0
"""Invariant 6: a failed write loses nothing, a failed read is an error that says where."""

from __future__ import annotations

import errno
import logging
import os

import pytest
import torch

from megatron.offload import StorageError
from megatron.offload.tiers import file as file_module
from tests.support.models import Model, assert_same, run_step, settle, ssd


def test_failed_writes_keep_the_bytes_and_warn_once(make_engine, monkeypatch, caplog):
    model, x = Model(), torch.randn(3, 17, 32)
    plain = run_step(model, x)
    engine = make_engine(io="buffered")

    def refuse(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(file_module.os, "pwritev", refuse)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_same(run_step(model, x, engine), plain)
    assert ssd(engine).degraded
    assert sum("nothing is lost" in message for message in caplog.messages) == 1
    assert engine.statistics.rejected_bytes > 0 and engine.statistics.written_bytes == 0


def test_short_reads_and_writes_are_continued(engine, monkeypatch):
    pwritev, preadv = os.pwritev, os.preadv
    calls = []

    def shorten(call):
        def short(fd, buffers, offset, flags):
            calls.append(offset)
            return call(fd, [buffers[0][:1000]], offset, flags)

        return short

    monkeypatch.setattr(file_module.os, "pwritev", shorten(pwritev))
    monkeypatch.setattr(file_module.os, "preadv", shorten(preadv))
    model, x = Model(), torch.randn(3, 17, 32)
    plain = run_step(model, x)
    assert_same(run_step(model, x, engine), plain)
    assert len(calls) > 2 * engine.statistics.offloaded_storages


@pytest.mark.parametrize("end_of_file", [True, False])
def test_a_failed_read_names_rank_scope_place_and_errno(engine, monkeypatch, end_of_file):
    with engine.step():
        packed = engine.hooks.pack(torch.randn(1024))
        settle(engine)

        def fail(*_):
            if end_of_file:
                return 0
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(file_module.os, "preadv", fail)
        with pytest.raises(StorageError) as raised:
            engine.hooks.unpack(packed)
    message = str(raised.value)
    for part in ("rank 0", "chunk 0 micro-batch 0", "offset 0", "length 4096", "Errno 5"):
        assert part in message
    assert ("short read: got 0 of 4096" in message) is end_of_file
