# SPDX-License-Identifier: Apache-2.0
"""A tape and its prefetcher: they hold no record alive, and read for the pass under way only."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from megatron.offload import Scope
from megatron.offload.restore.prefetch import Prefetcher, Tape
from megatron.offload.saved.record import SavedStorage, State


def on_tier(num_bytes: int = 64) -> SavedStorage:
    """A record whose bytes only a tier has."""
    record = SavedStorage(torch.UntypedStorage(num_bytes), Scope(), 0)
    record.state, record._memory, record.num_unused_views = State.ON_TIER, None, 1
    return record


class Reads:
    """Notes what was begun, and nothing that would keep it alive."""

    def __init__(self, error: Exception | None = None) -> None:
        self.sizes: list[int] = []
        self._error = error

    def __call__(self, record: SavedStorage, _: float) -> bool:
        if self._error is not None:
            raise self._error
        self.sizes.append(record.num_bytes)
        record.state = State.READING
        return True


def on_tape(records: list[SavedStorage]) -> Tape:
    tape = Tape()
    for record in records:
        tape.append(record)
    return tape


def test_a_dropped_record_is_neither_held_nor_read() -> None:
    reads = Reads()
    prefetcher = Prefetcher(reads, 1 << 20)
    records = [on_tier(64 + i) for i in range(3)]
    tape, first = on_tape(records), records[0]
    references = [weakref.ref(record) for record in records]
    del records
    assert [reference() is None for reference in references] == [False, True, True]
    prefetcher.start(tape)
    prefetcher.advance()
    assert reads.sizes == [first.num_bytes]


def test_a_record_that_is_read_ahead_is_not_held() -> None:
    record = on_tier()
    prefetcher = Prefetcher(Reads(), 1 << 20)
    prefetcher.start(on_tape([record]))
    prefetcher.advance()
    reference = weakref.ref(record)
    del record
    gc.collect()
    assert reference() is None


def test_a_storage_dropped_while_it_was_ahead_leaves_the_window() -> None:
    reads = Reads()
    prefetcher = Prefetcher(reads, 128)
    records = [on_tier(64 + i) for i in range(4)]
    prefetcher.start(on_tape(records))
    prefetcher.advance()
    assert reads.sizes == [67]
    records.pop()
    prefetcher.advance()
    assert reads.sizes == [67, 66]


def test_what_is_on_its_way_is_not_begun_again() -> None:
    reads = Reads()
    prefetcher = Prefetcher(reads, 1 << 20)
    first, second = on_tier(1), on_tier(2)
    tape = on_tape([first, second, first, second])
    prefetcher.start(tape)
    prefetcher.used(on_tier())
    prefetcher.advance()
    assert reads.sizes == [2, 1] and tape.last() is None


def test_what_compute_began_itself_is_not_ahead() -> None:
    begun: list[SavedStorage] = []
    prefetcher = Prefetcher(lambda record, _: bool(begun.append(record)), 1 << 20)
    records = [on_tier() for _ in range(3)]
    prefetcher.start(on_tape(records))
    prefetcher.advance()
    assert begun == records[::-1], "none of them counts, so each is the first"


def test_what_was_used_before_its_turn_is_not_brought_back() -> None:
    reads = Reads()
    prefetcher = Prefetcher(reads, 1 << 20)
    records = [on_tier(1), on_tier(2)]
    records[1].num_unused_views = 0
    prefetcher.start(on_tape(records))
    prefetcher.advance()
    assert reads.sizes == [1]


def test_what_is_still_to_be_written_stays_in_memory_within_the_window() -> None:
    reads = Reads()
    prefetcher = Prefetcher(reads, 1 << 20)
    records = [SavedStorage(torch.UntypedStorage(64), Scope(), 0) for _ in range(3)]
    for record in records:
        record.queue_write()
        record.num_unused_views = 1
    prefetcher.start(on_tape(records))
    prefetcher.advance()
    assert [record.state for record in records] == [State.QUEUED, State.QUEUED, State.IN_MEMORY]
    assert prefetcher.used(records[2])
    prefetcher.advance()
    assert all(record.state is State.IN_MEMORY for record in records) and reads.sizes == []


def test_a_read_that_cannot_begin_ends_the_read_ahead_of_its_pass() -> None:
    prefetcher = Prefetcher(Reads(MemoryError()), 1 << 20)
    records = [on_tier() for _ in range(3)]
    tape = on_tape(records)
    prefetcher.start(tape)
    with pytest.raises(MemoryError):
        prefetcher.advance()
    prefetcher.advance()
    assert tape.last() is records[-1] and records[-1].state is State.ON_TIER


def test_between_backward_passes_nothing_is_read() -> None:
    reads = Reads()
    prefetcher = Prefetcher(reads, 1 << 20)
    records = [on_tier() for _ in range(3)]
    prefetcher.start(on_tape(records))
    prefetcher.advance()
    prefetcher.stop()
    assert prefetcher.used(records[-1])
    prefetcher.advance()
    assert len(reads.sizes) == 1
