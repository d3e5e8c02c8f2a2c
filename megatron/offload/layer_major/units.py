# SPDX-License-Identifier: Apache-2.0
"""A model's layers in units of consecutive ones: `units_of`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

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
            f"--layer-major-units {wanted}: the model has {len(layers)} layers that can be divided"
        )
    return {layer: index * wanted // len(layers) for index, layer in enumerate(layers)}
