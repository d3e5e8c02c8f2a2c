# SPDX-License-Identifier: Apache-2.0
"""What layers keep from one micro-batch to the next, in layer-major steps: running means."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch

from megatron.offload import LayerMajor
from tests.support.layer_major import one_by_one
from tests.support.training import Stack

pytestmark = pytest.mark.usefixtures("one_thread_for_each_pass")

HIDDEN, UNITS, MICRO_BATCHES = 8, 4, 4
IN_ORDER = range(MICRO_BATCHES)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)
        self.norm = torch.nn.BatchNorm1d(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.norm(self.linear(x)).tanh()
        return y


class Model(Stack):
    """Layers with running means, each a unit."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__(HIDDEN, UNITS, layer=lambda _: Layer(), recomputes=recomputes)

    def norms(self) -> list[torch.nn.BatchNorm1d]:
        return [one for one in self.modules() if isinstance(one, torch.nn.BatchNorm1d)]


def micro_batches() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(16, HIDDEN, generator=draw) for _ in range(MICRO_BATCHES)]


def buffers(norm: torch.nn.Module) -> list[torch.Tensor]:
    return list(norm.buffers())


def after(orders: Callable[[int], Sequence[int]]) -> list[list[torch.Tensor]]:
    """Buffers of the norm of each unit when it has met micro-batches in an order."""
    model = Model(recomputes=False)
    norms = [copy.deepcopy(one) for one in model.norms()]
    met: list[list[torch.Tensor]] = [[] for _ in norms]
    for norm, inputs in zip(model.norms(), met, strict=True):
        norm.register_forward_pre_hook(lambda _, args, met=inputs: met.append(args[0].detach()))
    one_by_one(model, micro_batches())
    for unit, norm in enumerate(norms):
        for number in orders(unit):
            norm(met[unit][number])
    return list(map(buffers, norms))


def after_layer_major(
    *, recomputes: bool = False, alternates: bool = False
) -> list[list[torch.Tensor]]:
    model = Model(recomputes=recomputes)
    layer_major = LayerMajor(model, None, alternates=alternates)
    layer_major.step(micro_batches(), model)  # counts random numbers, in the usual order
    for norm in model.norms():
        norm.reset_running_stats()
    layer_major.step(micro_batches(), model)
    return list(map(buffers, model.norms()))


def are_same(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> list[bool]:
    """Whether all bits are, of each unit."""
    return [all(map(torch.equal, a, b)) for a, b in zip(one, other, strict=True)]


def test_running_means_have_the_bits_of_the_usual_order() -> None:
    model = Model(recomputes=False)
    one_by_one(model, micro_batches())
    usual = list(map(buffers, model.norms()))
    assert all(are_same(after_layer_major(), usual))


def test_where_the_order_alternates_every_second_running_mean_is_another_one() -> None:
    """That of micro-batches in reverse."""
    found = after_layer_major(alternates=True)
    assert all(are_same(found, after(lambda unit: IN_ORDER[::-1] if unit % 2 else IN_ORDER)))
    assert are_same(found, after(lambda unit: IN_ORDER)) == [True, False, True, False]


def test_what_is_recomputed_meets_all_micro_batches_before_one_again() -> None:
    """But in the last unit, where backward of each follows at once: there as in the usual order."""
    one_after_the_other = [number for number in IN_ORDER for _ in range(2)]
    model = Model(recomputes=True)
    one_by_one(model, micro_batches())
    usual = list(map(buffers, model.norms()))
    assert all(are_same(usual, after(lambda unit: one_after_the_other)))

    found = after_layer_major(recomputes=True)
    again = [*IN_ORDER, *IN_ORDER]
    orders = [again] * (UNITS - 1) + [one_after_the_other]
    assert all(are_same(found, after(lambda unit: orders[unit])))
    assert are_same(found, usual) == [False] * (UNITS - 1) + [True]
