# SPDX-License-Identifier: Apache-2.0
"""Invariant 5 without a GPU: on a device whose work lags behind, every missing wait shows.

`tests/support/simulated_device.py` says how. The first tests show that it would find one.
"""

from __future__ import annotations

import pytest
import torch

from megatron.offload import OffloadEngine, Scope
from megatron.offload.device.device import memory_at
from megatron.offload.tiers import ssd as ssd_module
from tests.support.models import Model, assert_same, run_step, settle
from tests.support.simulated_device import POISON, PoisoningPool, SimulatedDevice

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
    for event, found in ((device.record_event(), 3), (too_early, POISON), (None, POISON)):
        device.copy_to_host(source, address, event)
        assert set(buffer) == {found}


def test_a_copy_into_memory_that_is_still_in_use_is_overwritten(device):
    buffer = bytearray([3]) * 64
    address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    too_early = device.record_event()
    target = device.new_storage(64)
    for event, found in ((device.record_event(), 3), (too_early, POISON), (None, POISON)):
        device.copy_from_host(address, target, event)
        assert set(memory_at(target.data_ptr(), 64)) == {found}


def test_memory_that_was_given_back_is_poison(device):
    pool = PoisoningPool(1)
    with pool.buffer() as address:
        memory = memory_at(address, 64)
        memory[:] = bytes(64)
    assert set(memory) == {POISON}
    memory.release()
    pool.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "ssd"},
        {"mode": "ssd", "io": "buffered", "verify": "checksum"},
        {"mode": "ssd", "threads": 1},
        {"mode": "ssd", "inflight_bytes": 20_000},
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
    assert engine.statistics.tier_used_bytes == 0


def test_an_event_of_another_stream_tells_nothing(device):
    buffer = bytearray(64)
    address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    source = storage_of(3, device)
    for stream, found in (("side", POISON), ("main", 3)):
        with device.use_stream(stream):
            device.copy_to_host(source, address, device.record_event())
        assert set(buffer) == {found}
    with device.use_stream("side"):
        memory = torch.empty(0, dtype=torch.uint8).set_(device.new_storage(64))
    with pytest.raises(AssertionError, match="another stream"), device.computing():
        memory.add(1)


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


def test_large_storages_striped_over_directories_come_back(make_simulated_engine, device, tmp_path):
    directories = tuple(tmp_path / name for name in "ab")
    for directory in directories:
        directory.mkdir()
    engine = make_simulated_engine(directories=directories)
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
