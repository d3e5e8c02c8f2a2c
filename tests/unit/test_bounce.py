# SPDX-License-Identifier: Apache-2.0
"""Page-locked memory before the drives: when device memory is free, and who has the bytes."""

from __future__ import annotations

import ctypes
import errno
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import OffloadEngine
from megatron.offload.activations.open import open_tiers
from megatron.offload.activations.placement.policy import Placement
from megatron.offload.config import OffloadConfig
from megatron.offload.errors import ConfigurationError
from megatron.offload.machine.memory_limit import MemoryLimit
from megatron.offload.sizes import GIB, MIB
from megatron.offload.tiers.bounce import BouncingBlock, BouncingTier
from megatron.offload.tiers.file import UnlinkedFile
from megatron.offload.tiers.host_budget import pinned_pool_bytes
from megatron.offload.tiers.ssd import SsdTier
from megatron.offload.tiers.transfer import Transfer
from tests.conftest import Gate
from tests.support.models import Model, assert_same, run_step, settle
from tests.support.simulated_device import SimulatedDevice
from tests.support.waiting import SOON_S, wait_until

pytestmark = pytest.mark.timeout(60)

PAGE = 4096


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice()


@pytest.fixture
def make_tier(tmp_path: Path, device: SimulatedDevice) -> Iterator[Callable[..., BouncingTier]]:
    tiers: list[BouncingTier] = []

    def build(pool_bytes: int = 4 * PAGE, **options: Any) -> BouncingTier:
        options = {"io": "buffered", **options}
        tiers.append(BouncingTier([tmp_path], device=device, pool_bytes=pool_bytes, **options))
        return tiers[-1]

    yield build
    for tier in tiers:
        tier.close()


@pytest.fixture
def tier(make_tier: Callable[..., BouncingTier]) -> BouncingTier:
    return make_tier()


def begun(tier: SsdTier, value: int, num_bytes: int = PAGE) -> tuple[Any, Transfer]:
    storage = torch.full((num_bytes,), value, dtype=torch.uint8).untyped_storage()
    device = tier._device
    assert isinstance(device, SimulatedDevice)
    device.queued(storage)
    started = tier.begin_write(storage, device.record_event())
    assert started is not None
    return started


def in_pool(tier: SsdTier, value: int, num_bytes: int = PAGE) -> BouncingBlock:
    block, transfer = begun(tier, value, num_bytes)
    transfer.wait()
    assert isinstance(block, BouncingBlock)
    return block


def wait_until_it_leaves(block: BouncingBlock) -> None:
    """Its transfer has ended a moment before it goes on to the drives."""
    wait_until(lambda: block.write is not None, "it does not go on to the drives")


def read_back(tier: SsdTier, block: Any) -> bytes:
    target, transfer = tier.begin_read(block)
    transfer.wait()
    for event in transfer.events or ():
        tier._device.wait_for_event(event)
    return ctypes.string_at(target.data_ptr(), target.nbytes())


# -- On the way out -----------------------------------------------------------------------------


def test_a_write_has_ended_when_the_copy_to_the_pool_has(
    tier: BouncingTier, write_gate: Gate
) -> None:
    storage = torch.full((PAGE,), 3, dtype=torch.uint8).untyped_storage()
    weak = storage._weak_ref()
    block, transfer = tier.begin_write(storage) or pytest.fail("refused")
    del storage
    transfer.wait()
    write_gate.wait_for_arrival()
    assert torch.UntypedStorage._expired(weak), "device memory is free before the drive has a byte"
    torch.UntypedStorage._free_weak_ref(weak)
    assert tier.statistics.writes.total_bytes == 0 and not tier.wait_for_writes(timeout_s=0.01)
    assert (tier.pool_bytes, tier.used_bytes) == (PAGE, PAGE)
    write_gate.open.set()
    assert tier.wait_for_writes(timeout_s=SOON_S)
    assert tier.statistics.writes.total_bytes == PAGE == tier.used_bytes
    assert tier.pool_bytes == 0 and "page-locked" not in str(block)
    assert read_back(tier, block) == b"\3" * PAGE
    assert tier.statistics.reads.total_bytes == PAGE


