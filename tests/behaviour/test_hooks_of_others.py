# SPDX-License-Identifier: Apache-2.0
"""A tensor with hooks of somebody else's is left to them; any other error of a hook surfaces."""

from __future__ import annotations

import pytest
import torch

from megatron.offload import Scope
from megatron.offload.saved import graph
from tests.models import settle


@pytest.mark.parametrize("torch_tells", [True, False])
def test_a_saved_tensor_that_has_hooks_already_is_counted_and_left_alone(
    engine, monkeypatch, torch_tells
):
    if not torch_tells:  # as in old versions
        monkeypatch.setattr(graph, "_has_hooks", lambda saved: False)
    x = torch.randn(1000, requires_grad=True)
    unpacked = []
    with engine.step(), engine.forward(Scope()) as tape:
        y = x.exp()
        expected = y.detach().clone()
        y.grad_fn._raw_saved_result.register_hooks(
            lambda tensor: tensor, lambda tensor: unpacked.append(1) or tensor
        )
        engine.capture(Scope(), [y], [x])
        settle(engine)
        assert not (unpacked and torch_tells)
        assert engine.statistics.foreign_hooks == 1
        assert engine.statistics.offloaded_storages == 0
        with engine.backward(tape):
            y.sum().backward()
    assert unpacked and torch.equal(x.grad, expected)


def test_an_error_in_our_own_hook_is_not_taken_for_that(engine, monkeypatch):
    def fail(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine._cache, "add", fail)
    x = torch.randn(1000, requires_grad=True)
    with engine.step(), engine.forward(Scope()):
        y = x.exp()
        with pytest.raises(RuntimeError, match="illegal memory access"):
            engine.capture(Scope(), [y], [x])
    assert engine.statistics.foreign_hooks == 0


def test_our_own_hooks_of_an_earlier_capture_are_not_counted_and_nothing_is_read(engine):
    x = torch.randn(1000, requires_grad=True)
    with engine.step(), engine.forward(Scope()):
        y = x.exp().clone()
        engine.capture(Scope(), [y], [x])
        settle(engine)
        engine.capture(Scope(), [y], [x])
        assert engine.statistics.foreign_hooks == 0
        y.sum().backward()
    assert engine.statistics.read_bytes == engine.statistics.written_bytes == x.nbytes
