# SPDX-License-Identifier: Apache-2.0
"""Backward passes that no layer is told of, found by their gradients: `check_gradients`.

A gradient that reaches the output of a layer brings its weights. One that enters a layer elsewhere
(a loss of what a layer keeps as an attribute, or of what a hook inside of it has caught, and of no
output) does not, and computes with NaN, which is all that there is while weights are away.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

from megatron.offload.errors import PARAMETERS_PREFIX, OffloadError
from megatron.offload.parameters.unit import ParameterUnit


def check_gradients(units: Iterable[ParameterUnit]) -> list[Callable[[], None]]:
    """Has a backward pass that has computed without the weights of a unit end with an error.

    Returns:
        Functions that end it.
    """
    return [
        param.register_post_accumulate_grad_hook(_Check(unit)).remove
        for unit in units
        for param in unit.params
        if param.requires_grad
    ]


class _Check:
    """A hook of a parameter that has just got a gradient. It does not keep a dropped unit alive."""

    def __init__(self, unit: ParameterUnit) -> None:
        self._unit = weakref.ref(unit)

    def __call__(self, param: torch.Tensor) -> None:
        unit = self._unit()
        if unit is None or unit.is_in_place:
            return
        if unit.told_of == torch._C._current_graph_task_id():
            return
        # What was shown may be in a graph by itself, as a penalty on weights is.
        if not unit.was_shown or (param.grad is not None and bool(param.grad.isnan().any())):
            raise OffloadError(
                f"{PARAMETERS_PREFIX}a backward pass has reached those of {unit.name} while they "
                "were away, because it did not come from a result of their layer: the loss uses "
                "what the layer keeps as an attribute, or what a hook inside of it has caught; "
                "return it from the layer as well, or name other layers with layers="
            )
