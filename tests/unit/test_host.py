# SPDX-License-Identifier: Apache-2.0
"""The host tier: bytes come back unchanged, memory is bounded, reused and given back."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import threading
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.offload.device.cpu import CpuDevice
from megatron.offload.device.device import WHOLE
from megatron.offload.device.open import open_device
from megatron.offload.sizes import MIB
from megatron.offload.tiers import host
from megatron.offload.tiers.host import HostTier
from megatron.offload.tiers.purpose import STATES
from tests.support.waiting import SOON_S, wait_until

PAGE = mmap.PAGESIZE


def storage_of(num_bytes: int, value: int) -> torch.UntypedStorage:
    return torch.full((num_bytes,), value, dtype=torch.uint8).untyped_storage()


def bytes_of(storage: torch.UntypedStorage) -> bytes:
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


def written(tier: HostTier, storage: torch.UntypedStorage) -> host.HostBlock:
    started = tier.begin_write(storage)
    assert started is not None
    block, transfer = started
    transfer.wait()
    return block


def read_back(tier: HostTier, block: host.HostBlock) -> bytes:
    storage, transfer = tier.begin_read(block)
    transfer.wait()
    return bytes_of(storage)


class GatedDevice(CpuDevice):
    """Its copies wait, in their thread, until the gate is open, and raise `error` where it is set.

    `copied` has the first byte that each of them moved, in their order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Semaphore(0)  # one for each copy that has come to the gate
        self.error: Exception | None = None
        self.copied: list[int] = []

    def copy_to_host(
        self, source: torch.UntypedStorage, address: int, after: None, part: slice = WHOLE
    ) -> None:
        self._pass(source.data_ptr())
        super().copy_to_host(source, address, after, part)

    def copy_from_host(
        self, address: int, target: torch.UntypedStorage, part: slice = WHOLE
    ) -> None:
        self._pass(address)
        super().copy_from_host(address, target, part)

    def _pass(self, source: int) -> None:
        self.arrived.release()
        assert self.gate.wait(timeout=SOON_S)
        if self.error is not None:
            raise self.error
        self.copied.append(ctypes.string_at(source, 1)[0])


@pytest.fixture
def device():
    device = GatedDevice()
    yield device
    device.gate.set()


@pytest.fixture
def tier(device):
    tier = HostTier(64 * MIB, device=device)
    yield tier
    device.gate.set()
    tier.close()


# -- Contents -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [1, PAGE - 1, PAGE, PAGE + 1, 3 * MIB + 17])
def test_bytes_come_back_unchanged(tier, num_bytes):
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).untyped_storage()
    block = written(tier, source)
    assert read_back(tier, block) == read_back(tier, block) == bytes_of(source)
    assert (tier.statistics.writes.total_bytes, tier.statistics.reads.total_bytes) == (
        num_bytes,
        2 * num_bytes,
    )
    assert tier.statistics.writes.bytes_per_s and tier.statistics.reads.bytes_per_s


def test_what_is_written_is_what_the_source_held_not_what_it_holds_later(tier):
    source = storage_of(PAGE, 1)
    block = written(tier, source)
    ctypes.memset(source.data_ptr(), 2, PAGE)
    assert read_back(tier, block) == b"\1" * PAGE


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20 * PAGE)), max_size=60))
def test_random_lifetimes_keep_their_contents_and_stay_within_the_budget(operations):
    tier = HostTier(64 * PAGE, num_threads=3)
    live = []
    for value, (kind, num_bytes) in enumerate(operations):
        if kind == 0 and live:
            live.pop(num_bytes % len(live))  # dropped, written or not
        elif kind == 1 and live:
            block, transfer, expected = live[num_bytes % len(live)]
            transfer.wait()
            assert read_back(tier, block) == expected
        elif (started := tier.begin_write(storage_of(num_bytes, value))) is not None:
            live.append((*started, bytes([value]) * num_bytes))
        assert tier.used_bytes <= tier.capacity_bytes <= 64 * PAGE == tier.limit_bytes
    for block, transfer, expected in live:
        transfer.wait()
        assert read_back(tier, block) == expected
    del live
    block = transfer = started = None
    tier.close()


