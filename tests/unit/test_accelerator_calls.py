# SPDX-License-Identifier: Apache-2.0
"""What an accelerator's device asks of torch, call by call, and on which device.

On `FakeCuda`, which shows what is asked and in which order, not that CUDA does it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron.offload import offload_optimizer
from megatron.offload.device import open as open_module
from megatron.offload.device.accelerator import AcceleratorDevice
from megatron.offload.device.cuda import CudaPlatform
from megatron.offload.device.open import open_device
from megatron.offload.device.platform import platform_of, register_platform, registered_kinds
from megatron.offload.errors import PREFIX, STATES_PREFIX, ConfigurationError
from megatron.offload.sizes import MIB
from megatron.offload.tiers.arena import HostArena
from megatron.offload.tiers.host import HostTier
from megatron.offload.tiers.ssd import SsdTier
from tests.support.fake_cuda import FakeCuda
from tests.support.waiting import SOON_S


@pytest.fixture
def gpu(fake_cuda: FakeCuda) -> AcceleratorDevice:
    """The second of two GPUs."""
    return AcceleratorDevice(torch.device("cuda", 1), CudaPlatform())


def calls_of(fake_cuda: FakeCuda, work: Callable[[], object]) -> list[str]:
    """What a piece of work asks for, in a thread of its own, which begins on the first GPU."""
    fake_cuda.calls.clear()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(work).result(timeout=SOON_S)
    return fake_cuda.calls


# -- Call by call -------------------------------------------------------------------------------


def test_copies_make_these_calls(fake_cuda: FakeCuda, gpu: AcceleratorDevice) -> None:
    source, target = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    storage, host = source.untyped_storage(), ctypes.create_string_buffer(8)
    after = gpu.record_event()

    def copies() -> None:
        gpu.copy_to_host(storage, ctypes.addressof(host), after)
        gpu.copy_to_host(storage, ctypes.addressof(host), None, slice(0, 3))
        gpu.copy_from_host(ctypes.addressof(host), target.untyped_storage(), slice(2, 100))

    assert calls_of(fake_cuda, copies) == [
        "on cuda:1",
        "on stream 1 of cuda:1",
        "stream 1 of cuda:1 waits for event 1",
        "8 bytes are copied on stream 1 of cuda:1 non_blocking=True",
        "event 2 is made blocking=True",
        "event 2 is recorded in stream 1 of cuda:1",
        "on the first stream of cuda:1",
        "back on cuda:0",
        "on cuda:1",
        "on stream 2 of cuda:1",
        "3 bytes are copied on stream 2 of cuda:1 non_blocking=True",
        "event 3 is made blocking=True",
        "event 3 is recorded in stream 2 of cuda:1",
        "on the first stream of cuda:1",
        "back on cuda:0",
        "on cuda:1",
        "on stream 3 of cuda:1",
        "6 bytes are copied on stream 3 of cuda:1 non_blocking=True",
        "event 4 is made blocking=True",
        "event 4 is recorded in stream 3 of cuda:1",
        "on the first stream of cuda:1",
        "back on cuda:0",
    ]
    assert target.tolist() == [0, 0, 0, 1, 2, 3, 4, 5]


def test_events_memory_and_time_make_these_calls(
    fake_cuda: FakeCuda, gpu: AcceleratorDevice
) -> None:
    def work() -> None:
        assert gpu.current_stream().device == gpu.device
        gpu.wait_for_event(gpu.record_event())
        gpu.wait_for_event(None)  # nothing has to be waited for
        memory = gpu.new_restored(5)
        gpu.use_after(memory, [gpu.restored_is_free()])
        assert gpu.seconds_between(gpu.timestamp(), gpu.timestamp()) == 2.0
        with gpu.annotate("layer 3"):
            pass

    assert calls_of(fake_cuda, work) == [
        "event 1 is made blocking=True",
        "event 1 is recorded in the first stream of cuda:1",
        "on cuda:1",
        "a thread waits for event 1",
        "back on cuda:0",
        "on cuda:1",
        "on stream 3 of cuda:1",
        "5 bytes of cuda:1 for stream 3 of cuda:1",
        "on the first stream of cuda:1",
        "back on cuda:0",
        "event 2 is made blocking=True",
        "event 2 is recorded in stream 3 of cuda:1",
        "the first stream of cuda:1 waits for event 2",
        "5 bytes are kept for the first stream of cuda:1",
        "event 3 is made enable_timing=True",
        "event 3 is recorded in the first stream of cuda:1",
        "event 4 is made enable_timing=True",
        "event 4 is recorded in the first stream of cuda:1",
        "on cuda:1",
        "a thread waits for event 3",
        "a thread waits for event 4",
        "from event 3 to event 4",
        "back on cuda:0",
        "range layer 3 begins",
        "range layer 3 ends",
    ]


def test_what_is_allocated_is_asked_without_a_table_of_all_counters(
    fake_cuda: FakeCuda, gpu: AcceleratorDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samplers ask at each transfer, and a sorted table takes longer than all else of them."""
    monkeypatch.delattr(torch.cuda.memory, "memory_stats")
    fake_cuda.take(100, gpu=1)
    assert gpu.allocated_bytes() == 100


