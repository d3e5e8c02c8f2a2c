# SPDX-License-Identifier: Apache-2.0
"""Staging buffers: where they lie, whose they are, and that their memory is pinned and unpinned."""

from __future__ import annotations

import ctypes
import logging
import threading

import pytest
import torch

from megatron.offload.device import cuda as cuda_module
from megatron.offload.tiers.staging import PIECE_BYTES, StagingPool


class Runtime:
    """CUDA's runtime, as far as pinning goes."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.refuses = False

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if not self.refuses:
            self.pinned[address] = num_bytes
        return int(self.refuses)

    def cudaHostUnregister(self, address: int) -> int:
        ctypes.string_at(address, 1)  # would end the process if it were unmapped
        del self.pinned[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()

    def check(result: int) -> None:
        if result:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    monkeypatch.setattr(cuda_module, "_forget_error", lambda: None)
    return runtime


def test_buffers_are_pinned_at_once_and_unpinned_at_the_end(runtime: Runtime) -> None:
    pool = StagingPool(3, pinned=True)
    assert list(runtime.pinned.values()) == [3 * PIECE_BYTES] and pool.size_bytes == 3 * PIECE_BYTES
    with pool.buffer() as address:
        (start,) = runtime.pinned
        assert start <= address <= start + 2 * PIECE_BYTES
        ctypes.memset(address, 1, PIECE_BYTES)
    pool.close()
    assert not runtime.pinned


def test_where_the_system_refuses_to_pin_buffers_are_pageable_and_it_is_said(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.refuses = True
    with caplog.at_level(logging.WARNING):
        pool = StagingPool(2, pinned=True)
    assert "are pageable memory" in caplog.text and "ulimit -l" in caplog.text
    with pool.buffer() as first, pool.buffer() as second:
        ctypes.memset(first, 1, PIECE_BYTES)
        ctypes.memset(second, 2, PIECE_BYTES)
        assert ctypes.string_at(first, 1) == b"\1"
    pool.close()


def test_who_finds_no_buffer_waits_for_one() -> None:
    pool = StagingPool(1, piece_bytes=4096)
    taken: list[int] = []

    def take() -> None:
        with pool.buffer() as address:
            taken.append(address)

    thread = threading.Thread(target=take, daemon=True)
    with pool.buffer() as address:
        thread.start()
        thread.join(timeout=0.1)
        assert not taken
    thread.join(timeout=10)
    assert taken == [address]
    pool.close()