# -- Space --------------------------------------------------------------------------------------


def test_a_block_that_nobody_refers_to_frees_its_space(tier):
    blocks = [written(tier, storage_of(PAGE + 1, 1)) for _ in range(3)]
    assert tier.used_bytes == 6 * PAGE
    del blocks
    assert tier.used_bytes == 0


def test_a_block_freed_by_hand_is_not_freed_again_when_it_dies(tier):
    first = written(tier, storage_of(PAGE, 1))
    tier.free(first)
    second = written(tier, storage_of(PAGE, 2))
    tier.free(first)
    del first
    third = written(tier, storage_of(PAGE, 3))
    assert read_back(tier, second) == b"\2" * PAGE
    assert read_back(tier, third) == b"\3" * PAGE


def test_in_steady_state_the_tier_takes_no_new_memory(tier):
    sizes = [5 * PAGE + 1, 1, 12 * PAGE, 300]

    def step() -> list[int]:
        blocks = [written(tier, storage_of(size, 7)) for size in sizes]
        return [block.offset for block in blocks]

    first = step()
    assert all(step() == first for _ in range(5))


def test_space_is_not_reused_while_its_write_runs(tier, device):
    device.gate.clear()
    started = tier.begin_write(storage_of(PAGE, 1))
    offset = started[0].offset
    del started  # the graph is dropped
    block, transfer = tier.begin_write(storage_of(PAGE, 2))
    assert block.offset != offset
    device.gate.set()
    transfer.wait()
    assert read_back(tier, block) == b"\2" * PAGE


def test_a_running_write_keeps_its_source_and_a_finished_one_does_not(tier, device):
    device.gate.clear()
    source = storage_of(PAGE, 1)
    weak = source._weak_ref()
    block, transfer = tier.begin_write(source)
    del source
    assert not torch.UntypedStorage._expired(weak)
    device.gate.set()
    transfer.wait()
    assert torch.UntypedStorage._expired(weak)
    torch.UntypedStorage._free_weak_ref(weak)
    assert read_back(tier, block) == b"\1" * PAGE


def test_over_budget_means_keep_and_one_warning(caplog):
    tier = HostTier(4 * PAGE)
    block = written(tier, storage_of(4 * PAGE, 1))
    with caplog.at_level(logging.WARNING):
        assert tier.begin_write(storage_of(1, 2)) is None
        assert tier.begin_write(storage_of(1, 2)) is None
    assert len(caplog.records) == 1
    assert "--activation-offload-host-budget is used up" in caplog.text
    assert not tier.degraded
    assert read_back(tier, block) == b"\1" * 4 * PAGE
    del block
    assert written(tier, storage_of(PAGE, 3))  # goes on where space was freed
    tier.close()


def test_a_zero_budget_takes_nothing_and_complains_of_nothing(caplog):
    tier = HostTier(0)
    with caplog.at_level(logging.WARNING):
        assert tier.begin_write(storage_of(1, 1)) is None
    assert not caplog.records and not tier.degraded
    assert tier.used_bytes == tier.capacity_bytes == tier.limit_bytes == 0
    tier.close()


def test_a_tier_that_could_not_grow_within_its_budget_is_degraded(caplog, fake_cuda):
    fake_cuda.accepts = 0
    tier = HostTier(4 * PAGE, device=open_device("cuda"))
    with caplog.at_level(logging.WARNING):
        assert tier.begin_write(storage_of(1, 1)) is None
        assert tier.begin_write(storage_of(1, 1)) is None
    assert tier.degraded and "cannot grow" in str(tier)
    (record,) = caplog.records  # of the arena; the tier has nothing to add
    assert "could not be pinned" in record.getMessage()
    tier.close()


def test_memory_is_returned_when_the_tier_is_closed():
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    source = storage_of(48 * MIB, 1)
    before = resident_bytes()
    tier = HostTier(64 * MIB)
    block = written(tier, source)
    assert resident_bytes() - before > 40 * MIB
    tier.close()
    assert resident_bytes() - before < 8 * MIB
    del block  # later than its tier's memory