def test_memory_is_counted_for_its_own_gpu(fake_cuda: FakeCuda, gpu: AcceleratorDevice) -> None:
    fake_cuda.take(100, gpu=0)
    fake_cuda.take(30, gpu=1)
    assert gpu.allocated_bytes() == 30
    assert gpu.reusable_bytes() == fake_cuda.reserved_bytes - 30
    assert gpu.free_bytes() == fake_cuda.free_bytes + fake_cuda.reserved_bytes - 30


# -- On which device ----------------------------------------------------------------------------


@pytest.fixture
def gpus_with_contexts(fake_cuda: FakeCuda) -> Iterator[set[int]]:
    """Filled by the test. Whatever it does, nothing may happen on the first GPU."""
    fake_cuda.contexts.clear()
    yield fake_cuda.contexts
    assert fake_cuda.contexts == {1}


def test_a_thread_that_is_put_on_a_stream_opens_no_context_on_the_first_gpu(
    fake_cuda: FakeCuda, gpu: AcceleratorDevice, gpus_with_contexts: set[int]
) -> None:
    side = fake_cuda.make_stream(gpu.device)

    def work() -> None:
        with gpu.use_stream(side):
            assert gpu.current_stream() is side and fake_cuda.gpu == 1
        assert gpu.current_stream() is not side and fake_cuda.gpu == 0

    calls_of(fake_cuda, work)


def test_copies_and_waits_open_no_context_on_the_first_gpu(
    fake_cuda: FakeCuda, gpu: AcceleratorDevice, gpus_with_contexts: set[int]
) -> None:
    storage, host = torch.zeros(8).untyped_storage(), ctypes.create_string_buffer(32)

    def work() -> None:
        gpu.wait_for_event(event := gpu.record_event())
        gpu.copy_to_host(storage, ctypes.addressof(host), event)
        gpu.copy_to_host(storage, ctypes.addressof(host), None)
        gpu.copy_from_host(ctypes.addressof(host), storage)
        gpu.use_after(gpu.new_restored(5), [event, gpu.restored_is_free()])
        gpu.seconds_between(gpu.timestamp(), gpu.timestamp())
        assert gpu.has_passed(gpu.timestamp())

    calls_of(fake_cuda, work)


@pytest.mark.parametrize("accepts", [0, 1], ids=["refused", "pinned"])
def test_an_arena_that_grows_opens_no_context_on_the_first_gpu(
    fake_cuda: FakeCuda, gpu: AcceleratorDevice, gpus_with_contexts: set[int], accepts: int
) -> None:
    fake_cuda.accepts = accepts
    arena = HostArena(MIB, gpu)
    calls_of(fake_cuda, lambda: arena.allocate(1))  # in the dispatcher's thread, as a rule
    assert arena.growth_failed == (accepts == 0) and not fake_cuda.has_error
    assert ("a kernel" in fake_cuda.calls) == (accepts == 0)  # it takes the error
    calls_of(fake_cuda, arena.close)


