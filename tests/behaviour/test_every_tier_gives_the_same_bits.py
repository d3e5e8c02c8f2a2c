# SPDX-License-Identifier: Apache-2.0
"""Invariant 1 for every mode and setting of the tiers, with everything really moved."""

from __future__ import annotations

import pytest
import torch

from megatron.offload import ConfigurationError
from tests.support.models import Model, assert_same, run_step, ssd
from tests.support.waiting import wait_until

MIB = 1 << 20


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "ssd", "io": "direct"},
        {"mode": "ssd", "io": "buffered"},
        {"mode": "host"},
        {"mode": "tiered"},
        {"mode": "ssd", "verify": "checksum"},
        {"mode": "ssd", "verify": "checksum", "io": "buffered"},
        {"mode": "tiered", "host_budget": 65536},
        {"mode": "ssd", "write_bytes_per_s": 20e6},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_are_equal(make_engine, settings, dtype):
    settings = dict(settings)
    model, x = Model().to(dtype), torch.randn(3, 17, 32, dtype=dtype)
    plain = run_step(model, x)
    host_budget = settings.pop("host_budget", 64 * MIB)
    engine = make_engine(host_budget=host_budget, **settings)
    for _ in range(3):
        assert_same(run_step(model, x, engine), plain)
        step = engine.statistics
        assert (step.host_written_bytes > 0) is engine.config.uses_host
        # With room for all in host memory, the SSD's share of so few bytes may be none.
        if not engine.config.uses_host or host_budget < MIB:
            assert step.written_bytes > 0
        assert step.host_read_bytes == step.host_written_bytes
        assert step.read_bytes == step.written_bytes
        assert step.rejected_bytes == 0
        wait_until(lambda: not any(t.used_bytes for t in engine.tiers.values()), "tiers not empty")


def test_default_hooks_give_the_same_gradients(engine):
    model, x = Model(), torch.randn(3, 17, 32)
    plain = run_step(model, x)
    engine.exclude(model.parameters())
    torch.manual_seed(5)
    model.zero_grad()
    with engine.step():
        with engine.forward(engine.scope), engine.saved_tensors_hooks():
            loss = model(x).square().mean()
        loss.backward()
    assert_same((loss.detach(), [p.grad.clone() for p in model.parameters()]), plain)
    assert engine.statistics.offloaded_bytes > 0


def test_odd_sizes_survive_the_cut_into_edges_and_body(make_engine):
    engine = make_engine(io="direct")
    for numel in (1, 127, 128, 1000, 1024, 4096, 5000, 1 << 18, (1 << 18) + 3):
        source = torch.randn(numel, requires_grad=True)
        with engine.step():
            with engine.forward(engine.scope), engine.saved_tensors_hooks():
                y = source.exp()
            expected = y.detach().clone()
            y.sum().backward()
        assert torch.equal(source.grad, expected)


def test_several_directories_share_the_bytes(make_engine, write_gate, tmp_path):
    directories = tuple(tmp_path / name for name in "abc")
    for directory in directories:
        directory.mkdir()
    model, x = Model(), torch.randn(3, 17, 32)
    plain = run_step(model, x)
    engine = make_engine(directories=directories)

    def let_writes_run(*_):
        engine.dispatcher.drain()  # all are queued, each where the least was
        write_gate.open.set()

    model.register_forward_hook(let_writes_run)
    assert_same(run_step(model, x, engine), plain)
    written = [drive.statistics.writes.total_bytes for drive in ssd(engine).drives]
    assert sum(written) == engine.statistics.written_bytes
    assert all(written) and len(written) == 3


def test_a_large_storage_is_striped_over_the_directories(make_engine, tmp_path):
    directories = tuple(tmp_path / name for name in "ab")
    for directory in directories:
        directory.mkdir()
    engine = make_engine(directories=directories, verify="checksum")
    tensor = torch.randn(5 * MIB + 3)
    with engine.step():
        packed = engine.hooks.pack(tensor)
        engine.wait_for_writes()
        assert [e.num_bytes > 8 * MIB for e in packed.saved.block.extents] == [True, True]
        assert torch.equal(engine.hooks.unpack(packed), tensor)


def test_a_host_budget_of_zero_keeps_everything_where_it_is(make_engine):
    model, x = Model(), torch.randn(3, 17, 32)
    plain = run_step(model, x)
    engine = make_engine(mode="host", host_budget=0)
    assert_same(run_step(model, x, engine), plain)
    assert engine.statistics.host_written_bytes == 0 and engine.statistics.rejected_bytes > 0


def test_gpudirect_without_a_gpu_is_refused_in_one_sentence(make_engine):
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ConfigurationError, match="CUDA device"):
        make_engine(io="gds")
