# SPDX-License-Identifier: Apache-2.0
"""What moves and has no other copy: threads that meet, interrupts, errors that are of no tier."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.offload.device.cpu import CpuDevice
from megatron.offload.errors import GRADIENTS_PREFIX, LostStateError, OffloadError
from megatron.offload.integration.megatron.whole_training import OffloadedTraining
from megatron.offload.moving import memory
from megatron.offload.moving.bucket import Bucket, divided
from megatron.offload.moving.layout import Layout
from megatron.offload.moving.only_copy import OnlyCopy
from megatron.offload.moving.order import first_to_stay, live_units, most_together
from megatron.offload.moving.storage import Where
from megatron.offload.tiers.mapped import own_pages
from megatron.offload.tiers.ssd import SsdTier
from megatron.offload.tiers.transfer import Transfer

VALUE = torch.arange(1000.0)


class Noting(CpuDevice):
    """Notes which storages its streams were told to use."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[torch.UntypedStorage] = []

    def use_after(self, storage: torch.UntypedStorage, events: Iterable[Any]) -> None:
        self.used.append(storage)


class NeverWrites:
    """A tier whose writes never end."""

    def begin_write(self, source: torch.UntypedStorage, after: Any) -> tuple[Any, Transfer]:
        return self, Transfer(lambda: None)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[SsdTier]:
    made = SsdTier([tmp_path], verify=True)
    yield made
    made.close()


def filled(device: CpuDevice | None = None) -> Bucket:
    layout = Layout({(0, "grad"): VALUE})
    storage = layout.new_storage(torch.device("cpu"))
    layout.store([((0, "grad"), VALUE)], storage)
    bucket = Bucket([torch.zeros(1000)], device or CpuDevice())
    bucket.fill(layout, storage)
    return bucket


def away(tier: SsdTier, device: CpuDevice | None = None) -> Bucket:
    bucket = filled(device)
    assert bucket.begin_write(tier, None)
    bucket.wait_for_write()
    assert bucket.where is Where.ON_TIER
    return bucket


def test_a_thread_that_waits_for_a_write_sees_that_it_was_taken_back() -> None:
    """As where another thread's device memory runs out, which has all streams give up reads."""
    bucket = filled()
    assert bucket.begin_write(NeverWrites(), None)  # type: ignore[arg-type]
    waiting = threading.Thread(target=bucket.wait_for_write, daemon=True)
    waiting.start()
    while not bucket._lock._waiters:  # type: ignore[attr-defined]  # until it waits
        pass
    bucket.take_back()
    waiting.join(60)
    assert not waiting.is_alive() and bucket.where is Where.IN_MEMORY


def test_a_read_that_has_arrived_is_not_given_up_by_another_thread(tier: SsdTier) -> None:
    """The tier has no copy any more."""
    bucket = away(tier)
    bucket.begin_read()
    seen_by_another_thread = bucket._read_under_way()
    assert seen_by_another_thread is not None
    bucket.read()
    bucket._forget_read(seen_by_another_thread)
    assert bucket.where is Where.IN_MEMORY and torch.equal(bucket.views[0, "grad"], VALUE)


