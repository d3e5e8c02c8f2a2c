# SPDX-License-Identifier: Apache-2.0
"""A save order and its prefetcher hold no record alive, and read for the pass under way only."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from megatron.offload import Scope
from megatron.offload.activations.saved.record import SavedStorage, State
from megatron.offload.activations.saved.save_order import SaveOrder
from megatron.offload.activations.transfer.prefetcher import Prefetcher
from megatron.offload.tiers.budget import ByteBudget


def on_tier(num_bytes: int = 64) -> SavedStorage:
    """A record whose bytes only a tier has."""
    record = SavedStorage(torch.UntypedStorage(num_bytes), Scope(), 0)
    record.state, record._memory, record.num_unused_views = State.ON_TIER, None, 1
    return record


class Reads:
    """Notes what was begun, and nothing that would keep it alive."""

    def __init__(self, error: Exception | None = None) -> None:
        self.sizes: list[int] = []
        self.error = error

    def __call__(self, record: SavedStorage, _: float) -> bool:
        if self.error is not None:
            raise self.error
        self.sizes.append(record.num_bytes)
        record.state = State.READING
        return True


def on_save_order(records: list[SavedStorage]) -> SaveOrder:
    save_order = SaveOrder()
    for record in records:
        save_order.append(record)
    return save_order


def test_a_dropped_record_is_neither_held_nor_read() -> None:
    reads = Reads()
    prefetcher = Prefetcher(reads, ByteBudget(1 << 20))
    records = [on_tier(64 + i) for i in range(3)]
    save_order, first = on_save_order(records), records[0]
    references = [weakref.ref(record) for record in records]
    del records
    assert [reference() is None for reference in references] == [False, True, True]
    prefetcher.start(save_order)
    prefetcher.advance()
    assert reads.sizes == [first.num_bytes]


def test_a_record_that_is_read_ahead_is_not_held() -> None:
    record = on_tier()
    prefetcher = Prefetcher(Reads(), ByteBudget(1 << 20))
    prefetcher.start(on_save_order([record]))
    prefetcher.advance()
    reference = weakref.ref(record)
    del record
    gc.collect()
    assert reference() is None


def test_a_storage_dropped_while_it_was_ahead_leaves_the_window() -> None:
    reads = Reads()
    prefetcher = Prefetcher(reads, ByteBudget(128))
    records = [on_tier(64 + i) for i in range(4)]
    prefetcher.start(on_save_order(records))
    prefetcher.advance()
    assert reads.sizes == [67]
    records.pop()
    prefetcher.advance()
    assert reads.sizes == [67, 66]


def test_what_is_on_its_way_is_not_begun_again() -> None:
    reads = Reads()
    prefetcher = Prefetcher(reads, ByteBudget(1 << 20))
    first, second = on_tier(1), on_tier(2)
    save_order = on_save_order([first, second, first, second])
    prefetcher.start(save_order)
    prefetcher.used(on_tier())
    prefetcher.advance()
    prefetcher.used(second)
    prefetcher.advance()
    assert reads.sizes == [2, 1] and save_order.last() is None


def test_what_compute_began_itself_is_not_ahead() -> None:
    begun: list[SavedStorage] = []
    prefetcher = Prefetcher(lambda record, _: bool(begun.append(record)), ByteBudget(1 << 20))
    records = [on_tier() for _ in range(3)]
    prefetcher.start(on_save_order(records))
    prefetcher.advance()
    assert begun == records[::-1], "none of them counts, so each is the first"


def test_what_is_used_as_soon_as_it_was_begun_leaves_the_window() -> None:
    reads = Reads()

    def begin(record: SavedStorage, number: float) -> bool:
        if not reads.sizes:
            prefetcher.used(record)  # by compute, before this thread goes on
        return reads(record, number)

    prefetcher = Prefetcher(begin, ByteBudget(1))  # one at a time
    records = [on_tier(64 + i) for i in range(3)]
    prefetcher.start(on_save_order(records))
    prefetcher.advance()
    assert reads.sizes == [66, 65]
    prefetcher.advance()
    assert reads.sizes == [66, 65], "the second is ahead"


def test_a_used_storage_makes_room_for_as_much_as_it_held() -> None:
    reads = Reads()
    prefetcher = Prefetcher(reads, ByteBudget(1 << 20))
    records = [on_tier(100) for _ in range(10)]
    prefetcher.start(on_save_order(records))
    prefetcher.advance()
    for num_used in range(1, 8):
        prefetcher.used(records.pop())
        prefetcher.advance()
        assert len(reads.sizes) == num_used + 1, "one is ahead"


def test_room_of_several_storages_is_used_for_one() -> None:
    reads = Reads()
    prefetcher = Prefetcher(reads, ByteBudget(1 << 20))
    records = [on_tier(100), *(on_tier(50) for _ in range(5))]
    prefetcher.start(on_save_order(records))
    prefetcher.advance()
    prefetcher.used(records[5])
    prefetcher.advance()
    assert reads.sizes == [50] * 3, "two are ahead: as much as one of the largest"
    for index in (4, 3):
        prefetcher.used(records[index])
    prefetcher.advance()
    assert reads.sizes == [50] * 5
    for index in (2, 1):
        prefetcher.used(records[index])
    prefetcher.advance()
    assert reads.sizes == [50] * 5 + [100]


def test_each_backward_pass_begins_with_one_storage() -> None:
    reads = Reads()
    prefetcher = Prefetcher(reads, ByteBudget(1 << 20))
    for num_passes in (1, 2):
        reads.sizes.clear()
        records = [on_tier(200), *(on_tier(64) for _ in range(4))]  # the window holds 200
        prefetcher.start(on_save_order(records))
        prefetcher.advance()
        assert reads.sizes == [64], num_passes
        prefetcher.used(records.pop())
        prefetcher.advance()
        assert reads.sizes == [64] * 4, num_passes
        prefetcher.stop()
        for record in records:
            prefetcher.used(record)


def uses(prefetcher: Prefetcher, records: list[SavedStorage]) -> list[bool]:
    """Uses them from the last on; which of these uses the read-ahead is to hear of."""
    heard = []
    while records:
        heard.append(prefetcher.used(records.pop()))
        if heard[-1]:
            prefetcher.advance()
    return heard


def test_the_read_ahead_hears_of_the_first_use_and_whenever_half_of_the_window_was_used() -> None:
    prefetcher = Prefetcher(Reads(), ByteBudget(1 << 20))
    sizes = [100] * 3 + [200] + [50] * 8
    records = [on_tier(size) for size in sizes]
    prefetcher.start(on_save_order(records))
    prefetcher.advance()
    # 100 bytes of 200: two of the small ones, then the large one, then one by one.
    assert uses(prefetcher, records) == [True, *[False, True] * 3, *[True] * 4, False]


def test_a_storage_used_more_than_once_counts_once() -> None:
    prefetcher = Prefetcher(Reads(), ByteBudget(1 << 20))
    records = [on_tier(200), *(on_tier(50) for _ in range(6))]
    prefetcher.start(on_save_order(records))
    prefetcher.used(on_tier())
    prefetcher.advance()  # four are ahead
    assert not any(prefetcher.used(records[-1]) for _ in range(4))
    assert prefetcher.used(records[-2])


@pytest.mark.parametrize(
    ("budget_bytes", "num_small", "heard"),
    [
        (50, 5, [True, False, True, False, True, False]),  # less than the largest
        (100, 2, [True, True, False]),  # the second is all that there is room for beside it
    ],
)
def test_the_read_ahead_hears_when_all_was_used_however_little_that_is(
    budget_bytes: int, num_small: int, heard: list[bool]
) -> None:
    reads = Reads()
    prefetcher = Prefetcher(reads, ByteBudget(budget_bytes))
    records = [on_tier(100), *(on_tier(20) for _ in range(num_small))]
    prefetcher.start(on_save_order(records))
    prefetcher.advance()
    assert uses(prefetcher, records) == heard
    assert reads.sizes == [20] * num_small + [100]


def test_the_read_ahead_hears_of_what_was_not_ahead_if_it_is_the_first_or_all_others_died() -> None:
    reads = Reads()
    prefetcher = Prefetcher(reads, ByteBudget(1 << 20))
    records = [on_tier() for _ in range(6)]
    prefetcher.start(on_save_order(records))
    prefetcher.advance()
    assert prefetcher.used(on_tier()) and not prefetcher.used(on_tier())
    prefetcher.advance()
    assert len(reads.sizes) == 1
    del records[-1]
    assert prefetcher.used(records.pop())
    prefetcher.advance()
    assert len(reads.sizes) == 2


def test_the_read_ahead_hears_of_no_use_when_all_is_read() -> None:
    prefetcher = Prefetcher(Reads(), ByteBudget(1 << 20))
    records = [on_tier() for _ in range(3)]
    prefetcher.start(on_save_order(records))
    prefetcher.advance()
    assert uses(prefetcher, records) == [True, True, False]


@pytest.mark.parametrize("state", [State.QUEUED, State.WRITING, State.ON_TIER])
def test_what_is_or_may_soon_be_away_is_brought_back(state: State) -> None:
    reads = Reads()
    prefetcher = Prefetcher(reads, ByteBudget(1 << 20))
    record = on_tier()
    if state is not State.ON_TIER:
        record.state, record._memory = state, torch.UntypedStorage(64)
    prefetcher.start(on_save_order([record]))
    prefetcher.advance()
    assert record.state is (State.READING if state is State.ON_TIER else State.IN_MEMORY)
    assert prefetcher._ahead_bytes == 64


@pytest.mark.parametrize("state", [State.IN_MEMORY, State.READING, State.RESTORED])
def test_what_is_there_or_on_its_way_takes_no_room(state: State) -> None:
    reads = Reads()
    prefetcher = Prefetcher(reads, ByteBudget(1 << 20))
    record = on_tier()
    record.state, record._memory = state, torch.UntypedStorage(64)
    save_order = on_save_order([record])
    prefetcher.start(save_order)
    prefetcher.advance()
    assert record.state is state and reads.sizes == [] and prefetcher._ahead_bytes == 0
    assert save_order.last() is None


def test_what_was_used_before_its_turn_is_not_brought_back() -> None:
    reads = Reads()
    prefetcher = Prefetcher(reads, ByteBudget(1 << 20))
    records = [on_tier(1), on_tier(2)]
    records[1].num_unused_views = 0
    prefetcher.start(on_save_order(records))
    prefetcher.advance()
    assert reads.sizes == [1]


def test_what_is_still_to_be_written_stays_in_memory_within_the_window() -> None:
    reads = Reads()
    prefetcher = Prefetcher(reads, ByteBudget(1 << 20))
    records = [SavedStorage(torch.UntypedStorage(64), Scope(), 0) for _ in range(3)]
    for record in records:
        record.queue_write()
        record.num_unused_views = 1
    prefetcher.start(on_save_order(records))
    prefetcher.advance()
    assert [record.state for record in records] == [State.QUEUED, State.QUEUED, State.IN_MEMORY]
    for index in (2, 1):
        assert prefetcher.used(records[index])
        prefetcher.advance()
    assert all(record.state is State.IN_MEMORY for record in records) and reads.sizes == []


def test_what_was_passed_without_a_read_does_not_widen_the_window() -> None:
    """Logits: saved last, as a rule the largest, and used when memory is scarcest."""
    reads = Reads()
    prefetcher = Prefetcher(reads, ByteBudget(1 << 20))
    logits = SavedStorage(torch.UntypedStorage(6400), Scope(), 0)
    logits.queue_write()
    logits.num_unused_views = 1
    records = [*(on_tier(100) for _ in range(6)), logits]
    prefetcher.start(on_save_order(records))
    prefetcher.advance()
    prefetcher.used(logits)
    prefetcher.advance()
    assert reads.sizes == [100]


def test_a_window_forgets_what_other_passes_read() -> None:
    reads = Reads()
    prefetcher = Prefetcher(reads, ByteBudget(1 << 20))
    for sizes, expected in (([1000], [1000]), ([10] * 9, [10] * 2)):
        reads.sizes.clear()
        records = [on_tier(size) for size in sizes]
        prefetcher.start(on_save_order(records))
        prefetcher.advance()
        prefetcher.used(records.pop())
        prefetcher.advance()
        assert reads.sizes == expected
        prefetcher.stop()


def test_a_read_that_cannot_begin_ends_the_read_ahead_of_its_pass() -> None:
    reads = Reads(MemoryError())
    prefetcher = Prefetcher(reads, ByteBudget(1 << 20))
    records = [on_tier() for _ in range(3)]
    save_order = on_save_order(records)
    prefetcher.start(save_order)
    with pytest.raises(MemoryError):
        prefetcher.advance()
    prefetcher.advance()
    assert save_order.last() is records[-1] and records[-1].state is State.ON_TIER
    reads.error = None
    prefetcher.start(on_save_order(records))
    prefetcher.advance()
    assert reads.sizes == [64], "what could not be read takes no room"


def test_between_backward_passes_nothing_is_read() -> None:
    reads = Reads()
    prefetcher = Prefetcher(reads, ByteBudget(1 << 20))
    records = [on_tier() for _ in range(3)]
    prefetcher.start(on_save_order(records))
    prefetcher.advance()
    prefetcher.stop()
    assert prefetcher.used(records[-1])
    prefetcher.advance()
    assert len(reads.sizes) == 1
