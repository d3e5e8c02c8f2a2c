# SPDX-License-Identifier: Apache-2.0
"""Asks of parameters that are offloaded, whichever of the windows that are open has them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megatron.offload.integration.open_streams import OPEN
from megatron.offload.tiers.tier import Tier


@contextlib.contextmanager
def changing(params: Sequence[torch.Tensor]) -> Iterator[None]:
    """Around an update of parameters: those that are offloaded are in memory, and count as changed.

    For code that updates parameters and is no `torch.optim.Optimizer`.
    """
    with contextlib.ExitStack() as contexts:
        for window in OPEN.parameters:
            own = [param for param in params if window.has(param)]
            if own:
                contexts.enter_context(window.changing(own))
        yield


@contextlib.contextmanager
def brought(layer: torch.nn.Module) -> Iterator[None]:
    """Around a layer that runs again within a backward pass: it finds its weights in their places.

    They are there if a result of the layer has told of the pass. A pass that enters elsewhere, as
    pipelines' do that compute gradients of weights by themselves, tells nothing.
    """
    params = list(layer.parameters())
    for window in OPEN.parameters:
        numbers = {window.number_of(param) for param in params}
        for number in sorted(one for one in numbers if one is not None):
            if not window.units[number].is_in_place:
                window.use(number, -1)
                window.units[number].note_backward()
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(window.set_aside)
    yield


def unit_of(param: torch.Tensor) -> int:
    """Number of the unit that a parameter comes in with where it is offloaded; -1: it stays."""
    numbers = [window.number_of(param) for window in OPEN.parameters]
    return max((number for number in numbers if number is not None), default=-1)


def tier_of(param: torch.Tensor) -> Tier | None:
    """The tier that has a parameter's bytes when writes have ended; None: memory has them."""
    found = (window.tier_of(param) for window in OPEN.parameters)
    return next((tier for tier in found if tier is not None), None)


def gradient_tier_of(param: torch.Tensor) -> Tier | None:
    """The same of its gradient; of one that is not there yet, where it is to wait."""
    found = (window.gradient_tier_of(param) for window in OPEN.parameters)
    return next((tier for tier in found if tier is not None), None)


def by_units(
    params: Sequence[torch.Tensor],
    stands_for: Callable[[torch.Tensor], torch.Tensor] = lambda param: param,
) -> list[list[torch.Tensor]]:
    """Divides what is to be updated so that each slice needs one unit in memory, in their order.

    Args:
        params: of an optimizer.
        stands_for: gives the parameter of the model that each of them updates.
    """
    slices: dict[tuple[int, int], list[torch.Tensor]] = {}
    for param in params:
        place = (-1, -1)  # of those that are in no unit
        for index, window in enumerate(OPEN.parameters):
            number = window.number_of(stands_for(param))
            place = place if number is None else (index, number)
        slices.setdefault(place, []).append(param)
    return [slices[place] for place in sorted(slices)]


@contextlib.contextmanager
def unit_backward(params: Sequence[torch.Tensor], *, is_last: bool) -> Iterator[None]:
    """Around a backward pass of a layer-major step's unit: tells the offload of gradients of it.

    Args:
        params: whose gradients are complete behind the last pass of the unit.
        is_last: of the micro-batches.
    """
    with contextlib.ExitStack() as contexts:
        for window in OPEN.parameters:
            own = [param for param in params if window.has(param)]
            if window.gradients is not None and own:
                contexts.enter_context(window.gradients.backward(own, is_last=is_last))
        yield
