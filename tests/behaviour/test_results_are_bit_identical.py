# SPDX-License-Identifier: Apache-2.0
"""Invariant 1, on a plain model: losses and gradients do not depend on offload."""

from __future__ import annotations

import pytest
import torch

from tests.support.models import Model, assert_same, run_step


@pytest.mark.parametrize("io", ["direct", "buffered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_equal_with_everything_on_disk(make_engine, io, dtype):
    model, x = Model().to(dtype), torch.randn(3, 17, 32, dtype=dtype)
    plain = run_step(model, x)
    engine = make_engine(io=io)
    for _ in range(3):
        assert_same(run_step(model, x, engine), plain)
        assert engine.statistics.read_bytes > 0
        assert engine.statistics.read_bytes == engine.statistics.written_bytes
        assert engine.statistics.forwarded_bytes == 0


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
