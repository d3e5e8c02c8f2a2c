# SPDX-License-Identifier: Apache-2.0
"""How deep in autocast a thread is, and that a signal changes nothing of it."""

from __future__ import annotations

import contextlib

import torch

from megatron.offload.machine.autocast import autocast_depth, autocast_dtype, without_autocast
from tests.support.interrupts import Interrupt, moments_of


def test_contexts_are_counted() -> None:
    found = [autocast_depth()]
    with torch.autocast("cpu", torch.bfloat16):
        found.append(autocast_depth())
        with torch.autocast("cpu", enabled=False):
            found.append(autocast_depth())
        found.append(autocast_depth())
    assert [*found, autocast_depth()] == [0, 1, 2, 1, 0]


def test_what_it_casts_to_is_known_also_where_there_is_none() -> None:
    assert autocast_dtype("cpu") is None and autocast_dtype("meta") is None
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_dtype("cpu") is torch.bfloat16 and autocast_dtype("meta") is None
        with without_autocast("cpu"):
            assert autocast_dtype("cpu") is None
        with without_autocast("meta"):  # no device of ours
            assert autocast_dtype("cpu") is torch.bfloat16


def test_an_operation_is_within_autocast_too() -> None:
    found = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found.append((autocast_depth(), torch.is_autocast_enabled("cpu")))
        return tensor

    weight = torch.ones(4, 4, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        torch.mm(weight, weight)
    assert found and set(found) == {(1, False)}


class Stopped(Exception):
    pass


def test_a_handler_that_raises_leaves_the_count() -> None:
    """Else autocast keeps its casts of weights, and trains on with old ones."""
    moments = moments_of(autocast_depth)
    assert len(moments) >= 3
    for moment in moments:
        with Interrupt(moment, 1, Stopped) as interrupt, contextlib.suppress(Stopped):
            autocast_depth()
        assert interrupt.has_come and autocast_depth() == 0, moment