def test_a_read_that_another_thread_gave_up_begins_again(
    tier: SsdTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = away(tier)
    wait = Transfer.wait

    def give_up_behind(transfer: Transfer) -> None:
        wait(transfer)
        monkeypatch.setattr(Transfer, "wait", wait)
        bucket.give_up_read()

    monkeypatch.setattr(Transfer, "wait", give_up_behind)
    bucket.read()
    assert bucket.where is Where.IN_MEMORY and torch.equal(bucket.views[0, "grad"], VALUE)


def test_after_an_interrupt_behind_a_read_the_bytes_are_waited_for_all_the_same(
    tier: SsdTier,
) -> None:
    device = Noting()
    bucket = away(tier, device)
    bucket.read()  # and an interrupt before `use_here`
    assert not device.used
    bucket.bring()
    assert [one.data_ptr() for one in device.used] == [bucket.views[0, "grad"].data_ptr()]


@pytest.mark.parametrize("attempt", [1, 2])
def test_an_error_that_is_no_drives_is_not_called_a_lost_state(tier: SsdTier, attempt: int) -> None:
    bucket = away(tier)
    copies = OnlyCopy(GRADIENTS_PREFIX, [tier], CpuDevice(), [bucket], lambda one: "a bucket")
    errors: list[Exception] = [OSError(5, "Input/output error"), OffloadError("gradients: lost")]

    def fails() -> None:
        raise errors[-1] if attempt == 1 else errors.pop(0)

    with pytest.raises(OffloadError, match=r"^gradients: lost$") as raised:
        copies.bring(bucket, fails)
    assert not isinstance(raised.value, LostStateError)


def test_all_streams_of_a_training_close_though_one_raises() -> None:
    closed: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self, **_: Any) -> None:
            closed.append(self.name)
            raise OSError(self.name)

    training = OffloadedTraining(None)  # type: ignore[arg-type]
    training.states, training.parameters = Stream("states"), Stream("parameters")  # type: ignore[assignment]
    training._passes = Stream("activations")  # type: ignore[assignment]
    with pytest.raises(OSError, match="states"):
        training.close()
    assert closed == ["activations", "parameters", "states"]


@pytest.mark.parametrize("begin", [0, 64, 4095])
def test_bytes_come_back_into_pages_that_begin_where_they_did(begin: int, tier: SsdTier) -> None:
    """A gradient is in an allocator's memory, which would keep what it comes back into."""
    pages = own_pages(8 * mmap.PAGESIZE, begin)
    tensor = torch.tensor([], dtype=torch.uint8).set_(pages).random_(0, 256)
    expected = tensor.clone()
    bucket = Bucket([tensor], CpuDevice())
    bucket.fill(Layout({(0, "grad"): tensor}), tensor.untyped_storage())
    del tensor, pages
    assert bucket.begin_write(tier, None)
    bucket.wait_for_write()
    asked: list[tuple[int, int]] = []

    def noted(num_bytes: int, skipped_bytes: int = 0) -> torch.UntypedStorage:
        asked.append((num_bytes, skipped_bytes))
        return own_pages(num_bytes, skipped_bytes)

    with mock.patch.object(memory, "own_pages", noted):
        bucket.bring()
    assert asked == [(8 * mmap.PAGESIZE, begin)]
    assert torch.equal(bucket.views[0, "grad"], expected)
    bucket.forget()


def test_buckets_hold_what_fits_and_a_large_parameter_alone() -> None:
    sizes = [3, 3, 3, 9, 1, 8, 2]
    params = [torch.zeros(size) for size in sizes]
    runs = divided(params, torch.numel, 8)
    assert [[one.numel() for one in run] for run in runs] == [[3, 3], [3], [9], [1], [8], [2]]
    assert divided([], torch.numel, 8) == []


def test_the_last_buckets_stay_as_far_as_there_is_room_beside_those_that_move() -> None:
    assert first_to_stay([4, 4, 4], 12) == 1
    assert first_to_stay([4, 4, 4], 16) == 0
    assert first_to_stay([4, 4, 4], 12, beside=3) == 3
    assert first_to_stay([], 12) == 0


def test_a_large_bucket_is_in_memory_once() -> None:
    assert most_together([9, 1, 2, 1, 8], 3) == 12
    assert most_together([2, 9], 3) == 11 and most_together([], 3) == 0


def test_units_ahead_are_wanted_and_the_farthest_leave() -> None:
    assert live_units(2, 1, 2, 6, [0, 1, 2]) == ([2, 3], [1, 0])
    assert live_units(5, 1, 2, 6, [3, 4, 5]) == ([5], [3])  # where it turns, the nearest stays
    assert live_units(0, -1, 3, 6, [0, 1, 2, 3]) == ([0], [3])
