# SPDX-License-Identifier: Apache-2.0
"""Staging buffers: where they lie, whose they are, and that their memory is pinned and unpinned."""

from __future__ import annotations

import ctypes
import logging
import threading

import pytest

from megatron.offload.device.open import open_device
from megatron.offload.tiers.staging import PIECE_BYTES, StagingPool
from tests.support.fake_cuda import FakeCuda
from tests.support.simulated_device import SimulatedDevice
from tests.support.waiting import SOON_S


def test_buffers_are_pinned_at_once_and_unpinned_at_the_end(fake_cuda: FakeCuda) -> None:
    pool = StagingPool(3, open_device("cuda"))
    assert (
        list(fake_cuda.pinned.values()) == [3 * PIECE_BYTES] and pool.size_bytes == 3 * PIECE_BYTES
    )
    with pool.buffer() as buffer:
        address = buffer.address
        (start,) = fake_cuda.pinned
        assert start <= address <= start + 2 * PIECE_BYTES
        ctypes.memset(address, 1, PIECE_BYTES)
    pool.close()
    assert not fake_cuda.pinned


def test_where_the_system_refuses_to_pin_buffers_are_pageable_and_it_is_said(
    fake_cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    fake_cuda.accepts = 0
    with caplog.at_level(logging.WARNING):
        pool = StagingPool(2, open_device("cuda"))
    assert "are pageable memory" in caplog.text and "ulimit -l" in caplog.text
    assert not fake_cuda.has_error  # else torch would raise it at its next kernel
    with pool.buffer() as first, pool.buffer() as second:
        ctypes.memset(first.address, 1, PIECE_BYTES)
        ctypes.memset(second.address, 2, PIECE_BYTES)
        assert ctypes.string_at(first.address, 1) == b"\1"
    pool.close()


def test_who_finds_no_buffer_waits_for_one() -> None:
    pool = StagingPool(1, open_device("cpu"), piece_bytes=4096)
    taken: list[int] = []

    def take() -> None:
        with pool.buffer() as buffer:
            taken.append(buffer.address)

    thread = threading.Thread(target=take, daemon=True)
    with pool.buffer() as buffer:
        thread.start()
        thread.join(timeout=0.1)
        assert not taken
    thread.join(timeout=SOON_S)
    assert taken == [buffer.address]
    pool.close()


def test_a_pool_that_is_closed_waits_for_copies_from_its_buffers() -> None:
    device = SimulatedDevice()
    pool, target = StagingPool(2, device, piece_bytes=4096), device.new_restored(64)
    with pool.buffer() as buffer:
        ctypes.memset(buffer.address, 3, 64)
        buffer.event = device.copy_from_host(buffer.address, target)
    pool.close()
    assert buffer.event.happened.is_set()
    assert ctypes.string_at(target.data_ptr(), 64) == b"\3" * 64
