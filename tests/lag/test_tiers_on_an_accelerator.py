# SPDX-License-Identifier: Apache-2.0
"""Each tier with storages of an accelerator: bytes come back, and what goes wrong is said."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import OffloadConfig
from megatron.offload.activations.open import open_tiers
from megatron.offload.activations.placement.policy import Placement
from megatron.offload.device.accelerator import AcceleratorDevice
from megatron.offload.errors import ConfigurationError
from megatron.offload.sizes import GIB, MIB
from megatron.offload.tiers import arena as arena_module
from megatron.offload.tiers import ssd as ssd_module
from megatron.offload.tiers.bounce import BouncingBlock, BouncingTier
from megatron.offload.tiers.file import UnlinkedFile
from megatron.offload.tiers.host import HostTier
from megatron.offload.tiers.ssd import SsdTier
from megatron.offload.tiers.staging import StagingPool
from megatron.offload.tiers.tier import Tier
from megatron.offload.tiers.tiered import TieredTier
from tests.conftest import Gate
from tests.support.accelerators import Lag
from tests.support.lag.module import LagModule
from tests.support.waiting import SOON_S, wait_until_empty

PAGE = 4096
SIZE = 5 * PAGE


@pytest.fixture
def device(lag: LagModule) -> Iterator[AcceleratorDevice]:
    device = Lag(lag).open(1)
    lag.set_delays(200, 2000, seed=1)
    yield device
    lag.synchronize(1)


@pytest.fixture
def opened(device: AcceleratorDevice) -> Iterator[Callable[..., Any]]:
    """Opens tiers with the device, and closes them."""
    tiers: list[Tier] = []

    def build(make: Callable[..., Tier], *args: Any, **settings: Any) -> Tier:
        tiers.append(make(*args, **settings))
        return tiers[-1]

    yield build
    for tier in reversed(tiers):
        tier.close()


def storage_of(device: AcceleratorDevice, number: int, size: int = SIZE) -> torch.UntypedStorage:
    """Bytes that its stream has still to make."""
    with device.use_stream(device.current_stream()):
        made = torch.full((size,), number, dtype=torch.uint8, device=device.device)
    return made.untyped_storage()


def bytes_of(device: AcceleratorDevice, storage: torch.UntypedStorage) -> set[int]:
    """What is in a storage, when its stream gets to it."""
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return set(whole.cpu().tolist())


def write(tier: Tier, device: AcceleratorDevice, number: int, size: int = SIZE) -> Any:
    """A block of the tier, whose write has ended."""
    started = tier.begin_write(storage_of(device, number, size), device.record_event())
    assert started is not None
    block, transfer = started
    transfer.wait()
    return block


def read(tier: Tier, device: AcceleratorDevice, block: Any) -> set[int]:
    """What comes back of it."""
    storage, transfer = tier.begin_read(block)
    transfer.wait()
    device.use_after(storage, transfer.events or ())
    return bytes_of(device, storage)


# -- Host memory and drives side by side ----------------------------------------------------------


@pytest.fixture
def tiered(device: AcceleratorDevice, opened: Callable[..., Any], tmp_path: Path) -> TieredTier:
    host = HostTier(4 * SIZE, device=device)
    drives = SsdTier([tmp_path], device=device, budget_bytes=4 * SIZE, verify=True, io="buffered")
    tier = opened(TieredTier, [host, drives])
    assert isinstance(tier, TieredTier)
    return tier


def test_what_goes_to_several_tiers_comes_back_from_each(
    device: AcceleratorDevice, tiered: TieredTier
) -> None:
    blocks = [write(tiered, device, number) for number in range(6)]
    assert {type(block.tier) for block in blocks} == {HostTier, SsdTier}
    for number, block in enumerate(blocks):
        assert read(tiered, device, block) == {number}
    assert tiered.wait_for_writes(SOON_S)
    assert tiered.statistics.writes.total_bytes == tiered.statistics.reads.total_bytes == 6 * SIZE
    assert tiered.used_bytes == 6 * SIZE and tiered.capacity_bytes >= 6 * SIZE
    assert tiered.limit_bytes == 8 * SIZE and not tiered.degraded
    assert "host memory" in str(tiered) and " and " in str(tiered)
    del block, blocks
    wait_until_empty([tiered])


def test_what_is_changed_where_it_is_comes_back_changed(
    device: AcceleratorDevice, tiered: TieredTier
) -> None:
    for block in [write(tiered, device, number) for number in range(4)]:
        shown = torch.empty(0, dtype=torch.uint8).set_(tiered.view(block))
        shown.fill_(77)
        tiered.renew(block)
        del shown
        assert read(tiered, device, block) == {77}


def test_where_all_are_full_nothing_is_taken(device: AcceleratorDevice, tiered: TieredTier) -> None:
    blocks = [write(tiered, device, number) for number in range(8)]
    assert tiered.begin_write(storage_of(device, 9), device.record_event()) is None
    assert [read(tiered, device, block) for block in blocks] == [{n} for n in range(8)]


# -- Page-locked memory before the drives ---------------------------------------------------------


@pytest.fixture
def bouncing(device: AcceleratorDevice, opened: Callable[..., Any], tmp_path: Path) -> BouncingTier:
    settings: dict[str, Any] = {"device": device, "io": "buffered", "verify": True}
    make = functools.partial(BouncingTier, [tmp_path], pool_bytes=2 * SIZE, **settings)
    tier = opened(make, budget_bytes=6 * SIZE)
    assert isinstance(tier, BouncingTier)
    return tier


def test_what_is_in_the_pool_is_shown_and_changed_there(
    device: AcceleratorDevice, bouncing: BouncingTier, write_gate: Gate
) -> None:
    block = write(bouncing, device, 5)
    assert isinstance(block, BouncingBlock) and str(block).startswith("page-locked memory")
    shown = torch.empty(0, dtype=torch.uint8).set_(bouncing.view(block))
    assert set(shown.tolist()) == {5} and bouncing.pool_bytes == SIZE
    shown.fill_(6)
    bouncing.renew(block)
    assert read(bouncing, device, block) == {6}
    del shown


def test_what_has_left_the_pool_is_shown_and_changed_on_the_drives(
    device: AcceleratorDevice, bouncing: BouncingTier
) -> None:
    block = write(bouncing, device, 5)
    assert bouncing.wait_for_writes(SOON_S) and bouncing.pool_bytes == 0
    assert not str(block).startswith("page-locked memory")
    shown = torch.empty(0, dtype=torch.uint8).set_(bouncing.view(block))
    assert set(shown.tolist()) == {5}
    shown.fill_(6)
    bouncing.renew(block)
    del shown
    assert read(bouncing, device, block) == {6}


def test_what_finds_no_room_in_the_pool_goes_by_it(
    device: AcceleratorDevice, bouncing: BouncingTier, write_gate: Gate
) -> None:
    in_pool = [write(bouncing, device, number) for number in (1, 2)]
    started = bouncing.begin_write(storage_of(device, 3), device.record_event())
    assert started is not None and not isinstance(started[0], BouncingBlock)
    write_gate.open.set()
    started[1].wait()
    assert read(bouncing, device, started[0]) == {3}
    bouncing.renew(started[0])
    shown = torch.empty(0, dtype=torch.uint8).set_(bouncing.view(started[0]))
    assert set(shown.tolist()) == {3}
    assert [read(bouncing, device, block) for block in in_pool] == [{1}, {2}]


def test_where_the_drives_are_full_the_pool_takes_nothing(
    device: AcceleratorDevice, bouncing: BouncingTier
) -> None:
    blocks = [write(bouncing, device, number) for number in range(6)]
    assert bouncing.wait_for_writes(SOON_S)
    assert bouncing.begin_write(storage_of(device, 9), device.record_event()) is None
    assert [read(bouncing, device, block) for block in blocks] == [{n} for n in range(6)]


# -- What goes wrong ------------------------------------------------------------------------------


def refuse(*_: Any) -> None:
    raise RuntimeError("out of locked memory")


def test_host_memory_that_cannot_be_pinned_is_not_used(
    device: AcceleratorDevice,
    opened: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(arena_module, "GROWTH_BYTES", 2 * SIZE)
    tier = opened(HostTier, 8 * SIZE, device=device)
    before = write(tier, device, 1)
    monkeypatch.setattr(device, "pin", refuse)
    with caplog.at_level(logging.WARNING):
        found = [
            tier.begin_write(storage_of(device, number), device.record_event())
            for number in range(8)
        ]
    assert None in found and tier.degraded and "cannot grow" in str(tier)
    assert caplog.text.count("could not be pinned (out of locked memory)") == 1
    assert read(tier, device, before) == {1}


def test_staging_buffers_that_cannot_be_pinned_are_pageable(
    device: AcceleratorDevice,
    opened: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(device, "pin", refuse)
    with caplog.at_level(logging.WARNING):
        tier = opened(SsdTier, [tmp_path], device=device)
    assert "of staging buffers are pageable memory" in caplog.text
    assert read(tier, device, write(tier, device, 4)) == {4}


@pytest.mark.parametrize("kind", [HostTier, SsdTier])
def test_a_copy_that_the_device_refuses_is_a_failed_write(
    kind: type,
    device: AcceleratorDevice,
    opened: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = opened(kind, 8 * SIZE if kind is HostTier else [tmp_path], device=device)
    block = write(tier, device, 1)
    monkeypatch.setattr(device, "copy_to_host", refuse)
    with pytest.raises(RuntimeError, match="out of locked memory"):
        write(tier, device, 2)
    assert tier.statistics.failed_writes == (1 if kind is HostTier else 0)  # no drive's fault
    assert not tier.degraded
    assert read(tier, device, block) == {1}


def test_a_drive_that_fails_says_so_and_what_it_has_comes_back(
    device: AcceleratorDevice,
    opened: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tier = opened(SsdTier, [tmp_path], device=device)
    block = write(tier, device, 1)

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(UnlinkedFile, "write", fail)
    with caplog.at_level(logging.WARNING), pytest.raises(OSError, match="Input/output"):
        write(tier, device, 2)
    assert tier.degraded and "a write failed" in caplog.text
    assert read(tier, device, block) == {1}


def test_a_closed_tier_takes_and_gives_nothing(device: AcceleratorDevice) -> None:
    tier = HostTier(4 * SIZE, device=device)
    block = write(tier, device, 1)
    tier.close()
    for begin in (
        lambda: tier.begin_write(storage_of(device, 2), device.record_event()),
        lambda: tier.begin_read(block),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            begin()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"host_budget": 1 << 60}, "asks for more host memory than there is"),
        ({"pinned_bytes": 1 << 60, "mode": "ssd"}, "pinned asks for more host memory"),
        ({"directories": (Path("/nowhere"),)}, "/nowhere does not exist"),
    ],
)
def test_what_cannot_be_opened_is_refused(
    settings: dict[str, Any], sentence: str, device: AcceleratorDevice, tmp_path: Path
) -> None:
    settings = {"mode": "tiered", "host_budget": MIB, "directories": (tmp_path,)} | settings
    with pytest.raises(ConfigurationError, match=sentence):
        open_tiers(OffloadConfig(**settings), device, reserve_bytes=0, num_local_ranks=1)


def test_shares_of_the_machine_are_opened(device: AcceleratorDevice, tmp_path: Path) -> None:
    config = OffloadConfig(mode="tiered", host_budget=0.001, directories=(tmp_path,))
    tiers = open_tiers(config, device, reserve_bytes=MIB, num_local_ranks=2)
    host = tiers[Placement.HOST].limit_bytes
    assert host is not None and 0 < host < GIB
    block = write(tiers[Placement.TIERED], device, 3)
    assert read(tiers[Placement.TIERED], device, block) == {3}
    del block
    tiers[Placement.TIERED].close()


def test_large_storages_are_in_pieces(
    device: AcceleratorDevice,
    opened: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = functools.partial(StagingPool, piece_bytes=PAGE)
    monkeypatch.setattr(ssd_module, "StagingPool", small)
    tier = opened(SsdTier, [tmp_path], device=device, verify=True)
    blocks = [write(tier, device, number, 64 * PAGE + 100) for number in range(3)]
    assert [read(tier, device, block) for block in blocks] == [{0}, {1}, {2}]
    assert tier.statistics.reads.total_bytes == 3 * 65 * PAGE
