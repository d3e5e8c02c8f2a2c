# SPDX-License-Identifier: Apache-2.0
"""The device layer: bytes come back, copies wait for what they must and for nothing else.

The tests marked `gpu` show it of a real GPU. `keep_busy` puts a kernel on the current stream that
runs for so long that everything queued behind it is still to come when the next line runs.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron.offload.device.accelerator import AcceleratorDevice
from megatron.offload.device.cpu import CpuDevice
from megatron.offload.device.cuda import CudaPlatform
from megatron.offload.device.open import open_device
from megatron.offload.errors import ConfigurationError
from megatron.offload.sizes import MIB
from megatron.offload.tiers import arena as arena_part
from megatron.offload.tiers.arena import HostArena
from megatron.offload.tiers.host import HostTier

SIZES = [1, 4095, 4096, 4097, 3 * MIB + 17]
_BUSY_CYCLES = 1_000_000_000  # more than 0.4 s on GPUs up to 2.5 GHz
_OTHERS = 0xDB


def bytes_in(storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor of all bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def random_bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)


def host_memory(num_bytes: int, pinned: bool = True) -> torch.Tensor:
    return torch.full((num_bytes,), _OTHERS, dtype=torch.uint8, pin_memory=pinned)


def keep_busy() -> None:
    torch.cuda._sleep(_BUSY_CYCLES)


@pytest.fixture
def gpu():
    """Every kernel that the tests queue is loaded: loading one waits for those that run."""
    device = AcceleratorDevice(torch.device("cuda"), CudaPlatform())
    warm = torch.full((8,), 1, dtype=torch.uint8, device=device.device)
    torch.cuda._sleep(1)
    int((warm.fill_(2) != 1).sum())
    del warm
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # a storage then takes the memory that one of its size has just left
    yield device
    torch.cuda.synchronize()


# -- Any device ---------------------------------------------------------------------------------


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return open_device(request.param)


@pytest.mark.parametrize("num_bytes", SIZES)
def test_bytes_come_back_unchanged(device, num_bytes):
    source = random_bytes(num_bytes, device.device)
    host = host_memory(num_bytes + 2, device.pins_host_memory)
    inside = host[1:-1]  # host memory may start anywhere
    device.copy_to_host(source.untyped_storage(), inside.data_ptr(), device.record_event())
    assert torch.equal(inside, source.cpu())
    assert int(host[0]) == int(host[-1]) == _OTHERS
    target = device.new_storage(num_bytes)
    device.copy_from_host(inside.data_ptr(), target, device.record_event())
    assert target.nbytes() == num_bytes and target.device == device.device
    assert torch.equal(bytes_in(target), source)


@pytest.mark.parametrize("stop", [4097, 9000])  # a part may reach beyond the storage's end
def test_a_part_moves_and_nothing_else(device, stop):
    source = random_bytes(6000, device.device)
    host = host_memory(6000, device.pins_host_memory)
    part, length = slice(100, stop), min(stop, 6000) - 100
    device.copy_to_host(source.untyped_storage(), host.data_ptr(), device.record_event(), part)
    assert torch.equal(host[:length], source[part].cpu()) and torch.all(host[length:] == _OTHERS)
    target = device.new_storage(6000)
    event = device.record_event()
    device.wait_for_event(event)
    bytes_in(target).fill_(7)
    device.copy_from_host(host.data_ptr(), target, device.record_event(), part)
    assert torch.equal(bytes_in(target)[part], source[part])
    assert torch.all(bytes_in(target)[:100] == 7) and torch.all(bytes_in(target)[stop:] == 7)


def test_ranges_are_named_in_profiles(device):
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile, device.annotate("layer 3"):
        torch.ones(1)
    assert "layer 3" in [event.name for event in profile.events()]


def test_other_kinds_of_devices_are_refused():
    with pytest.raises(ConfigurationError, match="meta device cannot be offloaded, only on cuda"):
        open_device("meta")


# -- A CPU --------------------------------------------------------------------------------------


def test_a_cpu_queues_nothing_and_its_memory_is_the_processs():
    device = CpuDevice()
    with device.use_stream(device.current_stream()):
        assert device.record_event() is None
    assert device.is_host and not device.pins_host_memory
    device.return_freed_memory()  # what other tests left would be used again, and nothing grow
    before = device.allocated_bytes()
    device.reset_peak()
    storage = device.new_storage(64 * MIB)
    ctypes.memset(storage.data_ptr(), 1, storage.nbytes())
    assert device.allocated_bytes() - before > 60 * MIB
    del storage
    device.return_freed_memory()
    assert device.allocated_bytes() - before < 16 * MIB
    assert device.peak_bytes() - before > 60 * MIB
    device.reset_peak()
    assert device.peak_bytes() - before < 16 * MIB


# -- A GPU: memory ------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_gpus_memory_is_counted_to_the_byte(gpu):
    before = gpu.allocated_bytes()
    gpu.reset_peak()
    storages = [gpu.new_storage(32 * MIB), gpu.new_storage(MIB)]
    assert gpu.allocated_bytes() == before + 33 * MIB
    del storages
    gpu.return_freed_memory()
    assert gpu.allocated_bytes() == before and gpu.peak_bytes() == before + 33 * MIB
    gpu.reset_peak()
    assert gpu.peak_bytes() == before
    assert torch.cuda.max_memory_allocated(gpu.device) >= before + 33 * MIB  # others' view


@pytest.mark.gpu
def test_without_an_index_it_is_the_current_gpu(gpu):
    assert gpu.device == torch.device("cuda", torch.cuda.current_device())
    assert not gpu.is_host and gpu.pins_host_memory


# -- A GPU: who waits for whom ------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("on_side_stream", [True, False])
def test_a_copy_to_the_host_waits_for_what_was_queued_before_its_mark(gpu, pinned, on_side_stream):
    source = torch.zeros(MIB, dtype=torch.uint8, device=gpu.device)
    host = host_memory(MIB, pinned)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if on_side_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        keep_busy()
        source.fill_(5)
        event = gpu.record_event()
    assert not event.query(), "the GPU was done before the copy began; keep it busy for longer"
    gpu.copy_to_host(source.untyped_storage(), host.data_ptr(), event)
    assert torch.all(host == 5)


@pytest.mark.gpu
def test_a_thread_that_is_put_on_a_queue_sets_its_marks_there(gpu):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        stream = gpu.current_stream()
        keep_busy()
    with gpu.use_stream(stream):
        there = gpu.record_event()
    here = gpu.record_event()
    here.synchronize()
    assert stream == side and not there.query()


@pytest.mark.gpu
def test_who_waits_for_a_mark_returns_when_the_gpu_has_passed_it(gpu):
    keep_busy()
    event = gpu.record_event()
    assert not event.query()
    gpu.wait_for_event(event)
    assert event.query()


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [True, False])
def test_a_copy_from_the_host_leaves_memory_to_its_former_user_until_that_one_is_done(gpu, pinned):
    host = host_memory(32 * MIB, pinned).fill_(7)
    former = torch.zeros(32 * MIB, dtype=torch.uint8, device=gpu.device)
    address = former.data_ptr()
    keep_busy()
    former.fill_(5)
    del former  # the operations above are still to come
    target = gpu.new_storage(32 * MIB)
    event = gpu.record_event()
    assert target.data_ptr() == address and not event.query()
    gpu.copy_from_host(host.data_ptr(), target, event)
    torch.cuda.synchronize()
    assert torch.all(bytes_in(target) == 7)


@pytest.mark.gpu
def test_copies_wait_for_nothing_that_was_queued_after_their_mark(gpu):
    source = random_bytes(MIB, gpu.device)
    target = gpu.new_storage(MIB)
    host = host_memory(MIB)
    event = gpu.record_event()
    keep_busy()
    last = gpu.record_event()
    gpu.copy_to_host(source.untyped_storage(), host.data_ptr(), event)
    gpu.copy_from_host(host.data_ptr(), target, event)
    assert not last.query(), "copies waited for compute"
    assert torch.equal(bytes_in(target), source)


@pytest.mark.gpu
def test_a_copy_from_the_host_does_not_wait_behind_copies_to_it(gpu):
    source = torch.zeros(MIB, dtype=torch.uint8, device=gpu.device)
    target = gpu.new_storage(MIB)
    written, kept = host_memory(MIB), host_memory(MIB).fill_(7)
    first = gpu.record_event()
    keep_busy()
    source.fill_(5)
    last = gpu.record_event()
    write = threading.Thread(
        target=gpu.copy_to_host, args=(source.untyped_storage(), written.data_ptr(), last)
    )
    write.start()
    gpu.copy_from_host(kept.data_ptr(), target, first)
    assert not last.query()
    write.join()
    assert torch.all(written == 5) and torch.all(bytes_in(target) == 7)


@pytest.mark.gpu
def test_copies_of_several_threads_keep_their_bytes_apart(gpu):
    sources = [random_bytes((index + 1) * MIB // 4 + 1, gpu.device) for index in range(24)]

    def there_and_back(source: torch.Tensor, event: torch.cuda.Event) -> torch.UntypedStorage:
        host = host_memory(source.nbytes)
        gpu.copy_to_host(source.untyped_storage(), host.data_ptr(), event)
        target = gpu.new_storage(source.nbytes)
        gpu.copy_from_host(host.data_ptr(), target, gpu.record_event())
        return target

    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(there_and_back, source, gpu.record_event()) for source in sources]
        for _ in range(50):
            torch.full((MIB,), _OTHERS, dtype=torch.uint8, device=gpu.device)
        targets = [future.result() for future in futures]
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(bytes_in(target), source)


@pytest.mark.gpu
def test_memory_is_never_reused_before_those_who_use_it_are_done(gpu):
    """Nobody here waits for the GPU, so each storage is given up while it is still in use.

    A source is given up as soon as its copy is queued, a target as soon as the operation that reads
    it is; in both cases something else is put into the next memory of that size at once.
    """
    tier = HostTier(64 * MIB, device=gpu)
    num_wrong = torch.zeros((), dtype=torch.int64, device=gpu.device)
    for step in range(10):
        values = range(8 * step, 8 * step + 8)
        started = []
        for value in values:
            torch.cuda._sleep(2_000_000)  # about a millisecond
            source = torch.full((4 * MIB,), value, dtype=torch.uint8, device=gpu.device)
            started.append(tier.begin_write(source.untyped_storage()))
            del source
            torch.full((4 * MIB,), _OTHERS, dtype=torch.uint8, device=gpu.device)
        for value, (block, write) in zip(values, started, strict=True):
            write.wait()
            target, read = tier.begin_read(block)
            torch.full((4 * MIB,), _OTHERS, dtype=torch.uint8, device=gpu.device)
            read.wait()
            torch.cuda._sleep(2_000_000)
            num_wrong += (bytes_in(target) != value).sum()
            del target
        del started, block, write, read
    assert int(num_wrong) == 0
    tier.close()


# -- A GPU: pinned host memory ------------------------------------------------------------------


@pytest.fixture
def arena(gpu, monkeypatch):
    """Registers 4 MiB at a time."""
    monkeypatch.setattr(arena_part, "GROWTH_BYTES", 4 * MIB)
    arena = HostArena(16 * MIB, gpu)
    yield arena
    arena.close()


@pytest.mark.gpu
def test_an_arena_is_page_locked_and_its_blocks_keep_their_bytes(gpu, arena):
    offsets = [arena.allocate(MIB + 1) for _ in range(3)]
    sources = [random_bytes(MIB + 1, gpu.device) for _ in offsets]
    for offset, source in zip(offsets, sources, strict=True):
        memory = (ctypes.c_char * (MIB + 1)).from_address(arena.address(offset))
        assert torch.frombuffer(memory, dtype=torch.uint8).is_pinned()
        gpu.copy_to_host(source.untyped_storage(), arena.address(offset), gpu.record_event())
    for offset, source in zip(offsets, sources, strict=True):
        target = gpu.new_storage(MIB + 1)
        gpu.copy_from_host(arena.address(offset), target, gpu.record_event())
        assert torch.equal(bytes_in(target), source)


@pytest.mark.gpu
def test_no_block_spans_two_registered_ranges(gpu, arena):
    first = arena.allocate(3 * MIB)
    second = arena.allocate(3 * MIB)
    assert (first, second) == (0, 4 * MIB) and arena.size_bytes == 8 * MIB
    source = random_bytes(3 * MIB, gpu.device)
    gpu.copy_to_host(source.untyped_storage(), arena.address(second), gpu.record_event())
    assert ctypes.string_at(arena.address(second), 3 * MIB) == source.cpu().numpy().tobytes()
    target = gpu.new_storage(3 * MIB)
    gpu.copy_from_host(arena.address(second), target, gpu.record_event())
    assert torch.equal(bytes_in(target), source)


@pytest.mark.gpu
def test_memory_of_a_closed_arena_can_be_registered_again(gpu):
    for _ in range(3):
        arena = HostArena(64 * mmap.PAGESIZE, gpu)
        assert arena.allocate(1) == 0 and not arena.growth_failed
        arena.close()
    assert int(torch.ones(1, device=gpu.device)) == 1  # no error is left behind
