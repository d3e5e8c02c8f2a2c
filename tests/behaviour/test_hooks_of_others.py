# SPDX-License-Identifier: Apache-2.0
"""A tensor with hooks of somebody else's is left to them; any other error of a hook surfaces."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron.offload import Scope
from tests.support.models import settle


def test_a_saved_tensor_that_has_hooks_already_is_counted_and_unsupported(engine):
    x = torch.randn(1000, requires_grad=True)
    unpacked = []
    with engine.step(), engine.forward(Scope()) as save_order:
        y = x.exp()
        expected = y.detach().clone()
        y.grad_fn._raw_saved_result.register_hooks(
            lambda tensor: tensor, lambda tensor: unpacked.append(1) or tensor
        )
        engine.capture(Scope(), [y], [x])
        settle(engine)
        assert not unpacked
        assert engine.statistics.already_hooked == 1
        assert engine.statistics.offloaded_storages == 0
        with engine.backward(save_order):
            y.sum().backward()
    assert unpacked and torch.equal(x.grad, expected)


def test_an_error_in_our_own_hook_is_not_taken_for_that(engine, monkeypatch):
    def fail(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine.cache, "add", fail)
    x = torch.randn(1000, requires_grad=True)
    with engine.step(), engine.forward(Scope()):
        y = x.exp()
        with pytest.raises(RuntimeError, match="illegal memory access"):
            engine.capture(Scope(), [y], [x])
    assert engine.statistics.already_hooked == 0


def test_our_own_hooks_of_an_earlier_capture_are_not_counted_and_nothing_is_read(engine):
    x = torch.randn(1000, requires_grad=True)
    with engine.step(), engine.forward(Scope()):
        y = x.exp().clone()
        engine.capture(Scope(), [y], [x])
        settle(engine)
        engine.capture(Scope(), [y], [x])
        assert engine.statistics.already_hooked == 0
        y.sum().backward()
    assert engine.statistics.read_bytes == engine.statistics.written_bytes == x.nbytes


class Exponential(torch.autograd.Function):
    """Modes do not see its calls, so hooks of what it saved are called under them."""

    @staticmethod
    def forward(ctx, x):
        result = x.exp()
        ctx.save_for_backward(result)
        return result.clone()


@pytest.mark.parametrize("way", ["context", "capture"])
def test_a_mode_of_somebody_else_sees_no_call_of_ours(engine, way):
    class Noting(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen[-1].append(function)
            return function(*args, **(kwargs or {}))

    seen: list[list[object]] = []
    x = torch.randn(1000, requires_grad=True)
    for is_ours in (False, True):
        seen.append([])
        with engine.step(), Noting():
            in_context = is_ours and way == "context"
            with engine.saved_tensors_hooks() if in_context else contextlib.nullcontext():
                y = Exponential.apply(x)
            if is_ours and way == "capture":
                engine.capture(Scope(), [y], [x])
            settle(engine)
            (saved,) = y.grad_fn.saved_tensors
        assert torch.equal(saved, y)
        assert engine.statistics.read_bytes == (x.nbytes if is_ours else 0)
    assert seen[1] == seen[0]
