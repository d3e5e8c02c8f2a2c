# SPDX-License-Identifier: Apache-2.0
"""Invariant 5 without a GPU: on a device whose work lags behind, every missing wait shows.

`tests/support/simulated_device.py` says how. The first tests show that it would find one.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from megatron.offload import OffloadEngine, Scope
from megatron.offload.device.device import memory_at
from megatron.offload.tiers import ssd as ssd_module
from tests.support.models import Model, assert_same, run_step, settle
from tests.support.simulated_device import POISON, PoisoningPool, SimulatedDevice
from tests.support.waiting import wait_until, wait_until_empty

MIB = 1 << 20


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(ssd_module, "StagingPool", PoisoningPool)
    return SimulatedDevice()


@pytest.fixture
def make_simulated_engine(offload_config, device):
    engines = []

    def build(**changes):
        engines.append(OffloadEngine(offload_config(**changes), device))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def storage_of(value, device):
    with device.computing():
        return torch.full((64,), value, dtype=torch.uint8).untyped_storage()


def test_a_copy_that_does_not_wait_for_the_producer_finds_poison(device):
    buffer = bytearray(64)
    address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    too_early = device.record_event()
    source = storage_of(3, device)
    produced = device.record_event()
    for event, found in ((produced, 3), (too_early, POISON), (None, POISON)):
        device.wait_for_event(device.copy_to_host(source, address, event))
        assert set(buffer) == {found}
    device.wait_for_event(produced)  # the host has waited for it, so the copy need not
    device.wait_for_event(device.copy_to_host(source, address, None))
    assert set(buffer) == {3}


def test_a_copy_whose_source_is_freed_before_it_runs_finds_poison(device):
    buffer = bytearray(64)
    address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    source = storage_of(3, device)
    copied = device.copy_to_host(source, address, device.record_event())
    del source
    device.wait_for_event(copied)
    assert set(buffer) == {POISON}


def test_restored_memory_can_be_used_only_by_a_stream_that_was_told_to_wait(device):
    buffer = bytearray([3]) * 64
    address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    target = device.new_restored(64)
    restored = torch.empty(0, dtype=torch.uint8).set_(target)
    first = device.copy_from_host(address, target, slice(0, 32))
    last = device.copy_from_host(address, target, slice(32, 64))
    for events in ([], [first]):
        device.use_after(target, events)
        with device.computing(), pytest.raises(AssertionError, match="has not waited"):
            restored.add(1)
    device.use_after(target, [last])
    with device.use_stream("side"):
        device.use_after(device.new_restored(64), [last])
    for stream, is_told in (("main", True), ("side", False)):
        with device.use_stream(stream), device.computing():
            if is_told:
                assert set((restored + 1).tolist()) == {4}
            else:
                with pytest.raises(AssertionError, match="not kept for this stream"):
                    restored.add(1)


def test_a_buffer_that_is_taken_again_is_poison(device):
    pool = PoisoningPool(1, device)
    target = device.new_restored(64)
    with pool.buffer() as buffer:
        memory = memory_at(buffer.address, 64)
        memory[:] = bytes(64)
        copied = device.copy_from_host(buffer.address, target)
    with pool.buffer():
        assert set(memory) == {POISON}
    device.wait_for_event(copied)
    assert set(memory_at(target.data_ptr(), 64)) == {POISON}, "nobody said that it was in use"
    memory.release()
    pool.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "ssd"},
        {"mode": "ssd", "pinned_bytes": 0},
        {"mode": "ssd", "io": "buffered", "verify": "checksum"},
        {"mode": "ssd", "threads": 1, "pinned_bytes": 0},
        {"mode": "ssd", "inflight_bytes": 20_000, "pinned_bytes": 0},
        {"mode": "host", "host_budget": 64 * MIB},
        {"mode": "tiered", "host_budget": 100_000},
    ],
    ids=str,
)
def test_loss_and_gradients_are_equal(make_simulated_engine, device, settings):
    model, x = Model(), torch.randn(3, 17, 32)
    plain = run_step(model, x)
    engine = make_simulated_engine(**settings)
    for _ in range(2):
        with device.computing():
            assert_same(run_step(model, x, engine), plain)
    moved = engine.statistics.written_bytes + engine.statistics.host_written_bytes
    assert moved >= engine.statistics.offloaded_bytes > 0
    assert device.num_copies >= 4 * engine.statistics.offloaded_storages
    settle(engine)
    wait_until_empty(engine.tiers.values())


def test_an_event_of_another_stream_tells_nothing(device):
    buffer = bytearray(64)
    address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    source = storage_of(3, device)
    content = torch.empty(0, dtype=torch.uint8).set_(source)
    for stream, found in (("side", POISON), ("main", 3)):
        event = device.record_event(stream)
        device.wait_for_event(device.copy_to_host(source, address, event))
        assert set(buffer) == {found}
    with device.use_stream("side"), device.computing():
        with pytest.raises(AssertionError, match="side has not waited for memory that main wrote"):
            content.add(1)
        device.wait_for_stream("main")
        content.add(1)
        event = device.record_event()
    device.wait_for_event(device.copy_to_host(source, address, event))
    assert set(buffer) == {3}, "a stream's events come after what it has waited for"


@pytest.mark.parametrize("mode", ["ssd", "host"])
def test_a_model_may_compute_on_a_stream_of_its_own(make_simulated_engine, device, mode):
    model, x = Model(), torch.randn(3, 17, 32)
    plain = run_step(model, x)
    engine = make_simulated_engine(mode=mode, host_budget=64 * MIB)
    for device.stream in ("main", "side", "main"):
        with device.computing():
            assert_same(run_step(model, x, engine), plain)
    assert engine.statistics.written_bytes + engine.statistics.host_written_bytes > 0


@pytest.mark.parametrize("mode", ["ssd", "host"])
def test_a_capture_records_one_event_in_the_thread_that_computes(
    make_simulated_engine, device, monkeypatch, mode
):
    engine, record_event, threads = make_simulated_engine(mode=mode), device.record_event, []

    def noted(stream=None):
        threads.append(threading.current_thread())
        return record_event(stream)

    monkeypatch.setattr(device, "record_event", noted)
    x = torch.randn(1000, requires_grad=True)
    with device.computing(), engine.step(), engine.forward(Scope()):
        y = x.exp().flip(0).exp().flip(0).exp()  # none is computed again
        engine.capture(Scope(), [y], [x])
        settle(engine)
    assert engine.statistics.offloaded_storages == 3
    assert threads == [threading.current_thread()]


@pytest.mark.parametrize("mode", ["ssd", "host"])
def test_operations_may_be_on_several_streams_at_once(make_simulated_engine, device, mode):
    engine = make_simulated_engine(mode=mode, host_budget=64 * MIB)
    streams = ["main", "side", "side", "main", "other"]
    leaves = [torch.randn(1024, requires_grad=True) for _ in streams]
    results = []
    with device.computing(), engine.step():
        with engine.forward(Scope()) as save_order, engine.saved_tensors_hooks():
            for stream, leaf in zip(streams, leaves, strict=True):
                with device.use_stream(stream):
                    results.append(leaf.exp().clone())
        settle(engine)
        with engine.backward(save_order):
            for stream, result in zip(streams[::-1], results[::-1], strict=True):
                with device.use_stream(stream):  # as autograd does, each where it was in forward
                    result.backward(torch.ones_like(result))
    for leaf, result in zip(leaves, results, strict=True):
        assert torch.equal(leaf.grad, result)
    moved = engine.statistics.read_bytes + engine.statistics.host_read_bytes
    assert moved == len(leaves) * 4096


# -- Parts of a layer on a stream of their own ------------------------------------------------


class OnStream(torch.autograd.Function):
    """From here on operations are on a stream, which waits for the one before; and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: SimulatedDevice, stream: str) -> torch.Tensor:
        ctx.device, ctx.former = device, device.stream
        switch(device, stream)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        switch(ctx.device, ctx.former)
        return gradient, None, None