def test_what_is_on_its_way_to_the_pool_counts_where_storages_are_spread(
    tmp_path: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = [tmp_path / "0", tmp_path / "1"]
    for directory in directories:
        directory.mkdir()
    copied, wait_for_event = threading.Event(), device.wait_for_event

    def wait(event: Any) -> None:
        assert copied.wait(timeout=SOON_S)
        wait_for_event(event)

    tier = BouncingTier(directories, device=device, pool_bytes=8 * PAGE, io="buffered")
    try:
        monkeypatch.setattr(device, "wait_for_event", wait)
        started = [begun(tier, value) for value in range(4)]
        assert [drive.used_bytes for drive in tier.drives] == [2 * PAGE, 2 * PAGE]
        assert [drive.queued_bytes for drive in tier.drives] == [2 * PAGE, 2 * PAGE]
        copied.set()
        for _, transfer in started:
            transfer.wait()
        assert tier.wait_for_writes(timeout_s=SOON_S)
        assert [drive.queued_bytes for drive in tier.drives] == [0, 0]
    finally:
        copied.set()
        tier.close()


@pytest.mark.parametrize("num_bytes", [1, 511, 512, 5000, 3 * PAGE + 7])
@pytest.mark.parametrize("io", ["auto", "buffered"])
def test_bytes_come_back_from_the_pool_and_from_the_drives(
    make_tier: Callable[..., BouncingTier], write_gate: Gate, num_bytes: int, io: str
) -> None:
    tier = make_tier(io=io, verify=True)
    block, other = in_pool(tier, 7, num_bytes), None
    assert read_back(tier, block) == b"\7" * num_bytes
    write_gate.open.set()
    other = in_pool(tier, 9, num_bytes) if num_bytes < PAGE else block
    assert tier.wait_for_writes(timeout_s=SOON_S)
    assert read_back(tier, other) == (b"\7" if other is block else b"\x09") * num_bytes


def test_what_the_pool_has_no_room_for_is_kept_until_the_drive_has_it(
    tier: BouncingTier, write_gate: Gate
) -> None:
    first = in_pool(tier, 1, 3 * PAGE)
    block, transfer = begun(tier, 2, 2 * PAGE)
    assert not isinstance(block, BouncingBlock)
    write_gate.wait_for_arrival()
    assert not transfer.done()
    write_gate.open.set()
    transfer.wait()
    assert tier.wait_for_writes(timeout_s=SOON_S)
    assert read_back(tier, first) == b"\1" * 3 * PAGE and read_back(tier, block) == b"\2" * 2 * PAGE


def test_memory_of_the_pool_is_not_reused_before_the_drive_has_its_bytes(
    tier: BouncingTier, write_gate: Gate
) -> None:
    blocks = [in_pool(tier, value) for value in range(4)]
    assert tier.pool_bytes == 4 * PAGE
    assert not isinstance(begun(tier, 9)[0], BouncingBlock)
    write_gate.open.set()
    assert tier.wait_for_writes(timeout_s=SOON_S)
    others = [in_pool(tier, 10 + value) for value in range(4)]
    for value, block in enumerate([*blocks, *others]):
        assert read_back(tier, block) == bytes([value + 6 * (value > 3)]) * PAGE


def test_a_full_disk_takes_nothing_into_the_pool(make_tier: Callable[..., BouncingTier]) -> None:
    tier = make_tier(budget_bytes=2 * PAGE)
    blocks = [in_pool(tier, value) for value in range(2)]
    assert tier.begin_write(torch.UntypedStorage(PAGE)) is None
    assert tier.wait_for_writes(timeout_s=SOON_S) and tier.pool_bytes == 0 and len(blocks) == 2


# -- On the way back ----------------------------------------------------------------------------


def test_what_is_read_from_the_pool_is_not_written_any_more(
    make_tier: Callable[..., BouncingTier], write_gate: Gate
) -> None:
    tier = make_tier(num_threads=1)
    first, second = in_pool(tier, 1), in_pool(tier, 2)
    write_gate.wait_for_arrival()  # of the first: the second one waits
    wait_until_it_leaves(second)
    assert read_back(tier, second) == b"\2" * PAGE
    write_gate.open.set()
    assert tier.wait_for_writes(timeout_s=SOON_S)
    assert tier.statistics.writes.total_bytes == PAGE and tier.statistics.reads.total_bytes == 0
    assert tier.pool_bytes == PAGE, "the only place where the second one is"
    assert read_back(tier, second) == b"\2" * PAGE and read_back(tier, first) == b"\1" * PAGE
    del second
    wait_until(lambda: tier.pool_bytes == 0 and tier.used_bytes == PAGE, "its memory is kept")


def test_memory_of_the_pool_is_kept_while_it_is_copied_back(
    tier: BouncingTier, device: SimulatedDevice, write_gate: Gate
) -> None:
    block = in_pool(tier, 1)
    with device.copies_held():
        target, transfer = tier.begin_read(block)
        assert transfer.done()
        write_gate.open.set()
        assert tier.wait_for_writes(timeout_s=SOON_S)
        del block
        assert tier.pool_bytes == PAGE
    for event in transfer.events or ():
        device.wait_for_event(event)
    assert ctypes.string_at(target.data_ptr(), PAGE) == b"\1" * PAGE
    wait_until(lambda: tier.pool_bytes == 0, "a copy that ended keeps its memory")


def test_what_nobody_wants_any_more_is_not_written(
    make_tier: Callable[..., BouncingTier], write_gate: Gate
) -> None:
    tier = make_tier(num_threads=1)
    first, second = in_pool(tier, 1), in_pool(tier, 2)
    write_gate.wait_for_arrival()
    wait_until_it_leaves(second)
    del first, second
    assert tier.used_bytes == 2 * PAGE, "space that is being written is nobody else's"
    write_gate.open.set()
    assert tier.wait_for_writes(timeout_s=SOON_S)
    assert tier.statistics.writes.total_bytes <= PAGE
    wait_until(lambda: tier.pool_bytes == tier.used_bytes == 0, "something is kept")


def test_a_write_that_is_taken_back_before_its_copy_has_ended_goes_no_further(
    tier: BouncingTier, device: SimulatedDevice
) -> None:
    with device.copies_held():
        block, transfer = begun(tier, 1)
        assert transfer.cancel()
        del block
        assert tier.pool_bytes == PAGE, "the copy goes on"
    assert tier.wait_for_writes(timeout_s=SOON_S)
    wait_until(lambda: tier.pool_bytes == tier.used_bytes == 0, "something is kept")
    assert tier.statistics.writes.total_bytes == 0


# -- Errors and ends ----------------------------------------------------------------------------


def test_what_the_drive_refuses_stays_in_the_pool(
    tier: BouncingTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    may_fail = threading.Event()

    def refuse(*_: object) -> None:
        assert may_fail.wait(timeout=SOON_S)
        raise OSError(errno.EIO, "media")

    monkeypatch.setattr(UnlinkedFile, "write", refuse)
    with caplog.at_level(logging.WARNING):
        blocks = [in_pool(tier, value) for value in (1, 2)]
        may_fail.set()
        assert tier.wait_for_writes(timeout_s=SOON_S)
    assert tier.degraded and len(caplog.records) == 1
    assert tier.statistics.failed_writes >= 1 and tier.pool_bytes == 2 * PAGE
    assert tier.begin_write(torch.UntypedStorage(PAGE)) is None
    for value, block in zip((1, 2), blocks, strict=True):
        assert read_back(tier, block) == bytes([value]) * PAGE
    del block, blocks
    wait_until(lambda: tier.pool_bytes == 0, "something is kept")


def test_closing_waits_for_copies_and_writes_under_way(
    make_tier: Callable[..., BouncingTier], device: SimulatedDevice, write_gate: Gate
) -> None:
    tier = make_tier(num_threads=1)
    block = in_pool(tier, 1)
    write_gate.wait_for_arrival()
    closing = threading.Thread(target=tier.close, daemon=True)
    with device.copies_held():
        copied = begun(tier, 2)
        closing.start()
        closing.join(timeout=0.1)
        assert closing.is_alive()
    copied[1].wait()
    closing.join(timeout=0.1)
    assert closing.is_alive() and tier._pool is not None and not tier._pool._closed
    (drive,) = tier.drives
    wait_until(lambda: drive._threads._closing, "closing did not come to the drive")
    write_gate.open.set()
    closing.join(timeout=SOON_S)
    assert not closing.is_alive() and tier._pool._closed and block.write is not None
    assert tier.statistics.writes.total_bytes == PAGE


# -- In the engine ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("pinned_bytes", [8 * PAGE, MIB, 64 * MIB])
@pytest.mark.parametrize("settles", [True, False])
def test_loss_and_gradients_are_equal(
    offload_config: Callable[..., OffloadConfig],
    device: SimulatedDevice,
    pinned_bytes: int,
    settles: bool,
) -> None:
    model, x = Model(), torch.randn(3, 17, 32)
    plain = run_step(model, x)
    engine = OffloadEngine(offload_config(pinned_bytes=pinned_bytes), device)
    try:
        tier = engine.tiers[Placement.SSD]
        assert isinstance(tier, BouncingTier)
        if not settles:
            tier.wait_for_writes = lambda _=None: True  # type: ignore[assignment, method-assign]
        for _ in range(3):
            with device.computing():
                assert_same(run_step(model, x, engine), plain)
        if not settles:
            del tier.wait_for_writes
        settle(engine)
        wait_until(lambda: tier.pool_bytes == tier.used_bytes == 0, "something is kept")
        assert not settles or engine.statistics.read_bytes > 0
    finally:
        engine.close()


def test_which_devices_have_a_pool(offload_config: Callable[..., OffloadConfig]) -> None:
    for device, pinned_bytes, kind in (
        ("cpu", None, SsdTier),
        (SimulatedDevice(), 0, SsdTier),
        (SimulatedDevice(), None, BouncingTier),
    ):
        config = offload_config(pinned_bytes=pinned_bytes)
        engine = OffloadEngine(config, device)
        assert type(engine.tiers[Placement.SSD]) is kind
        engine.close()


@pytest.mark.parametrize(
    ("total_bytes", "num_local_ranks", "pool_bytes"),
    [(2048 * GIB, 8, 2 * GIB), (64 * GIB, 1, 2 * GIB), (64 * GIB, 8, GIB // 2), (16, 1, 1)],
)
def test_without_a_size_the_pools_are_a_small_part_of_the_memory(
    total_bytes: int, num_local_ranks: int, pool_bytes: int
) -> None:
    limit = MemoryLimit(total_bytes, total_bytes, "physical memory", total_bytes)
    assert pinned_pool_bytes(None, num_local_ranks, limit) == pool_bytes


def test_pools_that_the_machine_cannot_hold_are_refused(
    offload_config: Callable[..., OffloadConfig],
) -> None:
    limit = MemoryLimit(16 * GIB, GIB, "physical memory", 16 * GIB)
    assert pinned_pool_bytes(4 * GIB, 4, limit) == 4 * GIB
    with pytest.raises(ConfigurationError, match="4 x 5 GiB = 20 GiB; give a smaller size, or 0"):
        pinned_pool_bytes(5 * GIB, 4, limit)
    with pytest.raises(ConfigurationError, match="--activation-offload-pinned"):
        config = offload_config(pinned_bytes=1 << 50)
        open_tiers(config, SimulatedDevice(), reserve_bytes=0, num_local_ranks=1)