@pytest.mark.parametrize("kind", [HostTier, SsdTier])
def test_a_tiers_threads_open_no_context_on_the_first_gpu(
    fake_cuda: FakeCuda,
    gpu: AcceleratorDevice,
    gpus_with_contexts: set[int],
    tmp_path: Path,
    kind: type[HostTier] | type[SsdTier],
) -> None:
    tier = HostTier(MIB, device=gpu) if kind is HostTier else SsdTier([tmp_path], device=gpu)
    source = torch.arange(5000, dtype=torch.int16)

    def there_and_back() -> torch.UntypedStorage:
        with gpu.use_stream(gpu.current_stream()):
            begun = tier.begin_write(source.untyped_storage())
            assert begun is not None
            block, write = begun
            write.wait()
            target, read = tier.begin_read(block)
        read.wait()
        return target

    with ThreadPoolExecutor(1) as dispatcher:  # begins on the first GPU, as the tier's own threads
        target = dispatcher.submit(there_and_back).result(timeout=SOON_S)
        dispatcher.submit(tier.close).result(timeout=SOON_S)
    assert bytes(target) == bytes(source.untyped_storage())


# -- Which kinds --------------------------------------------------------------------------------


def test_a_kind_with_a_platform_is_opened(fake_cuda: FakeCuda) -> None:
    device = open_device("cuda:1")
    assert isinstance(device, AcceleratorDevice) and device.device == torch.device("cuda", 1)
    assert device.pins_host_memory and not device.is_host
    assert open_device("cuda").device == torch.device("cuda", 0)  # the current one


def test_all_who_open_a_device_in_a_process_share_it(fake_cuda: FakeCuda) -> None:
    device = open_device("cuda:0")
    assert open_device(torch.device("cuda", 0)) is open_device("cuda") is device
    assert open_device("cuda:1") is not device
    register_platform("cuda", CudaPlatform())  # as a test or a plugin does: not the one of before
    assert (other := open_device("cuda:0")) is not device and open_device("cuda:0") is other


def test_a_process_that_was_forked_has_devices_of_its_own(fake_cuda: FakeCuda) -> None:
    device = open_device("cuda:0")
    if (child := os.fork()) == 0:
        os._exit(0 if open_device("cuda:0") is not device else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert open_device("cuda:0") is device


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("xpu", "no way is known to pin host memory for xpu"),
        ("mps", "torch.mps has no streams"),
        ("meta", "torch has no module torch.meta"),
    ],
)
def test_other_kinds_are_refused_with_what_is_missing(kind: str, missing: str) -> None:
    known = ", ".join(registered_kinds())  # the test accelerator is one where its tests run too
    expected = f"only what is on {known} and cpu: {missing}; train on one of these, or without"
    for prefix in (PREFIX, STATES_PREFIX):
        with pytest.raises(ConfigurationError, match=f"^{prefix}.* on a {kind} .*{expected}"):
            open_device(kind, prefix)


def test_an_optimizer_on_such_a_device_is_refused_with_a_sentence_about_states(
    tmp_path: Path,
) -> None:
    params = torch.nn.Linear(4, 4, device="meta").parameters()
    with pytest.raises(ConfigurationError, match=r"^optimizer states: what is on a meta"):
        offload_optimizer(torch.optim.AdamW(params), tmp_path)


def test_a_registered_kind_is_no_longer_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = object()
    monkeypatch.setattr(open_module, "AcceleratorDevice", lambda *_: opened)
    monkeypatch.setattr(open_module, "platform_of", lambda kind: platform_of("cuda"))
    monkeypatch.setattr(open_module, "_opened", {})
    assert open_device("xpu:0") is opened
