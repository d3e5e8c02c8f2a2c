# SPDX-License-Identifier: Apache-2.0
"""A tape and its prefetcher: they hold no record alive, and read for the pass under way only."""

from __future__ import annotations

import gc
import weakref

import torch

from megatron.offload import Scope
from megatron.offload.restore.prefetch import Prefetcher, Tape
from megatron.offload.saved.record import SavedStorage, State


def on_tier(num_bytes: int = 64) -> SavedStorage:
    """A record whose bytes only a tier has."""
    record = SavedStorage(torch.UntypedStorage(num_bytes), Scope(), 0)
    record.state, record._memory = State.ON_TIER, None
    return record


def test_a_dropped_record_is_neither_held_nor_read() -> None:
    begun: list[SavedStorage] = []
    tape, prefetcher = Tape(), Prefetcher(lambda record, _: begun.append(record), 1 << 20)
    records = [on_tier() for _ in range(3)]
    for record in records:
        tape.append(record)
    first = records[0]
    references = [weakref.ref(record) for record in records]
    del record, records
    assert [reference() is None for reference in references] == [False, True, True]
    prefetcher.start(tape)
    assert begun == [first]


def test_a_record_that_is_read_ahead_is_not_held() -> None:
    tape, prefetcher = Tape(), Prefetcher(lambda record, _: None, 1 << 20)
    record = on_tier()
    tape.append(record)
    prefetcher.start(tape)
    reference = weakref.ref(record)
    del record
    gc.collect()
    assert reference() is None


def test_a_storage_dropped_while_it_was_ahead_leaves_the_window() -> None:
    begun: list[int] = []
    tape, prefetcher = Tape(), Prefetcher(lambda record, _: begun.append(record.num_bytes), 128)
    records = [on_tier(64 + i) for i in range(4)]
    for record in records:
        tape.append(record)
    del record
    prefetcher.start(tape)
    assert begun == [67]
    records.pop()
    prefetcher.advance()
    assert begun == [67, 66]


def test_what_is_on_its_way_is_not_begun_again() -> None:
    begun: list[SavedStorage] = []

    def begin(record: SavedStorage, _: float) -> None:
        record.state = State.READING
        begun.append(record)

    tape, prefetcher = Tape(), Prefetcher(begin, 1 << 20)
    first, second = on_tier(), on_tier()
    for record in (first, second, first, second):
        tape.append(record)
    prefetcher.start(tape)
    prefetcher.advance()
    assert begun == [second, first] and tape.last() is None


def test_between_backward_passes_nothing_is_read() -> None:
    begun: list[SavedStorage] = []
    tape, prefetcher = Tape(), Prefetcher(lambda record, _: begun.append(record), 1 << 20)
    records = [on_tier() for _ in range(3)]
    for record in records:
        tape.append(record)
    prefetcher.start(tape)
    prefetcher.stop()
    prefetcher.used(begun[0])
    prefetcher.advance()
    assert len(begun) == 1
