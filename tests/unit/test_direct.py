# SPDX-License-Identifier: Apache-2.0
"""How buffers are cut for direct I/O."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron.offload.storage.direct import BUFFERED, Alignment, cut


@given(
    st.integers(0, 1 << 20),
    st.integers(0, 1 << 20),
    st.sampled_from([1, 4, 512, 4096]),
    st.sampled_from([512, 4096]),
)
def test_the_body_is_aligned_and_nothing_is_lost(address, num_bytes, memory, offset):
    head, body, tail = cut(address, num_bytes, Alignment(memory, offset))
    assert min(head, body, tail) >= 0 and head + body + tail == num_bytes
    assert body % offset == 0
    assert body == 0 or (address + head) % memory == 0
    assert head < memory and (tail < offset or num_bytes - head < offset)


def test_buffered_io_has_no_edges():
    assert cut(12345, 678, BUFFERED) == (0, 678, 0)
