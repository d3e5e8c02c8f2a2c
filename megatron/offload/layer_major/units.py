# SPDX-License-Identifier: Apache-2.0
"""A model's layers in units of consecutive ones: `units_of`, `params_by_unit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from megatron.offload.layer_major.config import refusal

T = TypeVar("T")


def units_of(layers: Sequence[T], num_units: int | None) -> dict[T, int]:
    """The unit of each layer, counted from 0. Sizes differ by one layer at most.

    Args:
        layers: in the order in which they run.
        num_units: None: each layer is one.

    Raises:
        ConfigurationError: there are not as many layers.
    """
    if not layers:
        raise refusal("--layer-major-units: the model has no layers that repeat")
    wanted = len(layers) if num_units is None else num_units
    if not 1 <= wanted <= len(layers):
        raise refusal(
            f"--layer-major-units {wanted}: the model has {len(layers)} layers that can be "
            f"divided; give a number from 1 to {len(layers)}"
        )
    return {layer: index * wanted // len(layers) for index, layer in enumerate(layers)}


def params_by_unit(
    model: torch.nn.Module, units: Mapping[torch.nn.Module, int]
) -> dict[int, list[torch.Tensor]]:
    """Parameters whose gradients are complete with their unit: what no other one uses."""
    units_of_module: dict[torch.nn.Module, set[int | None]] = {}
    for layer, unit in units.items():
        for module in layer.modules():
            units_of_module.setdefault(module, set()).add(unit)
    users: dict[torch.nn.Parameter, set[int | None]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            users.setdefault(param, set()).update(units_of_module.get(module, {None}))
    found: dict[int, list[torch.Tensor]] = {}
    for one, (first, *others) in users.items():
        if first is not None and not others:
            found.setdefault(first, []).append(one)
    return found
