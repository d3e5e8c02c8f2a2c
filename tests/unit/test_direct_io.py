# SPDX-License-Identifier: Apache-2.0
"""How buffers are cut for direct I/O."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.offload.tiers.direct_io import BUFFERED, Alignment, cut, parts


@given(
    st.integers(0, 1 << 20),
    st.integers(0, 1 << 20),
    st.sampled_from([1, 4, 512, 4096]),
    st.sampled_from([512, 4096]),
)
def test_the_body_is_aligned_and_nothing_is_lost(address, num_bytes, memory, offset):
    head, body, tail = parts(address, num_bytes, Alignment(memory, offset))
    assert min(head, body, tail) >= 0 and head + body + tail == num_bytes
    assert body % offset == 0
    assert body == 0 or (address + head) % memory == 0
    assert head < memory and (tail < offset or num_bytes - head < offset)


def test_buffered_io_has_no_edges():
    assert parts(12345, 678, BUFFERED) == (0, 678, 0)


def test_a_cut_keeps_the_bytes_of_the_edges():
    memory = torch.arange(256, dtype=torch.uint8).repeat(64)
    pieces = cut(memory.data_ptr() + 1, 16_000, Alignment(512, 4096))
    start = 1 + len(pieces.head)
    assert (memory.data_ptr() + start) % 512 == 0 and pieces.body_bytes % 4096 == 0
    assert pieces.head == bytes(memory[1:start].tolist())
    assert pieces.tail == bytes(memory[start + pieces.body_bytes : 16_001].tolist())
    assert pieces.num_bytes == len(pieces.head) + pieces.body_bytes + len(pieces.tail) == 16_000
