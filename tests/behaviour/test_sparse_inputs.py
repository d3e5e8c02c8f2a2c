# SPDX-License-Identifier: Apache-2.0
"""A layer that is called with a sparse tensor, which has no storage that could move."""

from __future__ import annotations

import torch

from megatron.offload import Scope
from tests.support.models import settle


def test_a_layer_may_have_a_sparse_input(engine):
    adjacency = torch.eye(64).to_sparse()
    x = torch.randn(64, 64, requires_grad=True)
    with engine.step():
        with engine.forward(Scope()) as save_order:
            y = torch.sparse.mm(adjacency, x.exp())
            engine.capture(Scope(), [y], [x, adjacency])
            settle(engine)
        assert engine.statistics.offloaded_storages == 1
        with engine.backward(save_order):
            y.sum().backward()
    assert torch.equal(x.grad, x.detach().exp())
