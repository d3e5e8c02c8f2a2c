# SPDX-License-Identifier: Apache-2.0
"""The device layer: bytes come back, copies wait for what they must and for nothing else.

On a GPU where there is one, else on the test accelerator: see `tests/support/accelerators.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import OffloadConfig, OffloadEngine
from megatron.offload.device.accelerator import AcceleratorDevice
from megatron.offload.device.device import Device
from megatron.offload.device.open import open_device
from megatron.offload.sizes import MIB
from megatron.offload.tiers import arena as arena_part
from megatron.offload.tiers.arena import HostArena
from megatron.offload.tiers.host import HostTier
from tests.support.accelerators import Accelerator, Cuda, Lag
from tests.support.lag.module import LagModule
from tests.support.models import Model, assert_same, run_step

SIZES = [1, 4095, 4096, 4097, 3 * MIB + 17]
TIMEOUT_S = 10.0
_OTHERS = 0xDB


if torch.cuda.is_available():  # torch has one accelerator in a process

    @pytest.fixture
    def any_accelerator() -> Accelerator:
        return Cuda()

else:

    @pytest.fixture
    def any_accelerator(lag: LagModule) -> Accelerator:
        return Lag(lag)


@pytest.fixture
def accelerator(any_accelerator: Accelerator) -> Iterator[Accelerator]:
    any_accelerator.prepare()
    yield any_accelerator
    any_accelerator.module.synchronize()


@pytest.fixture
def device(accelerator: Accelerator) -> AcceleratorDevice:
    return accelerator.open()


@pytest.fixture(params=["cpu", "accelerator"])
def any_device(request: pytest.FixtureRequest, device: AcceleratorDevice) -> Device:
    return open_device("cpu") if request.param == "cpu" else device


def bytes_in(storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor of all bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def random_bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).to(device)


def host_memory(num_bytes: int, pinned: bool = True) -> torch.Tensor:
    return torch.full((num_bytes,), _OTHERS, dtype=torch.uint8, pin_memory=pinned)


# -- Bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", SIZES)
def test_bytes_come_back_unchanged(any_device: Device, num_bytes: int) -> None:
    source = random_bytes(num_bytes, any_device.device)
    host = host_memory(num_bytes + 2, any_device.pins_host_memory)
    inside = host[1:-1]  # host memory may start anywhere
    after = any_device.record_event()
    copied = any_device.copy_to_host(source.untyped_storage(), inside.data_ptr(), after)
    any_device.wait_for_event(copied)
    assert torch.equal(inside, source.cpu())
    assert int(host[0]) == int(host[-1]) == _OTHERS
    target = any_device.new_restored(num_bytes)
    any_device.use_after(target, [any_device.copy_from_host(inside.data_ptr(), target)])
    assert target.nbytes() == num_bytes and target.device == any_device.device
    assert torch.equal(bytes_in(target), source)


@pytest.mark.parametrize("stop", [4097, 9000])  # a part may reach beyond the storage's end
def test_a_part_moves_and_nothing_else(any_device: Device, stop: int) -> None:
    source = random_bytes(6000, any_device.device)
    host = host_memory(6000, any_device.pins_host_memory)
    part, length = slice(100, stop), min(stop, 6000) - 100
    after = any_device.record_event()
    copied = any_device.copy_to_host(source.untyped_storage(), host.data_ptr(), after, part)
    any_device.wait_for_event(copied)
    assert torch.equal(host[:length], source[part].cpu()) and torch.all(host[length:] == _OTHERS)
    target = any_device.new_restored(6000)
    sevens = host_memory(6000, any_device.pins_host_memory).fill_(7)
    any_device.copy_from_host(sevens.data_ptr(), target)
    any_device.use_after(target, [any_device.copy_from_host(host.data_ptr(), target, part)])
    assert torch.equal(bytes_in(target)[part], source[part])
    assert torch.all(bytes_in(target)[:100] == 7) and torch.all(bytes_in(target)[stop:] == 7)


def test_ranges_are_named_in_profiles(any_device: Device) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile, any_device.annotate("layer 3"):
        torch.ones(1)
    assert "layer 3" in [event.name for event in profile.events()]


# -- Memory and time ----------------------------------------------------------------------------


def test_memory_is_counted_to_the_byte(device: AcceleratorDevice, accelerator: Accelerator) -> None:
    before = device.allocated_bytes()
    peak = device.peak_reader()
    storages = [device.new_restored(32 * MIB), device.new_restored(MIB)]
    assert device.allocated_bytes() == before + 33 * MIB
    del storages
    device.return_freed_memory()
    assert device.allocated_bytes() == before and peak.peak_bytes() == before + 33 * MIB
    peak.reset()
    assert peak.peak_bytes() == before
    stats = accelerator.module.memory_stats_as_nested_dict(device.device)
    assert stats["allocated_bytes"]["all"]["peak"] >= before + 33 * MIB  # others' view


def test_without_an_index_it_is_the_current_device(
    device: AcceleratorDevice, accelerator: Accelerator
) -> None:
    kind, index = accelerator.kind, accelerator.module.current_device()
    assert device.device == open_device(kind).device == torch.device(kind, index)
    assert not device.is_host and device.pins_host_memory


def test_time_passes_on_the_device(device: AcceleratorDevice, accelerator: Accelerator) -> None:
    one = device.timestamp()
    accelerator.nap()
    other = device.timestamp()
    assert device.seconds_between(one, other) > 0
    assert other.query() and device.has_passed(other)


def test_the_device_says_whether_it_has_come_to_a_moment(
    device: AcceleratorDevice, accelerator: Accelerator
) -> None:
    before = device.timestamp()
    accelerator.module.synchronize()
    with accelerator.held():
        later = device.timestamp()
        assert device.has_passed(before) and not device.has_passed(later)
    device.seconds_between(before, later)
    assert device.has_passed(later)


def test_a_number_is_read_while_the_stream_that_computed_it_has_more_to_do(
    device: AcceleratorDevice, accelerator: Accelerator
) -> None:
    number = torch.full((), 2.5, device=accelerator.kind)
    device.number(number)  # what is done once for a stream
    accelerator.module.synchronize()
    with accelerator.held():
        later = device.timestamp()
        assert device.number(number) == 2.5 and not device.has_passed(later)


# -- Who waits for whom -------------------------------------------------------------------------


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("on_side_stream", [True, False])
def test_a_copy_to_the_host_waits_for_what_was_queued_before_its_event(
    device: AcceleratorDevice, accelerator: Accelerator, pinned: bool, on_side_stream: bool
) -> None:
    source = torch.zeros(MIB, dtype=torch.uint8, device=device.device)
    host = host_memory(MIB, pinned)
    accelerator.module.synchronize()
    side = accelerator.module.Stream(device.device)
    stream = side if on_side_stream else device.current_stream()
    with device.use_stream(stream), accelerator.held():
        accelerator.keep_busy()
        source.fill_(5)
        event = device.record_event()
        assert not event.query(), "the device was done before the copy began"
    device.wait_for_event(device.copy_to_host(source.untyped_storage(), host.data_ptr(), event))
    assert torch.all(host == 5)


def test_a_thread_that_is_put_on_a_stream_records_its_events_there(
    device: AcceleratorDevice, accelerator: Accelerator
) -> None:
    side = accelerator.module.Stream(device.device)
    with device.use_stream(side):
        assert device.current_stream() == side
        with accelerator.held():
            there, named = device.record_event(), device.record_event(side)
            with device.use_stream(accelerator.module.default_stream(device.device)):
                here = device.record_event()
            here.synchronize()
            assert not there.query() and not named.query()


def test_who_waits_for_an_event_returns_when_the_device_has_passed_it(
    device: AcceleratorDevice, accelerator: Accelerator
) -> None:
    with accelerator.held():
        accelerator.keep_busy()
        event = device.record_event()
        assert not event.query()
    device.wait_for_event(event)
    assert event.query()


def test_the_host_waits_for_no_copy_and_compute_does(
    device: AcceleratorDevice, accelerator: Accelerator
) -> None:
    source, there = random_bytes(MIB, device.device), host_memory(MIB)
    back, target = host_memory(MIB).fill_(7), device.new_restored(MIB)
    accelerator.module.synchronize()
    with contextlib.ExitStack() as held:
        with device.use_stream(device._load):
            held.enter_context(accelerator.held())
            accelerator.keep_busy()
        held.enter_context(accelerator.held())
        accelerator.keep_busy()
        source.fill_(5)
        produced = device.record_event()
        written = device.copy_to_host(source.untyped_storage(), there.data_ptr(), produced)
        read = device.copy_from_host(back.data_ptr(), target)
        device.use_after(target, [read])
        num_wrong = (bytes_in(target) != 7).sum()
        assert not any(event.query() for event in (produced, written, read))
    assert int(num_wrong) == 0
    device.wait_for_event(written)
    assert torch.all(there == 5)


@pytest.mark.parametrize("on_side_stream", [True, False])
def test_restored_memory_is_not_reused_before_the_stream_that_uses_it_is_done(
    device: AcceleratorDevice, accelerator: Accelerator, on_side_stream: bool
) -> None:
    host, others = host_memory(32 * MIB).fill_(7), host_memory(32 * MIB).fill_(5)
    target = device.new_restored(32 * MIB)
    read = device.copy_from_host(host.data_ptr(), target)
    side = accelerator.module.Stream(device.device)
    stream = side if on_side_stream else device.current_stream()
    with ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as held:
        with device.use_stream(stream):
            device.use_after(target, [read])
            held.enter_context(accelerator.held())
            num_wrong = (bytes_in(target) != 7).sum()
            used = device.record_event()
        del target
        other = device.new_restored(32 * MIB)
        copied = device.copy_from_host(others.data_ptr(), other)
        thread.submit(device.wait_for_event, copied).result(TIMEOUT_S)
        assert not used.query(), "the copy waited for compute"
    device.wait_for_event(used)
    assert int(num_wrong) == 0


def test_who_is_not_on_the_device_waits_for_copies_into_memory_that_was_freed(
    device: AcceleratorDevice, accelerator: Accelerator
) -> None:
    with device.use_stream(device._load), accelerator.held():
        assert not device.restored_is_free().query()


def test_copies_wait_for_nothing_that_was_queued_after_their_event(
    device: AcceleratorDevice, accelerator: Accelerator
) -> None:
    source, host = random_bytes(MIB, device.device), host_memory(MIB)
    target = device.new_restored(MIB)
    event = device.record_event()
    with ThreadPoolExecutor(1) as thread, accelerator.held():
        last = device.record_event()
        storage = source.untyped_storage()
        written = device.copy_to_host(storage, host.data_ptr(), event)
        thread.submit(device.wait_for_event, written).result(TIMEOUT_S)
        read = device.copy_from_host(host.data_ptr(), target)
        thread.submit(device.wait_for_event, read).result(TIMEOUT_S)
        assert not last.query(), "copies waited for compute"
    device.use_after(target, [])
    assert torch.equal(bytes_in(target), source)


def test_other_copies_do_not_wait_behind_one_that_waits_for_its_producer(
    device: AcceleratorDevice, accelerator: Accelerator
) -> None:
    source = torch.zeros(MIB, dtype=torch.uint8, device=device.device)
    earlier, target = random_bytes(MIB, device.device), device.new_restored(MIB)
    written, piece, kept = host_memory(MIB), host_memory(MIB), host_memory(MIB).fill_(7)
    accelerator.module.synchronize()
    with ThreadPoolExecutor(1) as thread, accelerator.held():
        source.fill_(5)
        last = device.record_event()
        write = device.copy_to_host(source.untyped_storage(), written.data_ptr(), last)
        for copied in (
            device.copy_to_host(earlier.untyped_storage(), piece.data_ptr(), None),
            device.copy_from_host(kept.data_ptr(), target),
        ):
            thread.submit(device.wait_for_event, copied).result(TIMEOUT_S)
        assert not last.query()
    device.wait_for_event(write)
    device.use_after(target, [])
    assert torch.equal(piece, earlier.cpu())
    assert torch.all(written == 5) and torch.all(bytes_in(target) == 7)


def test_copies_of_several_threads_keep_their_bytes_apart(device: AcceleratorDevice) -> None:
    sources = [random_bytes((index + 1) * MIB // 4 + 1, device.device) for index in range(24)]

    def there_and_back(source: torch.Tensor, event: Any) -> torch.UntypedStorage:
        host = host_memory(source.nbytes)
        device.wait_for_event(device.copy_to_host(source.untyped_storage(), host.data_ptr(), event))
        target = device.new_restored(source.nbytes)
        device.wait_for_event(device.copy_from_host(host.data_ptr(), target))
        return target

    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(there_and_back, one, device.record_event()) for one in sources]
        for _ in range(50):
            torch.full((MIB,), _OTHERS, dtype=torch.uint8, device=device.device)
        targets = [future.result() for future in futures]
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(bytes_in(target), source)


def test_memory_is_never_reused_before_those_who_use_it_are_done(
    device: AcceleratorDevice, accelerator: Accelerator
) -> None:
    """Nobody here waits for the device, so each storage is given up while it is still in use.

    A source is given up as soon as its copy is queued, a target as soon as the operation that reads
    it is; in both cases something else is put into the next memory of that size at once.
    """
    tier = HostTier(16 * MIB, device=device)
    num_wrong = torch.zeros((), dtype=torch.int64, device=device.device)
    for step in range(4):
        values = range(8 * step, 8 * step + 8)
        started = []
        for value in values:
            accelerator.nap()
            source = torch.full((MIB,), value, dtype=torch.uint8, device=device.device)
            begun = tier.begin_write(source.untyped_storage(), device.record_event())
            assert begun is not None
            started.append(begun)
            del source
            torch.full((MIB,), _OTHERS, dtype=torch.uint8, device=device.device)
        for value, (block, write) in zip(values, started, strict=True):
            write.wait()
            target, read = tier.begin_read(block)
            torch.full((MIB,), _OTHERS, dtype=torch.uint8, device=device.device)
            read.wait()
            device.use_after(target, read.events or ())
            accelerator.nap()
            num_wrong += (bytes_in(target) != value).sum()
            del target
        del started, begun, block, write, read
    assert int(num_wrong) == 0
    tier.close()


# -- Pinned host memory -------------------------------------------------------------------------


@pytest.fixture
def arena(device: AcceleratorDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostArena]:
    """Registers 4 MiB at a time."""
    monkeypatch.setattr(arena_part, "GROWTH_BYTES", 4 * MIB)
    arena = HostArena(16 * MIB, device)
    yield arena
    arena.close()


def allocated(arena: HostArena, num_bytes: int) -> int:
    """The address of a range."""
    offset = arena.allocate(num_bytes)
    assert offset is not None
    return arena.address(offset)


def test_an_arena_is_page_locked_and_its_blocks_keep_their_bytes(
    device: AcceleratorDevice, arena: HostArena
) -> None:
    addresses = [allocated(arena, MIB + 1) for _ in range(3)]
    sources = [random_bytes(MIB + 1, device.device) for _ in addresses]
    for address, source in zip(addresses, sources, strict=True):
        memory = (ctypes.c_char * (MIB + 1)).from_address(address)
        assert torch.frombuffer(memory, dtype=torch.uint8).is_pinned()
        after = device.record_event()
        device.wait_for_event(device.copy_to_host(source.untyped_storage(), address, after))
    for address, source in zip(addresses, sources, strict=True):
        target = device.new_restored(MIB + 1)
        device.use_after(target, [device.copy_from_host(address, target)])
        assert torch.equal(bytes_in(target), source)


def test_no_block_spans_two_registered_ranges(device: AcceleratorDevice, arena: HostArena) -> None:
    first, second = allocated(arena, 3 * MIB), allocated(arena, 3 * MIB)
    assert second - first == 4 * MIB and arena.size_bytes == 8 * MIB
    source = random_bytes(3 * MIB, device.device)
    after = device.record_event()
    device.wait_for_event(device.copy_to_host(source.untyped_storage(), second, after))
    assert ctypes.string_at(second, 3 * MIB) == source.cpu().numpy().tobytes()
    target = device.new_restored(3 * MIB)
    device.use_after(target, [device.copy_from_host(second, target)])
    assert torch.equal(bytes_in(target), source)


def test_memory_of_a_closed_arena_can_be_registered_again(device: AcceleratorDevice) -> None:
    for _ in range(3):
        arena = HostArena(64 * mmap.PAGESIZE, device)
        assert arena.allocate(1) == 0 and not arena.growth_failed
        arena.close()
    assert int(torch.ones(1, device=device.device)) == 1  # no error is left behind


# -- A whole engine -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ssd", "host", "tiered"])
@pytest.mark.parametrize("last", [False, True], ids=["the current device", "the last device"])
def test_results_are_equal_bit_for_bit(
    accelerator: Accelerator, tmp_path: Path, mode: str, last: bool
) -> None:
    """On the last device too, while the threads that move bytes begin on the first one."""
    module = accelerator.module
    index = module.device_count() - 1 if last else module.current_device()
    device = open_device(f"{accelerator.kind}:{index}")
    with module.device(index):
        model, x = Model().to(device.device), torch.randn(3, 17, 32).to(device.device)
        plain = run_step(model, x)
        config = OffloadConfig(
            mode=mode, directories=(tmp_path,), min_bytes=1, host_budget=64 * MIB
        )
        engine = OffloadEngine(config, device)
        try:
            for _ in range(2):
                assert_same(run_step(model, x, engine, between=accelerator.nap), plain)
        finally:
            engine.close()
        assert engine.statistics.offloaded_bytes > 0