def switch(device: SimulatedDevice, stream: str) -> None:
    former, device.stream = device.stream, stream
    device.wait_for_stream(former)


class WithAPartAside(torch.nn.Module):
    """A layer of which one part is on a side stream, as experts that all tokens share may be."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self.device = device
        self.main, self.side = torch.nn.Linear(32, 64), torch.nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        aside = OnStream.apply(x, self.device, "side")
        aside = torch.nn.functional.dropout(self.side(aside).sigmoid(), 0.3)
        part = aside.view(-1)[: 32 * len(x)].square()  # a copy of it moves
        aside = OnStream.apply(part.view(len(x), 32).sigmoid(), self.device, "main")
        return self.main(x)[:, :32].sigmoid() * aside + x


@pytest.fixture
def model_with_parts_aside(device):
    torch.manual_seed(3)
    model = Model(num_layers=0)
    model.blocks.extend(WithAPartAside(device) for _ in range(3))
    return model


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "ssd"},
        {"mode": "ssd", "pinned_bytes": 0},
        {"mode": "ssd", "threads": 1, "inflight_bytes": 20_000, "pinned_bytes": 0},
        {"mode": "host", "host_budget": 64 * MIB},
    ],
    ids=str,
)
def test_what_a_side_stream_saved_and_the_main_one_captured_is_safe_on_the_side_stream(
    make_simulated_engine, device, model_with_parts_aside, settings
):
    x = torch.randn(17, 32)
    plain = run_step(model_with_parts_aside, x)
    engine = make_simulated_engine(**settings)
    for _ in range(2):
        with device.computing():
            assert_same(run_step(model_with_parts_aside, x, engine), plain)
    counted = engine.statistics
    assert counted.read_bytes + counted.host_read_bytes > 0.9 * counted.offloaded_bytes > 0


@pytest.mark.parametrize("mode", ["ssd", "host"])
def test_a_context_takes_what_streams_save_each_after_its_own_operations(
    make_simulated_engine, device, model_with_parts_aside, mode
):
    x = torch.randn(17, 32)
    plain = run_step(model_with_parts_aside, x)
    engine = make_simulated_engine(mode=mode, host_budget=64 * MIB)
    engine.exclude(model_with_parts_aside.parameters())
    torch.manual_seed(5)
    model_with_parts_aside.zero_grad()
    with device.computing(), engine.step(), engine.forward(Scope()) as save_order:
        with engine.saved_tensors_hooks():
            loss = model_with_parts_aside(x).square().mean()
        settle(engine)
        with engine.backward(save_order):
            loss.backward()
        ours = loss.detach(), [p.grad.clone() for p in model_with_parts_aside.parameters()]
    assert_same(ours, plain)


def test_a_mask_that_one_stream_unpacked_is_waited_for_by_another(make_simulated_engine, device):
    mask = torch.rand(10_000) < 0.3
    engine = make_simulated_engine()
    with device.computing(), engine.step():
        saved = mask.clone()
        packed = [engine.hooks.pack(saved), engine.hooks.pack(saved[:])]
        settle(engine)
        del saved
        for stream, view in zip(("main", "side"), packed, strict=True):
            with device.use_stream(stream):
                assert torch.equal(engine.hooks.unpack(view) & True, mask)
    assert engine.statistics.bit_packed_bytes > 0


@pytest.mark.parametrize("mode", ["ssd", "host"])
def test_what_was_made_ready_ahead_is_waited_for_on_the_device(make_simulated_engine, device, mode):
    engine = make_simulated_engine(mode=mode, host_budget=64 * MIB)
    with device.computing(), engine.step(), engine.forward(Scope()) as save_order:
        tensor = torch.randn(5000)
        expected = tensor.clone()
        packed = engine.hooks.pack(tensor)
        del tensor
        settle(engine)
        with engine.backward(save_order):
            wait_until(lambda: packed.built, "it was not made ready")
            assert torch.equal(engine.hooks.unpack(packed), expected)


def test_a_copy_of_a_part_that_is_forwarded_is_waited_for(make_simulated_engine, device):
    """Captured on one stream, which copies it, and used on another one."""
    engine = make_simulated_engine()
    with device.computing(), engine.step():
        whole = torch.randn(5000)
        expected = whole[:100].clone()
        with device.copies_held():  # else it may have left, and is read
            packed = engine.hooks.pack(whole[:100])
            del whole
            with device.use_stream("side"):
                restored = engine.hooks.unpack(packed)
        with device.use_stream("side"):
            assert set((restored - restored).tolist()) == {0.0}
        assert torch.equal(restored, expected)
    assert engine.statistics.forwarded_bytes == 400


# -- Without a wait on the host -----------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ssd", "host"])
def test_compute_does_not_wait_for_copies_to_the_device(make_simulated_engine, device, mode):
    engine = make_simulated_engine(mode=mode, host_budget=64 * MIB)
    with device.computing(), engine.step():
        tensor = torch.randn(5000)
        expected = tensor.clone()
        packed = engine.hooks.pack(tensor)
        del tensor
        settle(engine)
        with device.copies_held():
            restored = engine.hooks.unpack(packed)
        assert torch.equal(restored, expected)


@pytest.mark.slow
def test_large_storages_striped_over_directories_come_back(make_simulated_engine, device, tmp_path):
    directories = tuple(tmp_path / name for name in "ab")
    for directory in directories:
        directory.mkdir()
    engine = make_simulated_engine(directories=directories, pinned_bytes=0)
    with device.computing(), engine.step():
        tensor = torch.randn(3 * MIB + 5)
        packed = engine.hooks.pack(tensor)
        engine.wait_for_writes()
        assert len(packed.saved.block.extents) == 2
        expected = tensor.clone()
        del tensor
        assert torch.equal(engine.hooks.unpack(packed), expected)


def test_without_waiting_for_writes_the_bytes_come_from_memory(make_simulated_engine, device):
    engine = make_simulated_engine()
    with device.computing(), engine.step():
        tensor = torch.randn(5000)
        packed = engine.hooks.pack(tensor)
        assert torch.equal(engine.hooks.unpack(packed), tensor)
    assert engine.statistics.forwarded_bytes == tensor.nbytes
