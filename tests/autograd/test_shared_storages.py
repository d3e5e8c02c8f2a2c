# SPDX-License-Identifier: Apache-2.0
"""Storages that several tensors share, and that change under everybody's hands.

Each computes plain and with all that autograd saved on the tier, and has to give the same bits.
"""

from __future__ import annotations

import threading

import pytest
import torch

from megatron.offload import Scope
from tests.autograd.roundtrip import (
    Watch,
    layer,
    leaf,
    run_both,
    seed,
    tensors_in,
    ways,
)
from tests.support.models import ssd

# -- Parts of one storage ------------------------------------------------------------------------


# In most of them gates are changed in place, in parts of one storage that autograd does not relate.
RECURRENT = {
    "LSTMCell": lambda: torch.nn.LSTMCell(16, 16),
    "GRUCell": lambda: torch.nn.GRUCell(16, 16),
    "LSTM": lambda: torch.nn.LSTM(16, 16),
    "LSTM, projected": lambda: torch.nn.LSTM(16, 16, proj_size=4),
    "LSTM, float64": lambda: torch.nn.LSTM(16, 16, dtype=torch.float64),
    "GRU": lambda: torch.nn.GRU(16, 16),
    "RNN, bfloat16": lambda: torch.nn.RNN(16, 16, dtype=torch.bfloat16),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@ways()
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_modules(engine, way, kind):
    def scenario(watch: Watch):
        seed(5)
        module = RECURRENT[kind]()
        weights = list(module.parameters())
        shape = (8, 16) if kind.endswith("Cell") else (3, 8, 16)
        x = leaf(*shape).detach().to(weights[0].dtype).requires_grad_()
        results = watch.call(lambda: module(x * 1), inputs=[x, *weights])
        total = sum(result.sum() for result in tensors_in(results))
        return torch.autograd.grad(total, [x, *weights])

    run_both(scenario, engine, way)


@ways()
def test_parts_of_one_storage_that_autograd_does_not_relate(engine, way):
    def scenario(watch: Watch):
        x = leaf(6, 8)

        def function():
            a, b = (x * 1).unsafe_chunk(2, dim=1)
            return a.sigmoid_() * 2 + b.sigmoid_() * 3

        watch.call(function, inputs=[x]).sum().backward()
        return x.grad

    run_both(scenario, engine, way)


@ways()
def test_such_parts_in_layers_of_their_own(engine, way):
    def scenario(watch: Watch):
        x = leaf(6, 8)
        a, b = (x * 1).unsafe_chunk(2, dim=1)
        a = watch.call(lambda: a.sigmoid_() * 2, inputs=[x])
        b = watch.call(lambda: b.sigmoid_() * 3, inputs=[x])
        (a + b).sum().backward()
        return x.grad

    run_both(scenario, engine, way)


# -- Inputs of a layer ---------------------------------------------------------------------------


@ways()
def test_an_input_of_a_layer_that_autograd_refuses_to_use_again(engine, way):
    def scenario(watch: Watch):
        x = leaf(6, 4)
        whole = x * 1
        part = whole.chunk(2)[0]

        def function(part):
            y = layer(part)
            whole.mul_(2)  # from now on no operation takes `part`
            return y + whole.sum()

        watch.call(function, part, inputs=[part, x]).sum().backward()
        return x.grad

    run_both(scenario, engine, way, moves=False)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_an_input_of_a_layer_without_a_storage(engine):
    x = leaf(6, 4)
    sparse = torch.eye(6).to_sparse_csr().requires_grad_()
    with engine.step():
        y = torch.sparse.mm(sparse, layer(x)[:, :2].repeat(2, 1)).exp()
        engine.capture(Scope(), [y], [x, sparse])
        y.sum().backward()
    assert x.grad is not None


# -- Storages that are emptied and filled again -------------------------------------------------


EMPTIED = ("before the capture", "during the write", "after the write")


@ways()
@pytest.mark.parametrize("when", EMPTIED)
def test_a_storage_that_is_emptied_and_filled_again_before_its_use(engine, way, when, monkeypatch):
    file = type(ssd(engine).drives[0].file)
    write = file.write
    has_begun, goes_on = threading.Event(), threading.Event()

    def gated(self, body, offset):
        has_begun.set()
        assert goes_on.wait(10)
        write(self, body, offset)

    if when == "during the write":
        monkeypatch.setattr(file, "write", gated)
    engine.is_prompt = False

    def scenario(watch: Watch):
        # During the write: so large that the system takes the memory away at once.
        x = leaf(1 << 23 if when == "during the write" else 1000)
        with watch.region():
            y = (x * 1).exp()
            z = y.clone()
        if when != "before the capture":
            watch.capture([z], [x])
        if when == "after the write":
            watch.settle()
        if watch.engine is not None and when == "during the write":
            assert has_begun.wait(10)
        content = y.detach().clone()
        storage = y.untyped_storage()
        num_bytes = storage.nbytes()
        storage.resize_(0)
        if when == "before the capture":
            watch.capture([z], [x])
        if watch.engine is not None:
            goes_on.set()
        watch.settle()

        def fill(_):
            storage.resize_(num_bytes)
            storage.copy_(content.untyped_storage())

        z.register_hook(fill)
        z.sum().backward()
        return x.grad

    run_both(scenario, engine, way, moves=False)
    assert not ssd(engine).degraded, "the drive was blamed"