# -- Transfers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("begin", ["write", "read"])
def test_a_copy_that_fails_surfaces_in_wait(tier, device, begin):
    block = written(tier, storage_of(PAGE, 1))
    device.error = OSError(14, "bad address")
    started = tier.begin_read(block) if begin == "read" else tier.begin_write(storage_of(PAGE, 2))
    with pytest.raises(OSError, match="bad address"):
        started[1].wait()
    device.error = None
    del started
    assert tier.statistics.failed_writes == (begin == "write")
    assert tier.statistics.writes.total_bytes == PAGE and tier.used_bytes == PAGE
    assert read_back(tier, block) == b"\1" * PAGE


def test_the_read_that_is_needed_first_goes_first(device):
    tier = HostTier(64 * PAGE, num_threads=1, device=device)
    blocks = [written(tier, storage_of(PAGE, value)) for value in range(3)]
    device.gate.clear()
    device.copied.clear()
    device.arrived = threading.Semaphore(0)
    running = tier.begin_write(storage_of(PAGE, 9))
    assert device.arrived.acquire(timeout=SOON_S)
    reads = [
        tier.begin_read(blocks[value], deadline) for value, deadline in ((0, 2), (1, 0), (2, 1))
    ]
    device.gate.set()
    for _, transfer in [running, *reads]:
        transfer.wait()
    assert device.copied == [9, 1, 2, 0]
    tier.close()


def test_closing_cancels_what_is_queued_and_refuses_more(device):
    device.gate.clear()
    tier = HostTier(64 * PAGE, num_threads=1, device=device)
    started = [tier.begin_write(storage_of(PAGE, 0))]
    assert device.arrived.acquire(timeout=SOON_S)  # before the thread could take others with it
    started += [tier.begin_write(storage_of(PAGE, value)) for value in (1, 2)]
    closing = threading.Thread(target=tier.close, daemon=True)
    closing.start()
    wait_until(started[2][1].cancelled, "what is queued was not cancelled")
    device.gate.set()
    closing.join(timeout=SOON_S)
    assert started[0][1].done() and not started[0][1].cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        tier.begin_write(storage_of(PAGE, 1))


def test_a_closed_tier_without_blocks_is_garbage():
    tier = HostTier(64 * PAGE)
    block = written(tier, storage_of(PAGE, 1))
    weak = weakref.ref(tier)
    tier.close()
    del tier, block
    gc.collect()
    assert weak() is None


def test_it_is_shown_to_people_with_its_budget(fake_cuda):
    tier = HostTier(12 * MIB)
    assert str(tier) == "host memory (12 MiB budget)"
    block = written(tier, storage_of(100, 1))
    assert str(block) == "host memory, offset 0, length 100"
    tier.close()
    pinned = HostTier(12 * MIB, device=open_device("cuda"))
    assert not fake_cuda.pinned  # nothing before it is needed
    assert str(pinned) == "host memory (12 MiB budget, pinned)"
    pinned.close()


def test_who_looks_at_a_block_keeps_its_memory_when_the_tier_is_closed() -> None:
    tier = HostTier(MIB)
    view = tier.view(written(tier, storage_of(3 * PAGE, value=7)))
    tier.close()
    assert bytes_of(view) == bytes([7]) * 3 * PAGE


def test_a_tier_that_others_overflow_from_says_nothing_when_it_is_full(
    caplog: pytest.LogCaptureFixture,
) -> None:
    quiet = HostTier(PAGE, purpose=STATES, flag="window", overflows=True)
    assert quiet.begin_write(storage_of(2 * PAGE, value=1)) is None
    assert not caplog.records
    other = HostTier(PAGE, purpose=STATES)
    assert other.begin_write(storage_of(2 * PAGE, value=1)) is None
    assert "--optimizer-state-host-budget is used up" in caplog.text
    quiet.close()
    other.close()
